"""Launchers of the Hopper kernels: dense attention and attention over a `Layout`, each with LSE.

Tables that a sparse launch needs come from `triton_plan` (device work only, no host sync). Inputs are checked for
layout here; their meaning is checked by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import TILE, HeadPlan
from headscope.kernels.gluon.compat import GL_DTYPE, descriptor
from headscope.kernels.gluon.dense import dense_kernel
from headscope.kernels.gluon.sparse import sparse_kernel
from headscope.kernels.triton.common import LOG2E, count_below, device_ints, steps_for
from headscope.kernels.triton.plan import Plan, column_bits, compact, keep_bits, make_cover, overlaps

HEAD_SIZES = (64, 128, 256)

MAX_BANDS = 64
"""Most distance ranges of a head that are worth a pass of 128-key tiles each; layouts with more go to Triton."""

BY_BLOCK_ROWS = 12_288
"""Up to this many query rows all heads of a row block run together; beyond, one KV head after another (L2)."""


@dataclass(frozen=True)
class DenseConfig:
    """Keys per tile, stages, consumer warpgroups of 64 rows, whether exponentials bound a step (then the sums of a row
    stay with its threads until the end) or products (then its maximum is taken in short chains), registers of a
    consumer thread."""

    keys: int
    stages: int
    groups: int
    exp_bound: bool
    registers: int


@dataclass(frozen=True)
class SparseConfig:
    """Stages, 64-key slots in a stage, stages of the ring of half blocks."""

    stages: int
    slots: int
    ring: int


SPARSE = {64: SparseConfig(4, 3, 6), 128: SparseConfig(2, 3, 3), 256: SparseConfig(1, 2, 1)}


def dense_config(head_dim: int) -> DenseConfig:
    """What ran fastest on an H200 (README.md of the kernels)."""
    if head_dim == 64:
        return DenseConfig(64, 6, 3, True, 160)
    return DenseConfig(128, 3, 2, False, 240) if head_dim == 128 else DenseConfig(64, 2, 2, False, 240)


def serves(q: torch.Tensor) -> str | None:
    """Why these queries cannot be served, or None."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"the Gluon kernels need a Hopper GPU (compute capability 9.0), q is on {q.device}"
    if q.dtype not in GL_DTYPE:
        return f"the Gluon kernels serve bfloat16 and float16, got q.dtype = {q.dtype}"
    if q.shape[-1] not in HEAD_SIZES:
        return f"the Gluon kernels serve head sizes {', '.join(map(str, HEAD_SIZES))}, got {q.shape[-1]}"
    return None


def serves_layout(layout: Layout) -> str | None:
    """Why this index cannot be served, or None. Looks at shapes and host facts only."""
    if layout.tile != TILE:
        return f"the Gluon kernels serve tile {TILE}, got tile = {layout.tile}"
    if layout.bands.shape[1] > MAX_BANDS:
        return f"the Gluon kernels serve up to {MAX_BANDS} distance ranges a head, got {layout.bands.shape[1]}"
    odd = sorted({size for size in _block_sizes(layout) if size % 64})
    if odd:
        return f"the Gluon kernels serve block sizes that are multiples of 64, got {odd}"
    return None


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [B, Hq, S, D] over k/v [B, Hkv, T, D]; out in q's dtype, LSE float32 [B, Hq, S].

    Padding rows give output 0 and LSE -inf. Raises `ValueError` for what these kernels do not serve.
    """
    check_inputs(q, k, v, scale)
    batch, heads, q_len, dim = q.shape
    config = dense_config(dim)
    rows = 64 * config.groups
    q3, k3, v3 = rows3d(q), rows3d(k), rows3d(_without_padding(v, starts))
    out, lse = _outputs(q, k.shape[2], starts)
    blocks = _row_blocks(q_len, k.shape[2], starts, rows)
    dense_kernel[(_programs(batch * heads * blocks, q.device),)](
        descriptor(q3, 64, dim),
        descriptor(k3, config.keys, dim),
        descriptor(v3, config.keys, dim),
        out,
        lse,
        device_ints(starts, q.device),
        _counter(q.device),
        scale * LOG2E,
        q_len,
        k.shape[2],
        batch * heads,
        heads,
        heads // k.shape[1],
        blocks,
        int(q_len > BY_BLOCK_ROWS),
        _only(starts),
        BN=config.keys,
        D=dim,
        STAGES=config.stages,
        GROUPS=config.groups,
        EXP_BOUND=config.exp_bound,
        CONSUMER_REGISTERS=config.registers,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the cells of `layout`, all heads in one launch; shapes and outputs as `dense`.

    A row with no cell gives output 0 and LSE -inf. Raises `ValueError` for what these kernels do not serve.
    """
    check_inputs(q, k, v, scale)
    if reason := serves_layout(layout):
        raise ValueError(reason)
    batch, heads, q_len, dim = q.shape
    config = SPARSE[dim]
    starts = layout.starts
    q3, k3, v3 = rows3d(q), rows3d(k), rows3d(_without_padding(v, starts))
    out, lse = _outputs(q, k.shape[2], starts)
    tables = _tables(k3.view(k.shape), v3.view(v.shape), layout)
    blocks = _row_blocks(q_len, k.shape[2], starts, 128)
    half_blocks = any(size % 128 for size in _block_sizes(layout))
    items = batch * heads * blocks
    # The rings of half blocks start afresh with each program.
    sparse_kernel[(items if half_blocks else _programs(items, q.device),)](
        descriptor(q3, 64, 64),
        descriptor(k3, 64, 64),
        descriptor(v3, 64, dim),
        descriptor(rows3d(out), 64, 64),
        descriptor(tables.keys, 64, 64),
        descriptor(tables.values, 64, dim),
        out,
        lse,
        device_ints(starts, q.device),
        _counter(q.device),
        layout.windows,
        layout.bands,
        layout.band_count,
        layout.columns,
        tables.counts,
        tables.sinks,
        tables.uneven,
        tables.some,
        tables.whole,
        layout.blocks,
        layout.block_count,
        tables.block_head,
        scale * LOG2E,
        q_len,
        k.shape[2],
        batch * heads,
        heads,
        heads // k.shape[1],
        blocks,
        tables.counts.shape[1],
        layout.windows.shape[1],
        layout.bands.shape[1],
        layout.columns.shape[1],
        tables.some.shape[-1],
        *layout.blocks.shape[1:],
        int(q_len > BY_BLOCK_ROWS),
        _only(starts),
        D=dim,
        STAGES=config.stages,
        SLOTS=config.slots,
        RING=config.ring,
        HALF_BLOCKS=half_blocks,
        OVERLAPS=may_overlap(layout),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, lse


def _programs(items: int, device: torch.device) -> int:
    """One a multiprocessor, where there are so many items."""
    return min(items, torch.cuda.get_device_properties(device).multi_processor_count)


def _counter(device: torch.device) -> torch.Tensor:
    """What the programs of one launch take their items from."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _only(starts: tuple[int, ...]) -> int:
    """The start of every sequence, or -1 where they differ."""
    return starts[0] if len(set(starts)) == 1 else -1


@dataclass(frozen=True)
class _Tables:
    """What the sparse kernel reads beside the layout; see `sparse_kernel`."""

    counts: torch.Tensor
    sinks: torch.Tensor
    uneven: torch.Tensor
    some: torch.Tensor
    whole: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_head: torch.Tensor


@triton.jit(do_not_specialize=["window_cap", "column_cap", "row_blocks", "window_steps", "column_steps"])
def _counts_kernel(
    windows_ptr,
    window_count_ptr,
    columns_ptr,
    column_count_ptr,
    counts_ptr,
    window_cap,
    column_cap,
    row_blocks,
    window_steps,
    column_steps,
):
    """Per 64 own rows: windows that hold a key `>= 0`, and columns up to the last row. 128 row blocks a program."""
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * 128 + tl.arange(0, 128)
    some, many = tl.load(window_count_ptr + head), tl.load(column_count_ptr + head)
    reach = count_below(windows_ptr + head * window_cap, some, block * 64 + 128, window_steps, 1)
    past = count_below(columns_ptr + head * column_cap, many, block * 64 + 64, column_steps, 1)
    out = counts_ptr + (head * row_blocks + block) * 2
    tl.store(out, reach, mask=block < row_blocks)
    tl.store(out + 1, past, mask=block < row_blocks)


@triton.jit(do_not_specialize=["row_blocks", "words"])
def _uneven_kernel(some_ptr, whole_ptr, uneven_ptr, row_blocks, words):
    """Whether some rows of 128 may read a column that others may not; one program a pair of row blocks."""
    pair = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    at = (head * row_blocks + 2 * pair) * words
    count = tl.minimum(row_blocks - 2 * pair, 2) * words
    differ = tl.zeros([128], tl.int32)
    for begin in range(0, count, 128):
        place = begin + tl.arange(0, 128)
        inside = place < count
        differ |= tl.load(some_ptr + at + place, mask=inside, other=0) ^ tl.load(
            whole_ptr + at + place, mask=inside, other=0
        )
    tl.store(uneven_ptr + head * tl.num_programs(0) + pair, tl.max((differ != 0).to(tl.int32), 0))


def _tables(k: torch.Tensor, v: torch.Tensor, layout: Layout) -> _Tables:
    """Derives the launch tables on the device; columns cost a copy of their K and V rows."""
    heads, row_blocks = layout.windows.shape[0], -(-layout.kv_len // 64)
    counts = torch.empty(heads, row_blocks, 2, dtype=torch.int32, device=k.device)
    _counts_kernel[(-(-row_blocks // 128), heads)](
        layout.windows,
        layout.window_count,
        layout.columns,
        layout.column_count,
        counts,
        layout.windows.shape[1],
        layout.columns.shape[1],
        row_blocks,
        steps_for(layout.windows.shape[1]),
        steps_for(layout.columns.shape[1]),
        num_warps=4,
    )
    some, whole, keys, values, uneven = layout.columns, layout.columns, k.flatten(0, 1), v.flatten(0, 1), counts
    care = may_overlap(layout)
    sinks = tuple(map(_sink, layout.plans)) if layout.plans and not care else (0,) * heads
    if layout.columns.shape[1] and (care or any(_has_columns(plan) and not _sink(plan) for plan in layout.plans)):
        plan = Plan(full=layout.windows, edge=layout.bands, counts=counts, cover=make_cover(layout))
        some, whole = keep_bits(layout, plan) if care else (column_bits(layout, plan),) * 2
        keys, values = compact(k, v, layout)
        if care:
            uneven = torch.empty(heads, -(-row_blocks // 2), dtype=torch.int32, device=k.device)
            _uneven_kernel[(uneven.shape[1], heads)](some, whole, uneven, row_blocks, some.shape[2], num_warps=1)
    pairs = tuple(n for pair in zip(layout.block_slot, layout.block_size, strict=True) for n in pair)
    return _Tables(
        counts, device_ints(sinks, k.device), uneven, some, whole, keys, values, device_ints(pairs, k.device)
    )


def _block_sizes(layout: Layout) -> list[int]:
    return [size for size, slot in zip(layout.block_size, layout.block_slot, strict=True) if slot >= 0]


def may_overlap(layout: Layout) -> bool:
    """Whether lists of a head may share a cell, or rows of a block read a column that others may not.

    Plans tell exactly; without them, shapes tell what can be excluded.
    """
    return not all(map(_apart, layout.plans)) if layout.plans else overlaps(layout)


def _apart(plan: HeadPlan) -> bool:
    """Whether the sparse kernel may walk this head's lists one after another.

    Windows that hold every row block's own diagonal leave of each column all cells of a row block or none.
    """
    if plan.online_slash:
        return (plan.local > 0 or plan.windows > 0) and not plan.bands and not plan.block_size
    lists = (bool(plan.bands), _has_columns(plan), plan.block_size > 0)
    return (not _has_columns(plan) and sum(lists) <= 1) or _sink(plan) > 0


def _has_columns(plan: HeadPlan) -> bool:
    return plan.online_slash or bool(plan.columns)


def _sink(plan: HeadPlan) -> int:
    """How many first keys are the columns of a head that has nothing else but a band from the diagonal on; else 0."""
    alone = not plan.online_slash and not plan.block_size and all(low == 0 for low, _ in plan.bands)
    return len(plan.columns) if alone and plan.columns == tuple(range(len(plan.columns))) else 0


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
    if reason := serves(q):
        raise ValueError(reason)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} must have q's dtype and device, got {x.dtype} on {x.device}")
        if x.shape[0] != q.shape[0] or x.shape[-1] != q.shape[-1] or q.shape[1] % x.shape[1]:
            raise ValueError(f"{name} does not fit q {tuple(q.shape)}: got {tuple(x.shape)}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")


def rows3d(x: torch.Tensor) -> torch.Tensor:
    """[B * H, n, D] contiguous and 16-byte aligned, as the copy engine needs it; a copy only where it is not."""
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(-1, x.shape[-2], x.shape[-1])


def _without_padding(v: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
    """Values with padding rows set to 0: a weight of 0 does not hide what is not finite there."""
    if not any(starts):
        return v
    v = v.clone(memory_format=torch.contiguous_format)
    for sequence, start in enumerate(starts):
        v[sequence, :, :start] = 0
    return v


def _outputs(q: torch.Tensor, kv_len: int, starts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the output and LSE. Kernels write every real row; padding rows are filled here."""
    padded = any(start > kv_len - q.shape[2] for start in starts)
    make = torch.zeros if padded else torch.empty
    out = make(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return out, lse.fill_(-torch.inf) if padded else lse


def _row_blocks(q_len: int, kv_len: int, starts: tuple[int, ...], rows: int) -> int:
    """Row blocks of the sequence with the most: they are aligned to own position 0."""
    return max(-(-(kv_len - start) // rows) - max(0, kv_len - q_len - start) // rows for start in starts)

"""Launchers of the Hopper kernels: dense attention and attention over a `Layout`, each with LSE.

Inputs are checked for layout here; their meaning is checked by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.kernels.cells import inputs
from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import TILE
from headscope.kernels.gluon.compat import GL_DTYPE, descriptor
from headscope.kernels.gluon.dense import dense_kernel
from headscope.kernels.gluon.sparse import sparse_kernel
from headscope.kernels.gluon.tables import block_sizes, may_overlap, sparse_tables
from headscope.kernels.triton.common import base2, device_ints

HEAD_SIZES = (64, 128, 256)

MAX_BANDS = 64
"""Most distance ranges of a head that are worth a pass of 128-key tiles each; layouts with more go to Triton."""

BY_BLOCK_ROWS = 12_288
"""Up to this many query rows all heads of a row block run together; beyond, one KV head after another (L2)."""


@dataclass(frozen=True)
class DenseConfig:
    """Keys per tile, stages, consumer warpgroups of 64 rows, whether exponentials bound a step (then the sums of a row
    stay with its threads until the end) or the MMA (then its maximum is taken in short chains), registers of a
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


def refusal(q: torch.Tensor) -> str | None:
    """Why these queries cannot be served, or None."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"the Gluon kernels need a Hopper GPU (compute capability 9.0), q is on {q.device}"
    if q.dtype not in GL_DTYPE:
        return f"the Gluon kernels serve bfloat16 and float16, got q.dtype = {q.dtype}"
    if q.shape[-1] not in HEAD_SIZES:
        return f"the Gluon kernels serve head sizes {', '.join(map(str, HEAD_SIZES))}, got {q.shape[-1]}"
    return None


def layout_refusal(layout: Layout) -> str | None:
    """Why this index cannot be served, or None. Looks at shapes and host facts only."""
    if layout.tile != TILE:
        return f"the Gluon kernels serve tile {TILE}, got tile = {layout.tile}"
    if layout.bands.shape[1] > MAX_BANDS:
        return f"the Gluon kernels serve up to {MAX_BANDS} distance ranges a head, got {layout.bands.shape[1]}"
    odd = sorted({size for size in block_sizes(layout) if size % 64})
    if odd:
        return f"the Gluon kernels serve block sizes that are multiples of 64, got {odd}"
    return None


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [B, Hq, S, D] over k/v [B, Hkv, T, D]; out in q's dtype, LSE float32 [B, Hq, S].

    Padding rows give output 0 and LSE -inf. Inputs are copied where they do not lie in one piece. `ValueError` for
    inputs that do not fit each other and for what these kernels do not serve.
    """
    check_inputs(q, k, v, scale, starts)
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
        base2(scale),
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

    A row with no cell gives output 0 and LSE -inf. `ValueError` as `dense`, and for a layout of other inputs.
    """
    check_inputs(q, k, v, scale, layout.starts)
    inputs.check_layout(layout, q, k)
    if reason := layout_refusal(layout):
        raise ValueError(reason)
    batch, heads, q_len, dim = q.shape
    config = SPARSE[dim]
    starts = layout.starts
    q3, k3, v3 = rows3d(q), rows3d(k), rows3d(_without_padding(v, starts))
    out, lse = _outputs(q, k.shape[2], starts)
    tables = sparse_tables(k3.view(k.shape), v3.view(v.shape), layout)
    blocks = _row_blocks(q_len, k.shape[2], starts, 128)
    half_blocks = any(size % 128 for size in block_sizes(layout))
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
        base2(scale),
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
    """One an SM, where there are so many items."""
    return min(items, torch.cuda.get_device_properties(device).multi_processor_count)


def _counter(device: torch.device) -> torch.Tensor:
    """What the programs of one launch take their items from."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _only(starts: tuple[int, ...]) -> int:
    """The start of every sequence, or -1 where they differ."""
    return starts[0] if len(set(starts)) == 1 else -1


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, scale: float, starts: tuple[int, ...]
) -> None:
    """`ValueError` naming what does not fit, or what these kernels cannot serve."""
    if reason := refusal(q):
        raise ValueError(reason)
    inputs.check_inputs(q, k, v, scale, starts)


def rows3d(x: torch.Tensor) -> torch.Tensor:
    """[B * H, n, D] in one piece, as the copy engine needs it; a copy only where it is not."""
    return inputs.packed(x).view(-1, x.shape[-2], x.shape[-1])


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

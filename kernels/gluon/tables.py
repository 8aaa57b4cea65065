"""What the sparse Hopper kernel reads beside a `Layout`, derived on the device without a host sync.

Also which layouts the kernel without exact masks may take: those in which no two lists of a head share a cell, which
plans tell on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import HeadPlan
from headscope.kernels.triton.common import count_below, device_ints, row_blocks, steps_for
from headscope.kernels.triton.cover import column_bits, keep_bits, make_cover
from headscope.kernels.triton.plan import compact, overlaps


@dataclass(frozen=True)
class SparseTables:
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


def sparse_tables(k: torch.Tensor, v: torch.Tensor, layout: Layout) -> SparseTables:
    """Derives the launch tables on the device; columns cost a copy of their K and V rows. k and v contiguous."""
    heads, blocks = layout.windows.shape[0], row_blocks(layout)
    counts = torch.empty(heads, blocks, 2, dtype=torch.int32, device=k.device)
    _counts_kernel[(-(-blocks // 128), heads)](
        layout.windows,
        layout.window_count,
        layout.columns,
        layout.column_count,
        counts,
        layout.windows.shape[1],
        layout.columns.shape[1],
        blocks,
        steps_for(layout.windows.shape[1]),
        steps_for(layout.columns.shape[1]),
        num_warps=4,
    )
    some, whole, keys, values, uneven = layout.columns, layout.columns, k.flatten(0, 1), v.flatten(0, 1), counts
    care = may_overlap(layout)
    sinks = tuple(map(_sink, layout.plans)) if layout.plans and not care else (0,) * heads
    if layout.columns.shape[1] and (care or any(_has_columns(plan) and not _sink(plan) for plan in layout.plans)):
        cover = make_cover(layout)
        some, whole = keep_bits(layout, cover) if care else (column_bits(layout, cover),) * 2
        keys, values = compact(k, v, layout)
        if care:
            uneven = torch.empty(heads, -(-blocks // 2), dtype=torch.int32, device=k.device)
            _uneven_kernel[(uneven.shape[1], heads)](some, whole, uneven, blocks, some.shape[2], num_warps=1)
    pairs = tuple(n for pair in zip(layout.block_slot, layout.block_size, strict=True) for n in pair)
    return SparseTables(
        counts, device_ints(sinks, k.device), uneven, some, whole, keys, values, device_ints(pairs, k.device)
    )


def block_sizes(layout: Layout) -> list[int]:
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

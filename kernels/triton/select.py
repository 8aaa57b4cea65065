"""Listing what was chosen of many scores, in Triton: exact budgets, ties by position.

Scores above their cut, the k-th best (`cut`), are in; those equal to it are taken in order of position until
the budget is met. Lists are written in ascending order by two launches, counts per chunk and then places, so that no
scan runs over a whole line on one SM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.triton.common import check_contiguous

CHUNK = 2048

SCORES = 0
"""Entries: forced ones, then scores above the cut, then scores at the cut as far as the budget goes."""
MARKS = 1
"""Entries: bytes that are not 0."""

EQUAL = tl.constexpr(2**16)
"""One score at the cut: sums over a chunk hold the scores above in their lower half, the equal ones in the upper."""


@triton.jit
def _flags(in_ptr, cut_ptr, forced_ptr, length_ptr, line, at, row_size, MODE: tl.constexpr, CHUNK: tl.constexpr):
    """int32 flags of one chunk: 1 where chosen whatever happens, `EQUAL` where chosen as far as the budget goes."""
    place = at + tl.arange(0, CHUNK)
    # Masked by the row's size alone, which may be known to be a multiple of 16, loads are wide.
    entry = tl.load(in_ptr + line.to(tl.int64) * row_size + place, mask=place < row_size, other=0)
    if MODE == 0:
        cut = tl.load(cut_ptr + line)
        score = tl.where(entry == entry, entry, float("-inf"))
        flag = tl.where(score > cut, 1, tl.where(score == cut, EQUAL, 0))
        flag = tl.where(place < tl.load(forced_ptr + line), 1, flag)
    else:
        flag = (entry > 0).to(tl.int32)
    return tl.where(place < tl.load(length_ptr + line), flag, 0)


@triton.jit(do_not_specialize=("chunks",))
def _count_kernel(
    in_ptr,
    cut_ptr,
    forced_ptr,
    length_ptr,
    tally_ptr,
    row_size,
    chunks,
    MODE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    line = tl.program_id(1)
    flag = _flags(in_ptr, cut_ptr, forced_ptr, length_ptr, line, tl.program_id(0) * CHUNK, row_size, MODE, CHUNK)
    tl.store(tally_ptr + line * chunks + tl.program_id(0), tl.sum(flag, 0))


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _tallies(tally_ptr, chunk, chunks):
    """How many are sure and how many equal in the chunks before one, and how many are sure in all."""
    sure_before = tl.zeros([256], tl.int32)
    equal_before = tl.zeros([256], tl.int32)
    sure_all = tl.zeros([256], tl.int32)
    for at in range(0, chunks, 256):
        number = at + tl.arange(0, 256)
        tally = tl.load(tally_ptr + number, mask=number < chunks, other=0)
        sure_all += tally & (EQUAL - 1)
        tally = tl.where(number < chunk, tally, 0)
        sure_before += tally & (EQUAL - 1)
        equal_before += tally >> 16
    return tl.reduce((sure_before, equal_before, sure_all), 0, _add_three)


@triton.jit(do_not_specialize=("chunks", "out_cap"))
def _write_kernel(
    in_ptr,
    cut_ptr,
    forced_ptr,
    length_ptr,
    budget_ptr,
    tally_ptr,
    row_ptr,
    out_ptr,
    count_ptr,
    flag_ptr,
    row_size,
    chunks,
    out_cap,
    flag_size,
    MODE: tl.constexpr,
    LIST: tl.constexpr,
    COUNT: tl.constexpr,
    FLAGS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The places of one chunk: list entries at `out[row]`, the count per row, bytes at `flags[line]`."""
    line = tl.program_id(1)
    chunk = tl.program_id(0)
    flag = _flags(in_ptr, cut_ptr, forced_ptr, length_ptr, line, chunk * CHUNK, row_size, MODE, CHUNK)
    sure_before, equal_before, sure_all = _tallies(tally_ptr + line * chunks, chunk, chunks)
    spare = 0
    if MODE == 0:
        spare = tl.maximum(tl.load(budget_ptr + line) - sure_all, 0)
    rank = tl.cumsum(flag, 0) - flag
    equal_rank = equal_before + (rank >> 16)
    taken = (flag == 1) | ((flag == EQUAL) & (equal_rank < spare))
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(row_ptr + line).to(tl.int64)
    if LIST:
        at = sure_before + (rank & (EQUAL - 1)) + tl.minimum(equal_rank, spare)
        out_ptr += row * out_cap
        tl.store(out_ptr + at, place, mask=taken & (at < out_cap))
    if COUNT:  # noqa: SIM102
        if chunk == chunks - 1:
            before = sure_before + tl.minimum(equal_before, spare)
            tl.store(count_ptr + row, before + tl.sum(taken.to(tl.int32), 0))
    if FLAGS:
        tl.store(flag_ptr + line.to(tl.int64) * flag_size + place, taken.to(tl.uint8), mask=place < flag_size)


def write(
    source: torch.Tensor,
    mode: int,
    length: torch.Tensor,
    rows: torch.Tensor,
    *,
    cut: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    budget: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
) -> None:
    """Lists the entries of each line of `source` [lines, n] below `length` [lines] (see the modes above).

    Line `l` goes to row `rows[l]` of `out` and of `count`; `flags` uint8 [lines, n] gets a byte per position. Budgets
    and cuts belong to `SCORES`. `ValueError` for a tensor that does not lie in one piece.
    """
    check_contiguous(source=source, length=length, rows=rows, cut=cut, forced=forced, budget=budget)
    check_contiguous(out=out, count=count, flags=flags)
    lines, size = source.shape
    chunks = max(1, -(-size // CHUNK))
    tally = torch.empty(lines, chunks, dtype=torch.int32, device=source.device)
    none = length
    _count_kernel[(chunks, lines)](
        source,
        none if cut is None else cut,
        none if forced is None else forced,
        length,
        tally,
        size,
        chunks,
        MODE=mode,
        CHUNK=CHUNK,
        num_warps=4,
    )
    _write_kernel[(chunks, lines)](
        source,
        none if cut is None else cut,
        none if forced is None else forced,
        length,
        none if budget is None else budget,
        tally,
        rows,
        none if out is None else out,
        none if count is None else count,
        none if flags is None else flags,
        size,
        chunks,
        0 if out is None else out.shape[1],
        0 if flags is None else flags.shape[1],
        MODE=mode,
        LIST=out is not None,
        COUNT=count is not None,
        FLAGS=flags is not None,
        CHUNK=CHUNK,
        num_warps=4,
    )

"""Choosing the best of many scores and listing what was chosen, in Triton: exact budgets, ties by position.

A list of scores is cut by its k-th best value; values equal to it are taken in order of position until the budget
is met. Lists are written in ascending order by two launches, counts per chunk and then places, so that no scan
runs over a whole line on one multiprocessor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.triton_common import device_ints

CHUNK = 2048

SCORES = 0
"""Entries: forced ones, then scores above the cut, then scores at the cut as far as the budget goes."""
MARKS = 1
"""Entries: bytes that are not 0."""


@triton.jit
def _flags(in_ptr, cut_ptr, forced_ptr, length_ptr, line, at, row_size, MODE: tl.constexpr, CHUNK: tl.constexpr):
    """int32 flags of one chunk: chosen whatever happens, and chosen as far as the budget goes."""
    place = at + tl.arange(0, CHUNK)
    length = tl.load(length_ptr + line)
    inside = place < length
    base = in_ptr + line.to(tl.int64) * row_size
    if MODE == 0:
        forced = tl.load(forced_ptr + line)
        cut = tl.load(cut_ptr + line)
        score = tl.load(base + place, mask=inside, other=float("-inf"))
        score = tl.where(score == score, score, float("-inf"))
        first = inside & (place < forced)
        open_ = inside & (place >= forced)
        return (first | (open_ & (score > cut))).to(tl.int32), (open_ & (score == cut)).to(tl.int32)
    here = tl.load(base + place, mask=inside, other=0).to(tl.int32) > 0
    return here.to(tl.int32), tl.zeros([CHUNK], tl.int32)


@triton.jit(do_not_specialize=("row_size", "chunks"))
def _count_kernel(
    in_ptr, cut_ptr, forced_ptr, length_ptr, tally_ptr, row_size, chunks, MODE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1)
    sure, equal = _flags(in_ptr, cut_ptr, forced_ptr, length_ptr, line, tl.program_id(0) * CHUNK, row_size, MODE, CHUNK)
    out = tally_ptr + (line * chunks + tl.program_id(0)) * 2
    tl.store(out, tl.sum(sure, 0))
    tl.store(out + 1, tl.sum(equal, 0))


@triton.jit(do_not_specialize=("row_size", "chunks", "out_cap", "flag_size"))
def _write_kernel(
    in_ptr, cut_ptr, forced_ptr, length_ptr, budget_ptr, tally_ptr, row_ptr, out_ptr, count_ptr, flag_ptr,
    row_size, chunks, out_cap, flag_size, MODE: tl.constexpr, LIST: tl.constexpr,
    COUNT: tl.constexpr, FLAGS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The places of one chunk: list entries at `out[row]`, the count per row, bytes at `flags[line]`."""
    line = tl.program_id(1)
    chunk = tl.program_id(0)
    sure_before = 0
    equal_before = 0
    sure_all = 0
    for at in range(0, chunks, 256):
        number = at + tl.arange(0, 256)
        tally = tally_ptr + (line * chunks + number) * 2
        sure_of = tl.load(tally, mask=number < chunks, other=0)
        equal_of = tl.load(tally + 1, mask=number < chunks, other=0)
        sure_before += tl.sum(tl.where(number < chunk, sure_of, 0), 0)
        equal_before += tl.sum(tl.where(number < chunk, equal_of, 0), 0)
        sure_all += tl.sum(sure_of, 0)
    sure, equal = _flags(in_ptr, cut_ptr, forced_ptr, length_ptr, line, chunk * CHUNK, row_size, MODE, CHUNK)
    spare = 0
    if MODE == 0:
        spare = tl.maximum(tl.load(budget_ptr + line) - sure_all, 0)
    rank = equal_before + tl.cumsum(equal, 0) - equal
    taken = sure > 0
    if MODE == 0:
        taken = taken | ((equal > 0) & (rank < spare))
    counted = taken.to(tl.int32)
    before = sure_before + tl.minimum(equal_before, spare)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(row_ptr + line).to(tl.int64)
    if LIST:
        at = before + tl.cumsum(counted, 0) - counted
        tl.store(out_ptr + row * out_cap + at, place, mask=taken & (at < out_cap))
    if COUNT:  # noqa: SIM102
        if chunk == chunks - 1:
            tl.store(count_ptr + row, before + tl.sum(counted, 0))
    if FLAGS:
        tl.store(flag_ptr + line.to(tl.int64) * flag_size + place, counted.to(tl.uint8), mask=place < flag_size)


@triton.jit(do_not_specialize=("size",))
def _open_kernel(score_ptr, forced_ptr, length_ptr, out_ptr, size, CHUNK: tl.constexpr):
    """Scores that compete for a budget: -inf where a position is forced, beyond the length, or no number."""
    line = tl.program_id(1)
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    at = line.to(tl.int64) * size + place
    score = tl.load(score_ptr + at, mask=place < size, other=0.0)
    competes = (place >= tl.load(forced_ptr + line)) & (place < tl.load(length_ptr + line)) & (score == score)
    tl.store(out_ptr + at, tl.where(competes, score, float("-inf")), mask=place < size)


def cut_values(
    score: torch.Tensor, forced: tuple[int, ...], budget: tuple[int, ...], lengths: tuple[int, ...]
) -> torch.Tensor:
    """float32 [lines]: the value of the last score that each line's budget reaches, beyond its forced positions."""
    asked = [min(b, n) - min(f, n) for f, b, n in zip(forced, budget, lengths, strict=True)]
    most = max(0, *asked)
    if most <= 0:
        return torch.full((score.shape[0],), torch.inf, device=score.device)
    lines, size = score.shape
    competing = torch.empty_like(score)
    _open_kernel[(-(-size // CHUNK), lines)](
        score, device_ints(forced, score.device), device_ints(lengths, score.device), competing, size,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    if min(asked) == most:
        return competing.topk(most, -1, sorted=False).values.amin(-1)
    best = competing.topk(most, -1, sorted=True).values
    wanted = device_ints(tuple(asked), score.device)
    cut = best.gather(1, (wanted - 1).clamp(min=0).long()[:, None])[:, 0]
    return torch.where(wanted > 0, cut, torch.inf)


def write(
    source: torch.Tensor, mode: int, length: torch.Tensor, rows: torch.Tensor, *,
    cut: torch.Tensor | None = None, forced: torch.Tensor | None = None, budget: torch.Tensor | None = None,
    out: torch.Tensor | None = None, count: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Lists the entries of each line of `source` [lines, n] below `length` [lines] (see the modes above).

    Line `l` goes to row `rows[l]` of `out` (row size `out.stride(0)`) and of `count`;
    `flags` uint8 [lines, n] gets a byte per position. Budgets and cuts belong to `SCORES`.
    """
    lines, size = source.shape
    chunks = max(1, -(-size // CHUNK))
    tally = torch.empty(lines, chunks, 2, dtype=torch.int32, device=source.device)
    none = length
    _count_kernel[(chunks, lines)](
        source, none if cut is None else cut, none if forced is None else forced, length, tally, size, chunks,
        MODE=mode, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    _write_kernel[(chunks, lines)](
        source, none if cut is None else cut, none if forced is None else forced, length,
        none if budget is None else budget, tally, rows, none if out is None else out,
        none if count is None else count, none if flags is None else flags, size, chunks,
        0 if out is None else out.stride(0), 0 if flags is None else flags.shape[1],
        MODE=mode, LIST=out is not None, COUNT=count is not None, FLAGS=flags is not None,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip

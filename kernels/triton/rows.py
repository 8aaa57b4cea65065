"""Choosing each row's blocks from its scores, in Triton: the diagonal, and the best of those before it.

One program takes one row of scores and writes the ascending list of what it chose. The cut, the score of the last
block that the budget reaches, is found by counting how many scores reach a bound and halving; scores equal to it are
taken in order of position, as in `torch.index`. Bounds are halved as ordered integers, scores are compared as floats.
NaN counts as -inf.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headscope.kernels.triton.common import check_contiguous, ordered_key, value_of_key

_HELD = 16384
"""Scores of a row that are held in registers, 64 a thread; those beyond are read anew for each bound."""

_FEWEST = 1024
"""Scores held at least, so that few sizes are compiled."""

REGISTERS = 128
"""Registers a thread at most, for 16 warps on an SM."""

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _scores(base, at, row, scale, BLOCK: tl.constexpr):
    """float32 [BLOCK] scores from block `at` on: -inf where they are NaN, and from the diagonal on."""
    place = at + tl.arange(0, BLOCK)
    # Read up to a multiple of 16, so that a load takes several.
    score = tl.load(base + place, mask=place < (row + 15) // 16 * 16) * scale
    return tl.where((place < row) & (score == score), tl.minimum(score, LARGEST), float("-inf"))


@triton.jit
def _worst(score, at, row, BLOCK: tl.constexpr):
    """The least of the scores before the diagonal."""
    return tl.min(tl.where(at + tl.arange(0, BLOCK) < row, score, float("inf")), 0)


@triton.jit
def _count(score, bound, BLOCK: tl.constexpr):
    """How many are `bound` or more, a bound other than +0. By the sign of the difference, which -0 - 0 has too: LLVM
    packs comparisons into words, at twice the instructions."""
    sign = (score - bound).to(tl.int32, bitcast=True) >> 31
    return BLOCK + tl.sum(sign, 0)


@triton.jit
def _reach(base, held, row, scale, bound, MORE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """How many of the row's scores are `bound` or more."""
    many = _count(held, bound, BLOCK)
    if MORE:
        for at in range(BLOCK, row, PIECE):
            many += _count(_scores(base, at, row, scale, PIECE), bound, PIECE)
    return many


@triton.jit
def _cut(base, row, scale, wanted, MORE: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """A bound that exactly `wanted` scores reach or, where equal scores leave none, the `wanted`-th best score;
    and how many of the scores equal to it are wanted (or more than there are)."""
    held = _scores(base, 0, row, scale, BLOCK)
    worst = _worst(held, 0, row, BLOCK)
    best = tl.max(held, 0)
    if MORE:
        for at in range(BLOCK, row, PIECE):
            score = _scores(base, at, row, scale, PIECE)
            worst = tl.minimum(worst, _worst(score, at, row, PIECE))
            best = tl.maximum(best, tl.max(score, 0))
    # At least `wanted` scores reach `low`, fewer reach what is above `high`: `above` of them.
    low = ordered_key(worst)
    high = ordered_key(best)
    above = 0
    step = 0
    while low < high:
        # Half of the integers between two numbers of unlike sign or size lie near 0, so values are halved at first.
        middle = tl.minimum(tl.maximum(ordered_key(0.5 * value_of_key(low) + 0.5 * value_of_key(high)), low + 1), high)
        middle = tl.where(step < 8, middle, (low | high) - ((low ^ high) >> 1))
        # The key of -0 in place of that of +0.
        bound = value_of_key(tl.where(middle == 0, -1, middle))
        many = _reach(base, held, row, scale, bound, MORE, BLOCK, PIECE)
        low = tl.where(many >= wanted, middle, low)
        high = tl.where(many > wanted, high, tl.where(many == wanted, middle, middle - 1))
        above = tl.where(many > wanted, above, tl.where(many == wanted, 0, many))
        step += 1
    return value_of_key(low), wanted - above


@triton.jit(do_not_specialize=("first", "sixteens", "table_rows", "table_columns", "budget"))
def _choose_kernel(
    score_ptr,
    slot_ptr,
    out_ptr,
    count_ptr,
    first,
    sixteens,
    table_rows,
    table_columns,
    budget,
    scale,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One row's list at `out[slot, row]` and its count. score [lines, rows, 16 sixteens]."""
    line = tl.program_id(1)
    row = first + tl.program_id(0)
    base = score_ptr + (line.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * sixteens * 16
    target = tl.load(slot_ptr + line).to(tl.int64) * table_rows + row
    out = out_ptr + target * table_columns
    wanted = tl.minimum(budget - 1, row)
    # All of them, unless there are more; none reaches an infinite cut.
    cut = tl.where(wanted > 0, float("-inf"), float("inf"))
    spare = wanted
    if (wanted > 0) & (wanted < row):
        cut, spare = _cut(base, row, scale, wanted, MORE, BLOCK, PIECE)
    better_before = 0
    equal_before = 0
    for at in range(0, row, PIECE):
        score = _scores(base, at, row, scale, PIECE)
        better = score > cut
        place = at + tl.arange(0, PIECE)
        equal = (score == cut) & (place < row)
        # One scan counts both: the better scores in the upper half of a word.
        both = tl.where(better, 65536, equal.to(tl.int32))
        passed = tl.cumsum(both, 0) - both
        equal_at = equal_before + (passed & 65535)
        target_at = better_before + (passed >> 16) + tl.minimum(equal_at, spare)
        tl.store(out + target_at.to(tl.int64), place, mask=better | (equal & (equal_at < spare)))
        all_ = tl.sum(both, 0)
        better_before += all_ >> 16
        equal_before += all_ & 65535
    tl.store(out + wanted, row)
    tl.store(count_ptr + target, wanted + 1)


def settings(most: int) -> tuple[dict[str, Any], int]:
    """Constants and warps for rows of up to `most` scores before the diagonal."""
    block = min(_HELD, max(_FEWEST, triton.next_power_of_2(most)))
    warps = max(1, block // 2048)
    return {"MORE": most > block, "BLOCK": block, "PIECE": 512 * warps}, warps


def choose(
    score: torch.Tensor,
    first: int,
    budget: int,
    scale: float,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Writes the lists of rows `first`, `first + 1`, ... of every line: `blocks[slots[line], row]` and the count there.

    score [lines, rows, columns] float32, before the scale: row `first + r` against every block before it, so
    `columns >= first + rows - 1`. blocks int32 [NB, block rows, K] with K >= min(budget, row + 1); what lies beyond
    a row's count is left alone. `ValueError` where rows of scores are not laid out in steps of 16, or another tensor
    does not lie in one piece.
    """
    check_contiguous(slots=slots, blocks=blocks, count=count)
    lines, rows, columns = score.shape
    if not score.is_contiguous() or columns % 16 or score.data_ptr() % 16:
        raise ValueError(f"scores must be contiguous in rows of a multiple of 16, got {tuple(score.shape)}")
    constants, warps = settings(first + rows - 1)
    _choose_kernel[(rows, lines)](
        score,
        slots,
        blocks,
        count,
        first,
        columns // 16,
        blocks.shape[1],
        blocks.shape[2],
        budget,
        scale,
        **constants,
        num_warps=warps,
        maxnreg=REGISTERS,
    )

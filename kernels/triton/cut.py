"""The k-th best of many scores, in Triton: exact, one cut a line, by four digits of 8 bits.

Scores become integers in the same order, the best first. A launch per digit counts, for each line, how often each
value of that digit occurs among the scores that share the digits found so far; the next launch begins by reading off
which value holds the k-th best. Counts are sums of integers, so that the order of programs does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.triton.common import check_contiguous, device_ints, ordered_key, value_of_key

CHUNK = 2048
DIGITS = 4

# Kernels read these as compile-time constants.
BINS = tl.constexpr(256)
TABLE = tl.constexpr(DIGITS * 256)
REST = tl.constexpr(2**31 - 1)


@triton.jit
def _keys(score_ptr, forced_ptr, length_ptr, line, row_size, CHUNK: tl.constexpr):
    """uint32 keys of a chunk, the best score the smallest: NaN counts as -inf and -0 as 0; what does not compete
    comes after every score."""
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(score_ptr + line.to(tl.int64) * row_size + place, mask=place < row_size, other=0.0)
    competes = (place >= tl.load(forced_ptr + line)) & (place < tl.load(length_ptr + line))
    key = ordered_key(tl.where(score == score, score, float("-inf")))
    # The key of -0 is just below that of 0.
    key = tl.where(key == -1, 0, key)
    return tl.where(competes, key ^ REST, -1).to(tl.uint32, bitcast=True)


@triton.jit
def _read_off(found_ptr, count_ptr):
    """The key's digits so far and the one just counted, and which of the keys that share them is wanted, counted
    from the best."""
    wanted = tl.load(found_ptr + 1)
    reached = tl.cumsum(tl.load(count_ptr + tl.arange(0, BINS)), 0)
    passed = reached < wanted
    digit = tl.sum(passed.to(tl.int32), 0)
    return tl.load(found_ptr) * BINS + digit, wanted - tl.max(tl.where(passed, reached, 0), 0)


@triton.jit
def _digit_kernel(
    score_ptr,
    forced_ptr,
    length_ptr,
    found_ptr,
    next_ptr,
    count_ptr,
    row_size,
    DIGIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Counts the values of one digit in `count` [lines, 4, 256] and hands on what the digit before says.

    The first two digits are counted within a program: most scores of a chunk have few of their values, and additions
    to one place in memory wait for each other. Few scores share two digits, unless they are equal.
    """
    line = tl.program_id(1)
    count_ptr += line * TABLE + DIGIT * BINS
    digit = _keys(score_ptr, forced_ptr, length_ptr, line, row_size, CHUNK) >> (24 - 8 * DIGIT)
    if DIGIT > 0:
        above, wanted = _read_off(found_ptr + line * 2, count_ptr - BINS)
        if tl.program_id(0) == 0:
            tl.store(next_ptr + line * 2, above)
            tl.store(next_ptr + line * 2 + 1, wanted)
        digit -= (above * BINS).to(tl.uint32, bitcast=True)
    shares = digit < BINS
    if DIGIT < 2:
        many = tl.histogram(digit.to(tl.int32, bitcast=True), BINS, mask=shares)
        tl.atomic_add(count_ptr + tl.arange(0, BINS), many, mask=many > 0, sem="relaxed")
    else:
        digit = tl.where(shares, digit.to(tl.int32, bitcast=True), -1)
        largest = tl.max(digit, 0)
        many = tl.sum((digit == largest).to(tl.int32), 0)
        tl.atomic_add(count_ptr + largest, many, mask=largest >= 0, sem="relaxed")
        others = digit.to(tl.uint32, bitcast=True) < largest.to(tl.uint32, bitcast=True)
        tl.atomic_add(count_ptr + digit, 1, mask=others, sem="relaxed")


@triton.jit
def _value_kernel(found_ptr, count_ptr, cut_ptr):
    """Turns a key back into its score; a line that wants none gets inf."""
    line = tl.program_id(0)
    bits, _wanted = _read_off(found_ptr + line * 2, count_ptr + line * TABLE + (TABLE - BINS))
    none = tl.load(found_ptr + line * 2 + 1) <= 0
    tl.store(cut_ptr + line, tl.where(none, float("inf"), value_of_key(bits ^ REST)))


def cut_values(
    score: torch.Tensor, forced: tuple[int, ...], budget: tuple[int, ...], lengths: tuple[int, ...]
) -> torch.Tensor:
    """float32 [lines]: the value of the last score that each line's budget reaches, beyond its forced positions.

    score float32 [lines, n], of which the first `lengths` count; a budget holds the forced positions too. inf where it
    reaches no score. `ValueError` for scores that do not lie in one piece.
    """
    check_contiguous(score=score)
    lines, size = score.shape
    device = score.device
    wanted = tuple(min(b, n) - min(f, n) for f, b, n in zip(forced, budget, lengths, strict=True))
    if max(0, *wanted) == 0:
        return torch.full((lines,), torch.inf, device=device)
    cut = torch.empty(lines, device=device)
    count = torch.zeros(lines, TABLE.value, dtype=torch.int32, device=device)
    later = torch.empty(DIGITS - 1, lines, 2, dtype=torch.int32, device=device)
    found = [device_ints(tuple(x for w in wanted for x in (0, w)), device), *later]
    source = score, device_ints(forced, device), device_ints(lengths, device)
    for digit in range(DIGITS):
        _digit_kernel[(-(-size // CHUNK), lines)](
            *source, found[max(0, digit - 1)], found[digit], count, size, DIGIT=digit, CHUNK=CHUNK, num_warps=4
        )
    _value_kernel[(lines,)](found[-1], count, cut, num_warps=4)
    return cut

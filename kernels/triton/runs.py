"""Chosen distances as lists, in Triton: ascending runs (bands), and by `tiles/1` the windows of 128 that hold them.

Both rules look back over all smaller distances, yet no program scans a whole line: one launch sums up each chunk, a
second counts its windows, a third writes, each starting from what the chunks before it say.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.triton.common import check_contiguous

CHUNK = 2048

NEVER = tl.constexpr(-(2**30))
GAP = tl.constexpr(192)
"""Distances this far apart lie in different runs: a run's windows start at its first distance (`torch.index`)."""


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _chosen(flag_ptr, distance, length, flag_size):
    # Masked by the row's size alone, which may be known to be a multiple of 16, loads are wide.
    return (tl.load(flag_ptr + distance, mask=distance < flag_size, other=0) > 0) & (distance < length)


@triton.jit
def _before(flag_ptr, distance, start, length):
    """The chosen distance before each of a chunk's, which begins at `start`, as far as the chunk knows; else NEVER."""
    inside = (distance > start) & (distance <= length)
    chosen = tl.load(flag_ptr + distance - 1, mask=inside, other=0) > 0
    return tl.associative_scan(tl.where(chosen, distance - 1, NEVER), 0, _later)


@triton.jit
def _summary_kernel(flag_ptr, length_ptr, summary_ptr, flag_size, CHUNK: tl.constexpr):
    """Per chunk: its first and last chosen distance, the last that opens a run of windows whatever came before, and
    how many bands begin."""
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    flag_ptr += line * flag_size
    length = tl.load(length_ptr + line)
    distance = chunk * CHUNK + tl.arange(0, CHUNK)
    here = _chosen(flag_ptr, distance, length, flag_size)
    before = _before(flag_ptr, distance, chunk * CHUNK, length)
    opens = here & (before > NEVER) & (distance - before >= GAP)
    # The chunk's first distance may go on with the band of the chunk before.
    joins = tl.load(flag_ptr + chunk * CHUNK - 1, mask=chunk > 0, other=0) > 0
    begins = here & (before < distance - 1) & ((distance > chunk * CHUNK) | (joins == 0))
    out = summary_ptr + (line * tl.num_programs(0) + chunk) * 4
    tl.store(out, tl.min(tl.where(here, distance, -NEVER), 0))
    tl.store(out + 1, tl.max(tl.where(here, distance, NEVER), 0))
    tl.store(out + 2, tl.max(tl.where(opens, distance, -1), 0))
    tl.store(out + 3, tl.sum(begins.to(tl.int32), 0))


@triton.jit
def _past(summary_ptr, chunk, CHUNKS: tl.constexpr):
    """(last chosen distance, start of the run of windows) before a chunk, from the chunks before it."""
    number = tl.arange(0, CHUNKS)
    earlier = number < chunk
    first = tl.load(summary_ptr + number * 4, mask=earlier, other=0)
    last = tl.load(summary_ptr + number * 4 + 1, mask=earlier, other=NEVER)
    inner = tl.load(summary_ptr + number * 4 + 2, mask=earlier, other=-1)
    before = tl.load(summary_ptr + number * 4 - 3, mask=earlier & (number > 0), other=NEVER)
    before = tl.associative_scan(before, 0, _later)
    opens = earlier & (first < -NEVER) & (first - before >= GAP)
    return tl.max(last, 0), tl.max(tl.maximum(inner, tl.where(opens, first, -1)), 0)


@triton.jit
def _new_windows(
    flag_ptr,
    summary_ptr,
    distance,
    length,
    flag_size,
    chunk,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The one or two windows of each distance of a chunk, and whether each is new: a run's distances touch windows in
    ascending order, so a window is new when it lies beyond the last window of the chosen distance before."""
    latest, start = _past(summary_ptr, chunk, CHUNKS)
    here = _chosen(flag_ptr, distance, length, flag_size)
    before = tl.maximum(_before(flag_ptr, distance, chunk * CHUNK, length), latest)
    opens = here & (distance - before >= GAP)
    run = tl.maximum(tl.associative_scan(tl.where(opens, distance, -1), 0, _later), start)
    one = run + 64 + (distance - run) // 128 * 128
    two = run + 64 + (distance - run + 63) // 128 * 128
    reached = tl.where(opens, -1, run + 64 + (before - run + 63) // 128 * 128)
    new_one = here & (one > reached) & (one - 127 < length)
    new_two = here & (two > reached) & (two > one) & (two - 127 < length)
    return one, two, new_one.to(tl.int32), new_two.to(tl.int32)


@triton.jit
def _count_kernel(flag_ptr, length_ptr, summary_ptr, tally_ptr, flag_size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    flag_ptr += line * flag_size
    summary_ptr += line * chunks * 4
    distance = chunk * CHUNK + tl.arange(0, CHUNK)
    length = tl.load(length_ptr + line)
    _one, _two, new_one, new_two = _new_windows(
        flag_ptr, summary_ptr, distance, length, flag_size, chunk, CHUNK, CHUNKS
    )
    tl.store(tally_ptr + line * chunks + chunk, tl.sum(new_one + new_two, 0))


@triton.jit(do_not_specialize=("bands_cap", "windows_cap"))
def _write_kernel(
    flag_ptr,
    length_ptr,
    row_ptr,
    summary_ptr,
    tally_ptr,
    bands_ptr,
    band_count_ptr,
    windows_ptr,
    window_count_ptr,
    flag_size,
    bands_cap,
    windows_cap,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Program 0 of the last axis writes a chunk's bands, program 1 its windows; the last chunk's writes the counts."""
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0)
    flag_ptr += line * flag_size
    summary_ptr += line * chunks * 4
    length = tl.load(length_ptr + line)
    row = tl.load(row_ptr + line).to(tl.int64)
    distance = chunk * CHUNK + tl.arange(0, CHUNK)
    number = tl.arange(0, CHUNKS)
    if tl.program_id(2) == 0:
        here = _chosen(flag_ptr, distance, length, flag_size)
        earlier = number < chunk
        begun = tl.sum(tl.load(summary_ptr + number * 4 + 3, mask=earlier, other=0), 0)
        latest = tl.max(tl.load(summary_ptr + number * 4 + 1, mask=earlier, other=NEVER), 0)
        before = tl.maximum(_before(flag_ptr, distance, chunk * CHUNK, length), latest)
        begins = (here & (before < distance - 1)).to(tl.int32)
        bands_ptr += row * bands_cap * 2
        place = begun + tl.cumsum(begins, 0) - 1
        tl.store(bands_ptr + place * 2, distance, mask=(begins > 0) & (place < bands_cap))
        # Where a band begins, the one before it ended; the last ends with the last distance.
        tl.store(bands_ptr + place * 2 - 1, before, mask=(begins > 0) & (place > 0) & (place <= bands_cap))
        if chunk == chunks - 1:
            count = begun + tl.sum(begins, 0)
            latest = tl.maximum(latest, tl.max(tl.where(here, distance, NEVER), 0))
            tl.store(bands_ptr + count * 2 - 1, latest, mask=(count > 0) & (count <= bands_cap))
            tl.store(band_count_ptr + row, count)
    else:
        one, two, new_one, new_two = _new_windows(
            flag_ptr, summary_ptr, distance, length, flag_size, chunk, CHUNK, CHUNKS
        )
        past = tl.sum(tl.load(tally_ptr + line * chunks + number, mask=number < chunk, other=0), 0)
        windows_ptr += row * windows_cap
        place = past + tl.cumsum(new_one + new_two, 0) - new_one - new_two
        tl.store(windows_ptr + place, one, mask=(new_one > 0) & (place < windows_cap))
        place += new_one
        tl.store(windows_ptr + place, two, mask=(new_two > 0) & (place < windows_cap))
        if chunk == chunks - 1:
            tl.store(window_count_ptr + row, past + tl.sum(new_one + new_two, 0))


def write(
    flags: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    bands: torch.Tensor,
    band_count: torch.Tensor,
    windows: torch.Tensor | None,
    window_count: torch.Tensor,
) -> None:
    """Lists the distances marked in `flags` uint8 [lines, n] below `lengths` [lines]: line `l` goes to row `rows[l]`
    of `bands` [N, Bn, 2] and its count, and unless `windows` is None also of `windows` [N, Wn] and its count.

    `ValueError` for a tensor that does not lie in one piece.
    """
    check_contiguous(flags=flags, lengths=lengths, rows=rows)
    check_contiguous(bands=bands, band_count=band_count, windows=windows, window_count=window_count)
    lines, size = flags.shape
    chunks = max(1, -(-size // CHUNK))
    constants = {"CHUNK": CHUNK, "CHUNKS": max(16, triton.next_power_of_2(chunks)), "num_warps": 8}
    summary = torch.empty(lines, chunks, 4, dtype=torch.int32, device=flags.device)
    tally = torch.empty(lines, chunks, dtype=torch.int32, device=flags.device)
    _summary_kernel[(chunks, lines)](flags, lengths, summary, size, CHUNK=CHUNK, num_warps=8)
    if windows is not None:
        _count_kernel[(chunks, lines)](flags, lengths, summary, tally, size, **constants)
    _write_kernel[(chunks, lines, 1 if windows is None else 2)](
        flags,
        lengths,
        rows,
        summary,
        tally,
        bands,
        band_count,
        bands if windows is None else windows,
        window_count,
        size,
        bands.shape[1],
        0 if windows is None else windows.shape[1],
        **constants,
    )

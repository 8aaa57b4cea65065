"""Walking the lists of a sparse layout, 128 keys a step, and which cells of a step count: parts of `sparse.py`."""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

ROWS = gl.constexpr(128)
WINDOW = gl.constexpr(128)
FAR = gl.constexpr(2**30)
BLOCK_RUN, BAND_RUN, WINDOW_RUN, COLUMN_RUN, SINK_RUN = (gl.constexpr(kind) for kind in range(5))


class Columns(NamedTuple):
    """The columns of an item's head and the keep bits of one row block (`cover.keep_bits`): `words` of each."""

    columns_ptr: Any
    cap: Any
    some_ptr: Any
    whole_ptr: Any
    words: Any


class Lists(NamedTuple):
    """The lists of an item's head: where bands, windows and blocks lie, and how many steps or entries each has.
    `uneven` and `blocked` say whether columns differ within the rows, and whether blocks are beside other lists."""

    bands_ptr: Any
    bands: Any
    windows_ptr: Any
    windows: Any
    columns: Any
    sink: Any
    uneven: Any
    blocks_ptr: Any
    tile_blocks: Any
    blocked: Any
    size: Any


class Run(NamedTuple):
    """One list being walked: its kind, its steps in this pass, what `first_key` needs, and which cells of a step that
    is no column step belong: lo <= i - j <= hi and 0 <= j < stop."""

    kind: Any
    steps: Any
    origin: Any
    lo: Any
    hi: Any
    stop: Any
    list_ptr: Any
    factor: Any
    pieces: Any
    pitch: Any


@gluon.jit
def list_run(number, later, r0, lists, WIDTH: gl.constexpr, OVERLAPS: gl.constexpr):
    """The `Run` of a head's list of that number: blocks, each band, windows, columns. Lists that need care go in a
    later pass.

    `r0` is the own position that window offsets count from. Where the columns are the first `sink` keys and no list but
    a band from the diagonal on is beside them, they are a run of keys beyond that band.
    """
    bands_ptr, bands, windows_ptr, windows, columns, sink, uneven, blocks_ptr, tile_blocks, blocked, size = lists
    kind = BLOCK_RUN
    steps = tile_blocks
    origin = 0
    lo = 0
    hi = FAR
    stop = FAR
    list_ptr = blocks_ptr
    factor = size
    pieces = gl.maximum(size // WIDTH, 1)
    pitch = WIDTH
    careful = False
    if number > 0:
        factor = 0
        pieces = FAR
        if number <= bands:
            kind = BAND_RUN
            lo = gl.load(bands_ptr + 2 * number - 2)
            hi = gl.load(bands_ptr + 2 * number - 1)
            item_row = r0 // ROWS * ROWS
            last = item_row + ROWS - 1 - lo
            steps = gl.where(last < 0, 0, gl.maximum(last - gl.maximum(item_row - hi, 0) + WIDTH, 0) // WIDTH)
            origin = last + 1 - WIDTH
            pitch = -WIDTH
            careful = blocked
        elif number == bands + 1:
            kind = WINDOW_RUN
            steps = windows * (WINDOW // WIDTH)
            origin = r0
            list_ptr = windows_ptr
            factor = -1
            pieces = WINDOW // WIDTH
            careful = blocked | (bands > 0)
        elif sink > 0:
            kind = SINK_RUN
            lo = gl.load(bands_ptr + 1, mask=bands > 0, other=-1) + 1
            stop = sink
            last = gl.minimum(r0 // ROWS * ROWS + ROWS - 1 - lo, sink - 1)
            steps = gl.where(last < 0, 0, gl.maximum(last + WIDTH, 0) // WIDTH)
        else:
            kind = COLUMN_RUN
            steps = columns
            careful = blocked | uneven
    if OVERLAPS:
        steps = gl.where(careful == later, steps, 0)
    return Run(kind, steps, origin, lo, hi, stop, list_ptr, factor, pieces, pitch)


@gluon.jit
def needs_care(lists):
    """Whether some list of this item goes in the second pass; most items have none."""
    return lists.blocked | lists.uneven | ((lists.bands > 0) & (lists.windows > 0))


@gluon.jit
def first_key(run, entry, piece):
    """Own position of a step's first key (its place in the compacted columns, for a column step)."""
    listed = gl.load(run.list_ptr + entry, mask=(run.kind == BLOCK_RUN) | (run.kind == WINDOW_RUN), other=0)
    return run.origin + run.factor * listed + piece * run.pitch


@gluon.jit
def next_piece(entry, piece, pieces):
    piece += 1
    if piece == pieces:
        piece = 0
        entry += 1
    return entry, piece


@gluon.jit
def keep_distances(scores, rows, key, cols, run):
    """Scores of the cells of keys key + cols that belong to a `Run`; -inf elsewhere.

    One unsigned comparison a cell: i - j - lo < min(hi, i) - lo + 1, where a negative left side is large.
    """
    count = gl.maximum(gl.minimum(run.hi, rows) - run.lo + 1, 0).to(gl.uint32)
    near = (rows - key - run.lo)[:, None] - cols[None, :]
    return gl.where((near.to(gl.uint32) < count[:, None]) & (cols < run.stop - key)[None, :], scores, float("-inf"))


@gluon.jit
def keep_columns(scores, rows, cols, kept, step, lists, listed, PAIR: gl.constexpr):
    """Scores of the column cells that are causal and that no window, band or listed block counts already."""
    w0, w1, w2, w3 = keep_words(kept.some_ptr, step * 2 * PAIR, kept.words, True, PAIR)
    a0, a1, a2, a3 = keep_words(kept.whole_ptr, step * 2 * PAIR, kept.words, True, PAIR)
    scores = gl.where(keep_mask(w0, w1, w2, w3, cols, PAIR)[None, :], scores, float("-inf"))
    if (((a0 ^ w0) | (a1 ^ w1) | (a2 ^ w2) | (a3 ^ w3)) != 0) | (listed > 0):
        place = step * 64 * PAIR + cols
        column = gl.load(kept.columns_ptr + place, mask=place < kept.cap, other=0)
        scores = gl.where(rows[:, None] >= column[None, :], scores, float("-inf"))
        scores = without_bands(scores, rows, column, lists)
        scores = without_blocks(scores, column, lists, listed)
    return scores


@gluon.jit
def without_bands(scores, rows, keys, lists):
    """Scores with the cells of the head's bands masked out: those were counted before."""
    for b in range(lists.bands):
        far = rows[:, None] - keys[None, :]
        within = (far >= gl.load(lists.bands_ptr + 2 * b)) & (far <= gl.load(lists.bands_ptr + 2 * b + 1))
        scores = gl.where(within, float("-inf"), scores)
    return scores


@gluon.jit
def without_blocks(scores, keys, lists, listed):
    """Scores with the keys of the row block's listed blocks masked out: those were counted before."""
    for e in range(listed):
        begin = gl.load(lists.blocks_ptr + e) * lists.size
        scores = gl.where(((keys >= begin) & (keys < begin + lists.size))[None, :], float("-inf"), scores)
    return scores


@gluon.jit
def keep_words(words_ptr, at, words, want, PAIR: gl.constexpr):
    """The keep words of one tile of columns; words beyond the table are 0. Two are repeated where two suffice."""
    w0 = gl.load(words_ptr + at, mask=want & (at < words), other=0)
    w1 = gl.load(words_ptr + at + 1, mask=want & (at + 1 < words), other=0)
    if PAIR == 2:
        w2 = gl.load(words_ptr + at + 2, mask=want & (at + 2 < words), other=0)
        w3 = gl.load(words_ptr + at + 3, mask=want & (at + 3 < words), other=0)
        return w0, w1, w2, w3
    else:
        return w0, w1, w0, w1


@gluon.jit
def keep_mask(w0, w1, w2, w3, columns, PAIR: gl.constexpr):
    """bool per column of a tile."""
    w = gl.where(columns < 32, w0, w1)
    if PAIR == 2:
        w = gl.where(columns < 64, w, gl.where(columns < 96, w2, w3))
    return ((w >> (columns & 31)) & 1) != 0

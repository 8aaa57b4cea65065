"""Walking the lists of a sparse layout, 128 keys a step, and which cells of a step count: parts of `gluon_sparse`."""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

ROWS = gl.constexpr(128)
WINDOW = gl.constexpr(128)
FAR = gl.constexpr(2**30)
BLOCK_RUN, BAND_RUN, WINDOW_RUN, COLUMN_RUN, SINK_RUN = (gl.constexpr(kind) for kind in range(5))


@gluon.jit
def list_run(run, later, r0, lists, WIDTH: gl.constexpr, OVERLAPS: gl.constexpr):
    """The run-th of a head's `lists`: blocks, each band, windows, columns. Lists that need care go in a later pass.

    Returns the kind, the number of steps in this pass and what `first_key` needs; cells of a step that is no column
    step belong when lo <= i - j <= hi and 0 <= j < stop. `r0` is the own position that window offsets count from. Where
    the columns are the first `sink` keys and no list but a band from the diagonal on is beside them, they are a run
    of keys beyond that band.
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
    if run > 0:
        factor = 0
        pieces = FAR
        if run <= bands:
            kind = BAND_RUN
            lo = gl.load(bands_ptr + 2 * run - 2)
            hi = gl.load(bands_ptr + 2 * run - 1)
            p0 = r0 // ROWS * ROWS
            last = p0 + ROWS - 1 - lo
            steps = gl.where(last < 0, 0, gl.maximum(last - gl.maximum(p0 - hi, 0) + WIDTH, 0) // WIDTH)
            origin = last + 1 - WIDTH
            pitch = -WIDTH
            careful = blocked
        elif run == bands + 1:
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
    return kind, steps, origin, lo, hi, stop, list_ptr, factor, pieces, pitch


@gluon.jit
def needs_care(bands, windows, uneven, blocked):
    """Whether some list of this item goes in the second pass; most items have none."""
    return blocked | uneven | ((bands > 0) & (windows > 0))


@gluon.jit
def first_key(kind, origin, list_ptr, factor, entry, piece, pitch):
    """Own position of a step's first key (its place in the compacted columns, for a column step)."""
    listed = gl.load(list_ptr + entry, mask=(kind == BLOCK_RUN) | (kind == WINDOW_RUN), other=0)
    return origin + factor * listed + piece * pitch


@gluon.jit
def next_piece(entry, piece, pieces):
    piece += 1
    if piece == pieces:
        piece = 0
        entry += 1
    return entry, piece


@gluon.jit
def keep_distances(s, rows, key, cols, lo, hi, stop):
    """Scores of the cells of keys key + cols with lo <= i - j <= hi and 0 <= j < stop; -inf elsewhere.

    One unsigned comparison a cell: i - j - lo < min(hi, i) - lo + 1, where a negative left side is large.
    """
    count = gl.maximum(gl.minimum(hi, rows) - lo + 1, 0).to(gl.uint32)
    near = (rows - key - lo)[:, None] - cols[None, :]
    return gl.where((near.to(gl.uint32) < count[:, None]) & (cols < stop - key)[None, :], s, float("-inf"))


@gluon.jit
def keep_columns(s, rows, cols, some_ptr, whole_ptr, words, columns_ptr, column_cap, step, bands_ptr, bands,
                   blocks_ptr, listed, size, PAIR: gl.constexpr):
    """Scores of the column cells that are causal and that no window, band or listed block counts already."""
    w0, w1, w2, w3 = keep_words(some_ptr, step * 2 * PAIR, words, True, PAIR)
    a0, a1, a2, a3 = keep_words(whole_ptr, step * 2 * PAIR, words, True, PAIR)
    s = gl.where(keep_mask(w0, w1, w2, w3, cols, PAIR)[None, :], s, float("-inf"))
    if (((a0 ^ w0) | (a1 ^ w1) | (a2 ^ w2) | (a3 ^ w3)) != 0) | (listed > 0):
        place = step * 64 * PAIR + cols
        column = gl.load(columns_ptr + place, mask=place < column_cap, other=0)
        s = gl.where(rows[:, None] >= column[None, :], s, float("-inf"))
        s = without_bands(s, rows, column, bands_ptr, bands)
        s = without_blocks(s, column, blocks_ptr, listed, size)
    return s


@gluon.jit
def without_bands(s, rows, keys, bands_ptr, bands):
    """Scores with the cells of the head's bands masked out: those were counted before."""
    for b in range(bands):
        far = rows[:, None] - keys[None, :]
        s = gl.where((far >= gl.load(bands_ptr + 2 * b)) & (far <= gl.load(bands_ptr + 2 * b + 1)), float("-inf"), s)
    return s


@gluon.jit
def without_blocks(s, keys, blocks_ptr, listed, size):
    """Scores with the keys of the row block's listed blocks masked out: those were counted before."""
    for e in range(listed):
        begin = gl.load(blocks_ptr + e) * size
        s = gl.where(((keys >= begin) & (keys < begin + size))[None, :], float("-inf"), s)
    return s


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

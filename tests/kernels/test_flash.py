"""Attention on the CPU in rectangles through torch's flash kernel, against float64, at every border of its parts."""

import random
from dataclasses import replace

import pytest
import torch

from headscope.engine import AShape, BlockSparse, Fixed, VerticalSlash, build_index, masked_attention
from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.torch import attention, flash, gathered

LENGTHS = (1, 2, 63, 64, 65, 111, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000)


def _inputs(rng: random.Random, length: int, rows: int, group: int, batch: int = 1, dim: int = 16):
    torch.manual_seed(rng.randrange(2**31))
    kv_heads = rng.choice((1, 2))
    q = torch.randn(batch, kv_heads * group, rows, dim)
    k, v = (torch.randn(batch, kv_heads, length, dim) for _ in range(2))
    return q, k, v


def _list(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 lists ended by PAD, and their counts."""
    most = max(map(len, rows))
    padded = [row + [PAD] * (most - len(row)) for row in rows]
    count = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), most), count


def _windows(rng: random.Random, length: int, tile: int) -> list[int]:
    """Ascending windows that do not overlap: a run of any length at the diagonal, or none, then some at random."""
    rows = tile // 2
    offsets = [rows + tile * step for step in range(rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 9, 17)))]
    at = (offsets[-1] if offsets else rows) + tile
    while at < length + tile and rng.random() < 0.8:
        offsets.append(at)
        at += tile + rng.choice((0, 0, 0, 1, 63, 64, 300))
    return offsets


def _columns(rng: random.Random, length: int) -> list[int]:
    """Sinks, columns near the end and at random, or every key of a piece."""
    kind = rng.randrange(4)
    if kind == 0:
        return []
    if kind == 1:
        first = rng.randrange(length)
        return list(range(first, min(length, first + rng.choice((1, 64, 130, 600)))))
    return sorted(rng.sample(range(length), min(length, rng.choice((1, 5, 40, 200)))))


def _random_layout(rng: random.Random, q: torch.Tensor, k: torch.Tensor, starts: tuple[int, ...]) -> Layout:
    """Windows, columns, bands and blocks that overlap, per head, as no pattern would choose them."""
    heads, length, tile = len(q) * q.shape[1], k.shape[2], rng.choice((128, 128, 256))
    size = rng.choice((64, 128))
    patterns = [
        rng.choice((BlockSparse(2, size), AShape(0, 1), AShape(3, rng.choice((64, 100, 700))))) for _ in range(heads)
    ]
    patterns = patterns[: q.shape[1]]
    layout = build_index(q, k, patterns, None, starts, 128).computed
    windows, window_count = _list([_windows(rng, length, tile) for _ in range(heads)])
    columns, column_count = _list([_columns(rng, length) for _ in range(heads)])
    return replace(
        layout,
        tile=tile,
        windows=windows,
        window_count=window_count,
        columns=columns,
        column_count=column_count,
        plans=(),
    )


def _check(q, k, v, layout, scale=0.25):
    out, lse = attention.attend(q, k, v, layout, scale)
    expected, expected_lse = masked_attention(q, k, v, membership.mask(layout), scale)
    finite = torch.isfinite(expected_lse)
    assert torch.equal(finite, torch.isfinite(lse))
    assert torch.allclose(lse[finite].double(), expected_lse[finite], rtol=1e-6, atol=1e-5)
    bound = 1e-5 if q.dtype == torch.float32 else 4 * torch.finfo(q.dtype).eps
    assert (out - expected).abs().max() < bound
    assert not out[~finite].any(), "a row without cells gives 0"


@pytest.mark.parametrize("seed", range(80))
def test_any_lists_equal_float64(seed):
    rng = random.Random(seed)
    length = rng.choice(LENGTHS)
    rows = rng.choice((length, length, max(1, length // 3), max(1, length - 64), 1))
    batch = rng.choice((1, 2))
    q, k, v = _inputs(rng, length, rows, rng.choice((1, 3, 4)), batch)
    starts = tuple(rng.choice((0, 0, rng.randrange(length))) for _ in range(batch))
    _check(q, k, v, _random_layout(rng, q, k, starts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patterns_of_a_long_prompt_equal_float64(dtype):
    rng = random.Random(7)
    q, k, v = (x.to(dtype) for x in _inputs(rng, 2050, 2050, 4))
    k[:, :, 300:303] += 1
    patterns = [VerticalSlash(90, 300), AShape(5, 600), VerticalSlash(40, windows=6), BlockSparse(9)]
    if q.shape[1] == 8:
        patterns += [
            VerticalSlash(400, 200, local=130),
            AShape(0, 70),
            Fixed((3, 900), (0, 5, 700)),
            BlockSparse(3, 128),
        ]
    _check(q, k, v, build_index(q, k, patterns).computed)


@pytest.mark.parametrize("run", range(1, 12))
def test_runs_of_windows_of_every_length(run):
    """Whole squares of 256 rows begin where the run covers them; columns lie inside and outside of it."""
    rng = random.Random(run)
    q, k, v = _inputs(rng, 777, 777, 1)
    heads = q.shape[1]
    layout = build_index(q, k, [AShape(0, 1)] * heads).computed
    windows, window_count = _list([[64 + 128 * step for step in range(run)]] * heads)
    columns, column_count = _list([[0, 1, 5, 63, 64, 200, 255, 256, 257, 511, 512, 600, 776]] * heads)
    nothing = {"bands": torch.full((heads, 0, 2), PAD, dtype=torch.int32), "band_count": torch.zeros_like(window_count)}
    _check(q, k, v, replace(
        layout, windows=windows, window_count=window_count, columns=columns, column_count=column_count, **nothing
    ))  # fmt: skip


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200, 256, 300])
def test_chunks_give_the_rows_of_the_whole(rows):
    rng = random.Random(rows)
    q, k, v = _inputs(rng, 600, 600, 3)
    layout = _random_layout(rng, q, k, (0,))
    whole, whole_lse = attention.attend(q, k, v, layout, 0.25)
    out, lse = attention.attend(q[:, :, -rows:], k, v, replace(layout, q_len=rows), 0.25)
    assert torch.allclose(out, whole[:, :, -rows:], atol=2e-6)
    assert torch.allclose(lse, whole_lse[:, :, -rows:], atol=2e-6)


def test_chunks_of_flags_change_nothing(monkeypatch):
    rng = random.Random(3)
    q, k, v = _inputs(rng, 1000, 1000, 3)
    layout = _random_layout(rng, q, k, (0,))
    at_once = attention.attend(q, k, v, layout, 0.25)
    monkeypatch.setattr(gathered, "FLAGS", 1)
    for few, all_ in zip(attention.attend(q, k, v, layout, 0.25), at_once, strict=True):
        assert torch.allclose(few, all_, atol=2e-6)


def test_a_cell_costs_one_cell(monkeypatch):
    """Score elements that are formed stay near the computed pairs, and most of them in blocks of 256 rows."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, 4096, 8) for _ in range(3))
    index = build_index(q, k, [VerticalSlash(100, 300, local=300)])
    formed = {256: 0, 64: 0}
    original = flash._flash

    def spy(queries, keys, values, scale, causal, mask):
        cells = queries.shape[0] * queries.shape[1] * keys.shape[1]
        formed[queries.shape[1]] += cells // 2 if causal else cells
        return original(queries, keys, values, scale, causal, mask)

    monkeypatch.setattr(flash, "_flash", spy)
    attention.attend(q, k, v, index.computed, 1.0)
    computed = int(index.computed_pairs())
    assert 0.99 * computed <= sum(formed.values()) <= 1.15 * computed
    assert formed[256] > 0


def test_who_is_served():
    assert flash.serves(torch.zeros(1))
    assert flash.serves(torch.zeros(1, dtype=torch.bfloat16))
    assert not flash.serves(torch.zeros(1, dtype=torch.float64))
    q, k, _ = _inputs(random.Random(0), 200, 200, 4)
    patterns = [VerticalSlash(9, 20), BlockSparse(2, 64), BlockSparse(2, 16), AShape(2, 30)] * (q.shape[1] // 4)
    assert flash.whole_rows(build_index(q, k, patterns).computed).tolist()[:4] == [True, True, False, True]
    narrow = build_index(q, k, patterns, None, None, 16).computed
    assert flash.whole_rows(narrow).tolist()[:4] == [False, True, False, True]

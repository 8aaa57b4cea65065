"""The lessons' numbers against the article's, and against arithmetic written out here."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headscope.engine import Estimator, build_index, sparse_attention
from headscope.engine.patterns.families import AShape, BlockSparse, Fixed, VerticalSlash
from headscope.studio.lessons import maths
from headscope.studio.lessons.maths import (
    a_shape,
    blocks,
    dense,
    estimator,
    find_heads,
    missed_mass,
    online_softmax,
    real_heads,
    tiles,
    time_split,
    toy,
    vertical_slash,
)


@pytest.mark.parametrize("n", [1, 4, 8, 64])
def test_dense_counts_the_lower_triangle(n: int) -> None:
    assert dense.cells_at(n) == n * (n + 1) // 2


def test_dense_rows_are_softmax_of_the_scores() -> None:
    found = dense.lesson(12, 9)
    expected = np.exp(found.scores - found.scores.max())
    np.testing.assert_allclose(found.weights[9, :10], expected / expected.sum(), rtol=1e-6)
    assert found.lse == pytest.approx(math.log(np.exp(found.scores).sum()), abs=1e-5)
    np.testing.assert_allclose(found.weights.sum(1), 1.0, rtol=1e-9)


def test_scores_are_the_scaled_dot_products() -> None:
    one = dense.head(10)
    expected = one.q[0, 0, 7].double() @ one.k[0, 0, :8].double().T * one.scale
    np.testing.assert_allclose(dense.scores_of(one, 7).numpy(), expected.numpy(), rtol=1e-9, atol=1e-12)


def test_a_shape_of_the_drawing_has_21_cells() -> None:
    found = a_shape.lesson(8, sink=1, window=2)
    assert found.cells == 21
    assert found.sink_cells + found.window_cells - found.both == found.cells
    assert (found.classes >= 2).sum() == found.cells
    assert (found.classes == 4).sum() == found.both


def test_a_shape_parts_against_equation_3() -> None:
    chance = random.Random(0)
    for _ in range(20):
        n, sink, window = chance.randint(4, 64), chance.randint(0, 16), chance.randint(1, 32)
        found = a_shape.lesson(n, sink, window)
        rows = [set(range(min(sink, i + 1))) | set(range(max(0, i - window + 1), i + 1)) for i in range(n)]
        assert found.cells == sum(map(len, rows))
        assert all(set(np.flatnonzero(found.classes[i] >= 2)) == row for i, row in enumerate(rows))


def test_vertical_slash_by_hand() -> None:
    found = vertical_slash.lesson((1,), (0, 2), 6)
    assert found.right.keys == (1, 4, 6)
    assert found.right.scores == pytest.approx((2.0, 1.0, 2.0))
    assert found.right.denominator == pytest.approx(2 * math.e**2 + math.e)
    assert found.right.weights == pytest.approx((0.422, 0.155, 0.422), abs=5e-4)
    assert found.right.output == pytest.approx((1.266, 0.732), abs=2e-3)
    assert found.right.rounded_output == pytest.approx((1.266, 0.732), abs=1e-9)
    # The same row from the sparse attention that models run, not from the reference.
    one = vertical_slash.head()
    index = build_index(one.q, one.k, [Fixed(columns=(1,), distances=(0, 2))], one.scale, tile=1)
    out, _ = sparse_attention(one.q, one.k, one.v, index)
    assert out[0, 0, 6].tolist() == pytest.approx(found.right.output, abs=1e-6)


def test_forgetting_to_remove_the_repeat_counts_it_twice() -> None:
    found = vertical_slash.lesson((1, 6), (0, 2), 6)
    assert found.repeated == (6,)
    assert sorted(found.doubled.keys) == [1, 4, 6, 6]
    e = math.e
    z = 3 * e**2 + e
    assert found.doubled.denominator == pytest.approx(z)
    assert found.doubled.output == pytest.approx(((e**2 * 1 + 2 * e**2 * 2) / z, (e * 2 + 2 * e**2) / z))
    assert found.right.output == pytest.approx(vertical_slash.lesson((1,), (0, 2), 6).right.output)
    assert found.doubled.output != pytest.approx(found.right.output, abs=0.01)


def test_distances_beyond_the_start_are_cut() -> None:
    found = vertical_slash.lesson((), (0, 2), 1)
    assert found.right.keys == (1,)
    assert found.cut == (2,)
    assert vertical_slash.lesson((5,), (), 3).right.keys == ()


def test_two_columns_of_1024() -> None:
    assert vertical_slash.column_cells(1024, (0, 512)) == 1536


def test_every_cover_holds_the_cells() -> None:
    covers = {one.name: one for one in vertical_slash.covers((1,), (0, 2))}
    target = covers["vertical-slash"].mask
    assert covers["vertical-slash"].cells == vertical_slash.lesson((1,), (0, 2), 6).cells == target.sum()
    for one in covers.values():
        assert (one.mask | ~target).all()
        assert one.cells == one.mask.sum() == target.sum() + one.extra
    assert covers["a-shape"].cells < 36
    assert vertical_slash.covers((), ()) == []


def test_block_drawing_has_20_cells() -> None:
    assert blocks.drawing().cells == 20
    assert blocks.drawing().causal == 36
    assert blocks.drawing(((0, 0), (1, 1)), 4).cells == 20


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pooled_softmax_ranks_blocks_as_the_index_does(block: int, k: int) -> None:
    found = blocks.lesson(block, k, needle=7.0)
    for u, row in enumerate(found.before):
        order = sorted(range(u), key=lambda v, row=row: -row[v])
        assert set(np.flatnonzero(found.chosen[u])) == {u, *order[: k - 1]}
    np.testing.assert_allclose(found.after.sum(1), 1.0, atol=1e-5)


def test_pooling_first_overlooks_the_lone_key() -> None:
    strong, none = blocks.lesson(8, 2, needle=7.0), blocks.lesson(8, 2, needle=0.0)
    last = blocks.N // 8 - 1
    assert strong.best[last, blocks.NEEDLE // 8]
    assert not strong.chosen[last, blocks.NEEDLE // 8]
    assert strong.captured_best[-8:].mean() - strong.captured[-8:].mean() > 0.5
    assert none.overlooked < strong.overlooked


@pytest.mark.parametrize("tile", [2, 3, 4, 6])
def test_merged_tiles_are_the_softmax(tile: int) -> None:
    found = online_softmax.lesson(tile)
    scores, values = np.array(online_softmax.SCORES), np.array(online_softmax.VALUES)
    expected = np.exp(scores) @ values / np.exp(scores).sum()
    np.testing.assert_allclose(found.output, expected, rtol=1e-6)
    np.testing.assert_allclose(online_softmax.merged(found.steps, len(found.steps)), expected, rtol=1e-6)
    for step in found.steps:
        seen = scores[: step.keys[-1] + 1]
        assert step.m == pytest.approx(seen.max(), abs=1e-6)
        assert step.l == pytest.approx(np.exp(seen - seen.max()).sum(), rel=1e-6)
    assert math.dist(found.averaged, found.output) > 0.1


def test_estimator_reads_equation_12() -> None:
    scores = estimator.proxy_scores(estimator.article_head(), [6, 7], 4)
    np.testing.assert_allclose(scores, estimator.PROXY, rtol=1e-6)
    np.testing.assert_allclose(scores.max(0), (2.0, 0.5, 0.3, 0.2), rtol=1e-6)


def test_the_early_key_is_lost_with_two_rows_and_kept_with_three() -> None:
    one = estimator.article_head()
    two = estimator.lesson(one, 1, 1, Estimator(rows=2))
    assert two.sampled == (6, 7)
    assert two.columns == (0,)
    assert two.classes[estimator.EARLY_ROW, estimator.EARLY_KEY] == 4
    assert two.captured[estimator.EARLY_ROW] < 0.1
    three = estimator.lesson(one, 1, 1, Estimator(rows=3))
    assert three.columns == (estimator.EARLY_KEY,)
    assert three.captured[estimator.EARLY_ROW] > 0.8
    assert three.captured[-1] < two.captured[-1]


def test_spread_rows_see_both_chapters() -> None:
    one = estimator.long_head()
    tail = estimator.lesson(one, 3, 3, Estimator(rows=8, where="tail"))
    spread = estimator.lesson(one, 3, 3, Estimator(rows=8, where="spread"))
    assert {6, 27} <= set(spread.columns)
    assert 6 not in tail.columns
    assert spread.mean > tail.mean


def test_a_mean_is_fooled_by_a_distance_that_one_row_can_have() -> None:
    found = dict(estimator.distance_variants(estimator.long_head(), 3, 3, Estimator(rows=8)))
    last = estimator.LONG - 1
    assert last in found["mean, keep"].distances
    assert last not in found["sum, keep"].distances
    assert last not in found["shrunk, keep"].distances
    assert found["sum, removed"].mean > found["sum, keep"].mean > found["mean, keep"].mean
    distance = found["mean, keep"].distance_scores
    weights = found["mean, keep"].weights
    assert distance[last] == pytest.approx(weights[last, 0], abs=1e-6)


def test_captured_mass_of_an_estimate_is_the_weight_on_its_cells() -> None:
    found = estimator.lesson(estimator.long_head(), 2, 4, Estimator(rows=6))
    read = np.isin(found.classes, (2, 3))
    np.testing.assert_allclose((found.weights * read).sum(1), found.captured, atol=1e-5)
    assert read.sum() == found.cells


@pytest.mark.parametrize("spread", list(tiles.SPREADS))
def test_tiles_only_add_cells(spread: str) -> None:
    found = [tiles.lesson(spread, width) for width in tiles.WIDTHS]
    assert found[0].requested == found[0].computed
    for one in found:
        block, column, _, _ = one.areas
        assert one.requested == found[0].requested
        assert one.requested <= one.computed <= one.causal == tiles.N * (tiles.N + 1) // 2
        assert block + column == one.computed
        assert (one.classes >= 2).sum() == one.computed
    assert found[-1].captured >= found[0].captured


def test_distances_far_apart_cost_more_tiles() -> None:
    near, far = tiles.lesson("side by side", 8), tiles.lesson("far apart", 8)
    assert far.windows > near.windows
    assert far.computed > near.computed


def test_two_lses_give_the_captured_mass() -> None:
    for sharpness in (0.25, 1.0, 4.0):
        found = missed_mass.lesson(sharpness, 0, 4)
        assert found.captured == pytest.approx(found.summed, abs=2e-6)
        assert found.captured == pytest.approx(math.exp(found.lse_sparse - found.lse_dense), abs=1e-6)


def test_sharp_rows_lose_little_or_everything() -> None:
    kept = [missed_mass.lesson(s, 0, 4).captured for s in (0.25, 1.0, 4.0)]
    lost = [missed_mass.lesson(s, 12, 4).captured for s in (0.25, 1.0, 4.0)]
    assert kept == sorted(kept) and kept[-1] > 0.95
    assert lost == sorted(lost, reverse=True) and lost[-1] < 0.05


def test_time_of_the_article() -> None:
    assert time_split.EXAMPLE.dense_ms == 10
    assert time_split.EXAMPLE.layer_ms == 3.5
    assert time_split.EXAMPLE.speedup == pytest.approx(2.86, abs=0.005)
    assert time_split.EXAMPLE.kernel_speedup == 8
    assert time_split.EXAMPLE.ceiling == pytest.approx(1 / (1 - time_split.EXAMPLE.share))


def test_a_toy_puts_strength_where_it_was_told() -> None:
    one = toy.make(20, distances={3: 2.0}, spots=[(range(5, 10), [1], 4.0)])
    scores = (one.q[0, 0] @ one.k[0, 0].T).numpy()
    assert scores[7, 1] == pytest.approx(4.0, abs=0.1)
    assert scores[12, 1] == pytest.approx(0.0, abs=0.1)
    assert scores[15, 12] - scores[15, 11] == pytest.approx(2.0, abs=0.1)


def test_equal_cells_stay_within_the_blocks() -> None:
    one = toy.make(128, distances={0: 2.0}, spots=[(range(128), [0], 2.0)], noise=1.0)
    found = find_heads.equal_cells(one.q, one.k, one.scale)
    cells = {
        kind: int(build_index(one.q, one.k, of, one.scale, tile=1).requested_pairs()) for kind, of in found.items()
    }
    assert max(cells.values()) == cells["block-sparse"]
    assert min(cells.values()) > 0.9 * cells["block-sparse"]


def test_choose_takes_the_clearest_head_of_each_kind() -> None:
    def trials(a: float, v: float, b: float) -> dict[str, find_heads.Trial]:
        made = zip(find_heads.FAMILIES, (AShape(1, 2), VerticalSlash(1, 1), BlockSparse(1, 4)), (a, v, b), strict=True)
        return {kind: find_heads.Trial(pattern, 10, missed, missed, missed) for kind, pattern, missed in made}

    found = {
        "one": {
            (0, 0): trials(0.05, 0.1, 0.6),
            (0, 1): trials(0.7, 0.05, 0.5),
            (1, 0): trials(0.35, 0.36, 0.3),
            (1, 1): trials(0.8, 0.7, 0.75),
        },
    }
    assert find_heads.choose(found) == {
        "a-shape": (0, 0),
        "vertical-slash": (0, 1),
        "block-sparse": (1, 0),
        "dense": (1, 1),
    }


def test_trials_survive_the_file() -> None:
    trial = find_heads.Trial(VerticalSlash(3, 4), 17, 0.25, 0.5, 0.125)
    assert find_heads.trial_from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


def test_the_packaged_heads_have_their_evidence() -> None:
    known = real_heads.heads_file()
    assert known.model == "smollm2"
    assert known.heads_measured == 270
    assert [one.role for one in known.heads] == [*find_heads.FAMILIES, "dense"]
    for one in known.heads:
        assert set(one.evidence) == set(known.prompts)
        for trials in one.evidence.values():
            most = trials["block-sparse"].cells
            assert all(0.97 * most <= trial.cells <= most for trial in trials.values())
        assert real_heads.sentence(one)
    assert known.heads[0].best == "a-shape"
    assert known.heads[1].best == "vertical-slash"
    assert min(known.heads[3].missed(kind) for kind in find_heads.FAMILIES) > 0.4


@pytest.mark.model
@pytest.mark.slow
def test_measured_again_the_heads_are_as_in_the_file(smollm2: object) -> None:
    torch.manual_seed(0)
    known = real_heads.heads_file()
    for one in real_heads.live(smollm2, known.prompts[0]):  # type: ignore[arg-type]
        for family, trial in one.trials.items():
            told = one.known.evidence[known.prompts[0]][family]
            assert trial.pattern == told.pattern
            assert trial.missed == pytest.approx(told.missed, abs=0.01)
        assert one.maps["a-shape"].dense.shape == (real_heads.CELLS, real_heads.CELLS)


def test_what_computes_neither_draws_nor_shows() -> None:
    """The lessons' numbers can be had without Streamlit and plotly."""
    names = sorted(path.stem for path in Path(maths.__file__).parent.glob("*.py") if path.stem != "__init__")
    code = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(f'{maths.__name__}.{{name}}')\n"
    code += "print(sorted({'streamlit', 'plotly'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The sampling study: equal cells, exact captured mass, and what is planted for each estimator to find."""

from __future__ import annotations

import pytest
import torch

from headscope.engine.attend.attention import dense_attention
from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.bench.sampling import SamplingPoint, captured_rows, choices, lines_at, study, totals
from headscope.engine.search.cost import CostModel
from headscope.engine.search.results import SearchError
from tests.helpers.planted import COLUMNS, DISTANCES, PlantedSource, planted_layer, planted_prompts


def mask_of(columns: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    length = columns.shape[-1]
    gap = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return (columns[None, :] | distances[gap.clamp(min=0)]) & (gap >= 0)


@pytest.mark.parametrize("estimator", [Estimator(), Estimator(32, "half", overlap="removed"), Estimator(64, "spread")])
def test_every_estimator_gets_the_same_cells(estimator: Estimator) -> None:
    q, k, _ = planted_layer(1, 512)
    for share in (0.2, 0.4):
        columns, distances = lines_at(ScoreInputs(q, k, 1.0), estimator, share)
        wanted = share * 512 * 513 / 2
        for head in range(4):
            cells = int(mask_of(columns[head], distances[head]).sum())
            assert wanted - 512 <= cells <= wanted  # less than one line away


def test_captured_mass_is_that_of_the_mask() -> None:
    q, k, v = planted_layer(2, 300)
    _, lse = dense_attention(q, k, v, 1.0)
    pairs = [lines_at(ScoreInputs(q, k, 1.0), Estimator(), share) for share in (0.1, 0.4)]
    columns, distances = (torch.stack([pair[at] for pair in pairs]) for at in (0, 1))
    found = captured_rows(ScoreInputs(q, k, 1.0), lse, columns, distances)
    scores = (q[0].double() @ k[0].double().transpose(-1, -2)).masked_fill(
        torch.ones(300, 300).triu(1).bool(), -torch.inf
    )
    weight = scores.softmax(-1)
    for choice in range(2):
        for head in range(4):
            wanted = (weight[head] * mask_of(columns[choice, head], distances[choice, head])).sum(-1)
            torch.testing.assert_close(found[choice, head].double(), wanted, atol=2e-5, rtol=0)


def test_planted_lines_are_chosen_first() -> None:
    q, k, _ = planted_layer(3)
    columns, distances = lines_at(ScoreInputs(q, k, 1.0), Estimator(64, "half", overlap="removed"), 0.12)
    assert columns[1, list(COLUMNS)].all() and distances[1, list(DISTANCES)].all()


def test_a_study_covers_every_choice_and_more_cells_capture_more() -> None:
    estimators = (Estimator(16), Estimator(64, "half", overlap="removed"))
    points = study(PlantedSource(1), planted_prompts(2, 512), [0], estimators, (0.1, 0.3))
    assert [(point.estimator, point.share) for point in points] == [(e, s) for e in estimators for s in (0.1, 0.3)]
    for low, high in zip(points[::2], points[1::2], strict=True):
        assert low.captured < high.captured and low.index_ms > 0 and len(low.prompts) == 2
        assert low.worst_row <= low.captured
    with pytest.raises(SearchError, match="at least 64 tokens"):
        study(PlantedSource(1), planted_prompts(1, 63), [0], estimators)
    assert len(choices()) >= 18 and len(set(choices())) == len(choices())


def test_totals_trade_index_time_against_cells() -> None:
    def point(rows: int, share: float, captured: float, index_ms: float) -> SamplingPoint:
        return SamplingPoint(Estimator(rows), share, captured, 0, 0, 0, 0, index_ms, ())

    points = [point(16, 0.1, 0.9, 1.0), point(16, 0.3, 0.97, 1.0), point(64, 0.1, 0.95, 4.0), point(64, 0.3, 0.99, 4.0)]
    cheap_tiles = CostModel(
        0, {f: {"layer": 0, "fixed": 0, "keys": 0, "tile": 1e-4} for f in CostModel.tiles().heads}, (0, 0), (0, 0)
    )
    found = totals(points, 0.04, cheap_tiles, 2048, 9)
    assert found[0].estimator.rows == 16 and found[0].reached
    assert found[0].share == pytest.approx(0.1 + 0.2 * (0.06 / 0.07))
    dear_tiles = totals(points, 0.04, CostModel.tiles(), 2048, 9)
    assert dear_tiles[0].estimator.rows == 64 and dear_tiles[0].share == pytest.approx(0.15)
    assert [total.reached for total in totals(points, 0.02, CostModel.tiles(), 2048, 9)] == [True, False]

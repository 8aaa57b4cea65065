"""The reference backend works in float64 from the inputs on: index, maps and sums, not attention alone."""

from __future__ import annotations

import math

import pytest
import torch

from headscope.engine import BlockSparse, Estimator, VerticalSlash, build_index, dense_attention, sparse_attention
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.loss import mass
from headscope.kernels import backends
from headscope.kernels.cells import reference
from headscope.kernels.torch.probabilities import probabilities


def _near_ties() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys 3 and 40 of 64, of which the later one is better by 2 ** -40 of a logit: float32 sees a tie."""
    q, k = torch.zeros(1, 1, 64, 16, dtype=torch.float64), torch.zeros(1, 1, 64, 16, dtype=torch.float64)
    q[..., 0] = 1.0
    k[0, 0, 3, 0], k[0, 0, 40, 0] = 8.0, 8.0 + 2.0**-40
    return q, k


def test_columns_are_chosen_by_their_float64_scores() -> None:
    q, k = _near_ties()
    for statistic in ("probability", "logit"):
        estimator = Estimator(rows=1, statistic=statistic)
        index = build_index(q, k, [VerticalSlash(1, 1)], 1.0, tile=1, estimator=estimator, impl="reference")
        assert index.impl == "reference"
        assert index.requested.columns[0].tolist() == [40], statistic


def test_sums_that_float32_cannot_hold_decide_between_blocks() -> None:
    """Means of 2 ** 25 + 1 and 2 ** 25: equal in float32, where the earlier block wins the tie."""
    q, k = torch.ones(1, 1, 48, 16), torch.zeros(1, 1, 48, 16)
    k[0, 0, :16, 0], k[0, 0, 16:32, 0] = 2.0**25, 2.0**25
    k[0, 0, 16:32, 1] = 1.0
    index = build_index(q, k, [BlockSparse(2, 16)], 1.0, tile=1, impl="reference")
    assert index.requested.blocks[0, 2, :2].tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_maps_and_profiles_are_exact(seed: int) -> None:
    torch.manual_seed(seed)
    q, k = (torch.randn(2, h, 200, 16) for h in (4, 2))
    starts = (0, 60)
    _, lse = dense_attention(q, k, k, starts=starts, impl="reference")
    index = build_index(q, k, [VerticalSlash(9, 20)] * 4, starts=starts, impl="reference")
    exact = reference.probabilities(q, k, reference.causal(200, 200, starts, q.device), 0.25)
    inputs = ScoreInputs(q, k, starts=starts)
    pooled = mass.pooled_map(inputs, lse, shape=(1, 1), impl="reference")
    kept = mass.pooled_map(inputs, lse, shape=(1, 1), index=index, impl="reference")
    columns, distances = mass.profiles(inputs, lse, impl="reference")
    rows = torch.tensor([200.0, 140.0], dtype=torch.float64)[:, None].expand(2, 4)
    assert {x.dtype for x in (pooled, kept, columns, distances)} == {torch.float64}
    for total in (pooled[..., 0, 0], columns.sum(-1), distances.sum(-1)):
        torch.testing.assert_close(total, rows, atol=1e-11, rtol=0)
    inside = (exact * index.computed_mask()).sum((2, 3))
    torch.testing.assert_close(kept[..., 0, 0], inside, atol=1e-11, rtol=0)
    for sequence, start in enumerate(starts):
        found = columns[sequence, :, : 200 - start]
        torch.testing.assert_close(found, exact[sequence].sum(1)[:, start:], atol=1e-12, rtol=0)


def test_missed_mass_is_that_of_float64_lses() -> None:
    """A row whose missed mass lies far below what float32 LSEs can tell apart."""
    q, k = torch.zeros(1, 1, 64, 16), torch.zeros(1, 1, 64, 16)
    q[..., 0], k[0, 0, 0, 0] = 1.0, 30.0
    index = build_index(q, k, [VerticalSlash(1, 1, sink=1)], 1.0, tile=1, impl="reference")
    _, sparse = sparse_attention(q, k, k, index, impl="reference")
    _, dense = dense_attention(q, k, k, 1.0, impl="reference")
    missed = mass.missed_mass(sparse, dense)
    exact = 62 / (torch.tensor(30.0, dtype=torch.float64).exp() + 63)
    assert missed[0, 0, 63].item() == pytest.approx(exact.item(), rel=1e-3)


def test_coverage_counts_beyond_float32() -> None:
    """2 ** 24 + 1 cells and more in one pool."""
    q = torch.zeros(1, 1, 5794, 16)
    layout = build_index(q, q, [VerticalSlash(1, 5794)], tile=1, impl="reference").computed
    cells = backends.REFERENCE.coverage(layout, (0, 5794), (0, 5794), (1, 1))
    assert cells.dtype == torch.float64 and int(cells) == 5794 * 5795 // 2


def test_coverage_asks_for_queries_that_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked with the layout's own integers, which every GPU kernel refuses, and so ran in torch everywhere."""
    q = torch.zeros(1, 1, 20, 16)
    index = build_index(q, q, [VerticalSlash(1, 3)])
    asked = []
    monkeypatch.setattr(backends, "choose", lambda impl, q, layout: asked.append(q.dtype) or backends.TORCH)
    assert mass.coverage_map(index, shape=(1, 1)).item() == int(index.computed_pairs())
    assert asked == [torch.float16]


def test_probabilities_follow_the_definition() -> None:
    """exp(q k scale - lse) over grouped heads and a crop of the keys, 0 right of the diagonal."""
    torch.manual_seed(0)
    q, k = torch.randn(6, 5, 8, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    rows, lse = torch.tensor([4, 6, 7, 9, 30]), torch.randn(6, 5, dtype=torch.float64)
    weight = probabilities(q, k, lse, rows, 0.3, first_key=3)
    for head in range(6):
        for at, row in enumerate(rows.tolist()):
            for key in range(7):
                logit = float(q[head, at] @ k[head // 3, key]) * 0.3
                expected = 0.0 if 3 + key > row else math.exp(logit - float(lse[head, at]))
                assert weight[head, at, key].item() == pytest.approx(expected, rel=1e-6)
    assert probabilities(q.half(), k.half(), lse.float(), rows, 0.3).dtype == torch.float32

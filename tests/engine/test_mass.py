"""Missed mass, maps and profiles against float64 matrices of probabilities."""

import pytest
import torch

from headscope.engine import VerticalSlash, build_index, dense_attention, measure_heads, sparse_attention
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.loss import mass, oracle
from headscope.kernels.cells import reference
from tests.helpers.cases import random_case


def _probabilities(case, starts):
    mask = reference.causal(case.q.shape[2], case.k.shape[2], starts, case.q.device)
    return reference.probabilities(case.q, case.k, mask, case.q.shape[3] ** -0.5)


@pytest.mark.parametrize("seed", range(60))
def test_missed_mass_from_two_lses_equals_the_matrix(seed):
    case = random_case(3000 + seed)
    index = build_index(case.q, case.k, case.patterns, None, case.starts, case.tile, case.estimator)
    _, sparse = sparse_attention(case.q, case.k, case.v, index)
    _, dense = dense_attention(case.q, case.k, case.v, starts=case.starts)
    missed = mass.missed_mass(sparse, dense)
    exact = (_probabilities(case, index.starts) * ~index.computed_mask()).sum(-1)
    loud = float((case.q.abs().max() * case.k.abs().max()) * 1e-6)
    assert (missed - exact).abs().max() < max(1e-5, 16 * loud)
    if case.q.abs().max() < 6:
        assert (missed - exact).abs().max() < 1e-5
    assert missed.min() >= 0
    assert missed.max() <= 1


def test_summaries_of_missed_mass():
    missed = torch.zeros(1, 2, 300)
    missed[0, 0, 250] = 0.9
    missed[0, 1, :100] = 0.5
    first, second = mass.losses(missed, (0,))
    assert (first.worst, first.worst_row, first.p99) == (pytest.approx(0.9), 250, 0.0)
    assert first.mean == pytest.approx(0.9 / 300)
    assert second.thirds == (pytest.approx(0.5), 0.0, 0.0)
    assert second.p99 == pytest.approx(0.5)


def test_padding_rows_enter_no_summary():
    missed = torch.ones(1, 1, 10)
    missed[0, 0, 4:] = 0.25
    loss = mass.losses(missed, (-4,))[0]
    assert (loss.mean, loss.worst, loss.worst_row) == (0.25, 0.25, 0)
    chunk = mass.losses(torch.tensor([[[0.0, 1.0]]]), (98,))[0]
    assert chunk.worst_row == 99


@pytest.mark.parametrize("seed", range(40))
def test_pooled_maps_sum_the_probabilities_of_their_tiles(seed):
    case = random_case(4000 + seed)
    index = build_index(case.q, case.k, case.patterns, None, case.starts, case.tile, case.estimator)
    _, lse = dense_attention(case.q, case.k, case.v, starts=case.starts)
    length = case.k.shape[2]
    shape = (min(5, length), min(7, length))
    span = (length // 4, length)
    if span[1] - span[0] < 7:
        span = (0, length)
    rows = [span[0] + (span[1] - span[0]) * a // shape[0] for a in range(shape[0] + 1)]
    cols = [length * a // shape[1] for a in range(shape[1] + 1)]
    exact = _probabilities(case, index.starts)
    computed = index.computed_mask()
    inputs = ScoreInputs(case.q, case.k, starts=case.starts)
    plain = mass.pooled_map(inputs, lse, rows=span, shape=shape)
    kept = mass.pooled_map(inputs, lse, rows=span, shape=shape, index=index)
    cells = mass.coverage_map(index, rows=span, shape=shape)
    for b, start in enumerate(index.starts):
        shift = length - case.q.shape[2] - start
        own = torch.arange(case.q.shape[2]) + shift
        for a in range(shape[0]):
            pick = (own >= rows[a]) & (own < rows[a + 1])
            for c in range(shape[1]):
                tile = slice(start + cols[c], start + cols[c + 1])
                probability, inside = exact[b][:, pick, tile], computed[b][:, pick, tile]
                assert torch.allclose(plain[b, :, a, c].double(), probability.sum((1, 2)), atol=1e-3)
                assert torch.allclose(kept[b, :, a, c].double(), (probability * inside).sum((1, 2)), atol=1e-3)
                assert torch.equal(cells[b, :, a, c], inside.sum((1, 2)).float())


@pytest.mark.parametrize("seed", range(30))
def test_profiles_sum_columns_and_distances(seed):
    case = random_case(5000 + seed)
    starts = case.starts or (0,) * len(case.q)
    _, lse = dense_attention(case.q, case.k, case.v, starts=case.starts)
    columns, distances = mass.profiles(ScoreInputs(case.q, case.k, starts=case.starts), lse)
    exact = _probabilities(case, starts)
    length = case.k.shape[2]
    for b, start in enumerate(starts):
        real = exact[b, :, :, start:]
        assert torch.allclose(columns[b, :, : length - start].double(), real.sum(1), atol=2e-3)
        for distance in {d for d in (0, 1, (length - start) // 2, length - start - 1) if d < length - start}:
            total = real.diagonal(length - case.q.shape[2] - start - distance, 1, 2).sum(-1)
            assert torch.allclose(distances[b, :, distance].double(), total, atol=2e-3)


def test_measurements_agree_with_the_matrix():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 400, 16) for h in (3, 1, 1))
    patterns = [VerticalSlash(9, 20), VerticalSlash(30, windows=1), VerticalSlash(400, 400)]
    layer = measure_heads(q, k, v, patterns, layer=4)
    mask = layer.index.computed_mask()
    exact = (reference.probabilities(q, k, reference.causal(400, 400, (0,), q.device), 0.25) * ~mask).sum(-1)[0]
    out, _ = reference.attend(q, k, v, layer.index.computed, 0.25)
    dense, _ = reference.dense(q, k, v, 0.25, (0,))
    for head, found in enumerate(layer.heads):
        assert (found.layer, found.head, found.pattern) == (4, head, patterns[head])
        assert found.missed_mass_mean == pytest.approx(exact[head].mean().item(), abs=1e-5)
        assert found.missed_mass_worst == pytest.approx(exact[head].max().item(), abs=1e-5)
        assert found.missed_mass_thirds[1] == pytest.approx(exact[head][133:266].mean().item(), abs=1e-5)
        error = ((out - dense)[0, head].norm() / dense[0, head].norm()).item()
        assert found.output_error == pytest.approx(error, abs=1e-5)
        assert found.computed_density == mask[0, head].sum().item() / (400 * 401 / 2)
        assert sum(found.areas[:2]) == found.computed_pairs
    assert layer.heads[2].missed_mass_mean < 1e-6
    assert layer.heads[2].output_cosine == pytest.approx(1.0)
    shares = sum(found.time_share_ms for found in layer.heads)
    assert shares == pytest.approx(layer.index_ms + layer.kernel_ms)


def test_the_loss_split_adds_up_and_orders_the_oracles():
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 2, 300, 16) * 2, torch.randn(1, 1, 300, 16), torch.randn(1, 1, 300, 16)
    layer = measure_heads(q, k, v, [VerticalSlash(12, 24)] * 2)
    _, lse = dense_attention(q, k, v)
    for head in range(2):
        split = oracle.loss_split(ScoreInputs(q, k), lse, layer.index, head)
        assert not split.sampled
        assert sum(split.steps) == pytest.approx(layer.heads[head].missed_mass_mean, abs=1e-5)
        assert split.top_k <= split.geometric <= split.online + 1e-9
        assert split.computed <= split.online


def test_the_geometric_oracle_finds_planted_lines():
    """Queries that all look at keys 37 and 90: two columns and the diagonal hold nearly everything."""
    torch.manual_seed(2)
    n, dim = 256, 16
    q, k = torch.randn(1, 1, n, dim) * 0.01, torch.randn(1, 1, n, dim) * 0.01
    q[..., 0] += 8.0
    k[0, 0, [0, 37, 90], 0] += 8.0
    _, lse = dense_attention(q, k, k)
    index = build_index(q, k, [VerticalSlash(vertical=3, slash=1)], tile=1)
    split = oracle.loss_split(ScoreInputs(q, k), lse, index, 0)
    assert split.geometric < 0.01
    assert split.top_k < 0.01

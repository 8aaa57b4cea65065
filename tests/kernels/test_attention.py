"""Attention of the torch path against the float64 reference."""

import pytest
import torch

from headscope.engine import (
    AShape,
    BlockSparse,
    Dense,
    Fixed,
    VerticalSlash,
    build_index,
    dense_attention,
    masked_attention,
    sparse_attention,
)
from headscope.kernels.cells import reference
from headscope.kernels.torch import attention as torch_attention
from tests.helpers.cases import random_case


def _index(case):
    return build_index(case.q, case.k, case.patterns, None, case.starts, case.tile, case.estimator)


@pytest.fixture
def poisoned(monkeypatch):
    """Every output that the torch path allocates starts as NaN or as its own value, never as a lucky zero."""
    empty = torch.empty_like

    def filled(x, **options):
        made = empty(x, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-7)

    monkeypatch.setattr(torch, "empty_like", filled)


@pytest.mark.parametrize("seed", range(150))
def test_sparse_equals_masked_float64(seed, poisoned):
    case = random_case(1000 + seed)
    index = _index(case)
    out, lse = sparse_attention(case.q, case.k, case.v, index)
    expected, expected_lse = masked_attention(case.q, case.k, case.v, index.computed_mask())
    assert (out - expected).abs().max() < 1e-4
    finite = torch.isfinite(expected_lse)
    assert torch.equal(finite, torch.isfinite(lse))
    assert torch.allclose(lse[finite].double(), expected_lse[finite], rtol=1e-6, atol=1e-5)
    assert not out[~finite].any(), "a row without cells gives 0"


@pytest.mark.parametrize("seed", range(60))
def test_dense_equals_float64(seed, poisoned):
    case = random_case(2000 + seed)
    out, lse = dense_attention(case.q, case.k, case.v, starts=case.starts)
    starts = case.starts or (0,) * len(case.q)
    expected, expected_lse = reference.dense(case.q, case.k, case.v, case.q.shape[3] ** -0.5, starts)
    assert (out - expected).abs().max() < 1e-4
    assert torch.equal(torch.isfinite(lse), torch.isfinite(expected_lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [65, 1000])
def test_low_precision_stays_within_twice_torch(dtype, length):
    torch.manual_seed(length)
    q, k, v = (torch.randn(1, h, length, 64).to(dtype) for h in (6, 2, 2))
    patterns = [AShape(4, 90), VerticalSlash(20, 40), BlockSparse(3), Dense(), VerticalSlash(9, windows=2), Dense()]
    index = build_index(q, k, patterns)
    mask = index.computed_mask()
    exact, _ = masked_attention(q, k, v, mask)
    ours = (sparse_attention(q, k, v, index)[0].double() - exact).norm()
    keys, values = (x.repeat_interleave(3, 1) for x in (k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    assert ours <= 2 * (plain.double() - exact).norm()


def test_the_seed_example_gives_its_output():
    """Query 6 of eq. 9 to 11; the article rounds its weights, so its output is met to 2e-3."""
    q, k, v = torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2)
    q[0, 0, 6] = torch.tensor([1.0, 1.0])
    k[0, 0, 1], k[0, 0, 4], k[0, 0, 6] = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    v[0, 0, 1], v[0, 0, 4], v[0, 0, 6] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([2.0, 1.0])
    index = build_index(q, k, [Fixed(columns=(1,), distances=(0, 2))], scale=1.0)
    out, _ = sparse_attention(q, k, v, index)
    assert torch.allclose(out[0, 0, 6], torch.tensor([1.266, 0.732]), atol=2e-3)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 111, 1000])
def test_full_budgets_equal_dense(length):
    torch.manual_seed(length)
    q, k, v = (torch.randn(1, h, length, 32) for h in (4, 2, 2))
    patterns = [Dense(), AShape(0, length), VerticalSlash(length, length), BlockSparse(length)]
    out, lse = sparse_attention(q, k, v, build_index(q, k, patterns))
    expected, expected_lse = dense_attention(q, k, v)
    assert torch.allclose(out, expected, atol=2e-6)
    assert torch.allclose(lse, expected_lse, atol=1e-5)


def test_two_chunks_equal_one_pass():
    """Dense and A-shape exactly; blocks at block boundaries; online lines mean the rows of their own chunk."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 320, 16) for h in (4, 2, 2))
    patterns = [Dense(), AShape(5, 70), BlockSparse(2, 64), AShape(0, 3)]
    whole, whole_lse = sparse_attention(q, k, v, build_index(q, k, patterns))
    for rows in (slice(0, 192), slice(192, 320)):
        seen = slice(0, rows.stop)
        part = (q[:, :, rows], k[:, :, seen], v[:, :, seen])
        out, lse = sparse_attention(*part, build_index(part[0], part[1], patterns))
        assert torch.allclose(out, whole[:, :, rows], atol=2e-6)
        assert torch.allclose(lse, whole_lse[:, :, rows], atol=2e-6)


def test_a_batch_of_two_equals_two_batches_of_one_and_padding_changes_nothing():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, 200, 16) for h in (6, 2, 2))
    patterns = [AShape(2, 30), VerticalSlash(9, 20), BlockSparse(2), Dense(), VerticalSlash(5, windows=1), Dense()]
    starts = [0, 73]
    out, lse = sparse_attention(q, k, v, build_index(q, k, patterns, starts=starts))
    for b, start in enumerate(starts):
        one = [x[b : b + 1, :, start:] for x in (q, k, v)]
        alone, alone_lse = sparse_attention(*one, build_index(one[0], one[1], patterns))
        assert torch.allclose(out[b : b + 1, :, start:], alone, atol=2e-6)
        assert torch.allclose(lse[b : b + 1, :, start:], alone_lse, atol=2e-6)
    assert not out[1, :, :73].any()
    assert torch.isneginf(lse[1, :, :73]).all()


def test_hostile_logits_stay_finite():
    """Very large logits, with the largest ones where no row may look."""
    torch.manual_seed(2)
    n = 300
    q, k, v = (torch.randn(1, h, n, 16) for h in (4, 4, 4))
    k[:, :, 250:] *= 1e4
    q[:, :, :100] *= 1e3
    patterns = [AShape(2, 20), VerticalSlash(6, 9), BlockSparse(1), Dense()]
    index = build_index(q, k, patterns)
    out, lse = sparse_attention(q, k, v, index)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()
    expected, _ = masked_attention(q, k, v, index.computed_mask())
    assert torch.allclose(out.double(), expected, atol=1e-2)


def test_work_follows_the_computed_pairs(monkeypatch):
    """Score elements that gathered items form stay near the computed pairs; nothing near n x n is ever allocated."""
    torch.manual_seed(3)
    n = 4096
    q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
    formed, largest = [0], [0]
    original = torch.Tensor.masked_fill_

    def spy(self, mask, value):
        formed[0] += self.numel()
        largest[0] = max(largest[0], self.numel())
        return original(self, mask, value)

    monkeypatch.setattr(torch.Tensor, "masked_fill_", spy)
    index = build_index(q, k, [AShape(16, 240)])
    formed[0] = 0
    torch_attention.attend(q.double(), k.double(), v.double(), index.computed, 1.0)
    assert int(index.computed_pairs()) <= formed[0] <= 1.5 * int(index.computed_pairs())
    assert largest[0] <= 2**22


def test_same_bits_on_repeats():
    case = random_case(5, length=333)
    index = _index(case)
    first = sparse_attention(case.q, case.k, case.v, index)
    again = sparse_attention(case.q, case.k, case.v, _index(case))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_mismatched_inputs_are_named():
    case = random_case(7, length=64)
    index = _index(case)
    with pytest.raises(ValueError, match="v must match k"):
        sparse_attention(case.q, case.k, case.v[:, :, :3], index)
    with pytest.raises(ValueError, match="index was built for"):
        sparse_attention(case.q[:, :, :1], case.k[:, :, :9], case.v[:, :, :9], index)
    with pytest.raises(ValueError, match="impl='triton' cannot serve here"):
        dense_attention(case.q, case.k, case.v, impl="triton")
    with pytest.raises(ValueError, match="mask"):
        masked_attention(case.q, case.k, case.v, torch.zeros(3, 3, dtype=torch.bool))

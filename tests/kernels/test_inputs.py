"""What launchers make of inputs: any strides give the same numbers, what does not fit is refused, LSEs keep float32."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from headscope.engine import BlockSparse, Dense, VerticalSlash, build_index, dense_attention, sparse_attention
from headscope.kernels.cells import inputs, reference
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch import attention, index, mass
from tests.helpers import strides, triton_cases


@pytest.mark.parametrize("how", strides.WAYS)
@pytest.mark.parametrize("seed", range(8))
def test_any_strides_give_the_same_attention(how: str, seed: int) -> None:
    case = triton_cases.random_case(seed, dtypes=(torch.float32, torch.bfloat16))
    q, k, v = strides.restrided(how, case.q, case.k, case.v)
    expected = reference.attend(q, k, v, case.layout, case.scale)
    allowed = 1e-5 if q.dtype == torch.float32 else 6e-3
    out, lse = attention.attend(q, k, v, case.layout, case.scale)
    assert triton_cases.error_of(out, expected[0]) <= allowed, case.name
    assert triton_cases.lse_error(lse, expected[1]) <= 1e-5, case.name
    out, lse = attention.dense(q, k, v, case.scale, case.layout.starts)
    expected = reference.dense(q, k, v, case.scale, case.layout.starts)
    assert triton_cases.error_of(out, expected[0]) <= allowed, case.name
    assert triton_cases.lse_error(lse, expected[1]) <= 1e-5, case.name


@pytest.mark.parametrize("how", strides.WAYS)
def test_any_strides_give_the_same_index_and_maps(how: str) -> None:
    q, k, _ = strides.restrided(how, *(torch.randn(2, h, 150, 16) for h in (4, 2, 2)))
    patterns = [VerticalSlash(9, 20), VerticalSlash(5, windows=1), BlockSparse(1), Dense()]
    plans = [pattern.plan(150) for _ in range(2) for pattern in patterns]
    found = index.build(q, k, plans, (0, 30), 0.25, triton_cases.Estimator(), 128)[1]
    plain = index.build(q.contiguous(), k.contiguous(), plans, (0, 30), 0.25, triton_cases.Estimator(), 128)[1]
    for table in ("windows", "columns", "bands", "blocks"):
        assert torch.equal(getattr(found, table), getattr(plain, table))
    lse = strides.restrided(how, reference.dense(q, k, k, 0.25, (0, 30))[1].float()[..., None])[0][..., 0]
    span = ((0, 150), (3, 140), (5, 7))
    sums = mass.sums(q, k, lse, 0.25, (0, 30)), mass.sums(q.clone(), k.clone(), lse.clone(), 0.25, (0, 30))
    pooled = mass.pooled(q, k, lse, 0.25, (0, 30), *span), mass.pooled(q.clone(), k.clone(), lse, 0.25, (0, 30), *span)
    for ours, theirs in (*zip(*sums, strict=True), pooled):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_transposed_head_dimension_is_read_right() -> None:
    """`q` whose neighbours in the last dimension lie apart: read as if side by side, it was wrong by orders."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 64, 300).transpose(2, 3) for h in (4, 2, 2))
    for out, lse in (
        dense_attention(q, k, v),
        sparse_attention(q, k, v, build_index(q, k, [Dense()] * 4)),
    ):
        expected, expected_lse = reference.dense(q, k, v, 64**-0.5, (0,))
        assert (out - expected).abs().max() < 1e-5
        assert (lse - expected_lse).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 63, 64, 111, 1000])
@pytest.mark.parametrize("rows", ["all", "last"])
def test_half_types_keep_the_lse_of_float32(dtype: torch.dtype, length: int, rows: str) -> None:
    """Against float64 of the same rounded inputs; torch's own kernel for half types is 6e-5 off."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, h, length, 64).to(dtype) for h in (6, 2, 2))
    q = q if rows == "all" else q[:, :, length // 2 :]
    patterns = [Dense(), VerticalSlash(20, 40), BlockSparse(2), Dense(), VerticalSlash(9, windows=1), Dense()]
    found = build_index(q, k, patterns)
    out, lse = dense_attention(q, k, v)
    expected, expected_lse = reference.dense(q, k, v, 0.125, (0, 0))
    assert (lse - expected_lse).abs().max() <= 1e-5
    assert (out - expected).norm() <= 2 * (expected.to(dtype) - expected).norm()
    _, lse = sparse_attention(q, k, v, found)
    assert triton_cases.lse_error(lse, reference.attend(q, k, v, found.computed, 0.125)[1]) <= 1e-5


def _layout(q: torch.Tensor, k: torch.Tensor) -> Layout:
    return build_index(q, k, [VerticalSlash(9, 20)] * q.shape[1]).computed


Q, K = torch.randn(1, 4, 90, 16), torch.randn(1, 2, 90, 16)
REFUSED: dict[str, Callable[[], object]] = {
    "k must have q's dtype": lambda: attention.dense(Q, K.half(), K.half(), 0.25, (0,)),
    "k must have q's batch": lambda: attention.dense(Q, K[:, :, :40], K[:, :, :40], 0.25, (0,)),
    "multiple of KV heads": lambda: attention.dense(Q[:, :3], K, K, 0.25, (0,)),
    "v must be shaped as k": lambda: attention.attend(Q, K, K[..., :8], _layout(Q, K), 0.25),
    "scale must be positive": lambda: attention.attend(Q, K, K, _layout(Q, K), float("nan")),
    "starts must be 1 positions": lambda: index.build(Q, K, [], (91,), 0.25, triton_cases.Estimator(), 128),
    "the layout is for": lambda: attention.attend(Q[:, :, :9], K, K, _layout(Q, K), 0.25),
    "layout.columns must be contiguous": lambda: attention.attend(
        Q, K, K, dataclasses.replace(_layout(Q, K), columns=_layout(Q, K).columns.T.contiguous().T), 0.25
    ),
    "lse must be floating point": lambda: mass.sums(Q, K, torch.zeros(1, 2, 90), 0.25, (0,)),
    "rows must be a span": lambda: mass.pooled(Q, K, Q[..., 0], 0.25, (0,), (0, 91), (0, 90), (1, 1)),
    "shape must cut": lambda: mass.coverage(_layout(Q, K), (0, 90), (0, 90), (1, 0)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace(".", r"\.")):
        REFUSED[sentence]()


def test_packed_copies_only_where_it_must() -> None:
    x = torch.randn(2, 3, 4, 8)
    assert inputs.packed(x) is x
    for how in random.Random(0).sample(strides.WAYS, len(strides.WAYS)):
        (other,) = strides.restrided(how, x)
        copy = inputs.packed(other)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, other)

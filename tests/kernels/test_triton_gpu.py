"""The Triton kernels on a GPU: random cases against float64, repeats, the index against torch, sampled long rows."""

from __future__ import annotations

import importlib

import pytest
import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.bench.cases import clustered_layout, random_inputs
from headscope.engine.bench.shapes import SHAPES
from headscope.kernels.cells import membership, reference
from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import HeadPlan
from headscope.kernels.torch import index as torch_index
from headscope.kernels.torch import mass as torch_mass
from tests.helpers import index_cases, triton_cases

pytestmark = pytest.mark.gpu
ROUNDING = {torch.bfloat16: 4e-4, torch.float16: 5e-5}
OPTIONS = {
    "dtypes": (torch.bfloat16, torch.float16),
    "head_dims": (64, 80, 96, 128, 256),
    "groups": (1, 3, 4, 8),
    "lengths": (1, 2, 63, 64, 65, 111, 127, 128, 333, 1000, 1111, 2048, 4095),
}


def _poison() -> None:
    """Fills free memory with NaN, so that what a kernel forgets to write shows."""
    torch.full((2**26,), torch.nan, device="cuda")


@pytest.mark.parametrize("seed", range(500))
def test_attention(seed: int) -> None:
    from headscope.kernels.triton import attention as triton_attention

    case = triton_cases.random_case(10000 + seed, device="cuda", **OPTIONS)
    q, starts = case.q, case.layout.starts
    causal = reference.causal(q.shape[2], case.k.shape[2], starts, q.device)
    for layout in (case.layout, None):
        _poison()
        results = [_run(triton_attention, case, layout) for _ in range(2)]
        out, lse = results[0]
        assert torch.equal(out, results[1][0]) and torch.equal(lse, results[1][1]), case.name
        mask = causal if layout is None else membership.mask(layout)
        expected, expected_lse = reference.masked(q, case.k, case.v, mask, case.scale)
        allowed = 2 * triton_cases.plain_error(case, mask, expected) + ROUNDING[q.dtype]
        assert triton_cases.error_of(out, expected) <= allowed, case.name
        assert triton_cases.lse_error(lse, expected_lse) <= 2e-5, case.name


def _run(module, case: triton_cases.Case, layout: Layout | None) -> tuple[torch.Tensor, torch.Tensor]:
    if layout is None:
        return module.dense(case.q, case.k, case.v, case.scale, case.layout.starts)
    return module.attend(case.q, case.k, case.v, layout, case.scale)


@pytest.mark.parametrize("length", [1000, 4095])
@pytest.mark.parametrize("head_dim, dtype", [*((d, torch.bfloat16) for d in (64, 80, 128, 256)), (128, torch.float32)])
@pytest.mark.parametrize(
    "plan",
    [
        HeadPlan(vertical=100, sink=4, slash=300, local=20),
        HeadPlan(vertical=50, sink=2, windows=5, local=1),
        HeadPlan(top_blocks=6, block_size=64),
    ],
)
def test_index_and_sums(length: int, head_dim: int, dtype: torch.dtype, plan: HeadPlan) -> None:
    from headscope.kernels.triton import index as triton_index
    from headscope.kernels.triton import mass as triton_mass
    from headscope.kernels.triton import profiles as triton_profiles

    generator = torch.Generator(device="cuda").manual_seed(length + head_dim)
    q, k = (torch.randn(1, h, length, head_dim, generator=generator, device="cuda").to(dtype) for h in (6, 2))
    arguments = (q, k, [plan] * 6, (0,), head_dim**-0.5, Estimator(), 128)
    ours, theirs = triton_index.build(*arguments)[1], torch_index.build(*arguments)[1]
    assert torch.equal(membership.mask(ours), membership.mask(theirs))
    lse = reference.dense(q, k, k, head_dim**-0.5, (0,))[1].float()
    mass = (q, k, lse, head_dim**-0.5, (0,))
    for found, expected in zip(triton_profiles.sums(*mass), torch_mass.sums(*mass), strict=True):
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    crop = ((3, length), (0, length - 5), (37, 61))
    for layout in (None, ours):
        found, expected = triton_mass.pooled(*mass, *crop, layout), torch_mass.pooled(*mass, *crop, layout)
        assert torch.allclose(found, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(triton_mass.coverage(ours, *crop), torch_mass.coverage(ours, *crop))


@pytest.mark.parametrize(("side", "held"), [(65, 16384), (1100, 16384), (2100, 1024), (2100, 16384), (17000, 16384)])
def test_index_chooses_rows(side: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp and eight, and rows beyond what registers hold."""
    from headscope.kernels.triton import rows as triton_rows

    monkeypatch.setattr(triton_rows, "_HELD", held)
    index_cases.check_rows(side, "cuda")


@pytest.mark.parametrize("size", [5, 2049, 10000, 131072])
def test_index_cuts(size: int) -> None:
    index_cases.check_cuts(size, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("length", [32768, 131072, 524288])
@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_sampled_long_rows(length: int, impl: str) -> None:
    """Rows of three heads at length, over a clustered vertical-slash index and over everything."""
    if impl == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    attention = importlib.import_module(f"headscope.kernels.{impl}.attention")

    shape = SHAPES["llama3-8b"]
    inputs = random_inputs(shape, 1, length, torch.bfloat16, torch.device("cuda"))
    q, k, v = inputs.q, inputs.k, inputs.v
    layout = clustered_layout(shape, 1, length, 1000, 6096, q.device)
    rows = torch.tensor([0, 63, 64, 1000, length // 3, length - 65, length - 1], device="cuda")
    columns = torch.arange(length, device="cuda")
    table = membership.tables(layout)
    for sparse in (True, False):
        call = attention.attend if sparse else attention.dense
        out, lse = call(q, k, v, layout, 128**-0.5) if sparse else call(q, k, v, 128**-0.5, (0,))
        for head in (0, 13, 31):
            mask = columns[None, :] <= rows[:, None]
            if sparse:
                mask = membership.cells(layout, table, slice(head, head + 1), rows, columns)[0]
            one = (q[:, head : head + 1, rows], k[:, head // 4 : head // 4 + 1], v[:, head // 4 : head // 4 + 1])
            expected, expected_lse = reference.masked(*one, mask[None, None], 128**-0.5)
            assert triton_cases.error_of(out[:, head : head + 1, rows], expected) <= 3e-3
            assert triton_cases.lse_error(lse[:, head : head + 1, rows], expected_lse) <= 2e-5

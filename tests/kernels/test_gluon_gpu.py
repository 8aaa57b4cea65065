"""The Hopper kernels against float64 on the GPU: every mix of lists, hostile lengths, and the prototype's defects."""

from __future__ import annotations

import random

import pytest
import torch

from headscope.kernels.cells import membership, reference
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.torch import mass as torch_mass
from tests.helpers import triton_cases

pytestmark = pytest.mark.gpu

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

LENGTHS = (1, 2, 63, 64, 65, 111, 127, 128, 200, 333, 700, 1000, 1111)
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Relative error allowed where plain torch in the same dtype does better than rounding."""


def random_case(seed: int, head_dim: int, dtype: torch.dtype) -> triton_cases.Case:
    return triton_cases.random_case(
        seed, "cuda", (dtype,), (head_dim,), lengths=LENGTHS, groups=(1, 2, 3, 4, 7), tiles=(128,)
    )


@pytest.fixture(autouse=True)
def served_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cases, "BLOCK_SIZES", (64, 128, 192, 256))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float buffers hold NaN, so that an element nobody writes shows."""
    plain = torch.empty

    def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
        buffer = plain(*args, **kwargs)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=[0, 1, 3], ids=["as launched", "one program", "three programs"])
def fewer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Divides the cases of a test. Few programs take many items each; with as many as a GPU has SMs, small
    cases are one item a program."""
    from headscope.kernels.gluon import attention as gluon_attention

    if request.param:
        monkeypatch.setattr(gluon_attention, "_programs", lambda items, device: min(items, request.param))
    return 4 if request.param else 1


@hopper
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.float16)])
def test_attention_over_layouts(head_dim: int, dtype: torch.dtype, fewer: int) -> None:
    from headscope.kernels.gluon import attention as gluon_attention

    for seed in range(260 // fewer):
        case = random_case(seed, head_dim, dtype)
        inputs = [x.clone() for x in (case.q, case.k, case.v, case.layout.columns, case.layout.windows)]
        out, lse = gluon_attention.attend(case.q, case.k, case.v, case.layout, case.scale)
        expected, expected_lse = triton_cases.truth(case)
        allowed = max(2 * triton_cases.plain_error(case, membership.mask(case.layout), expected), ROUNDING[dtype])
        assert triton_cases.error_of(out, expected) <= allowed, case.name
        assert triton_cases.lse_error(lse, expected_lse) <= 2e-5, case.name
        left = (case.q, case.k, case.v, case.layout.columns, case.layout.windows)
        assert all(torch.equal(a, b) for a, b in zip(inputs, left, strict=True)), "inputs must stay as they are"


@hopper
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
def test_attention_over_patterns(head_dim: int, dtype: torch.dtype, fewer: int) -> None:
    """Layouts that know their plans, which choose between the kernel with a second pass and the one without."""
    from headscope.kernels.gluon import attention as gluon_attention

    seen = {True: 0, False: 0}
    for seed in range(200 // fewer):
        case = triton_cases.built_case(seed, "cuda", dtype, head_dim, LENGTHS)
        seen[gluon_attention.may_overlap(case.layout)] += 1
        out, lse = gluon_attention.attend(case.q, case.k, case.v, case.layout, case.scale)
        expected, expected_lse = triton_cases.truth(case)
        allowed = max(2 * triton_cases.plain_error(case, membership.mask(case.layout), expected), ROUNDING[dtype])
        assert triton_cases.error_of(out, expected) <= allowed, case.name
        assert triton_cases.lse_error(lse, expected_lse) <= 2e-5, case.name
    assert min(seen.values()) > 20 / fewer


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dense(head_dim: int, dtype: torch.dtype, fewer: int) -> None:
    from headscope.kernels.gluon import attention as gluon_attention

    for seed in range(120 // fewer):
        case = random_case(seed, head_dim, dtype)
        starts = case.layout.starts
        out, lse = gluon_attention.dense(case.q, case.k, case.v, case.scale, starts)
        expected, expected_lse = reference.dense(case.q, case.k, case.v, case.scale, starts)
        mask = reference.causal(case.q.shape[2], case.k.shape[2], starts, case.q.device)
        allowed = max(2 * triton_cases.plain_error(case, mask, expected), ROUNDING[dtype])
        assert triton_cases.error_of(out, expected) <= allowed, case.name
        assert triton_cases.lse_error(lse, expected_lse) <= 2e-5, case.name


@hopper
def test_padding_that_is_not_finite_stays_out() -> None:
    from headscope.kernels.gluon import attention as gluon_attention

    q, k, v = (torch.randn(1, 2, 300, 128, device="cuda").bfloat16() for _ in range(3))
    k[:, :, :77], v[:, :, :77] = torch.nan, torch.inf
    out, lse = gluon_attention.dense(q, k, v, 0.1, (77,))
    alone, alone_lse = reference.dense(q[:, :, 77:], k[:, :, 77:], v[:, :, 77:], 0.1, (0,))
    assert triton_cases.error_of(out[:, :, 77:], alone) < 4e-3
    assert torch.equal(out[:, :, :77], torch.zeros_like(out[:, :, :77]))
    assert triton_cases.lse_error(lse[:, :, 77:], alone_lse) < 2e-5
    assert bool(torch.isneginf(lse[:, :, :77]).all())


@hopper
def test_strided_views_and_repeats_give_the_same_bits() -> None:
    from headscope.kernels.gluon import attention as gluon_attention

    case = random_case(3, 128, torch.bfloat16)
    plain = gluon_attention.attend(case.q, case.k, case.v, case.layout, case.scale)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v)]
    for _ in range(4):
        again = gluon_attention.attend(*views, case.layout, case.scale)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@hopper
def test_every_window_and_column_is_used() -> None:
    """As many windows and columns as a length can have: nothing is capped, and all of them make dense attention."""
    from headscope.kernels.gluon import attention as gluon_attention

    length = 5000
    q, k, v = (torch.randn(1, 1, length, 128, device="cuda").bfloat16() for _ in range(3))
    windows = list(range(64, length + 64 + 128, 128))
    none = torch.zeros(1, 0, 0, dtype=torch.int32, device="cuda")
    expected, expected_lse = reference.dense(q, k, v, 0.1, (0,))
    for lists in ((windows, range(0)), ([], range(length)), (windows[::2], range(length))):
        rows = [torch.tensor([list(x)], dtype=torch.int32, device="cuda").view(1, -1) for x in lists]
        count = [torch.tensor([len(x)], dtype=torch.int32, device="cuda") for x in lists]
        layout = Layout(
            tile=128,
            batch=1,
            heads=1,
            q_len=length,
            kv_len=length,
            starts=(0,),
            windows=rows[0],
            window_count=count[0],
            bands=none.view(1, 0, 2),
            band_count=torch.zeros_like(count[0]),
            columns=rows[1],
            column_count=count[1],
            blocks=none[:0],
            block_count=none[0],
            block_slot=(-1,),
            block_size=(0,),
        )
        out, lse = gluon_attention.attend(q, k, v, layout, 0.1)
        assert triton_cases.error_of(out, expected) < 4e-3
        assert triton_cases.lse_error(lse, expected_lse) < 2e-5


@hopper
def test_pooled_maps_are_exact_and_repeat_bit_for_bit() -> None:
    from headscope.kernels.gluon import mass as gluon_mass

    for seed in range(80):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        batch, kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 3, 4))
        length, head_dim = rng.choice((128, 129, 200, 333, 700, 1111, 2048)), rng.choice((64, 128, 256))
        q_len = rng.choice((length, length, max(1, length // 2), 1))
        starts = tuple(rng.choice((0, rng.randrange(length // 2))) for _ in range(batch))
        q = torch.randn(batch, kv_heads * group, q_len, head_dim, device="cuda").bfloat16()
        k = torch.randn(batch, kv_heads, length, head_dim, device="cuda").bfloat16()
        lse = reference.dense(q, k, k, head_dim**-0.5, starts)[1].float()
        rows, cols = (span_of(rng, length, least) for least in (64, 128))
        most = ((rows[1] - rows[0]) // 64, (cols[1] - cols[0]) // 128)
        shape = most if rng.random() < 0.3 else (rng.randrange(most[0]) + 1, rng.randrange(most[1]) + 1)
        got = gluon_mass.pooled(q, k, lse, head_dim**-0.5, starts, rows, cols, shape)
        expected = torch_mass.pooled(q.float(), k.float(), lse, head_dim**-0.5, starts, rows, cols, shape)
        case = f"{seed}: {q.shape} {k.shape} {starts} {rows} {cols} {shape}"
        assert float((got - expected).abs().max()) <= 2e-5 * float(expected.abs().max()) + 1e-9, case
        assert torch.equal(got, gluon_mass.pooled(q, k, lse, head_dim**-0.5, starts, rows, cols, shape)), case


@hopper
@pytest.mark.slow
@pytest.mark.parametrize("length", [131072, 524288])
def test_pooled_maps_at_length(length: int) -> None:
    """Every pool of a few pools of rows against float64, and the sum over keys of every pool of rows."""
    from headscope.kernels.gluon import attention as gluon_attention
    from headscope.kernels.gluon import mass as gluon_mass

    torch.manual_seed(length)
    q = torch.randn(1, 4, length, 128, device="cuda").bfloat16()
    k = torch.randn(1, 2, length, 128, device="cuda").bfloat16()
    lse = gluon_attention.dense(q, k, k, 128**-0.5, (0,))[1]
    for rows, shape in (((0, length), (1024, 1024)), ((0, length), (500, 500)), ((77, length - 9), (333, 601))):
        got = gluon_mass.pooled(q, k, lse, 128**-0.5, (0,), rows, (0, length), shape)
        row_edges, key_edges = edges(*rows, shape[0]), edges(0, length, shape[1])
        assert torch.allclose(got.double().sum(3)[0], row_edges.diff().double().expand(4, -1), rtol=1e-5)
        for pool in (0, shape[0] // 3, shape[0] - 1):
            own = torch.arange(int(row_edges[pool]), int(row_edges[pool + 1]), device="cuda")
            for head in (0, 3):
                scores = q[0, head, own].double() @ k[0, head // 2].double().T * 128**-0.5
                scores.masked_fill_(torch.arange(length, device="cuda") > own[:, None], float("-inf"))
                sums = torch.softmax(scores, 1).sum(0).cumsum(0)
                sums = torch.cat([sums.new_zeros(1), sums])[key_edges].diff()
                assert torch.allclose(got[0, head, pool].double(), sums, rtol=5e-5, atol=1e-9), (shape, pool, head)


def span_of(rng: random.Random, length: int, least: int) -> tuple[int, int]:
    """All of `length`, or some of it: whole pools of `least`, or any number from there on."""
    size = rng.choice((length, length // least * least, rng.randrange(least, length + 1)))
    first = rng.randrange(length - size + 1)
    return first, first + size


def edges(first: int, end: int, pools: int) -> torch.Tensor:
    return first + (end - first) * torch.arange(pools + 1, device="cuda") // pools


def test_what_is_not_served_says_why() -> None:
    from headscope.kernels.gluon import attention as gluon_attention
    from headscope.kernels.gluon import mass as gluon_mass

    case = random_case(0, 128, torch.bfloat16)
    for wrong in (case.q.float(), case.q[..., :80].contiguous()):
        with pytest.raises(ValueError, match="Gluon kernels"):
            gluon_attention.dense(wrong, wrong, wrong, 1.0, case.layout.starts)
    assert gluon_mass.pooled_refusal((0, 100), (0, 1000), (2, 2)) is not None
    narrow = Layout(**{**vars(case.layout), "tile": 1})
    assert "tile" in (gluon_attention.layout_refusal(narrow) or "")
    many = torch.full((case.layout.windows.shape[0], gluon_attention.MAX_BANDS + 1, 2), PAD, device="cuda")
    assert "distance ranges" in (gluon_attention.layout_refusal(Layout(**{**vars(case.layout), "bands": many})) or "")

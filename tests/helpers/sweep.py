"""Random calls of the public functions, each held to the float64 reference: strides, types and non-finite values."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from headscope.engine import (
    Index,
    ModelError,
    TriShape,
    build_index,
    dense_attention,
    masked_attention,
    measure_heads,
    sparse_attention,
)
from headscope.kernels.cells import reference
from tests.helpers import strides
from tests.helpers.cases import Case, random_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BAD = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class SweepCase:
    """A case whose tensors have unusual strides; `damaged` says that one of their values may not be finite."""

    case: Case
    damaged: bool
    name: str

    @property
    def starts(self) -> tuple[int, ...]:
        return self.case.starts or (0,) * len(self.case.q)

    def real(self) -> list[torch.Tensor]:
        """Everything that is no padding, in one dimension."""
        case, parts = self.case, []
        for x in (case.q, case.k, case.v):
            missing = case.k.shape[2] - x.shape[2]
            parts += [x[b, :, max(0, start - missing) :].flatten() for b, start in enumerate(self.starts)]
        return parts


def sweep_case(seed: int) -> SweepCase:
    """The case of a seed: a third of them holds one to three values that are not finite, anywhere."""
    rng = random.Random(seed)
    case = random_case(seed, dim=rng.choice((8, 16, 64)))
    length = case.k.shape[2]
    patterns = tuple(
        TriShape(rng.choice((0, 3)), rng.choice((1, 40)), rng.choice((1, 17, length))) if rng.random() < 0.2 else each
        for each in case.patterns
    )
    dtype, how = rng.choice(DTYPES), rng.choice(strides.WAYS)
    parts = [x.to(dtype) for x in (case.q, case.k, case.v)]
    damaged = rng.random() < 1 / 3
    for _ in range(rng.choice((1, 1, 3)) if damaged else 0):
        part = rng.choice(parts)
        part[tuple(rng.randrange(size) for size in part.shape)] = rng.choice(BAD)
    q, k, v = strides.restrided(how, *parts)
    name = f"seed {seed}: {dtype}, {how}, q {tuple(q.shape)}, k {tuple(k.shape)}, starts {case.starts}"
    return SweepCase(replace(case, q=q, k=k, v=v, patterns=patterns), damaged, name)


def check(seed: int) -> None:
    """AssertionError, with the case in words, where a public function gives a finite wrong number."""
    one = sweep_case(seed)
    case = one.case
    scale = case.q.shape[3] ** -0.5
    index = build_index(case.q, case.k, case.patterns, starts=case.starts, tile=case.tile, estimator=case.estimator)
    causal = reference.causal(case.q.shape[2], case.k.shape[2], one.starts, case.q.device)
    _check_index(one, index, causal)
    dense = dense_attention(case.q, case.k, case.v, starts=case.starts)
    sparse = sparse_attention(case.q, case.k, case.v, index)
    dense_lse = _check_attention(one, f"{one.name}, dense", dense, causal.expand(index.computed_mask().shape), scale)
    sparse_lse = _check_attention(one, f"{one.name}, sparse", sparse, index.computed_mask(), scale)
    _check_measurement(one, dense_lse, sparse_lse)


def _check_index(one: SweepCase, index: Index, causal: torch.Tensor) -> None:
    """Requested within computed within causal, and the same cells from the same numbers in one piece."""
    case = one.case
    requested, computed = index.requested_mask(), index.computed_mask()
    assert not (requested & ~computed).any() and not (computed & ~causal).any(), one.name
    plain = build_index(
        case.q.clone(memory_format=torch.contiguous_format),
        case.k.clone(memory_format=torch.contiguous_format),
        case.patterns,
        starts=case.starts,
        tile=case.tile,
        estimator=case.estimator,
    )
    exact = torch.tensor([not pattern.online for pattern in case.patterns])
    assert torch.equal(plain.requested_mask()[:, exact], requested[:, exact]), one.name
    # Chosen cells may differ where products in another order tie; how many there are may not.
    assert torch.equal(plain.requested_pairs()[:, exact], index.requested_pairs()[:, exact]), one.name


def _check_attention(
    one: SweepCase, name: str, result: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """What is finite is right, and nothing is finite that reads a value which is not. The LSE in float64."""
    q, k, v = one.case.q, one.case.k, one.case.v
    out, lse = result
    assert out.dtype == q.dtype and out.shape == q.shape and lse.shape == q.shape[:3], name
    # A masked-out value counts as 0 here; float64 itself would make 0 * inf of it.
    expected, expected_lse = masked_attention(q, k, v.nan_to_num(0.0, 0.0, 0.0), mask, scale)
    group = q.shape[1] // k.shape[1]
    bad = (~torch.isfinite(v)).double().repeat_interleave(group, 1)
    reads_bad = (mask.double() @ bad > 0) | ~(expected_lse < torch.inf)[..., None]
    assert not (torch.isfinite(out) & reads_bad & torch.isfinite(lse)[..., None]).any(), f"{name}: finite and wrong"
    rows = torch.isfinite(lse) & (expected_lse < torch.inf)
    assert not (torch.isneginf(lse) != torch.isneginf(expected_lse))[expected_lse < torch.inf].any(), (
        f"{name}: rows without cells"
    )
    size = expected_lse[rows].abs().max().item() if rows.any() else 0.0
    assert (lse[rows].double() - expected_lse[rows]).abs().max().item() <= 1e-5 + 1e-6 * size if rows.any() else True, (
        f"{name}: LSE"
    )
    finite = torch.isfinite(out) & ~reads_bad & (expected_lse < torch.inf)[..., None]
    if not one.damaged:
        assert torch.isfinite(out).all(), f"{name}: not finite"
    if finite.any():
        largest = v[torch.isfinite(v)].abs().max().item()
        allowed = (2e-5 + 2e-6 * size + (0 if q.dtype == torch.float64 else torch.finfo(q.dtype).eps)) * largest
        assert (out.double() - expected)[finite].abs().max().item() <= allowed, f"{name}: output"
    return expected_lse


def _check_measurement(one: SweepCase, dense: torch.Tensor, sparse: torch.Tensor) -> None:
    """Right, or refused where anything real is not finite."""
    case = one.case

    def measure() -> list[float]:
        layer = measure_heads(
            case.q, case.k, case.v, case.patterns, starts=case.starts, tile=case.tile, estimator=case.estimator
        )
        return [head.missed_mass_mean for head in layer.heads]

    if not all(bool(torch.isfinite(part).all()) for part in one.real()):
        with pytest.raises(ModelError, match=r"not finite in (float32|bfloat16|float16|float64): .*(bfloat16|float32)"):
            measure()
        return
    if not any(part.numel() for part in one.real()[: len(case.q)]):
        with pytest.raises(ValueError, match="at least one real row"):
            measure()
        return
    missing = case.k.shape[2] - case.q.shape[2]
    rows = [(b, max(0, start - missing)) for b, start in enumerate(one.starts)]
    missed = torch.cat([-torch.expm1(sparse[b, :, first:] - dense[b, :, first:]) for b, first in rows], 1).clamp(0, 1)
    size = max(dense[b, :, first:].abs().max().item() if first < dense.shape[2] else 0.0 for b, first in rows)
    for found, expected in zip(measure(), missed.mean(1).tolist(), strict=True):
        assert abs(found - expected) <= 2e-5 + 2e-6 * size, one.name

"""Measure every head of a layer: missed mass, output error, cells, and the time that they took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headscope.engine.attend.attention import attend_dense, attend_sparse
from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.finite import check_attention, check_layer, check_values
from headscope.engine.attend.index import Index, index_layer
from headscope.engine.attend.inputs import LayerInputs, Starts
from headscope.engine.base.errors import ModelError
from headscope.engine.base.timing import timed
from headscope.engine.loss import mass
from headscope.engine.patterns.families import Pattern
from headscope.kernels import backends


@dataclass(frozen=True)
class HeadMeasurement:
    """One head under one pattern. Masses and densities are shares in 0..1; errors are relative L2 and cosine.

    `areas` is (block, column, causal waste, padding) in cells. `time_share_ms` is an estimate: the layer's
    index and kernel time, split by computed pairs. ModelError names layer and head where a figure is not finite.
    """

    layer: int
    head: int
    pattern: Pattern
    missed_mass_mean: float
    missed_mass_worst: float
    missed_mass_worst_row: int
    missed_mass_p99: float
    missed_mass_thirds: tuple[float, float, float]
    output_error: float
    output_cosine: float
    requested_density: float
    computed_density: float
    requested_pairs: int
    computed_pairs: int
    areas: tuple[int, int, int, int]
    time_share_ms: float

    def __post_init__(self) -> None:
        figures = (
            self.missed_mass_mean,
            self.missed_mass_worst,
            self.missed_mass_p99,
            *self.missed_mass_thirds,
            self.output_error,
            self.output_cosine,
            self.requested_density,
            self.computed_density,
            self.time_share_ms,
        )
        if not all(math.isfinite(figure) for figure in figures):
            raise ModelError(
                f"the measurements of layer {self.layer} head {self.head} are not finite: measure again in bfloat16 "
                "or float32"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the pattern as its own object."""
        entry = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "pattern"}
        entry["missed_mass_thirds"] = list(self.missed_mass_thirds)
        entry["areas"] = dict(zip(("block", "column", "causal_waste", "padding"), self.areas, strict=True))
        return {"layer": self.layer, "head": self.head, "pattern": self.pattern.to_dict()} | entry


@dataclass(frozen=True)
class LayerMeasurement:
    """All heads of a layer. Times in ms are measured: index and kernel serve all heads at once.

    `missed` [B, Hq, S] is the missed mass of every row.
    """

    layer: int
    index_ms: float
    kernel_ms: float
    dense_ms: float
    impl: str
    device: str
    heads: tuple[HeadMeasurement, ...]
    missed: torch.Tensor = field(compare=False, repr=False)
    index: Index = field(compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The layer's own row, without its heads."""
        names = ("layer", "index_ms", "kernel_ms", "dense_ms", "impl", "device")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DensePass:
    """A dense pass to measure against: out [B, Hq, S, D], LSE [B, Hq, S], and what it took."""

    out: torch.Tensor
    lse: torch.Tensor
    ms: float


def dense_pass(inputs: LayerInputs, impl: str = "auto", layer: int | None = None) -> DensePass:
    """Dense attention with its time: what `measure_patterns` compares with.

    ModelError, naming the layer where it is given, if q, k, v or what comes of them is not finite; neither check is
    part of the time.
    """
    check_layer(layer, inputs)
    (out, lse), ms = timed(lambda: attend_dense(inputs, impl), inputs.device)
    check_attention(layer, inputs, out, lse)
    return DensePass(out, lse, ms)


def measure_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    patterns: Sequence[Pattern],
    *,
    layer: int = 0,
    scale: float | None = None,
    starts: Starts = None,
    estimator: Estimator | None = None,
    tile: int | None = None,
    impl: str = "auto",
    dense: DensePass | None = None,
) -> LayerMeasurement:
    """Build the index, run the sparse attention, and compare every head with the dense pass.

    Shapes as in `build_index`; `dense` reuses an earlier `dense_pass` over the same q, k, v. ModelError names the
    layer where q, k, v or what comes of them is not finite, and a dtype to try; NaN and infinities in the padding
    are read by nothing.
    """
    inputs = LayerInputs(q, k, v, scale, starts)
    return measure_patterns(inputs, patterns, layer=layer, estimator=estimator, tile=tile, impl=impl, dense=dense)


def measure_patterns(
    inputs: LayerInputs,
    patterns: Sequence[Pattern],
    *,
    layer: int = 0,
    estimator: Estimator | None = None,
    tile: int | None = None,
    impl: str = "auto",
    dense: DensePass | None = None,
) -> LayerMeasurement:
    """`measure_heads` over checked inputs."""
    base = dense if dense is not None else dense_pass(inputs, impl, layer)
    index, index_ms = timed(lambda: index_layer(inputs, patterns, tile, estimator, impl), inputs.device)
    (out, lse), kernel_ms = timed(lambda: attend_sparse(inputs, index, impl), inputs.device)
    check_attention(layer, inputs, out, lse, empty=True)
    missed = mass.missed_mass(lse, base.lse)
    return LayerMeasurement(
        layer=layer,
        index_ms=index_ms,
        kernel_ms=kernel_ms,
        dense_ms=base.ms,
        impl=backends.choose(impl, inputs.q, index.computed).name,
        device=str(inputs.device),
        heads=_heads(layer, index, missed, out, base.out, index_ms + kernel_ms),
        missed=missed,
        index=index,
    )


def output_errors(out: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative L2 error and cosine of whole head outputs, float64 [Hq] each, over batch, rows and channels.

    ModelError where `out` or `dense` is not finite.
    """
    check_values("out", out)
    check_values("dense", dense)
    a, b = (x.double().transpose(0, 1).flatten(1) for x in (out, dense))
    tiny = torch.finfo(torch.float64).tiny
    error = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=tiny)
    return error, (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=tiny)


def _heads(
    layer: int, index: Index, missed: torch.Tensor, out: torch.Tensor, dense: torch.Tensor, ms: float
) -> tuple[HeadMeasurement, ...]:
    losses = mass.losses(missed, index.computed.first_row)
    error, cosine = (x.tolist() for x in output_errors(out, dense))
    causal = max(1, int(index.causal_pairs().sum()))
    requested = index.requested_pairs().sum(0).tolist()
    counts = index.areas()
    areas = [x.sum(0).tolist() for x in (counts.block, counts.column, counts.causal_waste, counts.padding)]
    computed = [block + column for block, column in zip(areas[0], areas[1], strict=True)]
    total = max(1, sum(computed))
    return tuple(
        HeadMeasurement(
            layer=layer,
            head=head,
            pattern=pattern,
            missed_mass_mean=loss.mean,
            missed_mass_worst=loss.worst,
            missed_mass_worst_row=loss.worst_row,
            missed_mass_p99=loss.p99,
            missed_mass_thirds=loss.thirds,
            output_error=error[head],
            output_cosine=cosine[head],
            requested_density=requested[head] / causal,
            computed_density=computed[head] / causal,
            requested_pairs=requested[head],
            computed_pairs=computed[head],
            areas=(areas[0][head], areas[1][head], areas[2][head], areas[3][head]),
            time_share_ms=ms * computed[head] / total,
        )
        for head, (pattern, loss) in enumerate(zip(index.patterns, losses, strict=True))
    )

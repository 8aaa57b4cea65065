"""What is not finite ends a run: nothing of it is averaged, ranked, stored or called good."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from headscope.engine.attend.inputs import LayerInputs, ScoreInputs
from headscope.engine.base.errors import ModelError

LARGEST_SCORE = 1e30
"""Kernels form scores in float32 and start a row's maximum at -1e30: beyond it a row would pass for an empty one."""


def check_layer(layer: int | None, inputs: ScoreInputs) -> None:
    """ModelError that names the layer, if it is known, where its queries, keys or values are not all finite, or so
    large that scores may be beyond `LARGEST_SCORE`.

    What lies in the padding is read by nothing, and may be anything.
    """
    values = (("values", inputs.v),) if isinstance(inputs, LayerInputs) else ()
    largest = {}
    for name, tensor in (("queries", inputs.q), ("keys", inputs.k), *values):
        largest[name] = _largest(_real(inputs, tensor))
        if not math.isfinite(largest[name]):
            raise not_finite(f"the {name}{_of(layer)}", tensor.dtype)
    if largest["queries"] * largest["keys"] * inputs.head_dim * inputs.scale > LARGEST_SCORE:
        raise not_finite(f"the attention scores{_of(layer)}", inputs.q.dtype)


def check_attention(
    layer: int | None, inputs: ScoreInputs, out: torch.Tensor, lse: torch.Tensor, *, empty: bool = False
) -> None:
    """ModelError where out [B, Hq, S, D] or LSE [B, Hq, S] of real rows is not finite.

    `empty` allows rows without cells, whose LSE is -inf; a dense row has a cell, so there it is an overflow.
    """
    for part in _real(inputs, lse):
        fit = part < torch.inf if empty else torch.isfinite(part)  # a NaN is not below infinity
        if not bool(fit.all()):
            raise not_finite(f"the attention scores{_of(layer)}", inputs.q.dtype)
    if not all(bool(torch.isfinite(part).all()) for part in _real(inputs, out)):
        raise not_finite(f"the attention outputs{_of(layer)}", inputs.q.dtype)


def check_values(name: str, values: torch.Tensor, *, empty: bool = False) -> None:
    """ModelError that names the argument where it is not all finite; `empty` allows -inf, the LSE of an empty row."""
    fit = values < torch.inf if empty else torch.isfinite(values)
    if not bool(fit.all()):
        raise ModelError(f"{name} holds values that are not finite: compute the attention in bfloat16 or float32")


def not_finite(what: str, dtype: torch.dtype) -> ModelError:
    """The error for `what`, with a dtype that holds larger values."""
    name = str(dtype).removeprefix("torch.")
    wider = "float32" if dtype == torch.bfloat16 else "bfloat16" if dtype == torch.float32 else "bfloat16 or float32"
    return ModelError(
        f"{what} are not finite in {name}: load the model with --dtype {wider}, and if that changes nothing, its "
        "weights are damaged"
    )


def _largest(parts: Iterable[torch.Tensor]) -> float:
    """The largest magnitude, NaN if there is one; 0 of nothing."""
    bounds = [float(bound) for part in parts if part.numel() for bound in torch.aminmax(part)]
    return math.nan if any(math.isnan(bound) for bound in bounds) else max(map(abs, bounds), default=0.0)


def _of(layer: int | None) -> str:
    return "" if layer is None else f" of layer {layer}"


def _real(inputs: ScoreInputs, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The part of each sequence, along dimension 2 of `tensor`, that is no padding."""
    if not any(inputs.starts):
        yield tensor
        return
    missing = inputs.length - tensor.shape[2]
    for sequence, start in enumerate(inputs.starts):
        yield tensor[sequence, :, max(0, start - missing) :]

"""The first layer or logits that are not finite end a run: nothing of them is averaged, ranked or stored."""

from __future__ import annotations

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import ModelError


def check_layer(layer: int, inputs: LayerInputs) -> None:
    """ModelError that names the layer if its queries, keys or values are not all finite."""
    for name, tensor in (("queries", inputs.q), ("keys", inputs.k), ("values", inputs.v)):
        if not bool(torch.isfinite(tensor).all()):
            raise not_finite(f"the {name} of layer {layer}", tensor.dtype)


def not_finite(what: str, dtype: torch.dtype) -> ModelError:
    """The error for `what`, with a dtype that holds larger values."""
    name = str(dtype).removeprefix("torch.")
    wider = "float32" if dtype == torch.bfloat16 else "bfloat16" if dtype == torch.float32 else "bfloat16 or float32"
    return ModelError(
        f"{what} are not finite in {name}: load the model with --dtype {wider}, and if that changes nothing, its "
        "weights are damaged"
    )

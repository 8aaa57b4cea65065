"""What a head config must know about a model, read from the loaded model; torch is needed for a fingerprint only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from headscope.engine.base.errors import ModelError

FULL = "full_attention"
"""The only kind of layer that a pattern may change."""

_NO_ROPE = {"type": "none", "theta": 0.0, "scaling": {}}
"""Of a model whose positions enter in another way, or not at all."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model (design, "Files"). `rope` has `type`, `theta` and `scaling`; lengths are in tokens.

    `fingerprint` is over the shape of the model and its norms rounded to bf16, so dtype, file format and tensor
    parallel leave it alone. It is empty when the norms are not in memory (offloaded weights).
    """

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope: dict[str, Any]
    max_position: int
    layer_types: tuple[str, ...]
    fingerprint: str
    load_format: str = ""
    name: str = ""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "layer_types": list(self.layer_types)}

    def named(self, name: str, load_format: str) -> ModelFacts:
        return replace(self, name=name, load_format=load_format)


def facts_of(model: Any, name: str = "", load_format: str = "") -> ModelFacts:
    """Facts of a transformers causal language model (not of its weights' dtype or place).

    ModelError for a model without attention heads, such as a recurrent one.
    """
    model = uncompiled(model)
    config = text_config(model)
    layers = _number(config, "num_hidden_layers")
    heads = query_heads(model)
    if not layers or not heads:
        raise ModelError(f"{type(model).__name__} does not say how many layers and attention heads it has")
    shape: dict[str, Any] = {
        "architecture": type(model).__name__,
        "layers": layers,
        "query_heads": heads,
        "kv_heads": _number(config, "num_key_value_heads") or heads,
        "head_dim": _head_dim(config, heads),
        "rope": _rope(config),
        "max_position": max(0, int(getattr(config, "max_position_embeddings", 0) or 0)),
        "layer_types": _layer_types(config, layers),
    }
    return ModelFacts(**shape, fingerprint=_fingerprint(model, config, shape), load_format=load_format, name=name)


def uncompiled(model: Any) -> Any:
    """The model inside what `torch.compile` returned; any other model itself."""
    return getattr(model, "_orig_mod", model)


def query_heads(model: Any) -> int:
    """Query heads of a layer; the most that any has, where layers differ."""
    return _number(text_config(model), "num_attention_heads")


def _number(config: Any, name: str) -> int:
    """A whole-number setting, 0 where there is none; the largest where layers differ."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        value = None
    if value is None and getattr(config, "is_heterogeneous", False):
        layers = config.per_layer_config
        value = max(getattr(layers[layer], name, None) or 0 for layer in range(config.num_hidden_layers))
    return value if isinstance(value, int) else 0


def _head_dim(config: Any, heads: int) -> int:
    """Size of a query: the model's own word for it, with the rotary part where latent attention keeps that apart."""
    latent = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    if latent and _number(config, "kv_lora_rank"):
        return latent
    return _number(config, "head_dim") or int(config.hidden_size) // heads


def served_kind(kind: str) -> str:
    """`full_attention` for every name of a layer with plain causal attention (beside recurrent states or not)."""
    return FULL if kind in ("attention", "hybrid") else kind


def text_config(model: Any) -> Any:
    """The language model's own part of the config (multimodal models nest it)."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _rope(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if FULL in parameters:  # one set per layer type; None where full-attention layers have no positions
        parameters = parameters[FULL]
        if parameters is None:
            return {**_NO_ROPE}
    if not parameters and not any(name.startswith(("rope", "rotary")) for name in vars(config)):
        return {**_NO_ROPE}
    rest = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    return {
        "type": str(parameters.get("rope_type", parameters.get("type", "default"))),
        "theta": float(theta),
        "scaling": {key: _plain(rest[key]) for key in sorted(rest) if rest[key] is not None},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bool, int, float)) else str(value)


def _layer_types(config: Any, layers: int) -> tuple[str, ...]:
    named = getattr(config, "layer_types", None)
    if named:
        return tuple(served_kind(str(item)) for item in named)
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ("sliding_attention" if sliding else FULL,) * layers


def _fingerprint(model: Any, config: Any, shape: dict[str, Any]) -> str:
    """sha256 over the shape, the vocabulary and the replicated norms in bf16; see `ModelFacts`."""
    if getattr(model, "_pp_stage", None) is not None:  # the norms of other stages are in other processes
        return ""
    import torch

    head = {**shape, "hidden_size": int(config.hidden_size), "vocab_size": int(config.vocab_size)}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    parameters = sorted(model.named_parameters(), key=lambda item: item[0])
    norms = [
        (name, parameter)
        for name, parameter in parameters
        # Norms of queries and keys may be split over tensor-parallel ranks; all others are whole on each.
        if "norm" in name and parameter.ndim == 1 and "q_norm" not in name and "k_norm" not in name
    ]
    covered = {_layer_of(name) for name, _ in norms}
    for name, parameter in norms + _smallest_of_each_layer(parameters, covered):
        tensor = parameter.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.is_meta:
            return ""
        digest.update(name.encode())
        digest.update(tensor.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _layer_of(name: str) -> str | None:
    """The number of a parameter's layer, as text."""
    numbers = (part for part in name.split(".") if part.isdigit())
    return next(numbers, None)


def _smallest_of_each_layer(parameters: list[tuple[str, Any]], covered: set[str | None]) -> list[tuple[str, Any]]:
    """For layers without a norm that has weights: their smallest parameter that is not split over processes."""
    smallest: dict[str, tuple[str, Any]] = {}
    for name, parameter in parameters:
        layer = _layer_of(name)
        if layer is None or layer in covered or hasattr(parameter, "placements"):
            continue
        if layer not in smallest or parameter.numel() < smallest[layer][1].numel():
            smallest[layer] = (name, parameter)
    return list(smallest.values())

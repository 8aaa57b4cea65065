"""Does a head config fit a model? Every reason against it at once, each a sentence for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headscope.engine.base.errors import ConfigError
from headscope.engine.base.files import listing
from headscope.engine.config.facts import FULL, facts_of
from headscope.kernels.cells.plan import TILES_VERSION

if TYPE_CHECKING:
    from headscope.engine.config.file import HeadConfig

WEIGHTS = "weights: "
"""Begins the one reason that a person may overrule."""

_COMPARED = {
    "architecture": "architecture",
    "layers": "layers",
    "query_heads": "query heads",
    "kv_heads": "KV heads",
    "head_dim": "head size",
    "max_position": "largest position",
}


def facts_dict(model: Any) -> dict[str, Any]:
    """Facts as a dict, from a dict, `ModelFacts`, a `LoadedModel` or a transformers model."""
    facts = getattr(model, "facts", model)
    if isinstance(facts, Mapping):
        return dict(facts)
    if hasattr(facts, "to_dict") and hasattr(facts, "layer_types"):
        return dict(facts.to_dict())
    if hasattr(facts, "config") and hasattr(facts, "named_parameters"):
        return facts_of(facts).to_dict()
    raise ConfigError(f"A config is checked against a model or its facts, got {type(model).__name__}.")


def reasons(config: HeadConfig, facts: Mapping[str, Any], length: int | None, force_weights: bool) -> list[str]:
    """All reasons why `config` must not run on the model with these facts; [] if it may."""
    problems = _unknown(config.model)
    for name, words in _COMPARED.items():
        problems += _differ(words, config.model[name], facts.get(name))
    problems += _rope(config.model["rope"], facts.get("rope"))
    problems += _layer_types(config.model["layer_types"], facts.get("layer_types"))
    if config.tiles != TILES_VERSION:
        problems.append(
            f"tiles: the config was made for the rule {config.tiles[:40]}, this version has {TILES_VERSION}"
        )
    problems += _sparse_where_not_allowed(config, facts)
    if not force_weights:
        problems += _weights(config.model["fingerprint"], facts.get("fingerprint"))
    limit = facts.get("max_position")
    if length is not None and limit and length > limit:
        problems.append(f"length: the prompt has {length} tokens, the model has {limit} positions")
    return problems


def length_warnings(provenance: Mapping[str, Any], length: int) -> list[str]:
    """A warning if `length` lies outside the lengths in `provenance`, or if they are unknown."""
    raw = provenance.get("lengths")
    known = [value for value in raw if isinstance(value, int)] if isinstance(raw, list) else []
    if not known:
        return ["The config does not say on which lengths it was calibrated."]
    if min(known) <= length <= max(known):
        return []
    lengths = f"{min(known)} to {max(known)}" if min(known) < max(known) else f"{known[0]}"
    return [f"The config was calibrated on {lengths} tokens; this prompt has {length}."]


def _unknown(model: Mapping[str, Any]) -> list[str]:
    names = [name for name in (*_COMPARED, "rope", "layer_types") if model[name] is None]
    if not names:
        return []
    return [
        f"unknown facts: the config does not say its {listing(names, 9)}, so it cannot be checked; "
        "convert it again with --model"
    ]


def _differ(words: str, ours: Any, theirs: Any) -> list[str]:
    if ours is None or ours == theirs:
        return []
    return [f"{words}: the config is for {ours}, the model has {'an unknown value' if theirs is None else theirs}"]


def _rope(ours: Mapping[str, Any] | None, theirs: Any) -> list[str]:
    if ours is None:
        return []
    other = theirs if isinstance(theirs, Mapping) else {}
    problems: list[str] = []
    for name in sorted({*ours, *other}):
        mine, yours = ours.get(name), other.get(name)
        if mine != yours:
            problems.append(f"RoPE {name}: the config is for {_text(mine)}, the model has {_text(yours)}")
    return problems


def _layer_types(ours: Any, theirs: Any) -> list[str]:
    if ours is None or theirs is None or list(ours) == list(theirs):
        return []
    if len(ours) != len(theirs):
        return [f"layer types: the config names {len(ours)} layers, the model has {len(theirs)}"]
    places = [layer for layer, (mine, yours) in enumerate(zip(ours, theirs, strict=True)) if mine != yours]
    first = places[0]
    return [
        f"layer types: layers {listing(places)} differ (layer {first}: config {ours[first]}, model {theirs[first]})"
    ]


def _sparse_where_not_allowed(config: HeadConfig, facts: Mapping[str, Any]) -> list[str]:
    types = facts.get("layer_types") or []
    wrong = [
        layer
        for layer, (kind, entries) in enumerate(zip(types, config.heads, strict=False))
        if kind != FULL and any(not entry.pattern.is_dense for entry in entries)
    ]
    if not wrong:
        return []
    kinds = sorted({types[layer] for layer in wrong})
    return [
        f"patterns: layers {listing(wrong)} have their own attention ({listing(kinds)}) and must stay dense, "
        "but the config gives some of their heads a pattern"
    ]


def _weights(ours: str | None, theirs: str | None) -> list[str]:
    if ours and theirs and ours == theirs:
        return []
    if not ours:
        return [WEIGHTS + "the config does not say for which weights it was made"]
    if not theirs:
        return [WEIGHTS + "the model's fingerprint is unknown, since its norms are not in memory"]
    return [f"{WEIGHTS}the config was made for the fingerprint {ours[:12]}, the model has {theirs[:12]}"]


def _text(value: Any) -> str:
    return "nothing" if value is None or value == {} else str(value)[:80]

"""Which layers of a model can be served, and why the others cannot: found by one dense pass over a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from headscope.engine.base.files import listing
from headscope.engine.config.facts import text_config, uncompiled
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.sets import ConfigSet
from headscope.engine.model.hook import Call, Hook

_TOKENS = 4
NO_ATTENTION = "no attention that can be replaced"


def layer_reasons(model: Any) -> list[str | None]:
    """For every layer why it keeps the model's own attention, or None where it can be served.

    The model runs once, dense, on four tokens: what a family hands to its attention is seen only in a call.
    ModelError when its attention cannot be replaced at all.
    """
    bare = uncompiled(model)
    reasons: dict[int, str | None] = {}

    def handler(call: Call) -> None:
        # Where a layer has cross-attention too, its self-attention speaks for it.
        reasons[call.layer] = call.left and reasons.get(call.layer, call.left)

    ids = torch.ones(1, _TOKENS, dtype=torch.long, device=next(bare.parameters()).device)
    with torch.no_grad(), Hook(bare, handler):
        bare(input_ids=ids, use_cache=False)
    layers = int(text_config(bare).num_hidden_layers)
    return [reasons.get(layer, NO_ATTENTION) for layer in range(layers)]


def problems(config: HeadConfig | ConfigSet, reasons: Sequence[str | None]) -> list[str]:
    """Why `config` would run dense where it asks for patterns; [] where every pattern can run."""
    if all(reasons):
        return [f"layers: none can be served ({listing(sorted({reason for reason in reasons if reason}))})"]
    wrong: dict[str, list[int]] = {}
    for layer in _sparse_layers(config):
        reason = reasons[layer] if layer < len(reasons) else None
        if reason:
            wrong.setdefault(reason, []).append(layer)
    return [
        f"patterns: layers {listing(ranges(layers))} keep the model's own attention ({reason}), but the config gives "
        "some of their heads a pattern"
        for reason, layers in wrong.items()
    ]


def described(config: HeadConfig | ConfigSet, reasons: Sequence[str | None]) -> list[tuple[str, str]]:
    """One row for each run of equal layers: `0-3`, and what their attention will be."""
    sparse = set(_sparse_layers(config))
    words = [
        f"the model's own: {reason}" if reason else "sparse" if layer in sparse else "dense in the config"
        for layer, reason in enumerate(reasons)
    ]
    rows = []
    for word, group in groupby(range(len(words)), key=words.__getitem__):
        rows.append((ranges(list(group))[0], word))
    return rows


def ranges(layers: Sequence[int]) -> list[str]:
    """Ascending layer numbers with neighbours joined, such as `0-3` and `7`."""
    runs: dict[int, list[int]] = {}
    for place, layer in enumerate(layers):
        runs.setdefault(layer - place, []).append(layer)
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs.values()]


def _sparse_layers(config: HeadConfig | ConfigSet) -> list[int]:
    configs = [member.config for member in config.members] if isinstance(config, ConfigSet) else [config]
    return sorted({layer for each in configs for layer in each.sparse_layers})

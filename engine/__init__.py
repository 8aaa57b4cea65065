"""The production side of headscope: patterns, index, attention, losses, configs, and the model integration.

The public names below load on first use, so importing this package needs neither transformers nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headscope.engine.patterns.families import FAMILIES

if TYPE_CHECKING:
    from headscope.engine.attend.attention import dense_attention, masked_attention, sparse_attention
    from headscope.engine.attend.estimator import Estimator
    from headscope.engine.attend.index import Index, build_index
    from headscope.engine.base.errors import (
        Cancelled,
        CaptureError,
        ConfigError,
        ConfigMismatch,
        HeadscopeError,
        ModelError,
        PromptError,
    )
    from headscope.engine.config.file import HeadConfig
    from headscope.engine.config.host import HostProfile
    from headscope.engine.loss.measure import HeadMeasurement, LayerMeasurement, measure_heads
    from headscope.engine.model.apply import apply
    from headscope.engine.model.load import LoadedModel, ModelFacts, fetch, load_model
    from headscope.engine.patterns.budgets import Fraction
    from headscope.engine.patterns.families import *  # noqa: F403
    from headscope.engine.runs.capture import Capture
    from headscope.engine.search.run import search_config

_FAMILY_NAMES = [family.__name__ for family in FAMILIES.values()]
_HOMES = {
    "attend.attention": ("dense_attention", "masked_attention", "sparse_attention"),
    "runs.capture": ("Capture",),
    "config.file": ("HeadConfig",),
    "base.errors": (
        "Cancelled",
        "CaptureError",
        "ConfigError",
        "ConfigMismatch",
        "HeadscopeError",
        "ModelError",
        "PromptError",
    ),
    "attend.estimator": ("Estimator",),
    "config.host": ("HostProfile",),
    "attend.index": ("Index", "build_index"),
    "model.apply": ("apply",),
    "loss.measure": ("HeadMeasurement", "LayerMeasurement", "measure_heads"),
    "model.load": ("LoadedModel", "ModelFacts", "fetch", "load_model"),
    "patterns.families": ("Fraction", *_FAMILY_NAMES),
    "search.run": ("search_config",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Cancelled",
    "Capture",
    "CaptureError",
    "ConfigError",
    "ConfigMismatch",
    "Estimator",
    "Fraction",
    "HeadConfig",
    "HeadMeasurement",
    "HeadscopeError",
    "HostProfile",
    "Index",
    "LayerMeasurement",
    "LoadedModel",
    "ModelError",
    "ModelFacts",
    "PromptError",
    "apply",
    "build_index",
    "dense_attention",
    "fetch",
    "load_model",
    "masked_attention",
    "measure_heads",
    "search_config",
    "sparse_attention",
]
__all__ += _FAMILY_NAMES


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

"""The production side of headscope: patterns, index, attention, losses, configs, and the model integration.

The public names below load on first use, so importing this package needs neither transformers nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.engine.attention import dense_attention, masked_attention, sparse_attention
    from headscope.engine.capture import Capture
    from headscope.engine.config import HeadConfig
    from headscope.engine.errors import (
        Cancelled,
        CaptureError,
        ConfigError,
        ConfigMismatch,
        HeadscopeError,
        ModelError,
        PromptError,
    )
    from headscope.engine.estimator import Estimator
    from headscope.engine.host import HostProfile
    from headscope.engine.index import Index, build_index
    from headscope.engine.integration import apply
    from headscope.engine.measure import HeadMeasurement, LayerMeasurement, measure_heads
    from headscope.engine.model import LoadedModel, ModelFacts, fetch, load_model
    from headscope.engine.patterns import AShape, BlockSparse, Dense, Fixed, Fraction, VerticalSlash
    from headscope.engine.search import search_config

_HOMES = {
    "attention": ("dense_attention", "masked_attention", "sparse_attention"),
    "capture": ("Capture",),
    "config": ("HeadConfig",),
    "errors": (
        "Cancelled",
        "CaptureError",
        "ConfigError",
        "ConfigMismatch",
        "HeadscopeError",
        "ModelError",
        "PromptError",
    ),
    "estimator": ("Estimator",),
    "host": ("HostProfile",),
    "index": ("Index", "build_index"),
    "integration": ("apply",),
    "measure": ("HeadMeasurement", "LayerMeasurement", "measure_heads"),
    "model": ("LoadedModel", "ModelFacts", "fetch", "load_model"),
    "patterns": ("AShape", "BlockSparse", "Dense", "Fixed", "Fraction", "VerticalSlash"),
    "search": ("search_config",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AShape",
    "BlockSparse",
    "Cancelled",
    "Capture",
    "CaptureError",
    "ConfigError",
    "ConfigMismatch",
    "Dense",
    "Estimator",
    "Fixed",
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
    "VerticalSlash",
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


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

"""Which implementation runs: one name, the same functions, no silent fallback for a name that was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headscope.kernels.cells import reference
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch import attention as torch_attention
from headscope.kernels.torch import exact
from headscope.kernels.torch import index as torch_index
from headscope.kernels.torch import mass as torch_mass

NAMES = ("auto", "gluon", "triton", "torch", "reference")


@dataclass(frozen=True)
class Backend:
    """One implementation. The functions and their shapes are those of the torch modules of the same name.

    `refusal(q)` says in a few words why these queries cannot be served, or nothing. `layout_refusal(layout)`
    does the same for an index.
    """

    name: str
    dense: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    build: Callable[..., Any] = torch_index.build
    pooled: Callable[..., torch.Tensor] = torch_mass.pooled
    coverage: Callable[..., torch.Tensor] = torch_mass.coverage
    sums: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch_mass.sums
    refusal: Callable[[torch.Tensor], str | None] = lambda q: None
    layout_refusal: Callable[[Layout], str | None] = lambda layout: None


TORCH = Backend("torch", torch_attention.dense, torch_attention.attend)
REFERENCE = Backend(
    "reference",
    reference.dense,
    reference.attend,
    build=exact.build,
    pooled=exact.pooled,
    coverage=exact.coverage,
    sums=exact.sums,
)

_LAZY = {"triton": "headscope.kernels.triton.backend", "gluon": "headscope.kernels.gluon.backend"}


def choose(impl: str, q: torch.Tensor, layout: Layout | None = None) -> Backend:
    """The backend for `impl` on the device of `q`; with "auto" the fastest that serves. `ValueError` if none does."""
    if impl not in NAMES:
        raise ValueError(f"impl must be one of {', '.join(NAMES)}, got {impl!r}")
    if impl == "torch":
        return TORCH
    if impl == "reference":
        return REFERENCE
    if impl != "auto":
        backend, reason = _load(impl, q, layout)
        if backend is None:
            raise ValueError(f"impl={impl!r} cannot serve here: {reason}")
        return backend
    if q.device.type == "cuda":
        for name in _preferred(q):
            backend, _ = _load(name, q, layout)
            if backend is not None:
                return backend
    return TORCH


def for_layout(layout: Layout) -> Backend:
    """The fastest backend on the layout's own device for what needs no queries, such as its coverage."""
    queries = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=layout.device)
    return choose("auto", queries, layout)


def _preferred(q: torch.Tensor) -> tuple[str, ...]:
    hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    return ("gluon", "triton") if hopper else ("triton",)


def _load(name: str, q: torch.Tensor, layout: Layout | None) -> tuple[Backend | None, str]:
    """The named backend, or None and why it does not serve these queries or this layout."""
    try:
        module = importlib.import_module(_LAZY[name])
    except ImportError as error:
        return None, f"{error}"
    backend: Backend = module.BACKEND
    reason = backend.refusal(q) or (backend.layout_refusal(layout) if layout is not None else None)
    return (None, reason) if reason else (backend, "")

"""The Hopper implementation as one backend: attention and large maps in Gluon, index and sums in Triton."""

from __future__ import annotations

import torch

from headscope.kernels.backends import Backend
from headscope.kernels.cells.layout import Layout
from headscope.kernels.gluon import attention as gluon_attention
from headscope.kernels.gluon import mass as gluon_mass
from headscope.kernels.triton import index as triton_index
from headscope.kernels.triton import mass as triton_mass
from headscope.kernels.triton import profiles as triton_profiles


def pooled(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    starts: tuple[int, ...],
    rows: tuple[int, int],
    cols: tuple[int, int],
    shape: tuple[int, int],
    layout: Layout | None = None,
) -> torch.Tensor:
    """As `torch.mass.pooled`. Maps over a layout, and pools smaller than a tile, are summed by the Triton kernel."""
    if layout is not None or gluon_mass.pooled_refusal(rows, cols, shape):
        return triton_mass.pooled(q, k, lse, scale, starts, rows, cols, shape, layout)
    return gluon_mass.pooled(q, k, lse, scale, starts, rows, cols, shape)


BACKEND = Backend(
    "gluon",
    gluon_attention.dense,
    gluon_attention.attend,
    build=triton_index.build,
    pooled=pooled,
    coverage=triton_mass.coverage,
    sums=triton_profiles.sums,
    refusal=gluon_attention.refusal,
    layout_refusal=gluon_attention.layout_refusal,
)

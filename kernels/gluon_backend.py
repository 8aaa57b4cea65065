"""The Hopper implementation as one backend: attention and large maps in Gluon, index and sums in Triton."""

from __future__ import annotations

import torch

from headscope.kernels import gluon_attention, gluon_mass, triton_index, triton_mass
from headscope.kernels.backends import Backend
from headscope.kernels.layout import Layout


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
    """As `torch_mass.pooled`. Maps over a layout, and pools smaller than a tile, are summed by the Triton kernel."""
    if layout is not None or gluon_mass.serves_pooled(rows, cols, shape):
        return triton_mass.pooled(q, k, lse, scale, starts, rows, cols, shape, layout)
    return gluon_mass.pooled(q, k, lse, scale, starts, rows, cols, shape)


BACKEND = Backend(
    "gluon",
    gluon_attention.dense,
    gluon_attention.attend,
    build=triton_index.build,
    pooled=pooled,
    coverage=triton_mass.coverage,
    sums=triton_mass.sums,
    serves=gluon_attention.serves,
    serves_layout=gluon_attention.serves_layout,
)

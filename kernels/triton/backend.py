"""The portable GPU implementation as one backend: Triton on CUDA, sm_80 and newer."""

from __future__ import annotations

from typing import Any

import torch

from headscope.kernels.backends import Backend
from headscope.kernels.triton import attention as triton_attention
from headscope.kernels.triton import common
from headscope.kernels.triton import index as triton_index
from headscope.kernels.triton import mass as triton_mass
from headscope.kernels.triton import profiles as triton_profiles
from headscope.kernels.triton import scores as triton_scores


def refusal(q: torch.Tensor) -> str | None:
    """Why these queries cannot be served, or None."""
    if q.device.type != "cuda":
        return f"it needs a CUDA device, got {q.device.type}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    if reason := common.refusal(q):
        return reason
    # Half types fit every GPU: where shared memory is small, an MMA reads queries from registers.
    if q.dtype == torch.float32:
        needed = triton_scores.room_for_float32(common.pad_dim(q.shape[-1]))
        room = common.shared_room(q.device)
        if needed > room:
            return f"float32 heads of {q.shape[-1]} need {needed} bytes of shared memory, this GPU has {room}"
    return None


def layout_refusal(layout: Any) -> str | None:
    """Why this index cannot be served, or None."""
    return None if layout.tile in common.TILES else f"it serves tile 128 or 1, got tile = {layout.tile}"


BACKEND = Backend(
    "triton",
    triton_attention.dense,
    triton_attention.attend,
    build=triton_index.build,
    pooled=triton_mass.pooled,
    coverage=triton_mass.coverage,
    sums=triton_profiles.sums,
    refusal=refusal,
    layout_refusal=layout_refusal,
)

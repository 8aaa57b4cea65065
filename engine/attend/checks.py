"""Checks of what callers pass in: every `ValueError` names the argument, what was got and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Starts = torch.Tensor | Sequence[int] | None

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_qk(q: torch.Tensor, k: torch.Tensor) -> None:
    """q [B, Hq, S, D] and k [B, Hkv, T, D] on one device, in one dtype, with S <= T and Hq a multiple of Hkv."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            got = f"{x.dim()} dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [batch, heads, tokens, head size], got {got}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, got shape {tuple(x.shape)}")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(f"q and k must match: got {q.dtype} on {q.device} and {k.dtype} on {k.device}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree on batch and head size, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"q must have at most as many rows as k has keys ({k.shape[2]}), got {q.shape[2]}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """`check_qk`, and a v shaped as k."""
    check_qk(q, k)
    if not isinstance(v, torch.Tensor) or v.shape != k.shape or v.dtype != k.dtype or v.device != k.device:
        got = f"{tuple(v.shape)} {v.dtype} on {v.device}" if isinstance(v, torch.Tensor) else type(v).__name__
        raise ValueError(f"v must match k: {tuple(k.shape)} {k.dtype} on {k.device}, got {got}")


def check_scale(scale: float | None, q: torch.Tensor) -> float:
    """The factor on the logits; `head size ** -0.5` by default."""
    if scale is None:
        return float(q.shape[3]) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    return float(scale)


def check_starts(starts: Starts, q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    """First real position of every sequence, as host integers; all 0 by default."""
    batch, length = q.shape[0], k.shape[2]
    if starts is None:
        return (0,) * batch
    values = starts.tolist() if isinstance(starts, torch.Tensor) else list(starts)
    if len(values) != batch or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise ValueError(f"starts must hold {batch} whole numbers, one per sequence, got {values!r}")
    for value in values:
        if not 0 <= value <= length:
            raise ValueError(f"starts must lie between 0 and {length}, the number of keys, got {value}")
    return tuple(values)


def check_tile(tile: int) -> int:
    """Width of a window of the expansion rule: 1 for none, else an even number."""
    if isinstance(tile, bool) or not isinstance(tile, int) or not (tile == 1 or (tile % 2 == 0 and 2 <= tile <= 4096)):
        raise ValueError(f"tile must be 1 (no expansion) or an even width from 2 to 4096, got {tile!r}")
    return tile

"""What the attention of one layer reads, checked once: every `ValueError` names the argument, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Starts = torch.Tensor | Sequence[int] | None
"""First real position of every sequence, as callers give it; None where there is no padding."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, init=False, eq=False)
class ScoreInputs:
    """What the scores of one layer come from: q [B, Hq, S, D] and k [B, Hkv, T, D] after RoPE, scale and starts.

    `scale` is the factor on the logits, `D ** -0.5` by default. `starts` is each sequence's first real position (left
    padding), all 0 by default. With S < T the rows are the last S positions. `ValueError` for what does not fit.
    """

    q: torch.Tensor
    k: torch.Tensor
    scale: float
    starts: tuple[int, ...]

    def __init__(self, q: torch.Tensor, k: torch.Tensor, scale: float | None = None, starts: Starts = None) -> None:
        _check_qk(q, k)
        self._set(q=q, k=k, scale=_checked_scale(scale, q), starts=_checked_starts(starts, q, k))

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def query_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows S."""
        return self.q.shape[2]

    @property
    def length(self) -> int:
        """Keys T, padding included."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]


@dataclass(frozen=True, init=False, eq=False)
class LayerInputs(ScoreInputs):
    """`ScoreInputs`, and v [B, Hkv, T, D]."""

    v: torch.Tensor

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None, starts: Starts = None
    ) -> None:
        super().__init__(q, k, scale, starts)
        _check_v(v, k)
        self._set(v=v)

    def head(self, head: int) -> LayerInputs:
        """One query head with the KV head that it reads, as views."""
        kv_head = head // self.group
        query, key = slice(head, head + 1), slice(kv_head, kv_head + 1)
        return LayerInputs(self.q[:, query], self.k[:, key], self.v[:, key], self.scale, self.starts)

    def heads(self, indexes: Sequence[int]) -> LayerInputs:
        """Some query heads, each with a copy of the KV head that it reads."""
        query = torch.tensor(indexes, device=self.device)
        key = query // self.group
        return LayerInputs(self.q[:, query], self.k[:, key], self.v[:, key], self.scale, self.starts)

    def to(self, device: torch.device) -> LayerInputs:
        """The same on another device."""
        return self._each(lambda x: x.to(device))

    def contiguous(self) -> LayerInputs:
        """The same with every tensor in one piece."""
        return self._each(torch.Tensor.contiguous)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerInputs:
        return LayerInputs(change(self.q), change(self.k), change(self.v), self.scale, self.starts)


LayerVisitor = Callable[[int, LayerInputs], None]
"""Called with a layer's number and what its attention reads."""


def check_tile(tile: int) -> int:
    """Width of a window of the expansion rule: 1 for none, else an even number."""
    if isinstance(tile, bool) or not isinstance(tile, int) or not (tile == 1 or (tile % 2 == 0 and 2 <= tile <= 4096)):
        raise ValueError(f"tile must be 1 (no expansion) or an even width from 2 to 4096, got {tile!r}")
    return tile


def _check_qk(q: torch.Tensor, k: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            shape = f"{x.dim()} dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [batch, heads, tokens, head size], got {shape}")
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


def _check_v(v: torch.Tensor, k: torch.Tensor) -> None:
    if not isinstance(v, torch.Tensor) or v.shape != k.shape or v.dtype != k.dtype or v.device != k.device:
        described = f"{tuple(v.shape)} {v.dtype} on {v.device}" if isinstance(v, torch.Tensor) else type(v).__name__
        raise ValueError(f"v must match k: {tuple(k.shape)} {k.dtype} on {k.device}, got {described}")


def _checked_scale(scale: float | None, q: torch.Tensor) -> float:
    if scale is None:
        return float(q.shape[3]) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    return float(scale)


def _checked_starts(starts: Starts, q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    """Host integers, one a sequence."""
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

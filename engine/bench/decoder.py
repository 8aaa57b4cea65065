"""A decoder with random weights of its own, for timing whole prefills: real sizes, nothing to understand.

What a layer takes is split as in eq. 13: projections (with the norm and RoPE before attention), index, attention, and
the rest (residuals, the second norm, the MLP). Embedding and the last position's logits are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.timing import drain
from headscope.engine.bench.shapes import SHAPES, Shape

PARTS = ("projections", "index", "attention", "other")

_CHUNK = 16384
"""Tokens that projections and the MLP take at a time: their inner results stay below a few GiB at any length."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes."""

    layers: int
    hidden: int
    mlp: int
    heads: Shape
    rope_theta: float = 500000.0


MODELS = {
    "llama3-8b": ModelShape(32, 4096, 14336, SHAPES["llama3-8b"]),
    "mistral-7b": ModelShape(32, 4096, 14336, SHAPES["mistral-7b"], 1e6),
    "smollm2": ModelShape(30, 576, 1536, SHAPES["smollm2"], 1e5),
}


class Clock:
    """Time of the parts of a run: `lap(part)` books what passed since the lap before. No sync until `read`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.lap("")

    def lap(self, part: str) -> None:
        """Ends a stretch of `part`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Milliseconds of every part."""
        if self._cuda:
            torch.cuda.synchronize()
        total = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks[:-1], self._marks[1:], strict=True):
            total[part] += before.elapsed_time(after) if self._cuda else (after - before) * 1e3
        return total


Attention = Callable[[int, LayerInputs, Clock], torch.Tensor]
"""From a layer's number and inputs to the output [1, Hq, n, D]; books its own laps."""


@dataclass(frozen=True)
class Weights:
    """One layer: qkv [(Hq + 2 Hkv) D, hidden], out [hidden, Hq D], gate and up [2 mlp, hidden], down [hidden, mlp]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]


class Decoder:
    """`count` decoder layers with random weights of their own: RMSNorm, RoPE, GQA, gated MLP."""

    def __init__(self, model: ModelShape, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        generator = torch.Generator(device=device).manual_seed(0)
        heads = model.heads

        def draw(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

        def layer() -> Weights:
            ones = torch.ones(model.hidden, dtype=dtype, device=device)
            width = heads.query_heads * heads.head_dim
            return Weights(
                draw(width + 2 * heads.kv_heads * heads.head_dim, model.hidden),
                draw(model.hidden, width),
                draw(2 * model.mlp, model.hidden),
                draw(model.hidden, model.mlp),
                (ones, ones),
            )

        self.weights = [layer() for _ in range(count)]

    def run(self, length: int, attention: Attention, layers: int | None = None) -> dict[str, float]:
        """Milliseconds of every part of a prefill of `length` random embeddings through the first `layers` layers."""
        generator = torch.Generator(device=self.device).manual_seed(length)
        x = torch.empty(length, self.model.hidden, dtype=self.dtype, device=self.device)
        x.normal_(generator=generator)
        drain(self.device)
        clock = Clock(self.device)
        self.forward(x, attention, clock, layers)
        return clock.read()

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, attention: Attention, clock: Clock | None = None, layers: int | None = None
    ) -> torch.Tensor:
        """Hidden states x [n, hidden] after the layers, in place: no layer keeps its keys for the next."""
        clock = clock or Clock(self.device)
        cos, sin = self._rotation(len(x))
        for number, weights in enumerate(self.weights[:layers]):
            inputs = self._project(weights, x, cos, sin)
            clock.lap("projections")
            out = attention(number, inputs, clock)
            del inputs
            self._close(weights, x, out, clock)
            del out
        return x

    def _rotation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, D / 2] of RoPE."""
        half = self.model.heads.head_dim // 2
        frequency = self.model.rope_theta ** -(torch.arange(half, device=self.device) / half)
        angle = torch.arange(length, device=self.device)[:, None] * frequency
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _project(self, weights: Weights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> LayerInputs:
        """q, k (after RoPE) and v of a layer, contiguous per head."""
        heads, length = self.model.heads, len(x)
        counts_of = (heads.query_heads, heads.kv_heads, heads.kv_heads)
        q, k, v = (x.new_empty(1, count, length, heads.head_dim) for count in counts_of)
        for first in range(0, length, _CHUNK):
            part = slice(first, min(first + _CHUNK, length))
            mixed = self._norm(x[part], weights.norms[0]) @ weights.qkv.T
            queries, keys, values = mixed.view(len(mixed), -1, heads.head_dim).transpose(0, 1).split(counts_of)
            _rotate(queries, cos[part], sin[part], q[0, :, part])
            _rotate(keys, cos[part], sin[part], k[0, :, part])
            v[0, :, part] = values
        return LayerInputs(q, k, v)

    def _close(self, weights: Weights, x: torch.Tensor, out: torch.Tensor, clock: Clock) -> None:
        """Adds the output projection and the MLP to `x`, in place, a piece of the tokens at a time."""
        for first in range(0, len(x), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(x)))
            x[part] += out[0, :, part].transpose(0, 1).flatten(1) @ weights.out.T
        clock.lap("projections")
        for first in range(0, len(x), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(x)))
            gate_up = self._norm(x[part], weights.norms[1]) @ weights.gate_up.T
            opened = torch.nn.functional.silu(gate_up[:, : self.model.mlp]).mul_(gate_up[:, self.model.mlp :])
            x[part] += opened @ weights.down.T
        clock.lap("other")

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (self.model.hidden,), weight, 1e-5)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """RoPE on x [H, n, D] by halves, into `out`."""
    first, second = x.chunk(2, -1)
    half = first.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin

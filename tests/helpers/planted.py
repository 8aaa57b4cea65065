"""Heads whose true pattern is known, for tests of the search: planted in Q and K, one pattern a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.search.results import SearchPrompt

LENGTH = 1024
DIM = 256
WAVES = 124
FLAG = 2 * WAVES
"""The channel in which marked keys stand out; the ones before it carry positions."""
COLUMNS = (3, 130, 305, 511, 700)
DISTANCES = (0, 57, 330)
KINDS = ("a-shape", "vertical-slash", "block-sparse", "dense")


def _lags(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(WAVES, generator=generator) * 3.0 + 0.05


def _waves(position: torch.Tensor, lags: torch.Tensor) -> torch.Tensor:
    phase = position[:, None].float() * lags[None, :]
    return torch.cat([phase.cos(), phase.sin()], 1)


def _a_shape(generator: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four sinks and about the last 24 tokens."""
    place = torch.arange(length)
    lags = torch.linspace(0.004, 0.11, WAVES)
    q, k = torch.zeros(length, DIM), torch.zeros(length, DIM)
    q[:, :FLAG], k[:, :FLAG] = _waves(place, lags) * (30 / WAVES), _waves(place, lags)
    q[:, FLAG], k[:4, FLAG] = 1.0, 28.0
    return q, k


def _vertical_slash(generator: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(length)
    lags = _lags(generator)
    q, k = torch.zeros(length, DIM), torch.zeros(length, DIM)
    k[:, :FLAG] = _waves(place, lags)
    lag = torch.tensor(DISTANCES)
    overlap = (lags[None, None, :] * (lag[:, None] - lag[None, :])[..., None]).cos().sum(-1)
    # Peaks overlap a little: amplitudes that make every planted distance equally strong.
    for distance, amplitude in zip(DISTANCES, torch.linalg.solve(overlap, torch.full((3,), 30.0)), strict=True):
        q[:, :FLAG] += _waves(place - distance, lags) * amplitude
    q[:, FLAG] = 1.0
    k[[column for column in COLUMNS if column < length], FLAG] = 26.0
    return q, k


def _blocks(generator: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    side = -(-length // 64)
    codes = torch.nn.functional.normalize(torch.randn(side, DIM, generator=generator), dim=1)
    block = torch.arange(length) // 64
    wanted = torch.zeros(side, DIM)
    for row in range(side):
        far = torch.randperm(max(1, row), generator=generator)[:2].tolist()
        wanted[row] = codes[sorted({row, *far})].sum(0)
    return wanted[block] * 16.0, codes[block]


def _diffuse(generator: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(length, DIM, generator=generator) * 0.01, torch.randn(length, DIM, generator=generator)


MAKERS: dict[str, Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]] = {
    "a-shape": _a_shape,
    "vertical-slash": _vertical_slash,
    "block-sparse": _blocks,
    "dense": _diffuse,
}


def planted_layer(
    seed: int, length: int = LENGTH, kinds: Sequence[str] = KINDS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [1, heads, length, 256]; scale 1. Head h has the pattern `kinds[h]`."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [MAKERS[kind](generator, length) for kind in kinds]
    q, k = (torch.stack([pair[at] for pair in pairs])[None] for at in (0, 1))
    return q, k, torch.randn(q.shape, generator=generator)


class PlantedSource:
    """A source of planted layers: layer l of prompt p is seeded by both. `order(layer)` are the heads' kinds."""

    def __init__(self, layers: int = 2) -> None:
        self.count = layers
        self.streamed: list[int] = []

    def order(self, layer: int) -> tuple[str, ...]:
        shift = layer % len(KINDS)
        return KINDS[shift:] + KINDS[:shift]

    def stream(self, prompt: SearchPrompt, visit, layers, cancel) -> None:  # type: ignore[no-untyped-def]
        for layer in layers:
            self.streamed.append(layer)
            q, k, v = planted_layer(prompt.ids[0] * 100 + layer, len(prompt.ids), self.order(layer))
            visit(layer, LayerInputs(q, k, v, 1.0))

    def prefill_ms(self, prompt: SearchPrompt) -> float:
        return 0.0

    def facts(self) -> dict[str, object]:
        return {
            "architecture": "Planted",
            "layers": self.count,
            "query_heads": 4,
            "kv_heads": 4,
            "head_dim": DIM,
            "rope": {},
            "max_position": 4096,
            "layer_types": ["full_attention"] * self.count,
            "fingerprint": "planted",
            "load_format": "",
            "name": "planted",
        }


def planted_prompts(count: int = 2, length: int = LENGTH) -> list[SearchPrompt]:
    return [SearchPrompt(f"planted-{n}", "planted", (n + 1,) + (0,) * (length - 1), f"{n:064x}") for n in range(count)]

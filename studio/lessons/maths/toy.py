"""Small heads whose attention has a shape that is known beforehand: inputs for the engine, nothing else.

A head is made of wishes: "every row likes the key `d` back" (a distance), "these rows like these keys" (a spot).
Each wish adds its strength to the logits of the cells it names, so the softmax that the engine computes shows a
column, a slash or a block exactly where it was put. One spot is one extra channel of q and k. Distances share 2 n
channels of cosines and sines, whose products add up to a single peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

Spot = tuple[Iterable[int], Iterable[int], float]
"""Rows, keys and strength: these rows' logits at these keys grow by the strength."""


@dataclass(frozen=True)
class Head:
    """One head: q, k, v float32 [1, 1, n, D], to be used with `scale`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float = 1.0

    @property
    def length(self) -> int:
        """How many positions."""
        return self.q.shape[2]

    def copies(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [1, count, n, D] with the same k and v: the same head under several patterns in one call."""
        return self.q.expand(1, count, -1, -1), self.k, self.v


def make(
    n: int,
    *,
    distances: Mapping[int, float] | None = None,
    spots: Iterable[Spot] = (),
    noise: float = 0.0,
    sharpness: float = 1.0,
    seed: int = 0,
) -> Head:
    """A head of `n` positions. `noise` is the size of random logits, `sharpness` multiplies all of them."""
    chance = torch.Generator().manual_seed(seed)
    parts = [_distances(n, distances or {}), *(_spot(n, spot) for spot in spots), _noise(n, noise, chance)]
    q = torch.cat([part[0] for part in parts], 1) * sharpness
    k = torch.cat([part[1] for part in parts], 1)
    v = torch.randn(k.shape, generator=chance)
    return Head(q[None, None], k[None, None], v[None, None])


def by_hand(q: list[list[float]], k: list[list[float]], v: list[list[float]]) -> Head:
    """A head from written-out vectors, a row each."""
    return Head(torch.tensor(q)[None, None], torch.tensor(k)[None, None], torch.tensor(v)[None, None])


def _distances(n: int, strengths: Mapping[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    # The cosines of m x 2 pi / (2 n + 1), m = 1 .. n, add up to n at x = 0 and to -1/2 at every other whole x.
    wave = torch.arange(1, n + 1) * (2 * math.pi / (2 * n + 1))
    place = torch.arange(n)[:, None]
    k = torch.cat([(wave * place).cos(), (wave * place).sin()], 1)
    q = torch.zeros_like(k)
    for distance, strength in strengths.items():
        turned = wave * (place - distance)
        q += torch.cat([turned.cos(), turned.sin()], 1) * (strength / (n + 0.5))
    return q, k


def _spot(n: int, spot: Spot) -> tuple[torch.Tensor, torch.Tensor]:
    rows, keys, strength = spot
    q, k = torch.zeros(n, 1), torch.zeros(n, 1)
    q[[row for row in rows if row < n]] = strength
    k[[key for key in keys if key < n]] = 1.0
    return q, k


def _noise(n: int, size: float, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    channels = 8
    q, k = (torch.randn(n, channels, generator=chance) for _ in range(2))
    return q * (size / math.sqrt(channels)), k

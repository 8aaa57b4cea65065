"""The least total loss within a time, where a family costs its layer something once and dense layers have a kernel.

Those costs tie the heads of a layer together, so the Lagrangian is per layer: at an exchange rate of loss for time
each layer takes the best of every set of families and of the dense kernel, each head the best candidate of that set.
The rate is bisected until the times fit. The dual value at any rate is a bound that no choice can beat; what the
heads do inside the chosen families is then improved by `least_loss`, and the distance to the bound is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from headscope.engine.search.front import Choice, Front, Point, least_loss

_STEPS = 50
_HIGHEST = 1e12


@dataclass(frozen=True)
class Layers:
    """All heads by layer, then head: `fronts` [layers * heads], whose candidate 0 is dense and loses nothing.

    `kinds` names each candidate's family, `base` what a mix of families costs its layer before its heads, and
    `dense_ms` what a layer takes whose heads are all dense. `limits` caps the loss of single layers.
    """

    fronts: Sequence[Front]
    heads: int
    kinds: Sequence[str]
    base: Callable[[Iterable[str]], float]
    dense_ms: float
    limits: dict[int, float]

    @property
    def count(self) -> int:
        return len(self.fronts) // self.heads

    def row(self, at: int) -> Sequence[Front]:
        return self.fronts[at * self.heads : (at + 1) * self.heads]


@dataclass(frozen=True)
class _State:
    """What one exchange rate chooses: candidates int [layers, heads], times and losses [layers]."""

    picked: np.ndarray
    ms: np.ndarray
    loss: np.ndarray


class _Rates:
    """Choices of `layers` at an exchange rate, in arrays."""

    def __init__(self, layers: Layers) -> None:
        shape = (layers.count, layers.heads, len(layers.kinds))
        every = [front.every for front in layers.fronts]
        self.ms = np.array([[point.ms for point in points] for points in every]).reshape(shape)
        self.loss = np.array([[point.weighted for point in points] for points in every]).reshape(shape)
        most = np.array([layers.limits.get(layers.row(at)[0].layer, 1.0) for at in range(layers.count)])
        raw = np.array([[point.loss for point in points] for points in every]).reshape(shape)
        self.shut = raw > most[:, None, None]
        self.dense_ms = layers.dense_ms
        families = sorted(set(layers.kinds))
        sets = [names for size in range(1, len(families) + 1) for names in combinations(families, size)]
        self.sets = [
            (np.array([at for at, kind in enumerate(layers.kinds) if kind in names]), layers.base(names))
            for names in sets
        ]

    def at(self, rate: float) -> _State:
        """The choice that minimises loss + rate * ms, layer by layer."""
        score = np.where(self.shut, np.inf, self.loss + rate * self.ms)
        layers, heads, _ = score.shape
        best = _State(np.zeros((layers, heads), dtype=int), np.full(layers, self.dense_ms), np.zeros(layers))
        value = best.loss + rate * best.ms
        for members, base in self.sets:
            picked = members[score[:, :, members].argmin(2)]
            part = np.take_along_axis(score, picked[:, :, None], 2)[:, :, 0].sum(1) + rate * base
            better = part < value
            ms = np.take_along_axis(self.ms, picked[:, :, None], 2)[:, :, 0].sum(1) + base
            loss = np.take_along_axis(self.loss, picked[:, :, None], 2)[:, :, 0].sum(1)
            best = _State(
                np.where(better[:, None], picked, best.picked),
                np.where(better, ms, best.ms),
                np.where(better, loss, best.loss),
            )
            value = np.where(better, part, value)
        return best


def fastest_ms(layers: Layers) -> float:
    """The least time of all layers together, whatever it loses within the limits."""
    return float(_Rates(layers).at(_HIGHEST).ms.sum())


def least_loss_of_layers(layers: Layers, budget_ms: float) -> Choice:
    """The least total weighted loss whose layers take at most `budget_ms`, which must be at least `fastest_ms`."""
    rates = _Rates(layers)
    low, high = 0.0, 1e-9
    while rates.at(high).ms.sum() > budget_ms and high < _HIGHEST:
        low, high = high, high * 8
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5 if low else high / 8
        if rates.at(middle).ms.sum() > budget_ms:
            low = middle
        else:
            high = middle
        if not low and high < 1e-12:
            break
    state = rates.at(high)
    bound = max(
        float((each.loss + rate * each.ms).sum() - rate * budget_ms)
        for rate, each in ((low, rates.at(low)), (high, state))
    )
    points = _improved(layers, state, budget_ms)
    loss = sum(point.weighted for point in points)
    relaxed = max(0.0, min(bound, loss))
    return Choice(tuple(points), sum(point.ms for point in points), loss, relaxed, high)


def _improved(layers: Layers, state: _State, budget_ms: float) -> list[Point]:
    """The state's points, or better ones of the same families within what is left of the budget."""
    points = [front.every[number] for front, number in zip(layers.fronts, state.picked.ravel(), strict=True)]
    mixed = [at for at in range(layers.count) if state.picked[at].any()]
    left, fronts = budget_ms - layers.dense_ms * (layers.count - len(mixed)), []
    for at in mixed:
        names = {layers.kinds[number] for number in state.picked[at]}
        left -= layers.base(names)
        for front in layers.row(at):
            some = [point for point in front.every if layers.kinds[point.number] in names]
            fronts.append(Front.of(front.layer, front.head, some))
    spent = sum(points[at * layers.heads + head].ms for at in mixed for head in range(layers.heads))
    if not mixed:
        return points
    choice = least_loss(fronts, max(left, spent), layers.limits)
    if choice.loss <= float(state.loss.sum()):
        for number, at in enumerate(mixed):
            points[at * layers.heads : (at + 1) * layers.heads] = choice.points[
                number * layers.heads : (number + 1) * layers.heads
            ]
    for at in mixed:  # what became slower than the dense kernel by improving is dense
        row = points[at * layers.heads : (at + 1) * layers.heads]
        if sum(p.ms for p in row) + layers.base(layers.kinds[p.number] for p in row) >= layers.dense_ms:
            points[at * layers.heads : (at + 1) * layers.heads] = [front.every[0] for front in layers.row(at)]
    return points

"""The choosing half of a search: Pareto fronts of time and loss per head, and the allocation over the model.

Two questions are answered. `least_time`: no head above a loss, each head as fast as that allows. `least_loss`: a
time for the whole, the least total loss within it; its relaxation, where a head may run a share of its rows under
one candidate and the rest under the next, is solved exactly by a Lagrangian walk along the convex hulls, and the
gap between that bound and the whole-candidate answer is stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headscope.engine.base.errors import OptionError
from headscope.engine.search.results import SearchError

TIE_TIME = 0.02
"""Times within 2 % are a tie: the cost model knows them no better."""

TIE_LOSS = 1e-4
"""Losses this near are a tie."""


@dataclass(frozen=True)
class Point:
    """One candidate of one head: predicted `ms`, `loss` (0..1, what limits are about), and its place in the grid.

    `weight` scales the loss in totals. `rank` is its simplicity: smaller is simpler.
    """

    number: int
    ms: float
    loss: float
    rank: tuple[int, int]
    weight: float = 1.0

    @property
    def weighted(self) -> float:
        return self.loss * self.weight


@dataclass(frozen=True)
class Front:
    """A head's candidates: `points` that nothing beats, fastest first and losing less with every step, and `every`
    one, since a tie may prefer a simpler pattern that is beaten by a hair."""

    layer: int
    head: int
    points: tuple[Point, ...]
    every: tuple[Point, ...]

    @classmethod
    def of(cls, layer: int, head: int, every: Sequence[Point]) -> Front:
        """The front of all points of a head. SearchError where a time or loss is not finite: it has no rank."""
        if not all(math.isfinite(point.ms) and math.isfinite(point.weighted) for point in every):
            raise SearchError(
                f"Layer {layer} head {head} has a candidate whose time or loss is not finite: search again in bfloat16 "
                "or float32, with a new cost model."
            )
        return cls(layer, head, pareto(every), tuple(every))


@dataclass(frozen=True)
class Choice:
    """The chosen point of every head, in the order of the fronts.

    `ms` and `loss` are totals (loss weighted). For a time target, `relaxed_loss` is the optimum of the relaxed
    problem, which nothing can beat, and `gap` the distance to it; both None otherwise.
    """

    points: tuple[Point, ...]
    ms: float
    loss: float
    relaxed_loss: float | None = None
    multiplier: float | None = None

    @property
    def gap(self) -> float | None:
        return None if self.relaxed_loss is None else max(0.0, self.loss - self.relaxed_loss)


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that none beats in both time and weighted loss, fastest first; of equal ones the simplest."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.ms, point.weighted, point.rank)):
        if not best or point.weighted < best[-1].weighted:
            best.append(point)
    return tuple(best)


def least_time(fronts: Sequence[Front], limit: float, layer_limits: dict[int, float] | None = None) -> Choice:
    """Each head's fastest point of at most `limit` loss (or its layer's own limit). SearchError if a limit is no share.

    Dense loses nothing, so there is always one.
    """
    limits = layer_limits or {}
    for name, value in (("the limit", limit), *((f"the limit of layer {at}", value) for at, value in limits.items())):
        if not 0 <= value <= 1:
            raise OptionError(f"Missed mass is a share: {name} must be between 0 and 1, got {value}.")
    points = []
    for each in fronts:
        allowed = min(limit, limits.get(each.layer, limit))
        fits = [point for point in each.every if point.loss <= allowed]
        if not fits:
            raise SearchError(f"Layer {each.layer} head {each.head} has no candidate within {allowed}, dense included.")
        points.append(simplest_of_fastest(fits))
    return _choice(points)


def simplest_of_fastest(points: Sequence[Point]) -> Point:
    """The fastest point; among those within the tie in time the simplest, then the one that loses least."""
    fastest = min(point.ms for point in points)
    near = [point for point in points if point.ms <= fastest * (1 + TIE_TIME)]
    return min(near, key=lambda point: (point.rank[0], point.weighted, point.rank))


def least_loss(fronts: Sequence[Front], budget_ms: float, layer_limits: dict[int, float] | None = None) -> Choice:
    """The least total weighted loss whose times sum to at most `budget_ms`.

    Every head starts at its fastest allowed point; hull segments are bought by loss saved per ms, which is the
    Lagrangian's optimum at every multiplier on the way. The segment that no longer fits gives the relaxed optimum.
    What is left of the budget then goes to single steps that still fit. SearchError if even the fastest do not fit.
    """
    limits = layer_limits or {}
    every = [tuple(point for point in each.every if point.loss <= limits.get(each.layer, 1.0)) for each in fronts]
    allowed = [pareto(points) for points in every]
    for each, points in zip(fronts, allowed, strict=True):
        if not points:
            raise SearchError(f"Layer {each.layer} head {each.head} has no candidate within its layer's limit.")
    hulls = [hull(points) for points in allowed]
    picked = [points[0] for points in hulls]
    spent = sum(point.ms for point in picked)
    if spent > budget_ms * (1 + 1e-12):
        raise SearchError(
            f"No choice of candidates is that fast: the fastest takes {spent:.1f} ms of attention, the target leaves "
            f"{budget_ms:.1f} ms. Allow a lower speed-up, or add cheaper candidates."
        )
    segments = sorted(
        (
            (-(a.weighted - b.weighted) / (b.ms - a.ms), at, step)
            for at, points in enumerate(hulls)
            for step, (a, b) in enumerate(pairwise(points))
        ),
    )
    loss = sum(point.weighted for point in picked)
    relaxed, multiplier = None, 0.0
    for slope, at, step in segments:
        cost = hulls[at][step + 1].ms - hulls[at][step].ms
        if spent + cost > budget_ms:
            relaxed = loss + slope * (budget_ms - spent)
            multiplier = -slope
            break
        picked[at] = hulls[at][step + 1]
        spent += cost
        loss += slope * cost
    left = _fill(picked, allowed, budget_ms - sum(point.ms for point in picked))
    _simplify(picked, every, left)
    choice = _choice(picked)
    bound = choice.loss if relaxed is None else max(0.0, min(relaxed, choice.loss))
    return Choice(choice.points, choice.ms, choice.loss, bound, multiplier)


def hull(points: Sequence[Point]) -> tuple[Point, ...]:
    """The lower convex hull of a front, fastest first: what a Lagrangian can pick."""
    kept: list[Point] = []
    for point in points:
        while len(kept) >= 2 and _slope(kept[-1], point) <= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(point)
    return tuple(kept)


def _slope(a: Point, b: Point) -> float:
    """Loss change per ms from a to b (negative). The hull's slopes rise towards 0."""
    return (b.weighted - a.weighted) / (b.ms - a.ms)


def _fill(picked: list[Point], allowed: Sequence[Sequence[Point]], left: float) -> float:
    """Spends what is left on single upgrades, the one that saves most loss first; returns what remains."""
    while True:
        best: tuple[float, int, Point] | None = None
        for at, points in enumerate(allowed):
            for point in points:
                saved = picked[at].weighted - point.weighted
                if point.ms - picked[at].ms <= left and saved > 0 and (best is None or saved > best[0]):
                    best = (saved, at, point)
        if best is None:
            return left
        left -= best[2].ms - picked[best[1]].ms
        picked[best[1]] = best[2]


def _simplify(picked: list[Point], every: Sequence[Sequence[Point]], left: float) -> None:
    """Swaps in simpler patterns that tie in time and loss, as far as the budget that is left allows."""
    for at, points in enumerate(every):
        mine = picked[at]
        ties = [
            point
            for point in points
            if point.rank[0] < mine.rank[0]
            and point.ms - mine.ms <= min(left, TIE_TIME * mine.ms)
            and point.loss <= mine.loss + TIE_LOSS
        ]
        if ties:
            picked[at] = min(ties, key=lambda point: (point.rank[0], point.weighted, point.rank))
            left -= picked[at].ms - mine.ms


def _choice(points: Sequence[Point]) -> Choice:
    return Choice(tuple(points), sum(point.ms for point in points), sum(point.weighted for point in points))

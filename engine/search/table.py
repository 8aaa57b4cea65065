"""Measured results as arrays, and what follows from them at once: fronts, predictions, the best uniform setting.

Nothing here runs a model: a page that moves a target calls this with the stored results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from headscope.engine.base.errors import OptionError
from headscope.engine.patterns.families import Dense, Pattern
from headscope.engine.search.cost import CostModel
from headscope.engine.search.front import TIE_TIME, Choice, Front, Point, least_time
from headscope.engine.search.grid import Grid, simplicity
from headscope.engine.search.results import STATS, PromptResult, SearchError
from headscope.engine.search.speed import Layers, fastest_ms, least_loss_of_layers

METRICS = ("mean", "worst", "p99", "start", "middle", "end")
WEIGHTS = ("none", "output", "logits")


@dataclass(frozen=True)
class Table:
    """`stats[name]` is float64 [prompts, layers, heads, candidates]; prompts are sorted by hash."""

    grid: Grid
    layers: tuple[int, ...]
    prompts: tuple[dict[str, Any], ...]
    stats: dict[str, np.ndarray]
    dense_ms: np.ndarray

    @classmethod
    def of(cls, results: Sequence[PromptResult], grid: Grid) -> Table:
        """The table of results that share one grid and one set of layers."""
        if not results:
            raise SearchError("There are no results to choose from: measure at least one prompt.")
        stats = {
            name: np.array([[[row[name] for row in layer["rows"]] for layer in r.layers] for r in results]).swapaxes(
                2, 3
            )
            for name in STATS
        }
        for at, layer in enumerate(results[0].layers):
            if not all(np.isfinite(values[:, at]).all() for values in stats.values()):
                raise SearchError(
                    f"The results of layer {layer['layer']} are not finite, so nothing can be chosen from them: search "
                    "again in bfloat16 or float32."
                )
        return cls(
            grid,
            tuple(layer["layer"] for layer in results[0].layers),
            tuple(result.prompt for result in results),
            {name: values.astype(np.float64) for name, values in stats.items()},
            np.array([[layer["dense_ms"] for layer in result.layers] for result in results]),
        )

    @property
    def heads(self) -> int:
        return int(self.stats["mean"].shape[2])

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(int(prompt["tokens"]) for prompt in self.prompts)

    def only(self, prompts: Sequence[int]) -> Table:
        """The same table with some of its prompts."""
        picked = list(prompts)
        stats = {name: values[picked] for name, values in self.stats.items()}
        return Table(self.grid, self.layers, tuple(self.prompts[at] for at in picked), stats, self.dense_ms[picked])

    def loss(self, metric: str = "mean") -> np.ndarray:
        """[layers, heads, candidates]: the worst prompt's loss, to 5 digits, below which float32 says nothing."""
        if metric not in METRICS:
            raise OptionError(f"The metric is one of {', '.join(METRICS)}, got {metric[:40]!r}.")
        return np.round(self.stats[metric].max(0), 5)

    def head_ms(self, model: CostModel) -> np.ndarray:
        """[layers, heads, candidates]: predicted time of each head in a sparse layer, mean over prompts."""
        cells = self.stats["tile_cells"]
        return np.mean(
            [
                np.stack([model.head_ms(p, n, cells[at][..., c]) for c, p in enumerate(self.grid.candidates)], -1)
                for at, n in enumerate(self.tokens)
            ],
            axis=0,
        )


@dataclass(frozen=True)
class Target:
    """What to allocate for: `max_missed` (no head above it) or `speedup` (dense over sparse prefill), exactly one.

    `layer_limits` caps the loss of single layers. `weight` scales losses in totals: by nothing, by the head's output
    error, or by `layer_weights` (the effect of each layer on the final logits).
    """

    max_missed: float | None = None
    speedup: float | None = None
    metric: str = "mean"
    weight: str = "none"
    layer_limits: tuple[tuple[int, float], ...] = ()
    layer_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.max_missed is None) == (self.speedup is None):
            raise OptionError("Give either a largest missed mass or a speed-up as the target, and exactly one of them.")
        if self.max_missed is not None and not 0 <= self.max_missed <= 1:
            raise OptionError(f"The largest missed mass is a share between 0 and 1, got {self.max_missed}.")
        if self.speedup is not None and not 0 < self.speedup < 1e6:
            raise OptionError(f"The speed-up must be above 0 and below a million, got {self.speedup}.")
        if self.metric not in METRICS:
            raise OptionError(f"The metric is one of {', '.join(METRICS)}, got {self.metric[:40]!r}.")
        for layer, limit in self.layer_limits:
            if not 0 <= limit <= 1:
                raise OptionError(f"The limit of layer {layer} is a share between 0 and 1, got {limit}.")
        if self.weight not in WEIGHTS:
            raise OptionError(f"Losses are weighted by one of {', '.join(WEIGHTS)}, got {self.weight[:40]!r}.")
        if self.weight == "logits" and self.layer_weights is None:
            raise OptionError("Weighting by the logits needs a weight for each layer: measure them first.")
        for at, weight in enumerate(self.layer_weights or ()):
            if not 0 <= weight < math.inf:
                raise OptionError(f"Weight {at} of the layers must be a finite number of at least 0, got {weight}.")

    def check_layers(self, searched: Sequence[int]) -> None:
        """OptionError where a limit is for a layer that is not among the searched ones."""
        for layer, _ in self.layer_limits:
            if layer not in searched:
                raise OptionError(f"There is a limit for layer {layer}, which is not among the layers searched.")

    def to_dict(self) -> dict[str, Any]:
        value = {name: getattr(self, name) for name in ("max_missed", "speedup", "metric", "weight")}
        return value | {"layer_limits": {str(layer): limit for layer, limit in self.layer_limits}}


@dataclass(frozen=True)
class Prediction:
    """What a choice is predicted to take, means over prompts in ms, and to lose.

    `prefill_ms` = `other_ms` + attention. `loss_mean` and `loss_worst` are over heads, each on its worst prompt.
    `dense_layers` are those whose heads are all dense, so that they run in the dense kernel.
    """

    attention_ms: float
    dense_attention_ms: float
    other_ms: float
    loss_mean: float
    loss_worst: float
    computed_pairs: int
    causal_pairs: int
    dense_layers: tuple[int, ...]

    @property
    def prefill_ms(self) -> float:
        return self.other_ms + self.attention_ms

    @property
    def speedup(self) -> float:
        return (self.other_ms + self.dense_attention_ms) / max(1e-12, self.prefill_ms)


@dataclass(frozen=True)
class Allocation:
    """Candidate numbers int [layers, heads], how they were chosen, and what they are predicted to do.

    `stayed_dense` are the heads for which no sparse candidate was within the limit.
    """

    picked: np.ndarray
    choice: Choice
    prediction: Prediction
    stayed_dense: tuple[tuple[int, int], ...]

    def pattern(self, grid: Grid, layer_at: int, head: int) -> Pattern:
        return grid.candidates[int(self.picked[layer_at, head])]


def fronts(table: Table, model: CostModel, target: Target) -> list[Front]:
    """The front of every head, by layer, then head."""
    ms, loss = table.head_ms(model), table.loss(target.metric)
    weight = np.ones_like(loss)
    if target.weight == "output":
        weight = table.stats["output_error"].max(0)
    elif target.layer_weights is not None and target.weight == "logits":
        if len(target.layer_weights) != len(table.layers):
            raise SearchError(f"There are {len(table.layers)} layers and {len(target.layer_weights)} layer weights.")
        weight = np.broadcast_to(np.asarray(target.layer_weights)[:, None, None], loss.shape)
    ranks = [simplicity(pattern, number) for number, pattern in enumerate(table.grid.candidates)]
    every = []
    for at, layer in enumerate(table.layers):
        for head in range(table.heads):
            points = [
                Point(n, float(ms[at, head, n]), float(loss[at, head, n]), ranks[n], float(weight[at, head, n]))
                for n in range(len(ranks))
            ]
            every.append(Front.of(layer, head, points))
    return every


def allocate(table: Table, model: CostModel, target: Target, known: list[Front] | None = None) -> Allocation:
    """The choice for every head. Pure arithmetic on stored numbers; `made` reuses `fronts`.

    A layer that no mix makes faster than the dense kernel stays dense, whatever the target.
    """
    every = known if known is not None else fronts(table, model, target)
    target.check_layers(table.layers)
    limits = dict(target.layer_limits)
    if target.max_missed is not None:
        choice = _for_limit(every, table, model, target.max_missed, limits)
    else:
        choice = _for_speedup(every, table, model, target.speedup or 1.0, limits)
    picked = np.array([point.number for point in choice.points]).reshape(len(table.layers), table.heads)
    return Allocation(picked, choice, predict(picked, table, model, target.metric), _unserved(every, target))


def _for_limit(every: list[Front], table: Table, model: CostModel, limit: float, limits: dict[int, float]) -> Choice:
    """Least time within the limit, layer by layer: the dense kernel, or the best mix of any set of families.

    A family costs its layer something once, so every set is tried.
    """
    kinds = [pattern.kind for pattern in table.grid.candidates]
    sparse = sorted(set(kinds) - {Dense.kind})
    sets = [{Dense.kind, *picked} for size in range(1, len(sparse) + 1) for picked in combinations(sparse, size)]
    dense_ms = dense_layer_ms(table, model)
    points: list[Point] = []
    for at in range(len(table.layers)):
        row = every[at * table.heads : (at + 1) * table.heads]
        options = [(dense_ms, 0, 0.0, tuple(front.every[0] for front in row))]
        for allowed in sets:
            some = [replace(each, every=tuple(p for p in each.every if kinds[p.number] in allowed)) for each in row]
            choice = least_time(some, limit, limits)
            if any(point.number for point in choice.points):
                base = model.base_ms(kinds[point.number] for point in choice.points)
                simple = sum(point.rank[0] for point in choice.points)
                options.append((choice.ms + base, simple, choice.loss, choice.points))
        fastest = min(option[0] for option in options)
        # Ties in time go to the simpler patterns, as for single heads.
        near = [option for option in options if option[0] <= fastest * (1 + TIE_TIME)]
        points += min(near, key=lambda option: option[1:3])[3]
    return Choice(tuple(points), sum(point.ms for point in points), sum(point.weighted for point in points))


def _for_speedup(
    every: list[Front], table: Table, model: CostModel, speedup: float, limits: dict[int, float]
) -> Choice:
    """Least loss at the speed-up of the whole prefill. SearchError where no choice is predicted to reach it."""
    kinds = [pattern.kind for pattern in table.grid.candidates]
    layers = Layers(every, table.heads, kinds, model.base_ms, dense_layer_ms(table, model), limits)
    other = float(np.mean([model.other_ms(n) for n in table.tokens]))
    dense_total = other + layers.dense_ms * len(table.layers)
    most = dense_total / (other + fastest_ms(layers))
    if most < speedup * (1 - 1e-12):
        raise SearchError(
            f"No choice of candidates reaches a speed-up of {speedup:.2f} here: the fastest is predicted to reach "
            f"{most:.2f} of the whole prefill at these lengths."
        )
    return least_loss_of_layers(layers, dense_total / speedup - other)


def dense_layer_ms(table: Table, model: CostModel) -> float:
    """A layer in the dense kernel, mean over prompts."""
    return float(np.mean([model.dense_layer_ms(n, table.heads) for n in table.tokens]))


def _unserved(every: list[Front], target: Target) -> tuple[tuple[int, int], ...]:
    """Heads whose sparse candidates all lose more than the limit; for a speed-up, more than dense by any tie."""
    limits = dict(target.layer_limits)
    most = target.max_missed if target.max_missed is not None else 1.0
    return tuple(
        (each.layer, each.head)
        for each in every
        if all(point.rank[0] == 0 or point.loss > min(most, limits.get(each.layer, most)) for point in each.every)
    )


def layer_ms(picked: np.ndarray, table: Table, model: CostModel) -> np.ndarray:
    """Predicted ms of every layer [layers] under candidate numbers [layers, heads], mean over prompts."""
    ms = np.take_along_axis(table.head_ms(model), picked[:, :, None], 2)[:, :, 0]
    kinds = [pattern.kind for pattern in table.grid.candidates]
    mix = ms.sum(1) + [model.base_ms(kinds[int(number)] for number in row) for row in picked]
    return np.where((picked == 0).all(1), dense_layer_ms(table, model), mix)


def predict(picked: np.ndarray, table: Table, model: CostModel, metric: str = "mean") -> Prediction:
    """Time and loss of candidate numbers [layers, heads]."""
    loss = np.take_along_axis(table.loss(metric), picked[:, :, None], 2)[:, :, 0]
    pairs = np.stack([np.take_along_axis(x, picked[:, :, None], 2)[:, :, 0] for x in table.stats["computed_pairs"]])
    causal = sum(n * (n + 1) // 2 for n in table.tokens) * table.heads * len(table.layers)
    return Prediction(
        attention_ms=float(layer_ms(picked, table, model).sum()),
        dense_attention_ms=dense_layer_ms(table, model) * len(table.layers),
        other_ms=float(np.mean([model.other_ms(n) for n in table.tokens])),
        loss_mean=float(loss.mean()),
        loss_worst=float(loss.max()),
        computed_pairs=int(pairs.sum()),
        causal_pairs=int(causal),
        dense_layers=tuple(layer for layer, row in zip(table.layers, picked, strict=True) if not row.any()),
    )


@dataclass(frozen=True)
class Uniform:
    """The best that one pattern for all heads does at a number of computed pairs; worst prompt's mean missed mass.

    Between two measured patterns the loss is read off the straight line, which no single pattern can beat by much
    and most do not reach, so it errs on the uniform setting's side. `below` and `above` name the two.
    """

    loss: float
    pairs: int
    below: str
    above: str


def mean_losses(picked: np.ndarray, table: Table) -> np.ndarray:
    """[prompts]: mean missed mass over all heads under candidate numbers [layers, heads]."""
    return np.array(
        [np.take_along_axis(x, picked[:, :, None], 2).mean() for x in table.stats["mean"]], dtype=np.float64
    )


def best_uniform(table: Table, pairs: int) -> Uniform:
    """The lower hull of all uniform settings at `pairs` computed pairs over all prompts, layers and heads."""
    shape = (len(table.layers), table.heads)
    points = []
    for number, pattern in enumerate(table.grid.candidates):
        picked = np.full(shape, number)
        total = int(table.stats["computed_pairs"][..., number].sum())
        points.append((total, float(mean_losses(picked, table).max()), pattern.label))
    points.sort()
    kept: list[tuple[int, float, str]] = []
    for point in points:
        if kept and point[0] == kept[-1][0]:
            if point[1] >= kept[-1][1]:
                continue
            kept.pop()
        while len(kept) >= 2 and (point[1] - kept[-1][1]) * (kept[-1][0] - kept[-2][0]) <= (
            kept[-1][1] - kept[-2][1]
        ) * (point[0] - kept[-1][0]):
            kept.pop()
        kept.append(point)
    if pairs <= kept[0][0]:
        return Uniform(kept[0][1], kept[0][0], kept[0][2], kept[0][2])
    for low, high in pairwise(kept):
        if low[0] <= pairs <= high[0]:
            share = (pairs - low[0]) / (high[0] - low[0])
            return Uniform(low[1] + share * (high[1] - low[1]), pairs, low[2], high[2])
    return Uniform(kept[-1][1], kept[-1][0], Dense().label, Dense().label)

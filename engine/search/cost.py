"""What a config costs in time: a model fitted to measured layers of the machine at hand.

A layer takes `layer_ms`, `layer[family]` once for every family among its heads (its index has launches of its own),
and for each head `fixed[family] + keys[family] * tokens + tile[family] * tiles`, where a tile is 64 x 128 cells that
the kernel touches. Layers that are dense throughout have their own line. A machine is not equally fast all the time,
so every timing counts relative to the dense passes beside it, and the milliseconds are those of its calm moments. All
coefficients are at least 0; the fit is by least squares of the relative error, without outliers, since other programs
disturb single timings. The model is a file of its own: times are a machine's, budgets are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from headscope.engine.base import files, records
from headscope.engine.base.errors import ConfigError
from headscope.engine.base.records import Count, Finite, Milliseconds, Record
from headscope.engine.patterns.families import FAMILIES, Pattern
from headscope.engine.search.grid import Grid
from headscope.engine.search.results import PromptResult

FORMAT = "headscope.cost-model/1"
TILE_CELLS = 64 * 128
ALWAYS = tuple(kind for kind, family in FAMILIES.items() if family.cost_as == kind)
"""The families that every model holds. One that a model does not hold takes the times of its own `cost_as`."""

_PARTS = ("layer", "fixed", "keys", "tile")

_Pair = Annotated[Sequence[Milliseconds], Field(min_length=2, max_length=2)]


class _Head(Record):
    layer: Milliseconds
    fixed: Milliseconds
    keys: Milliseconds
    tile: Milliseconds


class _Fit(Record):
    samples: Count = 0
    left_out: Count = 0
    median_error: Finite = 0.0
    p90_error: Finite = 0.0
    mean_bias: Finite = 0.0
    mixed_error: Finite = 0.0


class _File(Record):
    format: str
    layer_ms: Milliseconds
    heads: dict[str, _Head]
    dense: _Pair
    other: _Pair
    machine: dict[str, Any] = Field(default_factory=dict)
    fit: _Fit


def dense_tiles(tokens: int) -> float:
    """Tiles that a dense causal pass over `tokens` rows touches, in row blocks of 64."""
    blocks = -(-tokens // 64)
    return blocks * (blocks + 1) / 2 * 64 * 64 / TILE_CELLS


@dataclass(frozen=True)
class Fit:
    """How well the model explains the timings: relative errors over `samples` layers, `left_out` of them outliers.

    `mixed_error` is the median over the mixed layers alone, outliers included: they are what configs look like.
    """

    samples: int = 0
    left_out: int = 0
    median_error: float = 0.0
    p90_error: float = 0.0
    mean_bias: float = 0.0
    mixed_error: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Milliseconds. `heads[family]` has `layer` once a layer that has the family, and for every head `fixed`, `keys`
    per 1,024 tokens and `tile` per tile.

    `layer_ms` is paid once a sparse layer. `dense` is [per layer, per tile] of an all-dense layer, over all heads.
    `other` is [per prompt, per 1,024 tokens] of everything that is not attention. `machine` says where it is from.
    """

    layer_ms: float
    heads: dict[str, dict[str, float]]
    dense: tuple[float, float]
    other: tuple[float, float]
    machine: dict[str, Any] = field(default_factory=dict)
    fit: Fit = Fit()

    def __post_init__(self) -> None:
        records.check(_File, {"format": FORMAT} | asdict(self), "", whole="the cost model")
        for family in ALWAYS:
            if family not in self.heads:
                raise ConfigError(f"a cost model needs {', '.join(_PARTS)} for {family}.")

    @property
    def unit(self) -> str:
        """What the times of this model are in: `ms` of its machine, or `tiles` of none."""
        return "tiles" if self.machine.get("unit") == "tiles" else "ms"

    def counts_as(self, kind: str) -> str:
        """The family whose times this model gives to a family: its own, if the model was fitted with it."""
        while kind not in self.heads:
            kind = FAMILIES[kind].cost_as
        return kind

    def head_ms(self, pattern: Pattern, tokens: int, tile_cells: Any) -> Any:
        """One head of a sparse layer, its share of the layer's own cost left out; `tile_cells` may be an array."""
        entry = self.heads[self.counts_as(pattern.kind)]
        return entry["fixed"] + entry["keys"] * tokens / 1024 + entry["tile"] * tile_cells / TILE_CELLS

    def base_ms(self, kinds: Iterable[str]) -> float:
        """What a sparse layer with heads of these families takes before its heads."""
        families = sorted({self.counts_as(kind) for kind in kinds})
        return self.layer_ms + sum(self.heads[family]["layer"] for family in families)

    def dense_layer_ms(self, tokens: int, heads: int) -> float:
        """A layer whose heads are all dense: it runs in the dense kernel."""
        return self.dense[0] + self.dense[1] * heads * dense_tiles(tokens)

    def other_ms(self, tokens: int) -> float:
        """Everything in a prefill that is not attention."""
        return self.other[0] + self.other[1] * tokens / 1024

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT} | asdict(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model as a file that `--cost-model` takes."""
        return files.write_atomic(path, files.indented(files.plain(self.to_dict()), 0) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a file; `ConfigError` with one sentence if it is not a cost model."""
        return cls.from_dict(files.read_json(path), str(path))

    @classmethod
    def from_dict(cls, value: Any, where: str) -> CostModel:
        """The model that `to_dict` wrote."""
        records.check_format(value, FORMAT, f"{where}: a cost model")
        records.check(_File, value, f"{where}:", whole=f"{where}: the cost model")
        try:
            return cls(
                value["layer_ms"],
                value["heads"],
                tuple(value["dense"]),
                tuple(value["other"]),
                value.get("machine", {}),
                Fit(**value["fit"]),
            )
        except ConfigError as problem:
            raise ConfigError(f"{where}: {problem}") from problem

    @classmethod
    def tiles(cls) -> CostModel:
        """A model of no machine: one millisecond a tile, nothing else. It compares configs by computed tiles."""
        entry = {"layer": 0.0, "fixed": 0.0, "keys": 0.0, "tile": 1.0}
        return cls(0.0, {family: dict(entry) for family in ALWAYS}, (0.0, 1.0), (0.0, 0.0), {"unit": "tiles"})


@dataclass(frozen=True)
class Sample:
    """One timed layer: the pattern of each head, what it touched, and what it takes when the machine is calm."""

    patterns: tuple[Pattern, ...]
    tile_cells: tuple[int, ...]
    tokens: int
    ms: float


def samples(results: Iterable[PromptResult], grid: Grid) -> list[Sample]:
    """Every timed layer of the results, uniform and mixed."""
    gathered = []
    for result in results:
        calm = calm_dense_ms(result)
        for layer in result.layers:
            rows = layer["rows"]
            for pattern, row in zip(grid.candidates, rows, strict=True):
                cells = tuple(row["tile_cells"])
                gathered.append(Sample((pattern,) * len(cells), cells, result.tokens, _calm_ms(row, layer, calm)))
            for mix in layer["mixed"]:
                cells = tuple(rows[number]["tile_cells"][head] for head, number in enumerate(mix["picked"]))
                patterns = tuple(grid.candidates[number] for number in mix["picked"])
                gathered.append(Sample(patterns, cells, result.tokens, _calm_ms(mix, layer, calm)))
    return gathered


def _calm_ms(entry: dict[str, Any], layer: dict[str, Any], calm: float) -> float:
    """A timing as it would be where a dense pass takes `calm` ms. Older results have one dense time a layer."""
    return float((entry["index_ms"] + entry["kernel_ms"]) * calm / entry.get("dense_ms", layer["dense_ms"]))


def fit(results: Sequence[PromptResult], grid: Grid, machine: dict[str, Any]) -> CostModel:
    """The cost model of measured results. Same results, same model, to the last bit."""
    timed = samples(results, grid)
    several = _lengths_differ(results)
    families = tuple(kind for kind in FAMILIES if kind in {*ALWAYS, *(one.kind for one in grid.candidates)})
    table = np.array([_features(sample, families, several) for sample in timed])
    ms = np.array([sample.ms for sample in timed])
    # Other programs make single timings slow, never fast: start from the medians of like samples, then keep what
    # lies near its own kind and fit again, with errors relative to what the model says. Mixes are one kind: they are
    # what real configs look like, so that they must not be left out for being unlike the rest.
    groups = _groups(timed)
    mixed = np.array([group[0] == "mix" for group in groups])
    weight = np.where(mixed, max(1.0, (~mixed).sum() / max(1, mixed.sum())), 1.0)  # in all, mixes count like the rest
    coefficients = _relative_fit(*_medians(table, ms, groups))
    keep = np.ones(len(ms), dtype=bool)
    for turn in range(8):
        expected = np.maximum(table @ coefficients, 1e-9)
        kept = _near(ms / expected, groups)
        if turn and (kept == keep).all():
            break
        keep = kept
        coefficients = _relative_fit(table[keep], ms[keep], expected[keep], weight[keep])
    off, mean_bias = (
        np.abs(table @ coefficients / ms - 1),
        float((table[keep] @ coefficients).sum() / ms[keep].sum() - 1),
    )
    quality = Fit(
        len(timed),
        int((~keep).sum()),
        float(np.median(off[keep])),
        float(np.quantile(off[keep], 0.9)),
        mean_bias,
        float(np.median(off[mixed])) if mixed.any() else 0.0,
    )
    heads = {
        family: dict(zip(_PARTS, (float(x) for x in coefficients[1 + 4 * at : 5 + 4 * at]), strict=True))
        for at, family in enumerate(families)
    }
    return CostModel(float(coefficients[0]), heads, _dense_fit(results), _other_fit(results), machine, quality)


def calm_dense_ms(result: PromptResult) -> float:
    """A dense layer of this prompt on the machine's calm side: the lower quartile of its layers."""
    return float(np.quantile([layer["dense_ms"] for layer in result.layers], 0.25))


def _features(sample: Sample, families: Sequence[str], several: bool) -> list[float]:
    row = [0.0] * (1 + 4 * len(families))
    row[0] = 1.0
    for pattern, cells in zip(sample.patterns, sample.tile_cells, strict=True):
        at = 1 + 4 * families.index(pattern.kind)
        row[at] = 1.0
        row[at + 1] += 1.0
        if several:  # with one length, what grows with it cannot be told from what is fixed
            row[at + 2] += sample.tokens / 1024
        row[at + 3] += cells / TILE_CELLS
    return row


def _groups(timed: Sequence[Sample]) -> list[Any]:
    """Like samples: one candidate on all heads at one length, or a mix at one length."""
    return [(set_of.pop() if len(set_of := set(s.patterns)) == 1 else "mix", s.tokens) for s in timed]


def _near(ratio: np.ndarray, groups: Sequence[Any]) -> np.ndarray:
    """Which samples lie near the median of their group."""
    members: dict[Any, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    kept = np.zeros(len(ratio), dtype=bool)
    for places in members.values():
        centre = float(np.median(ratio[places]))
        off = np.abs(ratio[places] / centre - 1)
        kept[places] = off <= max(0.1, 2.5 * float(np.median(off)))
    return kept


def _relative_fit(
    table: np.ndarray, ms: np.ndarray, expected: np.ndarray | None = None, weight: np.ndarray | None = None
) -> np.ndarray:
    """The coefficients with the least squared error relative to `expected` (or to the timings themselves)."""
    unit = ms if expected is None else expected
    scale = 1 / unit if weight is None else np.sqrt(weight) / unit
    return nonnegative_least_squares(table * scale[:, None], ms * scale)


def _medians(table: np.ndarray, ms: np.ndarray, groups: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """One row per group: its mean features and its median time."""
    members: dict[Any, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    rows = [(table[at].mean(0), float(np.median(ms[at]))) for at in members.values()]
    return np.array([row for row, _ in rows]), np.array([time for _, time in rows])


def _lengths_differ(results: Sequence[PromptResult]) -> bool:
    """Whether what grows with the length can be told from what is fixed: lengths at least a quarter apart."""
    tokens = [result.tokens for result in results]
    return max(tokens) >= 1.25 * min(tokens)


def _dense_fit(results: Sequence[PromptResult]) -> tuple[float, float]:
    rows, ms = [], []
    for result in results:
        tiles = dense_tiles(result.tokens)
        rows.append([1.0, tiles * len(result.layers[0]["rows"][0]["mean"])])
        ms.append(calm_dense_ms(result))
    if not _lengths_differ(results):  # all of it is put on the tiles
        return 0.0, float(np.mean(ms) / np.mean([row[1] for row in rows]))
    coefficients = _relative_fit(np.array(rows), np.array(ms))
    return float(coefficients[0]), float(coefficients[1])


def _other_fit(results: Sequence[PromptResult]) -> tuple[float, float]:
    rows = [[1.0, result.tokens / 1024] for result in results]
    rest = [max(0.0, result.prefill_ms - sum(layer["dense_ms"] for layer in result.layers)) for result in results]
    if not any(rest):
        return 0.0, 0.0
    if not _lengths_differ(results):
        return 0.0, float(np.mean(rest) / np.mean([row[1] for row in rows]))
    coefficients = nonnegative_least_squares(np.array(rows), np.array(rest))
    return float(coefficients[0]), float(coefficients[1])


def nonnegative_least_squares(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |table x - target| (Lawson and Hanson, 1974, algorithm 23.10)."""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    a = table / scale
    count = a.shape[1]
    x, active = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = a.T @ (target - a @ x)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-9:
            break
        active[best] = True
        while True:
            trial = np.zeros(count)
            trial[active] = np.linalg.lstsq(a[:, active], target, rcond=None)[0]
            if trial[active].min(initial=1.0) > 0:
                break
            negative = active & (trial <= 0)
            gap = x[negative] - trial[negative]
            step = float(np.min(np.divide(x[negative], gap, out=np.zeros_like(gap), where=gap > 0)))
            x = x + step * (trial - x)
            active &= x > 1e-15
            x[~active] = 0.0
            if not active.any():
                trial = np.zeros(count)
                break
        x = trial
    return x / scale

"""What the pages draw: runs and heads as measured, frozen, free of tensors that belong to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headscope.engine.attend.estimator import Estimator
from headscope.engine.config.facts import ModelFacts
from headscope.engine.loss.measure import HeadMeasurement
from headscope.engine.patterns import families as patterns
from headscope.engine.patterns.families import Pattern
from headscope.studio.data.draft import pattern_key
from headscope.studio.data.maps import HeadMaps
from headscope.studio.store.rows import RunRow

METRICS: dict[str, str] = {
    "missed_mass_mean": "missed mass, mean",
    "missed_mass_worst": "missed mass, worst row",
    "missed_mass_p99": "missed mass, 99th percentile",
    "start": "missed mass, start of the prompt",
    "middle": "missed mass, middle of the prompt",
    "end": "missed mass, end of the prompt",
    "output_error": "output error, relative L2",
    "computed_density": "computed share of the causal pairs",
}


@dataclass(frozen=True)
class Run:
    """One prompt on one model: the row in the store, the prompt's name, text and tokens, the model's facts."""

    row: RunRow
    prompt_name: str
    text: str
    pieces: tuple[str, ...]
    facts: ModelFacts
    stored: bool

    @property
    def id(self) -> str:
        """The run's id in the store."""
        return self.row.id


@dataclass(frozen=True)
class HeadCase:
    """One head of a run under a pattern, and how the online index samples."""

    run: Run
    layer: int
    head: int
    pattern: Pattern
    estimator: Estimator = field(default_factory=Estimator)

    @property
    def key(self) -> tuple[str, int, int, str, Estimator]:
        """What a measurement of it is kept under."""
        return measurement_key(self.run.id, self.layer, self.head, self.pattern, self.estimator)


@dataclass(frozen=True)
class HeadDetail:
    """One head alone under one pattern. Times in ms are of this head alone; `missed` [rows] float32 per row."""

    measurement: HeadMeasurement
    estimator: Estimator
    index_ms: float
    kernel_ms: float
    dense_ms: float
    impl: str
    missed: np.ndarray
    maps: HeadMaps

    def case(self, run: Run) -> HeadCase:
        """What this is a detail of."""
        one = self.measurement
        return HeadCase(run, one.layer, one.head, one.pattern, self.estimator)

    @property
    def sparse_ms(self) -> float:
        """Index and kernel together."""
        return self.index_ms + self.kernel_ms


def measurement_key(
    run_id: str, layer: int, head: int, pattern: Pattern, estimator: Estimator
) -> tuple[str, int, int, str, Estimator]:
    """What a measurement is kept under."""
    return run_id, layer, head, pattern_key(pattern), estimator


def metric_value(measurement: HeadMeasurement, metric: str) -> float:
    """A number of `METRICS`."""
    if metric in ("start", "middle", "end"):
        return measurement.missed_mass_thirds[("start", "middle", "end").index(metric)]
    value: float = getattr(measurement, metric)
    return value


def metric_grid(grid: Sequence[Sequence[HeadMeasurement | None]], metric: str) -> list[list[float]]:
    """Values of a metric by layer and head, NaN where a head is not measured."""
    return [[float("nan") if one is None else metric_value(one, metric) for one in row] for row in grid]


def worst_order(values: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Heads from the largest value to the smallest; those not measured last."""
    flat = [(layer, head, value) for layer, row in enumerate(values) for head, value in enumerate(row)]
    flat.sort(key=lambda item: (item[2] != item[2], -item[2] if item[2] == item[2] else 0.0, item[0], item[1]))
    return [(layer, head) for layer, head, _ in flat]


def measurement_from_dict(body: dict[str, Any]) -> HeadMeasurement:
    """The measurement that `HeadMeasurement.to_dict` wrote."""
    areas = body["areas"]
    parts = (areas["block"], areas["column"], areas["causal_waste"], areas["padding"])
    first, middle, last = body["missed_mass_thirds"]
    special = {
        "pattern": patterns.from_dict(body["pattern"]),
        "areas": parts,
        "missed_mass_thirds": (first, middle, last),
    }
    return HeadMeasurement(**(body | special))

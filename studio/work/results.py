"""What the pages draw: runs and heads as measured, frozen, free of tensors that belong to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headscope.engine.attend.estimator import Estimator
from headscope.engine.config.facts import ModelFacts
from headscope.engine.loss.measure import HeadMeasurement
from headscope.engine.patterns import families as patterns
from headscope.studio.store.store import RunRow
from headscope.studio.work.maps import HeadMaps

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

    @property
    def sparse_ms(self) -> float:
        """Index and kernel together."""
        return self.index_ms + self.kernel_ms


def metric_value(measurement: HeadMeasurement, metric: str) -> float:
    """A number of `METRICS`."""
    if metric in ("start", "middle", "end"):
        return measurement.missed_mass_thirds[("start", "middle", "end").index(metric)]
    value: float = getattr(measurement, metric)
    return value


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

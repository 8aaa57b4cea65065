"""What was measured of heads, so that nothing is measured twice and a restart finds it again.

Measurements are kept under (run, layer, head, pattern, estimator), in memory and in the store. Pictures, timings and
splits of one head are kept in memory. Whatever touches tensors runs on the device's thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.index import index_layer
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import ModelError
from headscope.engine.loss.measure import DensePass, HeadMeasurement, dense_pass, measure_patterns
from headscope.engine.loss.oracle import LossSplit, loss_split
from headscope.engine.patterns.families import Pattern
from headscope.studio.base import words
from headscope.studio.base.errors import StoreError
from headscope.studio.data.draft import HeadPatterns
from headscope.studio.data.maps import dense_sums, grid_edges, head_maps
from headscope.studio.data.profiles import Profiles, head_profiles
from headscope.studio.data.results import HeadCase, HeadDetail, Run, measurement_from_dict, measurement_key
from headscope.studio.lab.captures import Captures
from headscope.studio.lab.database import Database
from headscope.studio.lab.jobs import Context, Worker
from headscope.studio.lab.memo import Memo

QUICK_HEADS = 16
"""Up to so many heads are measured while a page waits; more become a job with progress."""

TIMING_BUDGET_S = 0.2
"""How long one head is timed; a shorter pass is repeated up to `REPEATS` times."""

REPEATS = 3

T = TypeVar("T")

CurvePoint = tuple[str, str, float, float, float]
"""Family, label, computed density, time alone in ms, missed mass."""


class Measurements:
    """Measurements of heads, and pictures of them, made once each."""

    def __init__(self, worker: Worker, database: Database, captures: Captures) -> None:
        self._worker = worker
        self._database = database
        self._captures = captures
        self._known: Memo[HeadMeasurement] = Memo(200_000)
        self._dense: Memo[DensePass] = Memo(64)
        self._sums: Memo[np.ndarray] = Memo(64)
        self._points: Memo[CurvePoint] = Memo(2048)
        self._splits: Memo[LossSplit] = Memo(256)
        self._profiles: Memo[Profiles] = Memo(64)
        self._details: Memo[HeadDetail] = Memo(48)

    # known numbers

    def known(
        self, run_id: str, layer: int, head: int, pattern: Pattern, estimator: Estimator | None = None
    ) -> HeadMeasurement | None:
        """What was measured for this head of this run under this pattern, if anything."""
        return self._known.get(measurement_key(run_id, layer, head, pattern, estimator or Estimator()))

    def grid(
        self, run_id: str, patterns: HeadPatterns, estimator: Estimator | None = None
    ) -> list[list[HeadMeasurement | None]]:
        """Known measurements of every head, `[layer][head]`."""
        return [
            [self.known(run_id, layer, head, pattern, estimator) for head, pattern in enumerate(row)]
            for layer, row in enumerate(patterns)
        ]

    def keep(self, run_id: str, measurements: Sequence[HeadMeasurement], estimator: Estimator) -> None:
        """Remembers measurements in memory."""
        for one in measurements:
            self._known.put(measurement_key(run_id, one.layer, one.head, one.pattern, estimator), one)

    def take_stored(self, run_id: str, estimator: dict[str, Any]) -> None:
        """Brings a run's measurements from the store; old ones name no estimator, and have the run's.

        What an earlier version stored though it is not finite counts as not measured.
        """
        for body in self._database.store.measurements(run_id):
            sampling = Estimator.from_dict(body.pop("estimator", estimator))
            with suppress(ModelError):
                self.keep(run_id, [measurement_from_dict(body)], sampling)

    def _remember(self, run_id: str, measurements: Sequence[HeadMeasurement], estimator: Estimator) -> None:
        fresh = [
            one
            for one in measurements
            if measurement_key(run_id, one.layer, one.head, one.pattern, estimator) not in self._known
        ]
        self.keep(run_id, fresh, estimator)
        # Numbers can be had again at any time, so a full disk must not stop the tuning.
        with suppress(StoreError):
            self._database.store.add_measurements(run_id, "isolated", bodies(fresh, estimator))

    # measuring

    def measure(
        self,
        run: Run,
        wanted: Sequence[tuple[int, int, Pattern]],
        context: Context | None = None,
        remember: bool = True,
        estimator: Estimator | None = None,
    ) -> list[HeadMeasurement]:
        """Measures heads under patterns, a layer at a time, and remembers them. On the device's thread."""
        captured, sampling = self._captures.of(run).layers, estimator or Estimator()
        by_layer: dict[int, list[tuple[int, Pattern]]] = {}
        for layer, head, pattern in wanted:
            if layer in captured:
                by_layer.setdefault(layer, []).append((head, pattern))
        measurements: list[HeadMeasurement] = []
        for step, (layer, heads) in enumerate(sorted(by_layer.items())):
            if context is not None:
                context.step(step, len(by_layer), f"Measuring: layer {layer}, {step + 1} of {len(by_layer)}")
            measurements += self._measure_some(run, layer, heads, sampling)
        if remember:
            self._remember(run.id, measurements, sampling)
        return measurements

    def _measure_some(
        self, run: Run, layer: int, heads: Sequence[tuple[int, Pattern]], estimator: Estimator
    ) -> list[HeadMeasurement]:
        inputs = self._captures.layer(run, layer).heads([head for head, _ in heads])
        result = measure_patterns(inputs, [pattern for _, pattern in heads], layer=layer, estimator=estimator)
        return [replace(one, head=head) for one, (head, _) in zip(result.heads, heads, strict=True)]

    # one head, looked at

    def detail(
        self, case: HeadCase, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> HeadDetail:
        """One head alone: measured, timed and drawn. A short call, about a second at most."""
        key = (*case.key, rows, columns)
        return self._details(key, lambda: self._worker.quick(lambda: self._detail(case, rows, columns)))

    def _detail(self, case: HeadCase, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> HeadDetail:
        inputs = self._head_inputs(case)
        dense = self._dense_pass(case, inputs)
        passes = _repeated(
            lambda: measure_patterns(inputs, [case.pattern], layer=case.layer, estimator=case.estimator, dense=dense)
        )
        result = passes[-1]
        self._remember(case.run.id, [replace(result.heads[0], head=case.head)], case.estimator)
        missed = result.missed[0, 0]
        sums = self._sums(
            (case.run.id, case.layer, case.head, rows, columns),
            lambda: dense_sums(inputs, dense.lse, *grid_edges(inputs, rows, columns)),
        )
        # The overview's number stands if there is one: the same head must not show two values that differ in rounding.
        measurement = self._known.get(case.key) or replace(result.heads[0], head=case.head)
        return HeadDetail(
            measurement=measurement,
            estimator=case.estimator,
            index_ms=statistics.median(one.index_ms for one in passes),
            kernel_ms=statistics.median(one.kernel_ms for one in passes),
            dense_ms=dense.ms,
            impl=result.impl,
            missed=missed.float().cpu().numpy(),
            maps=head_maps(inputs, dense.lse, result.index, missed, rows=rows, columns=columns, dense=sums),
        )

    def curve(self, case: HeadCase, patterns: Sequence[Pattern]) -> list[CurvePoint]:
        """One head under several patterns, each a short call."""
        return [self._point(replace(case, pattern=pattern)) for pattern in patterns]

    def _point(self, case: HeadCase) -> CurvePoint:
        def work() -> CurvePoint:
            inputs = self._head_inputs(case)
            dense = self._dense_pass(case, inputs)
            result = measure_patterns(inputs, [case.pattern], layer=case.layer, estimator=case.estimator, dense=dense)
            one = result.heads[0]
            ms = result.index_ms + result.kernel_ms
            return case.pattern.kind, words.label(case.pattern), one.computed_density, ms, one.missed_mass_mean

        return self._points(case.key, lambda: self._worker.quick(work))

    def loss_split(self, case: HeadCase) -> LossSplit:
        """A head's loss in four steps. A short call, but slower than `detail`."""

        def work() -> LossSplit:
            inputs = self._head_inputs(case)
            dense = self._dense_pass(case, inputs)
            index = index_layer(inputs, [case.pattern], estimator=case.estimator)
            return loss_split(inputs, dense.lse, index, 0)

        return self._splits(case.key, lambda: self._worker.quick(work))

    def profiles(self, case: HeadCase) -> Profiles:
        """Where a head's probability lies, and what the pattern keeps. A short call, about a dense pass."""

        def work() -> Profiles:
            inputs = self._head_inputs(case)
            dense = self._dense_pass(case, inputs)
            index = index_layer(inputs, [case.pattern], estimator=case.estimator)
            return head_profiles(inputs, dense.lse, index)

        return self._profiles(case.key, lambda: self._worker.quick(work))

    def _head_inputs(self, case: HeadCase) -> LayerInputs:
        """What one head reads."""
        return self._captures.layer(case.run, case.layer).head(case.head)

    def _dense_pass(self, case: HeadCase, inputs: LayerInputs) -> DensePass:
        def make() -> DensePass:
            passes = _repeated(lambda: dense_pass(inputs, layer=case.layer))
            return replace(passes[-1], ms=statistics.median(one.ms for one in passes))

        return self._dense((case.run.id, case.layer, case.head), make)


def bodies(measurements: Sequence[HeadMeasurement], estimator: Estimator) -> list[dict[str, Any]]:
    """Measurements as the store keeps them."""
    return [measurement.to_dict() | {"estimator": estimator.to_dict()} for measurement in measurements]


def _repeated(work: Callable[[], T]) -> list[T]:
    """What a pass gave, run until the time for it is up: once at least."""
    results, began = [work()], time.perf_counter()
    while len(results) < REPEATS and time.perf_counter() - began < TIMING_BUDGET_S:
        results.append(work())
    return results

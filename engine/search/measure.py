"""The measuring half of a search: every head under every candidate, one layer of one prompt at a time.

Q, K and V of one layer are held while its candidates run; what is kept is a few numbers per head and candidate.
A layer is written as soon as it is measured, so a run that is killed goes on where it was, to the same losses; a
finished prompt is never measured again.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from headscope.engine.attend.attention import attend_sparse
from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.index import index_layer
from headscope.engine.attend.inputs import LayerInputs, LayerVisitor
from headscope.engine.base import files
from headscope.engine.base.errors import Cancelled
from headscope.engine.base.heap import steady_heap
from headscope.engine.base.progress import Cancel
from headscope.engine.base.timing import timed
from headscope.engine.loss.measure import LayerMeasurement, dense_pass, measure_patterns
from headscope.engine.patterns.families import Pattern
from headscope.engine.search import stored
from headscope.engine.search.grid import Grid, check_length
from headscope.engine.search.results import (
    FORMAT,
    MIXED,
    STATS,
    SearchError,
    SearchPrompt,
    Settings,
    keep_prompt,
    largest_result,
    result_path,
)

TURNS = 2
"""Times that a mixed layer is timed, each between two dense passes; the best counts."""

LIMITS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Losses that the timed mixes are made for, as an allocation would make them."""


class Source(Protocol):
    """Where Q, K and V come from: a model, or planted heads in a test."""

    def stream(self, prompt: SearchPrompt, visit: LayerVisitor, layers: Sequence[int], cancel: Cancel | None) -> None:
        """Calls `visit` for each of `layers` in order."""

    def prefill_ms(self, prompt: SearchPrompt) -> float:
        """Wall time of a whole dense prefill; 0 where there is nothing but attention."""


@dataclass(frozen=True)
class Step:
    """Where a search is: `done` of `total` units (a unit is one candidate on one layer of one prompt), seconds left."""

    done: int
    total: int
    seconds_left: float
    words: str


SearchProgress = Callable[[Step], None]


class _Clock:
    """Counts units and estimates what is left from the units of this process alone."""

    def __init__(self, total: int, progress: SearchProgress | None) -> None:
        self.total, self.done, self._measured = total, 0, 0
        self._began = time.monotonic()
        self._progress = progress

    def skip(self, units: int) -> None:
        self.done += units

    def tick(self, words: str, units: int = 1) -> None:
        self.done += units
        self._measured += units
        if self._progress is not None:
            each = (time.monotonic() - self._began) / self._measured
            self._progress(Step(self.done, self.total, each * (self.total - self.done), words))


def measure_prompts(
    source: Source,
    prompts: Iterable[SearchPrompt],
    settings: Settings,
    folder: Path,
    *,
    progress: SearchProgress | None = None,
    cancel: Cancel | None = None,
) -> None:
    """Measures what the run folder does not hold yet. Raises Cancelled within a layer; what is done is kept."""
    steady_heap()
    todo = list(prompts)
    for prompt in todo:
        check_length(settings.grid, prompt.name, len(prompt.ids))
    per_prompt = len(settings.layers) * (len(settings.grid) + MIXED)
    clock = _Clock(per_prompt * len(todo), progress)
    for prompt in todo:
        if result_path(folder, prompt).exists():
            clock.skip(per_prompt)
        else:
            _measure_prompt(source, prompt, settings, folder, clock, cancel)
        keep_prompt(folder, prompt)


def _measure_prompt(
    source: Source, prompt: SearchPrompt, settings: Settings, folder: Path, clock: _Clock, cancel: Cancel | None
) -> None:
    parts = folder / "parts" / prompt.key
    measured = {layer for layer in settings.layers if (parts / _part(layer)).exists()}
    left = [layer for layer in settings.layers if layer not in measured]
    clock.skip(len(measured) * (len(settings.grid) + MIXED))
    if left:
        _check(cancel)

        def visit(layer: int, inputs: LayerInputs) -> None:
            result = measure_layer(inputs, layer, prompt, settings, clock.tick, cancel)
            files.write_atomic(parts / _part(layer), files.one_line(result) + "\n", SearchError)

        source.stream(prompt, visit, left, cancel)
    _check(cancel)
    # Read back, so that a resumed prompt and an uninterrupted one come from the same bytes.
    largest = largest_result(1, settings.grid)
    layers = [files.read_json(parts / _part(layer), SearchError, largest) for layer in settings.layers]
    for layer, value in zip(settings.layers, layers, strict=True):
        stored.check_layer(value, layer, len(settings.grid), str(parts / _part(layer)), SearchError)
    head = {
        "format": FORMAT,
        "prompt": prompt.to_dict(),
        "candidates": settings.grid.to_list(),
        "estimator": settings.estimator.to_dict(),
        "prefill_ms": source.prefill_ms(prompt),
    }
    lines = ",\n".join(files.one_line(layer) for layer in layers)
    text = files.one_line(head)[:-1] + ', "layers": [\n' + lines + "\n]}\n"
    files.write_atomic(result_path(folder, prompt), text, SearchError)
    shutil.rmtree(parts, ignore_errors=True)


def measure_layer(
    inputs: LayerInputs,
    layer: int,
    prompt: SearchPrompt,
    settings: Settings,
    tick: Callable[[str], None] = lambda words: None,
    cancel: Cancel | None = None,
) -> dict[str, Any]:
    """All candidates on one layer: a JSON object with times and, per candidate, the `STATS` of every head.

    Every timing has the `dense_ms` of the dense passes beside it, since a machine is not equally fast all the time.
    ModelError where the layer, or what a candidate makes of it, is not finite; then nothing of the layer is kept.
    """
    heads = inputs.query_heads
    words = f"{prompt.name}, layer {layer}"
    dense_pass(inputs, settings.impl, layer)  # pays for warming up
    dense = dense_pass(inputs, settings.impl, layer)
    passes, rows = [dense.ms], []
    for pattern in settings.grid.candidates:
        _check(cancel)
        measured = measure_patterns(
            inputs, [pattern] * heads, layer=layer, estimator=settings.estimator, impl=settings.impl, dense=dense
        )
        passes.append(dense_pass(inputs, settings.impl, layer).ms)
        beside = (passes[-2] + passes[-1]) / 2
        rows.append(
            {"index_ms": measured.index_ms, "kernel_ms": measured.kernel_ms, "dense_ms": beside} | _stats(measured)
        )
        tick(words)
    mixed = []
    for picked in _mixes(settings.grid, rows, heads, f"{prompt.key} {layer}"):
        _check(cancel)
        patterns = [settings.grid.candidates[number] for number in picked]
        times = time_beside_dense(inputs, patterns, settings.estimator, settings.impl, TURNS)
        passes.append(times.dense_ms)
        mixed.append({"picked": picked} | asdict(times))
        tick(words)
    return {
        "layer": layer,
        "dense_ms": min(passes),
        "impl": measured.impl,
        "device": measured.device,
        "rows": rows,
        "mixed": mixed,
    }


@dataclass(frozen=True)
class BesideDense:
    """A layer timed in turn with dense passes over the same q, k, v: the best of each, in ms."""

    index_ms: float
    kernel_ms: float
    dense_ms: float


def time_beside_dense(
    inputs: LayerInputs,
    patterns: Sequence[Pattern],
    estimator: Estimator,
    impl: str = "auto",
    turns: int = TURNS,
) -> BesideDense:
    """One layer under `patterns`, `turns` times, a dense pass before and after each."""
    dense = [dense_pass(inputs, impl).ms]
    sparse = []
    for _ in range(turns):
        index, index_ms = timed(lambda: index_layer(inputs, patterns, estimator=estimator, impl=impl), inputs.device)
        _, kernel_ms = timed(lambda index=index: attend_sparse(inputs, index, impl), inputs.device)  # type: ignore[misc]
        sparse.append((index_ms, kernel_ms))
        dense.append(dense_pass(inputs, impl).ms)
    return BesideDense(*min(sparse, key=sum), min(dense))


def _mixes(grid: Grid, rows: Sequence[dict[str, Any]], heads: int, seed: str) -> list[list[int]]:
    """Seeded candidate numbers per head for the mixed timings: layers as an allocation makes them.

    Some of the families take part, and some of the heads; each takes the fewest tiles within a limit of loss, or any
    candidate of those families. The other heads are dense.
    """
    rng = random.Random(f"headscope mix {seed}")
    families = sorted({pattern.kind for pattern in grid.candidates[1:]})
    mixes = []
    for number in range(MIXED):
        mixed = rng.sample(families, rng.randint(1, len(families)))
        allowed = [at for at, pattern in enumerate(grid.candidates) if pattern.kind in mixed]
        limit = rng.choice(LIMITS)
        taking_part = set(rng.sample(range(heads), rng.randint(1, heads)))
        picked = [0] * heads
        for head in sorted(taking_part):
            fits = allowed if number % 2 else [at for at in allowed if rows[at]["mean"][head] <= limit]
            if fits:
                fewest = min(fits, key=lambda at: (rows[at]["tile_cells"][head], at))
                picked[head] = rng.choice(fits) if number % 2 else fewest
        if not any(picked):  # a dense layer runs in another kernel, and is timed anyway
            picked = [rng.choice(allowed) for _ in range(heads)]
        mixes.append(picked)
    return mixes


def _stats(measured: LayerMeasurement) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {name: [] for name in STATS}
    for head in measured.heads:
        start, middle, end = head.missed_mass_thirds
        values = (
            head.missed_mass_mean,
            head.missed_mass_worst,
            head.missed_mass_worst_row,
            head.missed_mass_p99,
            start,
            middle,
            end,
            head.output_error,
            head.output_cosine,
            head.requested_pairs,
            head.computed_pairs,
            sum(head.areas),
        )
        for name, value in zip(STATS, values, strict=True):
            table[name].append(value)
    return table


def _part(layer: int) -> str:
    return f"{layer:04d}.json"


def _check(cancel: Cancel | None) -> None:
    if cancel is not None and cancel():
        raise Cancelled("The search was cancelled; what was measured is kept, and the same command goes on from there.")

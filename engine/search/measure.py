"""The measuring half of a search: every head under every candidate, one layer of one prompt at a time.

Q, K and V of one layer are held while its candidates run; what is kept is a few numbers per head and candidate.
One result file per prompt, named by the hash of its token ids, and the ids beside it. A layer is written as soon as
it is measured, so a run that is killed goes on where it was, to the same losses; a finished prompt is never measured
again.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from headscope.engine.attend.attention import attend_sparse
from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.index import index_layer
from headscope.engine.attend.inputs import LayerInputs, LayerVisitor
from headscope.engine.base import files, records
from headscope.engine.base.errors import Cancelled, HeadscopeError, PromptError
from headscope.engine.base.heap import steady_heap
from headscope.engine.base.progress import Cancel
from headscope.engine.base.timing import timed
from headscope.engine.loss.measure import LayerMeasurement, dense_pass, measure_patterns
from headscope.engine.patterns.families import Pattern
from headscope.engine.search import stored
from headscope.engine.search.grid import Grid, check_length

FORMAT = "headscope.search-result/1"
PROMPT_FORMAT = "headscope.search-prompt/1"

STATS = (
    "mean",
    "worst",
    "worst_row",
    "p99",
    "start",
    "middle",
    "end",
    "output_error",
    "output_cosine",
    "requested_pairs",
    "computed_pairs",
    "tile_cells",
)
"""What is kept of a head under a candidate. Losses are shares of probability; `tile_cells` are the cells that the
kernel touches: computed pairs, causal waste and padding."""

MOST_HEADS = 1024
"""Query heads of a layer, far more than models have: how large a file of results may be follows from it."""

_STAT_BYTES = 26
"""Most characters of one stored figure, with what parts it from the next."""

MIXED = 8
"""Mixed layers that are timed beside the uniform ones: a real config is a mix, and what a family costs its layer
once shows only where the families of layers differ."""

TURNS = 2
"""Times that a mixed layer is timed, each between two dense passes; the best counts."""

LIMITS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Losses that the timed mixes are made for, as an allocation would make them."""


class SearchError(HeadscopeError):
    """A search that cannot start, go on, or reach its target."""


@dataclass(frozen=True)
class SearchPrompt:
    """A calibration prompt as a run folder keeps it, without its text: `ids` are its token ids, `sha256` that of the
    text, `kind` such as prose or code, `chat_template` whether it stands in one (None where that is not known).
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    sha256: str
    chat_template: bool | None = None

    @property
    def key(self) -> str:
        """sha256 of the token ids: what a result file is named by."""
        return hashlib.sha256(torch.tensor(self.ids, dtype=torch.int64).numpy().tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """What provenance keeps; never the text."""
        known = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {
            "name": self.name,
            "kind": self.kind,
            "sha256": self.sha256,
            "tokens": len(self.ids),
            **known,
            "key": self.key,
        }


class Source(Protocol):
    """Where Q, K and V come from: a model, or planted heads in a test."""

    def stream(self, prompt: SearchPrompt, visit: LayerVisitor, layers: Sequence[int], cancel: Cancel | None) -> None:
        """Calls `visit` for each of `layers` in order."""

    def prefill_ms(self, prompt: SearchPrompt) -> float:
        """Wall time of a whole dense prefill; 0 where there is nothing but attention."""


@dataclass(frozen=True)
class Settings:
    """What decides a measurement: which layers, candidates and estimator, on which implementation."""

    layers: tuple[int, ...]
    grid: Grid
    estimator: Estimator
    impl: str = "auto"


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


def result_path(folder: Path, prompt: SearchPrompt) -> Path:
    """Where the result of a prompt lies in a run folder."""
    return folder / "results" / f"{prompt.key}.json"


def prompt_path(folder: Path, key: str) -> Path:
    """Where the token ids of a prompt lie in a run folder."""
    return folder / "prompts" / f"{key}.json"


def keep_prompt(folder: Path, prompt: SearchPrompt) -> None:
    """Writes the prompt's token ids into the run folder, so that a choice can be measured without the texts."""
    path = prompt_path(folder, prompt.key)
    if not path.exists():
        value = {"format": PROMPT_FORMAT, "prompt": prompt.to_dict(), "ids": list(prompt.ids)}
        files.write_atomic(path, files.one_line(value) + "\n", SearchError)


def read_prompt(folder: Path, key: str) -> SearchPrompt | None:
    """A prompt that a run folder keeps, None where it keeps none; SearchError if it is damaged."""
    path = prompt_path(folder, key)
    if not path.exists():
        return None
    value = files.read_json(path, SearchError)
    records.check(stored.PromptFile, value, f"{path} is no prompt of a search:", SearchError)
    about = value["prompt"]
    prompt = SearchPrompt(
        about["name"], about["kind"], tuple(value["ids"]), about["sha256"], about.get("chat_template")
    )
    if prompt.key != key:
        raise SearchError(f"{path} holds other tokens than its name says; delete it and run the search again.")
    return prompt


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
    held = {layer for layer in settings.layers if (parts / _part(layer)).exists()}
    left = [layer for layer in settings.layers if layer not in held]
    clock.skip(len(held) * (len(settings.grid) + MIXED))
    if left:
        _check(cancel)

        def visit(layer: int, inputs: LayerInputs) -> None:
            found = measure_layer(inputs, layer, prompt, settings, clock.tick, cancel)
            files.write_atomic(parts / _part(layer), files.one_line(found) + "\n", SearchError)

        source.stream(prompt, visit, left, cancel)
    _check(cancel)
    # Read back, so that a resumed prompt and an uninterrupted one come from the same bytes.
    largest = _largest_result(1, settings.grid)
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
        found = measure_patterns(
            inputs, [pattern] * heads, layer=layer, estimator=settings.estimator, impl=settings.impl, dense=dense
        )
        passes.append(dense_pass(inputs, settings.impl, layer).ms)
        beside = (passes[-2] + passes[-1]) / 2
        rows.append({"index_ms": found.index_ms, "kernel_ms": found.kernel_ms, "dense_ms": beside} | _stats(found))
        tick(words)
    mixed = []
    for picked in _mixes(settings.grid, rows, heads, f"{prompt.key} {layer}"):
        _check(cancel)
        patterns = [settings.grid.candidates[number] for number in picked]
        taken = time_beside_dense(inputs, patterns, settings.estimator, settings.impl, TURNS)
        passes.append(taken.dense_ms)
        mixed.append({"picked": picked} | asdict(taken))
        tick(words)
    return {
        "layer": layer,
        "dense_ms": min(passes),
        "impl": found.impl,
        "device": found.device,
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
        chosen = rng.sample(families, rng.randint(1, len(families)))
        allowed = [at for at, pattern in enumerate(grid.candidates) if pattern.kind in chosen]
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


def _stats(found: LayerMeasurement) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {name: [] for name in STATS}
    for head in found.heads:
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


@dataclass(frozen=True)
class PromptResult:
    """A result file. `layers` are as `measure_layer` made them, ascending."""

    prompt: dict[str, Any]
    prefill_ms: float
    layers: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> int:
        return int(self.prompt["tokens"])


def _largest_result(layers: int, grid: Grid) -> int:
    """Bytes that results of so many layers can need; 126 layers of 128 heads under the default grid write 75 MB."""
    return files.LARGEST_FILE + layers * (len(grid) + MIXED) * MOST_HEADS * len(STATS) * _STAT_BYTES


def read_result(path: str | os.PathLike[str], settings: Settings) -> PromptResult:
    """The result of one prompt; SearchError if it is damaged or was measured under other settings."""
    value = files.read_json(path, SearchError, _largest_result(len(settings.layers), settings.grid))
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise SearchError(f"{path} is no search result; delete it and run the search again.")
    records.check(stored.Result, value, f"{path} is damaged:", SearchError)
    if value.get("candidates") != files.plain(settings.grid.to_list()) or (
        value.get("estimator") != settings.estimator.to_dict()
    ):
        raise SearchError(f"{path} was measured with other candidates or another estimator; choose a new run folder.")
    layers = value["layers"]
    if [entry.get("layer") if isinstance(entry, dict) else None for entry in layers] != list(settings.layers):
        raise SearchError(f"{path} holds other layers than were asked for; choose a new run folder.")
    heads = {
        stored.check_layer(entry, layer, len(settings.grid), str(path), SearchError)
        for entry, layer in zip(layers, settings.layers, strict=True)
    }
    if len(heads) > 1:
        raise SearchError(f"{path} is damaged: its layers have different numbers of heads; run the search again.")
    return PromptResult(value["prompt"], float(value["prefill_ms"]), tuple(layers))


def check_alike(results: Sequence[PromptResult], folder: Path) -> None:
    """SearchError unless all results have the same number of heads, so that they make one table."""
    if len({len(result.layers[0]["rows"][0]["mean"]) for result in results if result.layers}) > 1:
        raise SearchError(f"{folder} holds results of different models; delete those of the other one.")


def read_results(folder: Path, prompts: Iterable[SearchPrompt], settings: Settings) -> tuple[PromptResult, ...]:
    """The results of all prompts, sorted by their hash, so that neither order nor process count matters."""
    found = []
    for prompt in sorted(prompts, key=lambda prompt: prompt.key):
        path = result_path(folder, prompt)
        if not path.exists():
            raise PromptError(f"The prompt {prompt.name} has no result in {folder}: run the search again.")
        found.append(read_result(path, settings))
    check_alike(found, folder)
    return tuple(found)

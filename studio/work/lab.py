"""What the server holds for all sessions: store, worker, models, captures, and measurements already made.

One `Lab` a process. Everything that touches the device runs on the worker's thread: as a job, or as a short call.
Measurements are kept under (run, layer, head, pattern, estimator), in memory and in the store, so nothing is measured
twice and a restart finds them again. Where no estimator is given, it is the lab's own.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.index import build_index
from headscope.engine.base.errors import CaptureError, HeadscopeError
from headscope.engine.base.machine import hardware, versions
from headscope.engine.config.facts import ModelFacts
from headscope.engine.loss.measure import DensePass, HeadMeasurement, LayerMeasurement, dense_pass, measure_heads
from headscope.engine.loss.oracle import LossSplit, loss_split
from headscope.engine.model.load import LoadedModel, load_model
from headscope.engine.model.packaged import PACKAGED, cache_dir
from headscope.engine.patterns.families import Pattern
from headscope.engine.runs.capture import Capture, capture
from headscope.kernels.cells.plan import TILES_VERSION
from headscope.studio.base import words
from headscope.studio.base.errors import StoreError
from headscope.studio.store.store import RunRow, Store, new_id, now
from headscope.studio.work import prompts
from headscope.studio.work.draft import Draft, Grid, pattern_key
from headscope.studio.work.jobs import Context, Worker
from headscope.studio.work.maps import dense_sums, grid_edges, head_maps
from headscope.studio.work.results import HeadDetail, Run, measurement_from_dict
from headscope.studio.work.shelf import Shelf

QUICK_HEADS = 16
"""Up to so many heads are measured while the page waits; more become a job with progress."""

TIMING_BUDGET_S = 0.2

T = TypeVar("T")


class Recent(OrderedDict[Hashable, T]):
    """A dictionary that forgets what was not used for longest. Its owner locks."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def fetch(self, key: Hashable) -> T | None:
        """The value, now the most recent; None if it is not there."""
        if key in self:
            self.move_to_end(key)
            return self[key]
        return None

    def keep(self, key: Hashable, value: T) -> T:
        """Remembers a value and drops the oldest beyond the limit."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)
        return value


class Lab:
    """See the module. `path` is the database's; if it cannot be opened, `problem` says why and memory serves."""

    def __init__(self, path: Path | None, shelf: Shelf) -> None:
        self.path = path
        self.shelf = shelf
        self.worker = Worker()
        self.problem = ""
        self.store = self._open()
        self.estimator = Estimator()
        self._lock = threading.RLock()
        self._models: Recent[LoadedModel] = Recent(2)
        self._runs: Recent[Run] = Recent(16)
        self._captures: Recent[Capture] = Recent(2)
        self._known: Recent[HeadMeasurement] = Recent(200_000)
        self._dense: Recent[DensePass] = Recent(64)
        self._sums: Recent[np.ndarray] = Recent(64)
        self._points: Recent[tuple[str, str, float, float, float]] = Recent(2048)
        self._splits: Recent[LossSplit] = Recent(256)
        self._details: Recent[HeadDetail] = Recent(48)
        self._warmed: set[str] = set()
        self._drafts: Recent[Draft] = Recent(256)

    def _open(self) -> Store:
        try:
            return Store(self.path)
        except StoreError as error:
            self.problem = str(error)
            return Store(None)

    def reopen(self) -> bool:
        """Tries the database again after a problem; what memory holds goes into it. True if it is open now."""
        if not self.problem:
            return True
        before = self.store
        self.problem = ""
        self.store = self._open()
        if self.problem:
            self.store.close()
            self.store = before
            return False
        with self._lock:
            for run in self._runs.values():
                prompt = before.prompt(run.row.prompt_sha256)
                if prompt is not None and self.store.run(run.id) is None:
                    self.store.add_prompt(prompt["sha256"], prompt["name"], prompt["kind"], prompt["text"])
                    self.store.add_model(run.facts.fingerprint, run.row.model, run.facts.to_dict())
                    self.store.add_run(run.row, before.measurements(run.id))
            for draft in self._drafts.values():
                self.store.add_draft(draft.id, draft.sequence, draft.to_dict())
        return True

    # models

    def loaded(self, name: str) -> LoadedModel | None:
        """The model if it is in memory; never loads."""
        with self._lock:
            return self._models.fetch(name)

    def may_warm(self, name: str) -> bool:
        """True once for a packaged model that is on this machine and not loaded yet."""
        with self._lock:
            if name in self._warmed or name not in PACKAGED or not any((cache_dir() / name).glob("float32-*")):
                return False
            self._warmed.add(name)
            return True

    def is_warming(self, name: str) -> bool:
        """Whether a load that nobody pressed Run for was begun."""
        return name in self._warmed

    def load(self, name: str, context: Context | None = None) -> LoadedModel:
        """The model, loaded on first use. On the worker's thread only: two sessions, one load."""
        known = self.loaded(name)
        if known is not None:
            return known

        def told(done: int, total: int) -> None:
            if context is not None:
                context.step(done, total, f"Downloading {name}")

        if context is not None:
            context.step(0, 1, f"Loading {name}")
        model = load_model(name, progress=told)
        with self._lock:
            return self._models.keep(name, model)

    # runs

    def run_prompt(
        self, context: Context, name: str, prompt: prompts.Prompt, chat: bool, draft_of: Callable[[ModelFacts], Draft]
    ) -> str:
        """A job: prefill once, keep Q/K/V, measure every head under the draft that `draft_of` gives. The run's id."""
        loaded = self.load(name, context)
        encoded = prompts.encode(loaded, prompt.text, chat)
        layers = loaded.facts.layers
        began = time.perf_counter()
        taken = capture(
            loaded,
            encoded.ids,
            progress=lambda done, total: context.step(done, 2 * layers, f"Reading: layer {done} of {total}"),
            cancel=lambda: context.cancelled,
        )
        capture_ms = (time.perf_counter() - began) * 1e3
        draft, found = draft_of(loaded.facts), list[HeadMeasurement]()
        began, impl = time.perf_counter(), ""
        for layer in taken.layers:
            context.step(layers + layer, 2 * layers, f"Measuring: layer {layer + 1} of {layers}")
            q, k, v = taken.layer(layer)
            result = measure_heads(
                q, k, v, draft.patterns[layer], layer=layer, scale=taken.scales[layer], estimator=draft.estimator
            )
            impl = result.impl
            found += result.heads
        row = RunRow(
            id=new_id(),
            model=name,
            fingerprint=loaded.fingerprint,
            prompt_sha256=prompt.sha256,
            tokens=encoded.tokens,
            chat_template=chat,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            impl=impl,
            tiles=TILES_VERSION,
            estimator=draft.estimator.to_dict(),
            capture_ms=capture_ms,
            measure_ms=(time.perf_counter() - began) * 1e3,
            versions=versions() | {"hardware": hardware(loaded.device)},
            created_at=now(),
        )
        context.step(2 * layers, 2 * layers, "Keeping the capture")
        stored = self.shelf.put(row.id, taken, capture_bytes(loaded.facts, encoded.tokens, loaded.dtype.itemsize))
        if context.cancelled:
            self.shelf.drop(row.id)
            context.check()
        run = Run(row, prompt.name, prompt.text, encoded.pieces, loaded.facts, stored)
        with self._lock:
            self._captures.keep(row.id, taken)
            self._runs.keep(row.id, run)
            for measurement in found:
                self._known.keep(_known_key(row.id, measurement, draft.estimator), measurement)
        try:
            self.store.add_model(loaded.fingerprint, name, loaded.facts.to_dict())
            self.store.add_prompt(prompt.sha256, prompt.name, prompt.kind, prompt.text)
            self.store.add_run(row, _bodies(found, draft.estimator))
        except StoreError as error:
            context.warn(f"{error} The run is open and can be tuned, but a restart will not find it.")
        return row.id

    def has_run(self, run_id: str) -> bool:
        """Whether a run can be had without loading anything."""
        with self._lock:
            return run_id in self._runs

    def run(self, run_id: str) -> Run | None:
        """A run, from memory or the store. Needs its model's tokenizer, so it loads the model on the worker."""
        with self._lock:
            known = self._runs.fetch(run_id)
        if known is not None:
            return known
        row = self.store.run(run_id)
        prompt = None if row is None else self.store.prompt(row.prompt_sha256)
        if row is None or prompt is None:
            return None
        loaded = self.worker.quick(lambda: self.load(row.model), timeout=120)
        if loaded.fingerprint != row.fingerprint:
            raise HeadscopeError(f"The model {row.model} has other weights now than in this run: run the prompt again.")
        encoded = prompts.encode(loaded, prompt["text"], row.chat_template)
        run = Run(row, prompt["name"], prompt["text"], encoded.pieces, loaded.facts, self.shelf.has(run_id))
        with self._lock:
            for body in self.store.measurements(run_id):
                estimator = Estimator.from_dict(body.pop("estimator", row.estimator))
                measurement = measurement_from_dict(body)
                self._known.keep(_known_key(run_id, measurement, estimator), measurement)
            return self._runs.keep(run_id, run)

    def capture(self, run: Run) -> Capture:
        """The run's Q/K/V, from memory or disk. On the worker's thread."""
        with self._lock:
            known = self._captures.fetch(run.id)
        if known is not None:
            return known
        if not self.shelf.has(run.id):
            raise CaptureError("The captured Q/K/V of this run are no longer stored: run the prompt again to go on.")
        loaded = Capture.load(self.shelf.path(run.id))
        with self._lock:
            return self._captures.keep(run.id, loaded)

    # measurements

    def known(
        self, run_id: str, layer: int, head: int, pattern: Pattern, estimator: Estimator | None = None
    ) -> HeadMeasurement | None:
        """What was measured for this head of this run under this pattern, if anything."""
        with self._lock:
            return self._known.fetch((run_id, layer, head, pattern_key(pattern), estimator or self.estimator))

    def grid(
        self, run_id: str, patterns: Grid, estimator: Estimator | None = None
    ) -> list[list[HeadMeasurement | None]]:
        """Known measurements of every head, `[layer][head]`."""
        return [
            [self.known(run_id, layer, head, pattern, estimator) for head, pattern in enumerate(row)]
            for layer, row in enumerate(patterns)
        ]

    def measure(
        self,
        run: Run,
        wanted: Sequence[tuple[int, int, Pattern]],
        context: Context | None = None,
        remember: bool = True,
        estimator: Estimator | None = None,
    ) -> list[HeadMeasurement]:
        """Measures heads under patterns, a layer at a time, and remembers them. On the worker's thread."""
        taken, sampling = self.capture(run), estimator or self.estimator
        by_layer: dict[int, list[tuple[int, Pattern]]] = {}
        for layer, head, pattern in wanted:
            if layer in taken.layers:
                by_layer.setdefault(layer, []).append((head, pattern))
        found: list[HeadMeasurement] = []
        for step, (layer, heads) in enumerate(sorted(by_layer.items())):
            if context is not None:
                context.step(step, len(by_layer), f"Measuring: layer {layer}, {step + 1} of {len(by_layer)}")
            found += self._measure_some(run, taken, layer, heads, sampling)
        if remember:
            self._remember(run.id, found, sampling)
        return found

    def _measure_some(
        self, run: Run, taken: Capture, layer: int, heads: Sequence[tuple[int, Pattern]], estimator: Estimator
    ) -> list[HeadMeasurement]:
        q, k, v = _on_device(taken, layer, run)
        rows = torch.tensor([head for head, _ in heads], device=q.device)
        shared = rows // run.facts.group
        result = measure_heads(
            q[:, rows],
            k[:, shared],
            v[:, shared],
            [pattern for _, pattern in heads],
            layer=layer,
            scale=taken.scales[layer],
            estimator=estimator,
        )
        return [replace(one, head=head) for one, (head, _) in zip(result.heads, heads, strict=True)]

    def _remember(self, run_id: str, found: Sequence[HeadMeasurement], estimator: Estimator) -> None:
        with self._lock:
            fresh = [one for one in found if _known_key(run_id, one, estimator) not in self._known]
            for measurement in fresh:
                self._known.keep(_known_key(run_id, measurement, estimator), measurement)
        # Numbers can be had again at any time, so a full disk must not stop the tuning.
        with suppress(StoreError):
            self.store.add_measurements(run_id, "isolated", _bodies(fresh, estimator))

    def detail(
        self,
        run: Run,
        layer: int,
        head: int,
        pattern: Pattern,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        estimator: Estimator | None = None,
    ) -> HeadDetail:
        """One head alone: measured, timed and drawn. A short call on the worker's thread, about a second at most."""
        sampling = estimator or self.estimator
        key = (run.id, layer, head, pattern_key(pattern), sampling, rows, columns)
        with self._lock:
            known = self._details.fetch(key)
        if known is not None:
            return known
        made = self.worker.quick(lambda: self._detail(run, layer, head, pattern, sampling, rows, columns))
        with self._lock:
            return self._details.keep(key, made)

    def _detail(
        self,
        run: Run,
        layer: int,
        head: int,
        pattern: Pattern,
        estimator: Estimator,
        rows: tuple[int, int] | None,
        columns: tuple[int, int] | None,
    ) -> HeadDetail:
        q, k, v = self._head_tensors(run, layer, head)
        scale = self.capture(run).scales[layer]
        dense = self._dense_pass(run, layer, head, q, k, v, scale)
        results, began = list[LayerMeasurement](), time.perf_counter()
        while not results or (len(results) < 3 and time.perf_counter() - began < TIMING_BUDGET_S):
            results.append(
                measure_heads(q, k, v, [pattern], layer=layer, scale=scale, estimator=estimator, dense=dense)
            )
        last = results[-1]
        measurement = replace(last.heads[0], head=head)
        self._remember(run.id, [measurement], estimator)
        # The overview's number stands if there is one: the same head must not show two values that differ in rounding.
        measurement = self.known(run.id, layer, head, pattern, estimator) or measurement
        missed = last.missed[0, 0]
        key = (run.id, layer, head, rows, columns)
        with self._lock:
            sums = self._sums.fetch(key)
        if sums is None:
            sums = dense_sums(q, k, dense.lse, scale, *grid_edges(q, k, rows, columns))
            with self._lock:
                self._sums.keep(key, sums)
        return HeadDetail(
            measurement=measurement,
            estimator=estimator,
            index_ms=statistics.median(result.index_ms for result in results),
            kernel_ms=statistics.median(result.kernel_ms for result in results),
            dense_ms=dense.ms,
            impl=last.impl,
            missed=missed.float().cpu().numpy(),
            maps=head_maps(q, k, dense.lse, last.index, missed, rows=rows, columns=columns, dense=sums),
        )

    def curve(
        self, run: Run, layer: int, head: int, patterns: Sequence[Pattern], estimator: Estimator | None = None
    ) -> list[tuple[str, str, float, float, float]]:
        """One head under several patterns: family, label, computed density, time alone in ms, missed mass."""
        sampling = estimator or self.estimator

        def one(pattern: Pattern) -> tuple[str, str, float, float, float]:
            q, k, v = self._head_tensors(run, layer, head)
            scale = self.capture(run).scales[layer]
            dense = self._dense_pass(run, layer, head, q, k, v, scale)
            result = measure_heads(q, k, v, [pattern], layer=layer, scale=scale, estimator=sampling, dense=dense)
            found = result.heads[0]
            ms = result.index_ms + result.kernel_ms
            return pattern.kind, words.label(pattern), found.computed_density, ms, found.missed_mass_mean

        points = []
        for pattern in patterns:
            key = (run.id, layer, head, pattern_key(pattern), sampling)
            with self._lock:
                known = self._points.fetch(key)
            if known is None:
                known = self.worker.quick(partial(one, pattern))
                with self._lock:
                    self._points.keep(key, known)
            points.append(known)
        return points

    def loss_split(
        self, run: Run, layer: int, head: int, pattern: Pattern, estimator: Estimator | None = None
    ) -> LossSplit:
        """A head's loss in four steps. A short call, but slower than `detail`."""
        sampling = estimator or self.estimator
        key = (run.id, layer, head, pattern_key(pattern), sampling)
        with self._lock:
            known = self._splits.fetch(key)
        if known is not None:
            return known

        def work() -> LossSplit:
            q, k, v = self._head_tensors(run, layer, head)
            scale = self.capture(run).scales[layer]
            dense = self._dense_pass(run, layer, head, q, k, v, scale)
            index = build_index(q, k, [pattern], scale, estimator=sampling)
            return loss_split(q, k, dense.lse, index, 0)

        made = self.worker.quick(work)
        with self._lock:
            return self._splits.keep(key, made)

    def _head_tensors(self, run: Run, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [1, 1, tokens, head size] of one head, with the KV head that it reads."""
        taken = self.capture(run)
        if layer not in taken.layers:
            raise CaptureError(
                f"Layer {layer} has its own kind of attention and is left to the model: no head to tune."
            )
        q, k, v = _on_device(taken, layer, run)
        shared = head // run.facts.group
        return q[:, head : head + 1], k[:, shared : shared + 1], v[:, shared : shared + 1]

    def _dense_pass(
        self, run: Run, layer: int, head: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> DensePass:
        key = (run.id, layer, head)
        with self._lock:
            known = self._dense.fetch(key)
        if known is not None:
            return known
        passes, began = list[DensePass](), time.perf_counter()
        while not passes or (len(passes) < 3 and time.perf_counter() - began < TIMING_BUDGET_S):
            passes.append(dense_pass(q, k, v, scale))
        made = replace(passes[-1], ms=statistics.median(one.ms for one in passes))
        with self._lock:
            return self._dense.keep(key, made)

    # drafts

    def draft(self, draft_id: str) -> Draft | None:
        """A session's working copy, from memory or the store."""
        with self._lock:
            known = self._drafts.fetch(draft_id)
        if known is not None:
            return known
        stored = self.store.draft(draft_id)
        if stored is None:
            return None
        with self._lock:
            return self._drafts.keep(draft_id, Draft.from_dict(draft_id, *stored))

    def keep_draft(self, draft: Draft) -> Draft:
        """Makes this the session's working copy, in memory whatever happens and in the store if it can."""
        with self._lock:
            known = self._drafts.fetch(draft.id)
            if known is not None and known.sequence >= draft.sequence:
                draft = replace(draft, sequence=known.sequence + 1)
            self._drafts.keep(draft.id, draft)
        with suppress(StoreError):
            self.store.add_draft(draft.id, draft.sequence, draft.to_dict())
        return draft

    def close(self) -> None:
        """Stops the worker and lets go of the database; for tests."""
        self.worker.close()
        self.store.close()


def capture_bytes(facts: ModelFacts, tokens: int, itemsize: int) -> int:
    """Bytes of Q, K and V of all layers for a prompt."""
    return facts.layers * (facts.query_heads + 2 * facts.kv_heads) * facts.head_dim * tokens * itemsize


def _on_device(taken: Capture, layer: int, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's tensors where the run had them; what was read from disk lies on the CPU at first."""
    place = torch.device(run.row.device)
    if place.type == "cuda" and not torch.cuda.is_available():
        place = torch.device("cpu")
    q, k, v = taken.layer(layer)
    return q.to(place), k.to(place), v.to(place)


def _known_key(run_id: str, measurement: HeadMeasurement, estimator: Estimator) -> tuple[str, int, int, str, Estimator]:
    return run_id, measurement.layer, measurement.head, pattern_key(measurement.pattern), estimator


def _bodies(found: Sequence[HeadMeasurement], estimator: Estimator) -> list[dict[str, Any]]:
    """Measurements as the store keeps them."""
    return [measurement.to_dict() | {"estimator": estimator.to_dict()} for measurement in found]

"""Runs: a prompt read once by a model, its queries, keys and values kept, every head measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.base.machine import hardware, versions
from headscope.engine.config.facts import ModelFacts
from headscope.engine.loss.measure import HeadMeasurement, measure_patterns
from headscope.engine.model.load import LoadedModel
from headscope.engine.runs.capture import Capture, capture
from headscope.kernels.cells.plan import TILES_VERSION
from headscope.studio.base.errors import StoreError
from headscope.studio.data import prompts
from headscope.studio.data.draft import Draft
from headscope.studio.data.results import Run
from headscope.studio.lab.captures import Captures, capture_bytes
from headscope.studio.lab.database import Database
from headscope.studio.lab.jobs import Context, Worker
from headscope.studio.lab.measurements import Measurements, bodies
from headscope.studio.lab.memo import Memo
from headscope.studio.lab.models import Models
from headscope.studio.store.rows import RunRow, new_id, now
from headscope.studio.store.store import Store

RUNS = 16
OPEN_S = 120.0
"""How long opening a run may wait for its model."""


@dataclass(frozen=True)
class _Measured:
    """Every head of a capture under a draft, and the time of it in ms."""

    heads: list[HeadMeasurement]
    impl: str
    ms: float


class Runs:
    """Runs by id, in memory and in the store."""

    def __init__(
        self, worker: Worker, database: Database, models: Models, captures: Captures, measurements: Measurements
    ) -> None:
        self._worker = worker
        self._database = database
        self._models = models
        self._captures = captures
        self._measurements = measurements
        self._runs: Memo[Run] = Memo(RUNS)

    def make(
        self, context: Context, name: str, prompt: prompts.Prompt, chat: bool, draft_of: Callable[[ModelFacts], Draft]
    ) -> str:
        """A job: prefill once, keep Q/K/V, measure every head under the draft that `draft_of` gives. The run's id."""
        loaded = self._models.load(name, context)
        encoded = prompts.encode(loaded, prompt.text, chat)
        layers = loaded.facts.layers
        began = context.clock()
        captured = capture(
            loaded,
            encoded.ids,
            progress=lambda done, total: context.step(done, 2 * layers, f"Reading: layer {done} of {total}"),
            cancel=lambda: context.cancelled,
        )
        capture_ms = (context.clock() - began) * 1e3
        draft = draft_of(loaded.facts)
        measured = _measure_all(context, captured, draft, layers)
        row = _row(loaded, name, prompt.sha256, encoded.tokens, chat, draft, capture_ms, measured)
        context.step(2 * layers, 2 * layers, "Keeping the capture")
        size = capture_bytes(loaded.facts, encoded.tokens, loaded.dtype.itemsize)
        stored = self._captures.store(row.id, captured, size)
        if context.cancelled:
            self._captures.shelf.drop(row.id)
            context.check()
        self._captures.keep(row.id, captured)
        self._runs.put(row.id, Run(row, prompt.name, prompt.text, encoded.pieces, loaded.facts, stored))
        self._measurements.keep(row.id, measured.heads, draft.estimator)
        try:
            store = self._database.store
            store.add_model(loaded.fingerprint, name, loaded.facts.to_dict())
            store.add_prompt(prompt.sha256, prompt.name, prompt.kind, prompt.text)
            store.add_run(row, bodies(measured.heads, draft.estimator))
        except StoreError as error:
            context.warn(f"{error} The run is open and can be tuned, but a restart will not find it.")
        return row.id

    def has(self, run_id: str) -> bool:
        """Whether a run can be had without loading anything."""
        return run_id in self._runs

    def open(self, run_id: str) -> Run | None:
        """A run, from memory or the store; None if neither has it.

        Needs its model's tokenizer, so it loads the model on the device's thread.
        """
        known = self._runs.get(run_id)
        row = None if known is not None else self._database.store.run(run_id)
        return known if row is None else self._runs(run_id, lambda: self._from_store(row))

    def _from_store(self, row: RunRow) -> Run:
        store = self._database.store
        prompt = store.prompt(row.prompt_sha256)
        if prompt is None:
            raise HeadscopeError(f"The prompt of the run {row.id} is not in the database: run it again.")
        loaded = self._worker.quick(lambda: self._models.load(row.model), timeout=OPEN_S)
        if loaded.fingerprint != row.fingerprint:
            raise HeadscopeError(f"The model {row.model} has other weights now than in this run: run the prompt again.")
        encoded = prompts.encode(loaded, prompt["text"], row.chat_template)
        self._measurements.take_stored(row.id, row.estimator)
        stored = self._captures.shelf.has(row.id)
        return Run(row, prompt["name"], prompt["text"], encoded.pieces, loaded.facts, stored)

    def move(self, before: Store) -> None:
        """Brings the runs in memory from another store into the one in use."""
        store = self._database.store
        for _, run in self._runs.items():
            prompt = before.prompt(run.row.prompt_sha256)
            if prompt is not None and store.run(run.id) is None:
                store.add_prompt(prompt["sha256"], prompt["name"], prompt["kind"], prompt["text"])
                store.add_model(run.facts.fingerprint, run.row.model, run.facts.to_dict())
                store.add_run(run.row, before.measurements(run.id))


def _measure_all(context: Context, captured: Capture, draft: Draft, layers: int) -> _Measured:
    """Every head of a capture under a draft, a layer at a time."""
    began, impl, heads = context.clock(), "", list[HeadMeasurement]()
    for layer in captured.layers:
        context.step(layers + layer, 2 * layers, f"Measuring: layer {layer + 1} of {layers}")
        result = measure_patterns(captured.layer(layer), draft.patterns[layer], layer=layer, estimator=draft.estimator)
        impl = result.impl
        heads += result.heads
    return _Measured(heads, impl, (context.clock() - began) * 1e3)


def _row(
    loaded: LoadedModel,
    name: str,
    prompt_sha256: str,
    tokens: int,
    chat: bool,
    draft: Draft,
    capture_ms: float,
    measured: _Measured,
) -> RunRow:
    return RunRow(
        id=new_id(),
        model=name,
        fingerprint=loaded.fingerprint,
        prompt_sha256=prompt_sha256,
        tokens=tokens,
        chat_template=chat,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        impl=measured.impl,
        tiles=TILES_VERSION,
        estimator=draft.estimator.to_dict(),
        capture_ms=capture_ms,
        measure_ms=measured.ms,
        versions=versions() | {"hardware": hardware(loaded.device)},
        created_at=now(),
    )

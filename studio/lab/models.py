"""The models in memory. All sessions share them; they are loaded on the device's thread only."""

from __future__ import annotations

import threading

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.model.load import LoadedModel, load_model
from headscope.engine.model.packaged import PACKAGED, cache_dir
from headscope.studio.lab.jobs import Context, Worker
from headscope.studio.lab.memo import Memo

MODELS = 2
WARM_S = 300.0
"""How long a load that nobody pressed Run for may wait for the device."""


class Models:
    """Loaded models by name."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._models: Memo[LoadedModel] = Memo(MODELS)
        self._lock = threading.Lock()
        self._warming: dict[str, threading.Thread] = {}

    def loaded(self, name: str) -> LoadedModel | None:
        """The model if it is in memory; never loads."""
        return self._models.get(name)

    def load(self, name: str, context: Context | None = None) -> LoadedModel:
        """The model, loaded on first use. On the device's thread only: two sessions, one load."""

        def told(done: int, total: int) -> None:
            if context is not None:
                context.step(done, total, f"Downloading {name}")

        def make() -> LoadedModel:
            if context is not None:
                context.report(0, 1, f"Loading {name}")
            return load_model(name, progress=told)

        return self._models(name, make)

    def warm(self, name: str) -> None:
        """Begins to load a packaged model that is already on this machine, once, without anybody waiting for it."""
        with self._lock:
            if name in self._warming or self.loaded(name) is not None or not _on_this_machine(name):
                return
            thread = threading.Thread(target=self._warm, args=(name,), name="headscope-warm", daemon=True)
            self._warming[name] = thread
            thread.start()

    def is_warming(self, name: str) -> bool:
        """Whether such a load is under way: not once it has ended, with the model or without."""
        thread = self._warming.get(name)
        return thread is not None and thread.is_alive()

    def _warm(self, name: str) -> None:
        try:
            self._worker.quick(lambda: self.load(name), timeout=WARM_S)
        except HeadscopeError:
            return  # Run says what is wrong with the model


def _on_this_machine(name: str) -> bool:
    return name in PACKAGED and any((cache_dir() / name).glob("float32-*"))

"""The captured queries, keys and values of runs: the latest in memory, more on disk."""

from __future__ import annotations

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import CaptureError
from headscope.engine.config.facts import ModelFacts
from headscope.engine.runs.capture import Capture
from headscope.studio.data.results import Run
from headscope.studio.lab.memo import Memo
from headscope.studio.lab.shelf import Shelf

IN_MEMORY = 2


class Captures:
    """Captures by run."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._captures: Memo[Capture] = Memo(IN_MEMORY)

    def of(self, run: Run) -> Capture:
        """The run's capture, from memory or disk. On the device's thread. CaptureError if it is no longer stored."""

        def make() -> Capture:
            if not self.shelf.has(run.id):
                raise CaptureError(
                    "The captured Q/K/V of this run are no longer stored: run the prompt again to go on."
                )
            return self.shelf.load(run.id)

        self.shelf.touch(run.id)
        return self._captures(run.id, make)

    def keep(self, run_id: str, capture: Capture) -> None:
        """Holds a capture in memory."""
        self._captures.put(run_id, capture)

    def store(self, run_id: str, capture: Capture, size: int) -> bool:
        """Puts a capture of about `size` bytes on disk if there is room, which those in memory keep theirs."""
        in_memory = [str(key) for key, _ in self._captures.items()]
        return self.shelf.put(run_id, capture, size, in_memory)

    def layer(self, run: Run, layer: int) -> LayerInputs:
        """What a layer reads, on the device where the run had it; what was read from disk lies on the CPU at first."""
        capture = self.of(run)
        if layer not in capture.layers:
            raise CaptureError(
                f"Layer {layer} has its own kind of attention and is left to the model: no head to tune."
            )
        place = torch.device(run.row.device)
        if place.type == "cuda" and not torch.cuda.is_available():
            place = torch.device("cpu")
        return capture.layer(layer).to(place)


def capture_bytes(facts: ModelFacts, tokens: int, itemsize: int) -> int:
    """Bytes of Q, K and V of all layers for a prompt."""
    return facts.layers * (facts.query_heads + 2 * facts.kv_heads) * facts.head_dim * tokens * itemsize

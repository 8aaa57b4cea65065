"""Chapter 10: four heads of a real model under the three patterns, at equal cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.loss import measure
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.packaged import PACKAGED, cache_dir
from headscope.engine.runs import capture
from headscope.studio.base.words import percent
from headscope.studio.data.maps import HeadMaps, head_maps
from headscope.studio.lab.jobs import Context
from headscope.studio.lessons.maths import find_heads
from headscope.studio.lessons.maths.find_heads import FAMILIES, Trial

CELLS = 64


NARROW = 0.01
"""A lead below this is called narrow."""


@dataclass(frozen=True)
class KnownHead:
    """A head of the file: its role, its place, and what was measured, by prompt and pattern family."""

    role: str
    layer: int
    head: int
    evidence: dict[str, dict[str, Trial]]

    @property
    def name(self) -> str:
        """Such as "layer 3 head 4"."""
        return f"layer {self.layer} head {self.head}"

    def missed(self, family: str) -> float:
        """Mean over the prompts."""
        return sum(trials[family].missed for trials in self.evidence.values()) / len(self.evidence)

    @property
    def best(self) -> str:
        """The family that misses least."""
        return min(FAMILIES, key=self.missed)


@dataclass(frozen=True)
class HeadsFile:
    """What `find_heads` wrote."""

    model: str
    fingerprint: str
    tokens: int
    prompts: tuple[str, ...]
    heads_measured: int
    heads: tuple[KnownHead, ...]


@dataclass(frozen=True)
class LiveHead:
    """A head measured again: trials by family, and the maps under each family's cells."""

    known: KnownHead
    trials: dict[str, Trial]
    maps: dict[str, HeadMaps]


@cache
def heads_file() -> HeadsFile:
    """The packaged file; ValueError if it is of another format."""
    body = json.loads(find_heads.FILE.read_text(encoding="utf-8"))
    if body.get("format") != find_heads.FORMAT:
        raise ValueError(f"{find_heads.FILE.name} must have format {find_heads.FORMAT}, got {body.get('format')!r}")
    return HeadsFile(
        body["model"],
        body["fingerprint"],
        body["tokens"],
        tuple(body["prompts"]),
        body["heads_measured"],
        tuple(_known(entry) for entry in body["heads"]),
    )


def _known(entry: dict[str, Any]) -> KnownHead:
    evidence = {
        prompt: {family: find_heads.trial_from_dict(trial) for family, trial in trials.items()}
        for prompt, trials in entry["evidence"].items()
    }
    return KnownHead(entry["role"], entry["layer"], entry["head"], evidence)


def fetched(model: str) -> bool:
    """Whether a packaged model lies in the cache; nothing is read or downloaded."""
    known = PACKAGED.get(model)
    return known is not None and (cache_dir() / known.name / known.file_name).is_file()


def live(loaded: LoadedModel, prompt: str, context: Context | None = None) -> tuple[LiveHead, ...]:
    """Reads the prompt with the model and measures the file's heads under the file's patterns again.

    `context` is told of every layer and every head, and stops the work at the next of either.
    """
    known = heads_file()
    heads: dict[tuple[int, int], LiveHead] = {}
    layers = max(one.layer for one in known.heads) + 1

    def step(done: int, what: str) -> None:
        if context is not None:
            context.step(done, layers, what)

    def visit(layer: int, inputs: LayerInputs) -> None:
        for one in known.heads:
            if one.layer == layer:
                step(layer, f"Measuring {one.name}")
                heads[layer, one.head] = _again(one, prompt, inputs.head(one.head))

    ids = find_heads.prompt_ids(loaded, prompt, known.tokens)
    capture.stream(
        loaded,
        ids,
        visit,
        layers=sorted({one.layer for one in known.heads}),
        logits=False,
        progress=lambda done, _: step(done, f"Reading {prompt}: layer {done} of {layers}"),
    )
    return tuple(heads[one.layer, one.head] for one in known.heads)


def _again(one: KnownHead, prompt: str, inputs: LayerInputs) -> LiveHead:
    patterns = {family: [trial.pattern] for family, trial in one.evidence[prompt].items()}
    trials = find_heads.try_layer(inputs, patterns)[0]
    dense = measure.dense_pass(inputs)
    maps = {}
    for family, of_head in patterns.items():
        result = measure.measure_patterns(inputs, of_head, tile=1, dense=dense)
        maps[family] = head_maps(inputs, dense.lse, result.index, result.missed[0, 0], cells=CELLS)
    return LiveHead(one, trials, maps)


def sentence(one: KnownHead, families: Sequence[str] = FAMILIES) -> str:
    """What the evidence says of a head, in words."""
    best, order = one.best, sorted(families, key=one.missed)
    second = order[1]
    facts = f"{best} misses {percent(one.missed(best))}, {second} {percent(one.missed(second))}"
    if one.role == "dense":
        return f"Even its best pattern misses {percent(one.missed(best))}: no shape fits, so it should stay dense."
    if one.role != best:
        return f"{facts}: no head of this model is served best by {one.role}; this one comes nearest."
    if one.missed(second) - one.missed(best) < NARROW:
        return f"At equal cells {facts}: a narrow win. This model has hardly a head of this kind."
    return f"At equal cells {facts}."

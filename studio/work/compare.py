"""The whole model with and without a draft: answers side by side, time to first token, next-token KL, in-situ loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import CaptureError, PromptError
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.loss import measure
from headscope.engine.model.load import LoadedModel
from headscope.engine.runs.answer import Answer, answer, next_token_kl
from headscope.engine.runs.capture import stream
from headscope.kernels.cells.plan import TILES_VERSION
from headscope.studio.base.errors import StoreError
from headscope.studio.data import prompts
from headscope.studio.data.draft import Draft
from headscope.studio.data.results import Run
from headscope.studio.lab.jobs import Context
from headscope.studio.lab.lab import Lab

NEW_TOKENS = 48


@dataclass(frozen=True)
class Comparison:
    """Dense and sparse. `kl` in nats is KL(dense || sparse) of the next token; in situ by layer, mean of heads."""

    dense: Answer
    sparse: Answer
    kl: float
    same_first: bool
    top_dense: tuple[tuple[str, float], ...]
    top_sparse: tuple[tuple[str, float], ...]
    in_situ: tuple[float, ...]
    isolated: tuple[float, ...]
    layers: tuple[int, ...]
    title: str
    run_id: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the texts."""
        body = {
            name: getattr(self, name)
            for name in ("kl", "same_first", "in_situ", "isolated", "layers", "title", "run_id")
        }
        for name, one in (("dense", self.dense), ("sparse", self.sparse)):
            body[name] = one.to_dict() | {"total_ms": one.total_ms}
            del body[name]["text"], body[name]["token_ids"]
        body["isolated"] = [None if math.isnan(value) else value for value in self.isolated]
        return body


def compare(lab: Lab, context: Context, run: Run, draft: Draft) -> Comparison:
    """A job: dense and sparse answers to the run's prompt, then a second sparse prefill that measures in situ."""
    loaded = lab.models.load(run.row.model, context)
    ids = prompts.encode(loaded, run.text, run.row.chat_template).ids.to(loaded.device)
    patterns, estimator = draft.patterns, draft.estimator
    heads = tuple(tuple(HeadEntry(pattern) for pattern in row) for row in patterns)
    config = HeadConfig(run.facts.to_dict(), {}, TILES_VERSION, estimator, heads)
    layers = run.facts.layers
    room = (run.facts.max_position or 2**30) - ids.shape[1]
    if room < 1:
        raise PromptError("The prompt fills all of the model's positions, so there is no room for an answer.")
    count = min(NEW_TOKENS, room)

    def run_once(name: str, done: int, under: HeadConfig | None) -> Answer:
        return answer(
            loaded,
            ids,
            under,
            max_new_tokens=count,
            on_layer=lambda layer, of: context.report(
                done + layer - 1, 3 * layers, f"{name} prefill: layer {layer} of {of}"
            ),
            on_token=lambda token: context.say(f"{name} answer: token {token} of {count}"),
            cancel=lambda: context.cancelled,
        )

    dense, sparse = run_once("Dense", 0, None), run_once("Sparse", layers, config)
    missed: dict[int, float] = {}

    def visit(layer: int, inputs: LayerInputs) -> None:
        context.step(2 * layers + layer, 3 * layers, f"Measuring in place: layer {layer + 1} of {layers}")
        result = measure.measure_patterns(inputs, patterns[layer], layer=layer, estimator=estimator)
        missed[layer] = sum(one.missed_mass_mean for one in result.heads) / len(result.heads)

    stream(loaded, ids, visit, config=config, cancel=lambda: context.cancelled, logits=False)
    isolated = _isolated(lab, context, run, draft, tuple(missed))
    first, second = (torch.log_softmax(one.logits.double(), -1) for one in (dense, sparse))
    comparison = Comparison(
        dense=dense,
        sparse=sparse,
        kl=next_token_kl(dense.logits, sparse.logits),
        same_first=bool(first.argmax() == second.argmax()),
        top_dense=_top(loaded, ids, first),
        top_sparse=_top(loaded, ids, second),
        in_situ=tuple(missed.values()),
        isolated=isolated,
        layers=tuple(missed),
        title=draft.title,
        run_id=run.id,
    )
    _remember(lab, run, comparison)
    return comparison


def _isolated(lab: Lab, context: Context, run: Run, draft: Draft, layers: Sequence[int]) -> tuple[float, ...]:
    """Mean isolated loss of each layer; heads that were edited and not looked at since are measured now.

    NaN for a layer that cannot be measured, since the capture is no longer stored.
    """
    known = lab.measurements.grid(run.id, draft.patterns, draft.estimator)
    missing = [
        (layer, head, draft.patterns[layer][head])
        for layer in layers
        for head, one in enumerate(known[layer])
        if one is None
    ]
    if missing:
        with suppress(CaptureError):
            lab.measurements.measure(run, missing, context, estimator=draft.estimator)
            known = lab.measurements.grid(run.id, draft.patterns, draft.estimator)
    return tuple(
        sum(math.nan if one is None else one.missed_mass_mean for one in known[layer]) / len(known[layer])
        for layer in layers
    )


def _remember(lab: Lab, run: Run, comparison: Comparison) -> None:
    try:
        lab.store.add_latency(run.id, None, "dense against draft", run.row.tokens, comparison.to_dict())
    except StoreError:
        return  # the comparison is on the page; the record of it can wait for a database that works


def _top(loaded: LoadedModel, ids: torch.Tensor, logs: torch.Tensor) -> tuple[tuple[str, float], ...]:
    """The five likeliest next tokens as they would go on after the prompt (alone, some lose their space)."""
    best, last = logs.topk(5), ids[0, -4:].tolist()
    before = len(loaded.tokenizer.decode(last))
    return tuple(
        (loaded.tokenizer.decode([*last, token])[before:], value)
        for token, value in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    )

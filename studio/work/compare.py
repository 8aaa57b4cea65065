"""The whole model with and without a draft: answers side by side, time to first token, next-token KL, in-situ loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headscope.engine.base.errors import CaptureError, PromptError
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.loss import measure
from headscope.engine.model.apply import apply
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.modules import attention_modules
from headscope.engine.runs.capture import stream
from headscope.kernels.cells.plan import TILES_VERSION
from headscope.studio.base.errors import StoreError
from headscope.studio.work import prompts
from headscope.studio.work.draft import Draft
from headscope.studio.work.jobs import Context
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import Run

NEW_TOKENS = 48


@dataclass(frozen=True)
class Answer:
    """One generation: text, time to first token (prefill and first decode choice, model only), and all of it."""

    text: str
    ttft_ms: float
    total_ms: float
    tokens: int


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
        body = asdict(self)
        for name in ("dense", "sparse"):
            del body[name]["text"]
        del body["top_dense"], body["top_sparse"]
        body["isolated"] = [None if math.isnan(value) else value for value in self.isolated]
        return body


def compare(lab: Lab, context: Context, run: Run, draft: Draft) -> Comparison:
    """A job: dense and sparse answers to the run's prompt, then a second sparse prefill that measures in situ."""
    loaded = lab.models.load(run.row.model, context)
    ids = prompts.encode(loaded, run.text, run.row.chat_template).ids.to(loaded.device)
    grid, estimator = draft.patterns, draft.estimator
    heads = tuple(tuple(HeadEntry(pattern) for pattern in row) for row in grid)
    config = HeadConfig(run.facts.to_dict(), {}, TILES_VERSION, estimator, heads)
    layers = run.facts.layers
    room = (run.facts.max_position or 2**30) - ids.shape[1]
    if room < 1:
        raise PromptError("The prompt fills all of the model's positions, so there is no room for an answer.")
    count = min(NEW_TOKENS, room)
    # One short pass of each first: the first call of a process pays for things that no later one does.
    for warm_sparse in (False, True):
        with torch.no_grad(), apply(loaded, config) if warm_sparse else nullcontext():
            loaded.model(input_ids=ids[:, :8], use_cache=False, logits_to_keep=1)
    with _watched(loaded, context, 0, 3 * layers, "Dense prefill"):
        dense, dense_logits = _answer(loaded, ids, count, "Dense", context)
    with apply(loaded, config), _watched(loaded, context, layers, 3 * layers, "Sparse prefill"):
        sparse, sparse_logits = _answer(loaded, ids, count, "Sparse", context)
    found: dict[int, float] = {}

    def visit(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        context.step(2 * layers + layer, 3 * layers, f"Measuring in place: layer {layer + 1} of {layers}")
        result = measure.measure_heads(q, k, v, grid[layer], layer=layer, scale=scale, estimator=estimator)
        found[layer] = sum(one.missed_mass_mean for one in result.heads) / len(result.heads)

    stream(loaded, ids, visit, config=config, cancel=lambda: context.cancelled, logits=False)
    isolated = _isolated(lab, context, run, draft, tuple(found))
    first, second = (torch.log_softmax(logits.double(), -1) for logits in (dense_logits, sparse_logits))
    made = Comparison(
        dense=dense,
        sparse=sparse,
        kl=max(0.0, float((first.exp() * (first - second)).sum())),
        same_first=bool(first.argmax() == second.argmax()),
        top_dense=_top(loaded, first),
        top_sparse=_top(loaded, second),
        in_situ=tuple(found.values()),
        isolated=isolated,
        layers=tuple(found),
        title=draft.title,
        run_id=run.id,
    )
    _remember(lab, run, made)
    return made


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


def _remember(lab: Lab, run: Run, made: Comparison) -> None:
    try:
        lab.store.add_latency(run.id, None, "dense against draft", run.row.tokens, made.to_dict())
    except StoreError:
        return  # the comparison is on the page; the record of it can wait for a database that works


def _answer(
    loaded: LoadedModel, ids: torch.Tensor, count: int, name: str, context: Context
) -> tuple[Answer, torch.Tensor]:
    """Greedy generation with the time of its first token, and the float32 logits [vocabulary] of that token."""
    times: list[float] = []
    began = time.perf_counter()

    class Clock:
        """transformers calls `put` with the prompt, then with every token."""

        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())
            context.say(f"{name} answer: token {len(times) - 1} of {count}")

        def end(self) -> None:
            return

    result = loaded.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        streamer=Clock(),
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=loaded.tokenizer.pad_token_id or loaded.tokenizer.eos_token_id,
    )
    new = result.sequences[0, ids.shape[1] :]
    text = loaded.tokenizer.decode(new, skip_special_tokens=True)
    total = (time.perf_counter() - began) * 1e3
    return Answer(text, (times[1] - began) * 1e3, total, len(new)), result.logits[0][0].float().cpu()


def _top(loaded: LoadedModel, logs: torch.Tensor) -> tuple[tuple[str, float], ...]:
    best = logs.topk(5)
    return tuple(
        (loaded.tokenizer.decode([token]), value)
        for token, value in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    )


@contextmanager
def _watched(loaded: LoadedModel, context: Context, done: int, total: int, words: str) -> Iterator[None]:
    """Progress and cancel at every attention layer while the block runs."""
    modules = list(attention_modules(loaded.model))
    prefill = True

    def before(layer: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal prefill
            context.check()
            if prefill:
                context.report(done + layer, total, f"{words}: layer {layer + 1} of {len(modules)}")
                prefill = layer + 1 < len(modules)

        return hook

    handles = [module.register_forward_pre_hook(before(layer)) for layer, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

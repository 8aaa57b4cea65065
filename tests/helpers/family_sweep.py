"""One model type of transformers against its own stock attention: every promise of `apply`, on a tiny random model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headscope.engine import AShape, Dense, HeadConfig, VerticalSlash, apply
from headscope.engine.attend.index import build_index
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.facts import ModelFacts, facts_of
from headscope.engine.model.hook import Call, Hook
from headscope.engine.model.modules import attention_modules

TOKENS, FIRST_TURN, PADDING = 44, 25, 7
CLOSE = 2e-4
"""Largest difference of logits, relative to their largest, that counts as rounding."""


class Unequal(AssertionError):
    """A promise that does not hold."""


@dataclass
class Outcome:
    """What became of one type under one stock attention: how many layers were served, and why the others were not."""

    served: tuple[int, ...] = ()
    left: dict[int, str] | None = None
    refused: str = ""
    layers: int = 0


@dataclass
class Inputs:
    ids: torch.Tensor
    padding: torch.Tensor

    @classmethod
    def random(cls) -> Inputs:
        ids = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
        padding = torch.ones_like(ids)
        padding[1, :PADDING] = 0
        return cls(ids, padding)


def sweep(model: Any, base: str) -> Outcome:
    """Every check of one model; raises Unequal with the promise that does not hold."""
    inputs = Inputs.random()
    stock = _runs(model, inputs)
    try:
        facts = facts_of(model)
        with apply(model, HeadConfig.uniform(facts, Dense())) as active:
            dense = _runs(model, inputs, stock)
            left = active.left_alone
    except HeadscopeError as error:
        _equal("undo after a refusal", _runs(model, inputs, stock), stock, exact=True)
        return Outcome(refused=str(error))
    _equal("all-dense", dense, stock)
    served = tuple(
        layer
        for layer in sorted({module.layer_idx for module in attention_modules(model)} - set(left))
        if layer < facts.layers
    )
    if served:
        _check_sparse(model, facts, served, inputs, stock, base)
    _equal("undo", _runs(model, inputs, stock), stock, exact=True)
    return Outcome(served, left, layers=facts.layers)


def _check_sparse(
    model: Any, facts: ModelFacts, served: tuple[int, ...], inputs: Inputs, stock: dict[str, torch.Tensor], base: str
) -> None:
    full = HeadConfig.uniform(facts, VerticalSlash(vertical=4096, slash=4096))
    with apply(model, full, prefill_from=2):
        _equal("full budgets", _runs(model, inputs, stock), stock)
    tight = HeadConfig.uniform(facts, AShape(sink=1, window=4))
    with apply(model, tight, prefill_from=2) as active:
        sparse = _runs(model, inputs, stock)
        changed = inputs.ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 90 + 3
        with torch.no_grad():
            after = _logits(model(input_ids=changed))
    if set(active.left_alone) & set(served):
        raise Unequal(f"sparse layers: {set(active.left_alone) & set(served)} were left alone")
    if not torch.isfinite(after).all() or (after - sparse["one pass"])[:, :-1].abs().max() > CLOSE * _size(after):
        raise Unequal("causality: another last token changes earlier rows")
    with _reference(model, tight, base):
        _equal("tight budgets", sparse, _runs(model, inputs, stock))
    if (sparse["one pass"] - stock["one pass"]).abs().max() <= CLOSE * _size(sparse["one pass"]):
        raise Unequal("sparse layers: the patterns change nothing")


@contextlib.contextmanager
def _reference(model: Any, config: HeadConfig, base: str) -> Iterator[None]:
    """The stock attention of every served layer under an explicit additive mask of the index's cells."""

    def handler(call: Call) -> torch.Tensor | None:
        if call.left or call.q.shape[2] == 1:
            return None
        rows = call.rows
        k = call.k[:, :, : rows.kv_len]
        patterns = config.patterns(call.layer)
        index = build_index(call.q, k, patterns, scale=call.scale, starts=rows.starts, estimator=config.estimator)
        mask = torch.zeros_like(index.computed_mask(), dtype=call.q.dtype)
        mask.masked_fill_(~index.computed_mask(), torch.finfo(call.q.dtype).min)
        unwritten = call.k.shape[2] - rows.kv_len
        mask = torch.nn.functional.pad(mask, (0, unwritten), value=torch.finfo(call.q.dtype).min)
        call.mask = mask
        return call.own()[0].transpose(1, 2)

    with Hook(model, handler):
        yield


def _runs(model: Any, inputs: Inputs, stock: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Logits of one pass, of the second turn on a cache, and of a left-padded batch without its padded rows.

    Without `stock` this is the stock run, and what the type itself cannot do is left out.
    """

    def padded() -> torch.Tensor:
        logits = _logits(model(input_ids=inputs.ids, attention_mask=inputs.padding))
        return logits * inputs.padding[:, -logits.shape[1] :, None]

    runs: dict[str, Callable[[], torch.Tensor | None]] = {
        "one pass": lambda: _logits(model(input_ids=inputs.ids)),
        "padded": padded,
        "two turns": lambda: _two_turns(model, inputs.ids),
    }
    results = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in runs.items():
            if stock is not None and name not in stock:
                continue
            try:
                logits = run()
            except (RuntimeError, ValueError, AssertionError, TypeError, AttributeError, IndexError):
                if stock is not None or name == "one pass":
                    raise
                continue
            if logits is not None:
                results[name] = logits
    return results


def _two_turns(model: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits of the second turn, or None where the type has no cache that a second turn can use."""
    first = model(input_ids=ids[:, :FIRST_TURN], use_cache=True)
    name = next((name for name in ("cache", "past_key_values", "cache_params") if first.get(name) is not None), None)
    if name is None:
        return None
    second = model(input_ids=ids[:, FIRST_TURN:], use_cache=True, **{name: first[name]})
    return _logits(second)


def _logits(result: Any) -> torch.Tensor:
    return result.logits.float()


def _size(logits: torch.Tensor) -> float:
    return max(1e-6, float(logits.abs().max()))


def _equal(what: str, got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], exact: bool = False) -> None:
    for name, logits in wanted.items():
        other = got[name]
        if torch.equal(other, logits):
            continue
        difference = float((other - logits).abs().nan_to_num(nan=float("inf")).max()) / _size(logits)
        if exact or not difference <= CLOSE:
            raise Unequal(f"{what}, {name}: differs by {difference:.2g} of the largest logit")

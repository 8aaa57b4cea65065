"""Answering a prompt: sparse prefill and dense decode, beside the dense run where it is asked for."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.attend.finite import not_finite
from headscope.engine.base.errors import Cancelled, PromptError
from headscope.engine.base.timing import drain
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.host import HostProfile
from headscope.engine.config.sets import ConfigSet
from headscope.engine.config.warnings import CalibrationWarning
from headscope.engine.model.apply import Applied, apply
from headscope.engine.model.modules import attention_modules
from headscope.engine.prompts.tokens import check_ids

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """One greedy continuation, the same for every command and page. `ttft_ms` runs from token ids on the device to
    the first new token, index included; tokenizing and loading are not in it. `decode_ms_per_token` is None where the
    first new token was the only one. `logits` [vocabulary] float32 are those of the first new token.
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_ms: float
    decode_ms_per_token: float | None
    left_alone: dict[int, str]
    logits: torch.Tensor = field(repr=False, compare=False)

    @property
    def total_ms(self) -> float:
        """From token ids on the device to the last new token."""
        return self.ttft_ms + (self.decode_ms_per_token or 0.0) * (len(self.token_ids) - 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the logits."""
        return {
            "text": self.text,
            "tokens": len(self.token_ids),
            "token_ids": list(self.token_ids),
            "ttft_ms": self.ttft_ms,
            "decode_ms_per_token": self.decode_ms_per_token,
            "left_alone": {str(layer): reason for layer, reason in self.left_alone.items()},
        }


def answer(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    config: HeadConfig | ConfigSet | None = None,
    *,
    max_new_tokens: int = 64,
    host: HostProfile | None = None,
    force_weights: bool = False,
    warm_up: bool = True,
    on_layer: Callable[[int, int], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    cancel: Callable[[], bool] | None = None,
) -> Answer:
    """Greedy continuation of `input_ids` [1, S]; dense throughout without `config`.

    `warm_up` runs a few tokens first, so that the times are not those of a process's first call. `on_layer` is called
    in the prefill with attention layers begun and layers in all, `on_token` with the number of new tokens so far;
    `cancel` is asked at each layer and token. Raises PromptError when prompt and new tokens exceed the model's
    positions, ModelError when logits are not finite, Cancelled, and what `apply` raises; warns as `apply` does.
    """
    ids = check_ids(loaded, input_ids).to(loaded.device)
    most = loaded.facts.max_position
    if max_new_tokens < 1:
        raise PromptError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if most and ids.shape[1] + max_new_tokens > most:
        raise PromptError(
            f"{ids.shape[1]} prompt tokens and {max_new_tokens} new ones exceed the {most} positions of "
            f"{loaded.name}: shorten the prompt or ask for fewer"
        )
    stops = _stop_tokens(loaded)

    def applied() -> AbstractContextManager[Applied | None]:
        return nullcontext() if config is None else apply(loaded, config, host, force_weights=force_weights)

    # The warm-up is nobody's prompt, so warnings about its length would only confuse.
    if warm_up:
        with torch.no_grad(), warnings.catch_warnings(action="ignore", category=CalibrationWarning), applied():
            loaded.model(input_ids=ids[:, :_WARM_UP_TOKENS], use_cache=True, logits_to_keep=1)
    with torch.no_grad(), applied() as active, _watched(loaded, on_layer, cancel):
        drain(ids.device)
        began = time.perf_counter()
        result = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        logits = result.logits[0, -1].float()
        new = [_best(logits, "the logits of the first new token", loaded.dtype)]
        first = time.perf_counter()
        # The argument and the field were renamed within the supported range.
        argument = "cache" if "cache" in signature(loaded.model.forward).parameters else "past_key_values"
        cache = result["cache" if "cache" in result else "past_key_values"]
        while new[-1] not in stops and len(new) < max_new_tokens:
            if on_token is not None:
                on_token(len(new))
            step = torch.tensor([[new[-1]]], device=ids.device)
            result = loaded.model(input_ids=step, use_cache=True, logits_to_keep=1, **{argument: cache})
            new.append(_best(result.logits[0, -1], f"the logits of new token {len(new) + 1}", loaded.dtype))
        ended = time.perf_counter()
        left = dict(active.left_alone) if active is not None else {}
    shown = new[:-1] if new[-1] in stops else new
    text = loaded.tokenizer.decode(shown, skip_special_tokens=True) if loaded.tokenizer is not None else ""
    per_token = (ended - first) * 1e3 / (len(new) - 1) if len(new) > 1 else None
    return Answer(text, tuple(new), (first - began) * 1e3, per_token, left, logits.cpu())


def next_token_kl(dense: torch.Tensor, sparse: torch.Tensor) -> float:
    """KL(dense || sparse) of the next token in nats, from logits [vocabulary], in float64.

    Rounding can make it a little less than nothing, which counts as 0. ModelError if it is not finite.
    """
    p = torch.log_softmax(dense.double(), dim=-1)
    q = torch.log_softmax(sparse.double(), dim=-1)
    kl = float((p.exp() * (p - q)).sum())
    if not math.isfinite(kl):  # asked before the bound below, which hides a NaN
        raise not_finite("the logits of the first new token", dense.dtype)
    return max(0.0, kl)


def _best(logits: torch.Tensor, what: str, dtype: torch.dtype) -> int:
    """The token of the largest logit; a NaN among them is the largest, and no answer."""
    highest, token = logits.max(dim=-1)
    if not math.isfinite(float(highest)):
        raise not_finite(what, dtype)
    return int(token)


@contextmanager
def _watched(
    loaded: LoadedModel, on_layer: Callable[[int, int], None] | None, cancel: Callable[[], bool] | None
) -> Iterator[None]:
    """Progress and cancel as each attention layer begins, while the block runs; nothing at all where none is asked."""
    modules = [] if on_layer is None and cancel is None else list(attention_modules(loaded.model))
    prefill = True

    def before(layer: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal prefill
            if cancel is not None and cancel():
                raise Cancelled("the answer was cancelled, and nothing of it was kept")
            if on_layer is not None and prefill:
                on_layer(layer + 1, len(modules))
            prefill = prefill and layer + 1 < len(modules)

        return hook

    handles = [module.register_forward_pre_hook(before(layer)) for layer, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stop_tokens(loaded: LoadedModel) -> set[int]:
    settings = getattr(loaded.model, "generation_config", None)
    stops = getattr(settings, "eos_token_id", None)
    if stops is None:
        stops = getattr(loaded.model.config, "eos_token_id", None)
    if stops is None:
        return set()
    return set(stops) if isinstance(stops, (list, tuple)) else {int(stops)}

"""The hook on a model's attention: what a call is, whether it may be served, and the exact way back.

The attention and mask registries of transformers are per process, so what is registered there holds no state: the
function looks for a hook on the attention module that calls it. Several models, each with its own hook, can run at
once. A layer that is not plain causal attention keeps the model's own (see `Call.reason_to_leave`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar

import torch

from headscope.engine.base.errors import ModelError
from headscope.engine.config.facts import query_heads, text_config, uncompiled
from headscope.engine.model import modules as parts
from headscope.engine.model.masks import CausalMask, mask_function
from headscope.engine.model.rows import Rows

_ATTRIBUTE = "_headscope_hook"
_PREFIX = "headscope_"
_HARMLESS = {
    # What transformers hands to every attention function and what plain causal attention may ignore.
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "num_items_in_batch",
    "is_causal",
    "sliding_window",
    "softcap",
    "s_aux",
    "logits_to_keep",
    "training",
}

Handler = Callable[["Call"], torch.Tensor | None]
"""Given one layer's call: the output [B, Hq, S, D], or None to leave the layer to the model's own attention."""


@dataclass
class Call:
    """One layer's attention call: q [B, Hq, S, D], k and v [B, Hkv, T, D] after RoPE, and what came with them.

    `left` is why the layer stays the model's own, or None where it may be served. `guesses` of the last rows are
    tokens that speculative decoding only tries out.
    """

    module: Any
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    dropout: float
    extras: dict[str, Any]
    base: str
    left: str | None = None
    guesses: int = 0

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)

    @property
    def rows(self) -> Rows:
        """Where each sequence starts, and how many keys there are.

        A mask that was skipped aligns the rows with the first keys, so what lies behind them is unwritten.
        """
        if isinstance(self.mask, CausalMask):
            return self.mask.rows()
        return Rows((0,) * self.q.shape[0], self.q.shape[2] if self.q.shape[2] > 1 else self.k.shape[2])

    def in_dtype(self, dtype: torch.dtype) -> Call:
        """The call as autocast would make it for the stock attention."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    @property
    def wide_v(self) -> torch.Tensor:
        """v with zeros up to the size of k: latent attention has smaller values, and our kernels know one size."""
        missing = self.k.shape[-1] - self.v.shape[-1]
        return torch.nn.functional.pad(self.v, (0, missing)) if missing else self.v

    def reason_to_leave(self) -> str | None:
        """Why this layer is not plain causal attention, or None."""
        if self.extras.get("sliding_window") is not None:
            return "sliding-window or chunked layer"
        if self.extras.get("s_aux") is not None:
            return "learned attention sink"
        if self.extras.get("softcap") is not None:
            return "soft-capped logits"
        causal = self.extras.get("is_causal")
        if causal is not None and not causal:
            return "not causal"
        if self.dropout:
            return "dropout while training"
        unknown = sorted(name for name, value in self.extras.items() if self._matters(name, value))
        return f"unknown argument {unknown[0]!r}" if unknown else self._mask_reason() or self._shape_reason()

    def own(self) -> tuple[torch.Tensor, Any]:
        """The model's own attention, with the mask that it would have had."""
        mask = self.mask.stock() if isinstance(self.mask, CausalMask) else self.mask
        return _own_attention(self.base, self.module)(
            self.module, self.q, self.k, self.v, mask, dropout=self.dropout, scaling=self.scale, **self.extras
        )

    def _matters(self, name: str, value: Any) -> bool:
        """Whether an argument that we do not know could change the result: any tensor, or what the function names."""
        if value is None or name in _HARMLESS:
            return False
        return isinstance(value, torch.Tensor) or name in _named(_own_attention(self.base, self.module))

    def _mask_reason(self) -> str | None:
        mask = self.mask
        if mask is None:
            # Without a mask SDPA is causal by a flag, and the attention of a model file sees every key.
            return "no causal mask" if self.base == "eager" and self.q.shape[2] > 1 else None
        if not isinstance(mask, CausalMask) or mask.changed:
            return "a mask of its own" if self.q.shape[2] > 1 else None
        fits = (self.q.shape[0], 1, self.q.shape[2], self.k.shape[2])
        return None if mask.shape == fits else "keys that its mask does not describe"

    def _shape_reason(self) -> str | None:
        if self.q.shape[1] % self.k.shape[1] or self.q.shape[-1] != self.k.shape[-1]:
            return "queries and keys of different shapes"
        if self.v.shape[:3] != self.k.shape[:3] or self.v.shape[-1] > self.k.shape[-1]:
            return "values that do not fit the keys"
        if not self.q.dtype == self.k.dtype == self.v.dtype:
            return "queries, keys and values of different precision"
        return None


def _own_attention(base: str, module: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if base == "eager":  # each model file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


@lru_cache(maxsize=256)
def _named(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments that a function takes by name; what it only collects it cannot depend on by any public rule."""
    parameters = signature(function).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)


@dataclass
class Hook:
    """Sits on every attention module of one model and hands their calls to `handler` until it is removed.

    With `prefill_only`, calls of one new token go straight to the stock attention.
    """

    model: Any
    handler: Handler
    prefill_only: bool = False
    left_alone: dict[int, str] = field(default_factory=dict)
    _modules: list[Any] = field(default_factory=list)
    _heads: int = 0
    _guesses: int = 0
    _before_forward: Any = None
    _fixed: dict[int, str | None] = field(default_factory=dict)
    _settings: list[Any] = field(default_factory=list)

    def install(self) -> Hook:
        """ModelError when the model is in use by another hook or does not go through the registry."""
        self.model = uncompiled(self.model)
        modules = parts.attention_modules(self.model)
        if not modules:
            raise ModelError(f"{type(self.model).__name__} has no attention modules that can be served")
        if any(hasattr(module, _ATTRIBUTE) for module in modules):
            raise ModelError("this model is already under apply or a capture: leave that first, then start again")
        self._heads = query_heads(self.model)
        parts.check_tensor_parallel(modules, self._heads)
        base = _base(self.model)
        name = _register(base)
        self._settings = [_Setting.of(config) for config in parts.configs_of(self.model)]
        try:
            self.model.set_attn_implementation(name)
        except (ValueError, ImportError, AttributeError) as error:
            self._restore()
            raise ModelError(f"{type(self.model).__name__} refuses another attention function: {error}") from error
        if any(module.config._attn_implementation != name for module in modules):
            self._restore()
            raise ModelError(
                f"{type(self.model).__name__} does not use transformers' attention registry, so its attention "
                "cannot be replaced: use a model of a family that does"
            )
        shared = parts.shared_modules(self.model)
        for module in modules:
            several = "one attention module for several layers" if id(module) in shared else None
            self._fixed[id(module)] = several or parts.reason_to_leave(module)
            setattr(module, _ATTRIBUTE, self)
        self._modules = modules
        self._before_forward = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        return self

    @property
    def fixed_reasons(self) -> dict[int, str | None]:
        """Why each layer will be left alone whatever the call, or None; layers without attention are not named.

        Where a layer has cross-attention too, its self-attention speaks for it.
        """
        reasons: dict[int, str | None] = {}
        for module in self._modules:
            reason = self._fixed[id(module)]
            reasons[module.layer_idx] = reason and reasons.get(module.layer_idx, reason)
        return reasons

    def remove(self) -> None:
        """Restores the model exactly; a second call does nothing."""
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None
        for module in self._modules:
            delattr(module, _ATTRIBUTE)
        self._modules = []
        self._restore()

    def __enter__(self) -> Hook:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _restore(self) -> None:
        for setting in self._settings:
            setting.release()
        self._settings = []

    def run(self, call: Call) -> tuple[torch.Tensor, Any]:
        kind = call.q.device.type
        cast = torch.is_autocast_enabled(kind)
        served = call.in_dtype(torch.get_autocast_dtype(kind)) if cast else call
        served.left = self._fixed[id(call.module)] or served.reason_to_leave() or self._heads_reason(call)
        served.guesses = self._guesses
        if served.left and call.layer not in self.left_alone:
            self.left_alone[call.layer] = served.left
            if served.left.startswith("unknown"):
                warnings.warn(f"layer {call.layer} keeps its own attention: {served.left}", stacklevel=2)
        graded = torch.is_grad_enabled() and call.q.requires_grad
        with (
            torch.no_grad() if graded else nullcontext(),
            torch.autocast(kind, enabled=False) if cast else nullcontext(),
        ):
            out = self.handler(served)
        if out is None or served.left:
            return call.own()
        out = out.transpose(1, 2).contiguous()
        return _WithoutGradient.apply(out, call.q) if graded else out, None

    def _begin(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Before each forward: refuses what sparse layers cannot give, and finds the guesses in a first pass.

        Speculative decoding puts its first guesses behind the prompt in one pass on an empty cache, and asks for
        their logits and one more.
        """
        if options.get("output_attentions") or getattr(text_config(model), "output_attentions", False):
            raise ModelError(
                "sparse layers have no attention weights to return: leave output_attentions out, or take the config off"
            )
        self._guesses = 0
        kept = options.get("logits_to_keep")
        if isinstance(kept, int) and kept > 1:
            cache = options.get("cache", options.get("past_key_values"))
            if cache is not None and hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) == 0:
                self._guesses = kept - 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError("a model under apply or a capture cannot be copied or pickled: take the config off first")

    def _heads_reason(self, call: Call) -> str | None:
        """Tensor parallel splits the heads evenly; any other number of them is a layer of another shape."""
        local = call.q.shape[1]
        if local == self._heads or (self._heads % local == 0 and parts.is_parallel(call.module)):
            return None
        return f"{local} query heads where the model has {self._heads}"


class _WithoutGradient(torch.autograd.Function):
    """Passes the output of our kernels on, and refuses the way back instead of dropping gradients in silence."""

    @staticmethod
    def forward(context: Any, out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise ModelError("sparse layers have no gradients: take the config off before you train the model")


class _Setting:
    """The attention setting of one config object, kept while any hook uses it: models may share a config."""

    _in_use: ClassVar[dict[int, _Setting]] = {}

    def __init__(self, config: Any) -> None:
        self._config = config
        self._implementation = config._attn_implementation
        self._users = 0

    @classmethod
    def of(cls, config: Any) -> _Setting:
        setting = cls._in_use.setdefault(id(config), cls(config))
        setting._users += 1
        return setting

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            del self._in_use[id(self._config)]
            self._config._attn_implementation_internal = self._implementation


def _base(model: Any) -> str:
    """The stock attention that serves what is left to the model: its own if eager, else SDPA."""
    current = text_config(model)._attn_implementation
    if current in (_PREFIX + "eager", _PREFIX + "sdpa"):  # a config that another served model shares
        return current.removeprefix(_PREFIX)
    if current == "eager" or not getattr(model, "_supports_sdpa", True):
        return "eager"
    return "sdpa"


def _register(base: str) -> str:
    """Registers the stateless functions for one stock attention (again does no harm); returns their name."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, Any]:
        hook: Hook | None = getattr(module, _ATTRIBUTE, None)
        if hook is None or (hook.prefill_only and query.shape[2] == 1):
            mask = attention_mask.stock() if isinstance(attention_mask, CausalMask) else attention_mask
            own = _own_attention(base, module)
            return own(module, query, key, value, mask, dropout=dropout, scaling=scaling, **extras)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        call = Call(module, query, key, value, attention_mask, scale, dropout, extras, base)
        return run(hook, call)

    @torch.compiler.disable
    def run(hook: Hook, call: Call) -> tuple[torch.Tensor, Any]:
        return hook.run(call)

    name = _PREFIX + base
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask_function(base))
    return name

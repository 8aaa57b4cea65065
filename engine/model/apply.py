"""Putting our attention into a transformers model, and taking it out again without a trace.

The attention and mask registries of transformers are per process, so what is registered there holds no state: the
function looks for a hook on the attention module that calls it. Several models, each with its own hook, can run at
once. A layer that is not plain causal attention keeps the model's own (see `Call.reason_to_leave`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.attend.attention import dense_attention, sparse_attention
from headscope.engine.attend.index import build_index
from headscope.engine.base.errors import ConfigMismatch, ModelError
from headscope.engine.config.facts import FULL, text_config
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.sets import ConfigSet
from headscope.engine.config.warnings import LengthWarnings
from headscope.engine.model import rows as row_maths
from headscope.engine.model.modules import attention_modules, configs_of, tensor_parallel_rank
from headscope.engine.model.rows import Rows

if TYPE_CHECKING:
    from headscope.engine.config.host import HostProfile
    from headscope.engine.model.load import LoadedModel

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

    `left` is why the layer stays the model's own, or None where it may be served.
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

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)

    def plain_mask(self) -> bool:
        """Whether the mask is ours (codes per key slot, or nothing) and not one that the model or a caller made."""
        return self.mask is None or self.mask.dtype == torch.int8

    def reason_to_leave(self) -> str | None:
        """Why this layer is not plain causal attention, or None."""
        types = getattr(self.module.config, "layer_types", None)
        if self.extras.get("sliding_window") is not None or (types and types[self.layer] != FULL):
            return "sliding-window or chunked layer"
        if self.extras.get("s_aux") is not None:
            return "learned attention sink"
        if self.extras.get("softcap") is not None or getattr(self.module, "attn_logit_softcapping", None) is not None:
            return "soft-capped logits"
        causal = self.extras.get("is_causal")
        if not (getattr(self.module, "is_causal", True) if causal is None else causal):
            return "not causal"
        if self.dropout:
            return "dropout while training"
        if not self.plain_mask():
            return "a mask of the caller's own"
        unknown = sorted(key for key, value in self.extras.items() if value is not None and key not in _HARMLESS)
        return f"unknown argument {unknown[0]!r}" if unknown else None

    def own(self) -> tuple[torch.Tensor, Any]:
        """The model's own attention, with the mask that it would have had."""
        mask = self.mask
        stock = self.extras.get("sliding_window") is not None or not self.plain_mask() or self.left == "not causal"
        if not stock and not (mask is None and self._needs_no_mask()):
            mask = self._stock_mask()
        return _own_attention(self.base, self.module)(
            self.module, self.q, self.k, self.v, mask, dropout=self.dropout, scaling=self.scale, **self.extras
        )

    def _needs_no_mask(self) -> bool:
        if self.left is not None and self.left.startswith("sliding"):
            return True  # the model's own mask function made it
        return self.base != "eager" and self.q.shape[2] in (1, self.k.shape[2])

    def _stock_mask(self) -> torch.Tensor | None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        batch, _, q_len, _ = self.q.shape
        kv_len = self.k.shape[2]
        valid, written = None, kv_len
        if self.mask is not None:
            written = int((self.mask[0, 0, 0] != row_maths.UNWRITTEN).sum())
            valid = (self.mask[:, 0, 0, :] == row_maths.VALID).expand(batch, -1)
        return ALL_MASK_ATTENTION_FUNCTIONS[self.base](
            batch_size=batch,
            q_length=q_len,
            kv_length=kv_len,
            q_offset=written - q_len,
            attention_mask=valid,
            dtype=self.q.dtype,
            device=self.q.device,
        )


def _own_attention(base: str, module: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if base == "eager":  # each model file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


@dataclass
class Hook:
    """Sits on every attention module of one model and hands their calls to `handler` until it is removed."""

    model: Any
    handler: Handler
    left_alone: dict[int, str] = field(default_factory=dict)
    _modules: list[Any] = field(default_factory=list)
    _saved: list[tuple[Any, Any]] = field(default_factory=list)
    _last: tuple[torch.Tensor | None, tuple[int, int], Rows] | None = None

    def install(self) -> Hook:
        """ModelError when the model is in use by another hook or does not go through the registry."""
        modules = attention_modules(self.model)
        if not modules:
            raise ModelError(f"{type(self.model).__name__} has no attention modules that can be served")
        if any(hasattr(module, _ATTRIBUTE) for module in modules):
            raise ModelError("this model is already under apply or a capture: leave that first, then start again")
        self._saved = [(config, config._attn_implementation) for config in configs_of(self.model)]
        name = _register(_base(self.model))
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
        for module in modules:
            setattr(module, _ATTRIBUTE, self)
        self._modules = modules
        return self

    def remove(self) -> None:
        """Restores the model exactly; a second call does nothing."""
        for module in self._modules:
            delattr(module, _ATTRIBUTE)
        self._modules = []
        self._last = None
        self._restore()

    def __enter__(self) -> Hook:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _restore(self) -> None:
        for config, implementation in self._saved:
            config._attn_implementation_internal = implementation
        self._saved = []

    def run(self, call: Call) -> tuple[torch.Tensor, Any]:
        call.left = call.reason_to_leave()
        if call.left and call.layer not in self.left_alone:
            self.left_alone[call.layer] = call.left
            if call.left.startswith("unknown"):
                warnings.warn(f"layer {call.layer} keeps its own attention: {call.left}", stacklevel=2)
        out = self.handler(call)
        if out is None or call.left:
            return call.own()
        return out.transpose(1, 2).contiguous(), None

    def rows(self, call: Call) -> Rows:
        """Starts and length of a call. All layers of a forward share one mask, so it is read once."""
        shape = (call.q.shape[0], call.k.shape[2])
        last = self._last
        if last is None or last[0] is not call.mask or last[1] != shape:
            last = (call.mask, shape, row_maths.decode_mask(call.mask, *shape))
            self._last = last
        return last[2]


def hook_of(call: Call) -> Hook:
    """The hook that a call came through."""
    return getattr(call.module, _ATTRIBUTE)


def _base(model: Any) -> str:
    """The stock attention that serves what is left to the model: its own if eager, else SDPA."""
    current = text_config(model)._attn_implementation
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
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        call = Call(module, query, key, value, attention_mask, scale, dropout, extras, base)
        hook: Hook | None = getattr(module, _ATTRIBUTE, None)
        return call.own() if hook is None else hook.run(call)

    name = _PREFIX + base
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask_function(base))
    return name


def _mask_function(base: str) -> Callable[..., torch.Tensor | None]:
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
        causal_mask_function,
    )

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        local_size: int | None = None,
        **options: Any,
    ) -> torch.Tensor | None:
        if local_size is not None or mask_function is bidirectional_mask_function:
            return ALL_MASK_ATTENTION_FUNCTIONS[base](
                batch_size=batch_size,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                local_size=local_size,
                **options,
            )
        if mask_function is not causal_mask_function or int(kv_offset):
            raise ModelError(
                "packed sequences and masks other than plain causal ones are not served: give each sequence its own "
                "row of the batch, padded on the left"
            )
        device = options.get("device", "cpu")
        return row_maths.encode_mask(batch_size, q_length, kv_length, int(q_offset), attention_mask, device)

    return mask


class SparsePrefill:
    """Handler: sparse prefill under a head config, dense decode, dense below the host's measured length."""

    def __init__(
        self,
        config: HeadConfig | ConfigSet,
        host: HostProfile | None,
        name: str | None = None,
        lengths: LengthWarnings | None = None,
    ) -> None:
        self._config = config
        self._host = host
        self._name = name
        self._lengths = lengths

    def __call__(self, call: Call) -> torch.Tensor | None:
        batch, heads, q_len, _ = call.q.shape
        if call.left or q_len == 1:
            return None
        known = hook_of(call).rows(call)
        config = self._pick(known.kv_len - min(known.starts))
        if config is None or (self._host and known.kv_len < self._host.dense_below_tokens(batch)):
            return self._dense(call, known)
        patterns = config.patterns(call.layer)
        offset = row_maths.head_offset(heads, len(patterns), tensor_parallel_rank(call.module))
        mine = patterns[offset : offset + heads]
        if all(pattern.is_dense for pattern in mine):
            return self._dense(call, known)
        if self._lengths is not None:
            # In a chunked prefill these are the lengths so far.
            self._lengths.check(config, {known.kv_len - start for start in known.starts})
        k, v = call.k[:, :, : known.kv_len], call.v[:, :, : known.kv_len]
        index = build_index(call.q, k, mine, scale=call.scale, starts=known.starts, estimator=config.estimator)
        return sparse_attention(call.q, k, v, index)[0]

    def _pick(self, length: int) -> HeadConfig | None:
        return self._config.pick(length, self._name) if isinstance(self._config, ConfigSet) else self._config

    @staticmethod
    def _dense(call: Call, known: Rows) -> torch.Tensor | None:
        if call.q.shape[2] == call.k.shape[2] and not any(known.starts):
            return None
        # The stock mask would have q_len x kv_len cells; our own dense pass needs none.
        k, v = call.k[:, :, : known.kv_len], call.v[:, :, : known.kv_len]
        return dense_attention(call.q, k, v, scale=call.scale, starts=known.starts)[0]


class Applied:
    """A model under a head config until `remove()`, or until the end of its `with` block."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @property
    def left_alone(self) -> dict[int, str]:
        """Layers met so far that keep the model's own attention, with the reason."""
        return dict(self._hook.left_alone)

    def remove(self) -> None:
        """Takes the config off; the model is exactly as before. A second call does nothing."""
        self._hook.remove()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    model: LoadedModel | Any,
    config: HeadConfig | ConfigSet,
    host: HostProfile | None = None,
    *,
    name: str | None = None,
    force_weights: bool = False,
) -> Applied:
    """Runs `model` with sparse prefill under `config` and dense decode, until the result is removed.

    `model` is a LoadedModel or transformers' own. A config set picks by the length at hand, or by `name`. Prompts
    shorter than `host` says run dense. The first sparse prompt that is shorter than those on which the config was
    calibrated gives a CalibrationWarning, and so does the first longer one.

    Raises ConfigMismatch with every reason when the config does not fit (weights alone can be forced), and ModelError
    when the model cannot be served or already is.
    """
    reasons = config.check(model, force_weights=force_weights)
    if reasons:
        raise ConfigMismatch("the model", reasons)
    bare = getattr(model, "model", model) if hasattr(model, "facts") else model
    return Applied(Hook(bare, SparsePrefill(config, host, name, LengthWarnings())).install())

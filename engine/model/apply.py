"""Putting our attention into a transformers model, and taking it out again without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.attend.attention import dense_attention, sparse_attention
from headscope.engine.attend.index import build_index
from headscope.engine.base.errors import ConfigMismatch, ModelError, OptionError
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.sets import ConfigSet
from headscope.engine.config.warnings import LengthWarnings
from headscope.engine.model import rows as row_maths
from headscope.engine.model.choice import ConfigChoice, Group
from headscope.engine.model.hook import Call, Hook
from headscope.engine.model.modules import tensor_parallel_rank
from headscope.engine.model.rows import Rows

if TYPE_CHECKING:
    from headscope.engine.config.host import HostProfile
    from headscope.engine.model.load import LoadedModel
    from headscope.engine.patterns.families import Pattern


PREFILL_FROM = 64
"""Fewest new tokens on a cache that count as a prefill, such as a new turn. Fewer continue a generation."""


class SparsePrefill:
    """Handler: sparse prefill under a head config, dense decode, dense below the host's measured length.

    A batch whose sequences run under several configs, some of them dense, is served in parts.
    """

    def __init__(
        self,
        config: HeadConfig | ConfigSet,
        host: HostProfile | None,
        name: str | None = None,
        lengths: LengthWarnings | None = None,
        prefill_from: int = PREFILL_FROM,
        prompt_tokens: int | None = None,
    ) -> None:
        self._prefill_from = prefill_from
        self._choice = ConfigChoice(config, host, name, prompt_tokens)
        self._lengths = lengths

    def __call__(self, call: Call) -> torch.Tensor | None:
        q_len = call.q.shape[2]
        if call.left or q_len == 1:
            return None
        rows = call.rows
        if q_len < self._prefill_from and q_len < rows.kv_len:
            return None  # a continuation, such as the guesses of speculative decoding
        guesses = call.guesses if call.guesses < q_len else 0
        prompt_len = rows.kv_len - guesses
        groups = self._choice.groups(rows, prompt_len, rows.kv_len - q_len)
        patterns = [_patterns(call, group.config) for group in groups]
        if not any(patterns):
            return _dense(call, rows)
        if len(groups) == 1:
            return self._sparse(call, rows, groups[0], patterns[0], guesses)
        out = torch.empty((*call.q.shape[:-1], call.v.shape[-1]), dtype=call.q.dtype, device=call.q.device)
        for group, mine in zip(groups, patterns, strict=True):
            own = list(group.sequences)
            part = replace(call, q=call.q[own], k=call.k[own], v=call.v[own])
            own_rows = Rows(tuple(rows.starts[sequence] for sequence in own), rows.kv_len)
            if mine:
                out[own] = self._sparse(part, own_rows, group, mine, guesses)
            else:
                out[own] = _dense_rows(part, own_rows, q_len)
        return out

    def _sparse(self, call: Call, rows: Rows, group: Group, mine: Sequence[Pattern], guesses: int) -> torch.Tensor:
        """Sparse attention of a call whose sequences all run under the group's config; the guesses are dense."""
        assert group.config is not None
        if self._lengths is not None:
            self._lengths.check(group.config, set(group.lengths))
        prompt_len = rows.kv_len - guesses
        q = call.q[:, :, : call.q.shape[2] - guesses]
        k, v = call.k[:, :, :prompt_len], call.wide_v[:, :, :prompt_len]
        index = build_index(q, k, mine, scale=call.scale, starts=rows.starts, estimator=group.config.estimator)
        out = sparse_attention(q, k, v, index)[0][..., : call.v.shape[-1]]
        return torch.cat((out, _dense_rows(call, rows, guesses)), dim=2) if guesses else out


def _patterns(call: Call, config: HeadConfig | None) -> Sequence[Pattern]:
    """The patterns of this rank's heads; none where all of them are dense."""
    if config is None:
        return ()
    patterns, heads = config.patterns(call.layer), call.q.shape[1]
    offset = row_maths.head_offset(heads, len(patterns), tensor_parallel_rank(call.module))
    mine = patterns[offset : offset + heads]
    return () if all(pattern.is_dense for pattern in mine) else mine


def _dense(call: Call, rows: Rows) -> torch.Tensor | None:
    if call.q.shape[2] == call.k.shape[2] and not any(rows.starts):
        return None
    # The stock mask would have q_len x kv_len cells; our own dense pass needs none.
    return _dense_rows(call, rows, call.q.shape[2])


def _dense_rows(call: Call, rows: Rows, last: int) -> torch.Tensor:
    """Dense attention of the `last` rows of a call."""
    q = call.q[:, :, call.q.shape[2] - last :]
    k, v = call.k[:, :, : rows.kv_len], call.wide_v[:, :, : rows.kv_len]
    return dense_attention(q, k, v, scale=call.scale, starts=rows.starts)[0][..., : call.v.shape[-1]]


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
    prefill_from: int = PREFILL_FROM,
    prompt_tokens: int | None = None,
) -> Applied:
    """Runs `model` with sparse prefill under `config` and dense decode, until the result is removed.

    `model` is a LoadedModel or transformers' own. A config set picks by each sequence's length without its padding, and
    by `name`; sequences shorter than `host` says for this batch size run dense. A batch may mix both, and each of its
    sequences gets what it would get alone. The first sparse prompt that is shorter than those on which the config was
    calibrated gives a CalibrationWarning, and so does the first longer one.

    A pass on an empty cache, or without one, is a prefill, and so is one of `prefill_from` new tokens or more on a
    cache, such as a new turn. Fewer continue a generation and run dense: decoding, and the guesses that speculative
    decoding verifies. (Its first pass holds the prompt and guesses: those run dense too.)

    In a prefill in chunks every call decides by the length so far, unless `prompt_tokens` says how long the whole
    prompt is (with padding, of the longest); the first call that changes the config of a sequence gives a ChunkWarning.
    Each chunk builds an index of its own: online patterns choose cells by the chunk's own rows, tri-shape has last rows
    in each, and a `Fraction` is a share of the keys so far, so that early chunks keep less than one pass would. Only
    A-shape and fixed patterns with counts for budgets give what one pass gives.

    Raises ConfigMismatch with every reason when the config does not fit (weights alone can be forced), and ModelError
    when the model cannot be served or already is. Sparse layers have neither gradients nor attention weights; asking
    for them is a ModelError.
    """
    reasons = config.check(model, force_weights=force_weights)
    if reasons:
        raise ConfigMismatch("the model", reasons)
    if prefill_from < 2:
        raise OptionError(f"prefill_from must be at least 2 new tokens, got {prefill_from}")
    bare = getattr(model, "model", model) if hasattr(model, "facts") else model
    handler = SparsePrefill(config, host, name, LengthWarnings(), prefill_from, prompt_tokens)
    hook = Hook(bare, handler, prefill_only=True).install()
    try:
        _check_any_served(config, hook.fixed_reasons)
    except ModelError:
        hook.remove()
        raise
    return Applied(hook)


def _check_any_served(config: HeadConfig | ConfigSet, reasons: dict[int, str | None]) -> None:
    """ModelError when every layer to which the config gives a pattern would stay dense."""
    configs = [member.config for member in config.members] if isinstance(config, ConfigSet) else [config]
    sparse = {layer for each in configs for layer in each.sparse_layers}
    if sparse and all(reasons.get(layer, "no attention") for layer in sparse):
        first = min(sparse)
        raise ModelError(
            f"no layer that this config makes sparse can be served, from layer {first} on "
            f"({reasons.get(first, 'no attention')}): run the model without a config"
        )

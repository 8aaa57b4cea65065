"""Which config a sequence runs under: its own length decides, in a batch, in chunks, and in the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch

from headscope.engine import (
    AShape,
    Dense,
    Fraction,
    HeadConfig,
    HostProfile,
    VerticalSlash,
    apply,
    build_index,
)
from headscope.engine.base.errors import OptionError
from headscope.engine.config.sets import ConfigSet, Member
from headscope.engine.model.choice import ChunkWarning, ConfigChoice
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.rows import Rows
from headscope.engine.runs.answer import next_token_kl

TIGHT, WIDE = AShape(1, 4), AShape(2, 20)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def members(loaded: LoadedModel) -> ConfigSet:
    """Up to 30 tokens dense (no member), to 49 the one, from 50 the other."""
    wide, tight = (HeadConfig.uniform(loaded.facts, pattern) for pattern in (WIDE, TIGHT))
    return ConfigSet((Member(wide, least=31, most=49), Member(tight, least=50)))


def last_logits(loaded: LoadedModel, ids: torch.Tensor, starts: list[int] | None = None) -> torch.Tensor:
    """[B, vocabulary] of the last position of left-padded sequences."""
    mask = torch.ones_like(ids)
    for sequence, start in enumerate(starts or []):
        mask[sequence, :start] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return loaded.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()


def in_chunks(loaded: LoadedModel, ids: torch.Tensor, size: int) -> torch.Tensor:
    """[B, S, vocabulary] of every position, `size` of them at a time."""
    from transformers import DynamicCache

    # The argument was renamed within the supported range.
    argument = "cache" if "cache" in signature(loaded.model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=loaded.model.config)
    with torch.no_grad():
        parts = [loaded.model(input_ids=x, use_cache=True, **{argument: cache}).logits for x in ids.split(size, dim=1)]
    return torch.cat(parts, 1).float()


def test_sequences_are_grouped_by_their_own_length(tiny_llama: LoadedModel) -> None:
    both = members(tiny_llama)
    wide, tight = (member.config for member in both.members)
    groups = ConfigChoice(both, None, None, None).groups(Rows((0, 20, 25, 35, 0), 60), 60)
    assert [(group.config, group.sequences, group.lengths) for group in groups] == [
        (tight, (0, 4), (60, 60)),
        (wide, (1, 2), (40, 35)),
        (None, (3,), (25,)),
    ]
    host = HostProfile(dense_below={2: 50})
    for batch, expected in (((0, 15), [((0,), tight), ((1,), None)]), ((0, 15, 0), [((0, 2), tight), ((1,), wide)])):
        found = ConfigChoice(both, host, None, None).groups(Rows(batch, 60), 60)
        assert [(group.sequences, group.config) for group in found] == expected
    with pytest.raises(OptionError, match="prompt_tokens must be at least 1"):
        ConfigChoice(both, None, None, 0)


@pytest.mark.parametrize("starts", [[0, 20, 35], [20, 0, 0], [40, 45, 31]])
def test_a_padded_batch_gives_every_sequence_what_it_gets_alone(tiny_llama: LoadedModel, starts: list[int]) -> None:
    ids = tokens(3, 60)
    with apply(tiny_llama, members(tiny_llama)):
        together = last_logits(tiny_llama, ids, starts)
        alone = [last_logits(tiny_llama, ids[b : b + 1, start:])[0] for b, start in enumerate(starts)]
    assert (together - torch.stack(alone)).abs().max() < 1e-4
    dense = last_logits(tiny_llama, ids, starts)
    for sequence, start in enumerate(starts):
        same = (together[sequence] - dense[sequence]).abs().max() < 1e-4
        assert same == (60 - start <= 30), "no range of the set holds it, so it is dense"


def test_the_hosts_length_is_asked_for_each_sequence(tiny_llama: LoadedModel) -> None:
    config, ids, starts = HeadConfig.uniform(tiny_llama.facts, TIGHT), tokens(2, 60), [0, 25]
    with apply(tiny_llama, config, HostProfile(dense_below={2: 40})):
        together = last_logits(tiny_llama, ids, starts)
    with apply(tiny_llama, config):
        long = last_logits(tiny_llama, ids[:1])
    short = last_logits(tiny_llama, ids[1:, 25:])
    assert (together[:1] - long).abs().max() < 1e-4 and (together[1:] - short).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["Qwen3", "Phi3"])
def test_generation_from_a_mixed_batch_goes_on_as_alone(make_tiny: Callable[..., LoadedModel], family: str) -> None:
    loaded = make_tiny(family, **({"sliding_window": None} if family == "Phi3" else {}))
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    ids[1, :20], mask[1, :20] = 0, 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with apply(loaded, members(loaded)):
        together = loaded.model.generate(ids, attention_mask=mask, **options)[:, 60:]
        for sequence, start in enumerate((0, 20)):
            one = ids[sequence : sequence + 1, start:]
            alone = loaded.model.generate(one, attention_mask=torch.ones_like(one), **options)
            assert torch.equal(alone[0, 60 - start :], together[sequence])


def test_chunks_decide_by_the_whole_prompt_where_it_is_known(tiny_llama: LoadedModel) -> None:
    both, ids = members(tiny_llama), tokens(1, 70)
    with apply(tiny_llama, both, prefill_from=2):
        whole = in_chunks(tiny_llama, ids, 70)
    with (
        warnings.catch_warnings(action="error", category=ChunkWarning),
        apply(tiny_llama, both, prefill_from=2, prompt_tokens=70),
    ):
        known = in_chunks(tiny_llama, ids, 25)
    assert (known - whole).abs().max() < 1e-4
    with apply(tiny_llama, both, prefill_from=2), pytest.warns(ChunkWarning, match="prompt_tokens") as found:
        unknown = in_chunks(tiny_llama, ids, 25)
        in_chunks(tiny_llama, ids, 25)
    assert len(found) == 1 and "The first 25 tokens" in str(found[0].message)
    assert (unknown - whole).abs().max() > 1e-4, "earlier chunks ran dense, and under the other config"
    host = HostProfile(dense_below={1: 40})
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT)
    with apply(tiny_llama, config, host, prefill_from=2), pytest.warns(ChunkWarning, match="or dense"):
        in_chunks(tiny_llama, ids, 30)
    with warnings.catch_warnings(action="error", category=ChunkWarning), apply(tiny_llama, config, prefill_from=2):
        in_chunks(tiny_llama, ids, 30)


def test_a_share_in_chunks_keeps_less_early_and_as_much_in_the_last() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 400, 16), torch.randn(1, 1, 400, 16)
    share, count = AShape(2, Fraction(0.1)), AShape(2, 40)
    for pattern in (share, count):
        whole = build_index(q, k, [pattern], tile=1).requested_mask()[0, 0]
        for stop in (100, 200, 300, 400):
            part = build_index(q[:, :, stop - 100 : stop], k[:, :, :stop], [pattern], tile=1).requested_mask()[0, 0]
            kept, one_pass = int(part.sum()), int(whole[stop - 100 : stop].sum())
            assert kept == one_pass if stop == 400 or pattern is count else kept < one_pass


@pytest.mark.parametrize("pattern", [AShape(4, Fraction(0.25)), VerticalSlash(Fraction(0.1), Fraction(0.25)), Dense()])
def test_a_share_in_chunks_stays_near_one_pass(tiny_llama: LoadedModel, pattern: Any) -> None:
    """KL of the next token against dense, which the tiny model's flat logits keep small: stated as at most 0.01."""
    ids = tokens(1, 512)[:, : tiny_llama.facts.max_position or 512]
    dense = last_logits(tiny_llama, ids)[0]
    with apply(tiny_llama, HeadConfig.uniform(tiny_llama.facts, pattern)):
        for sparse in (last_logits(tiny_llama, ids)[0], in_chunks(tiny_llama, ids, 128)[0, -1]):
            assert next_token_kl(dense, sparse) <= (1e-9 if pattern == Dense() else 0.01)

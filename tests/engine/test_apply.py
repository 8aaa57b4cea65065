"""`apply`: the model under a config, everything that a cache or a batch does to it, and leaving no trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headscope.engine import AShape, BlockSparse, Dense, HeadConfig, HostProfile, VerticalSlash, apply
from headscope.engine.base.errors import ConfigMismatch, ModelError
from headscope.engine.config.file import HeadEntry
from headscope.engine.config.sets import ConfigSet, Member
from headscope.engine.config.warnings import CalibrationWarning
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.modules import attention_modules
from headscope.engine.model.rows import Rows, head_offset, rows_behind

EVERYTHING = VerticalSlash(vertical=4096, slash=4096)
TIGHT = AShape(sink=1, window=4)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(loaded: LoadedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(input_ids=ids, **options).logits.float()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Glm4", "Gemma3"])
def test_full_budgets_equal_dense_and_undo_is_exact(make_tiny: Callable[..., LoadedModel], family: str) -> None:
    settings: dict[str, Any] = {"sliding_window": None} if family in ("Mistral", "Phi3") else {}
    loaded = _gemma3(make_tiny) if family == "Gemma3" else make_tiny(family, **settings)
    ids = tokens(2, 70)
    before = logits(loaded, ids)
    with apply(loaded, HeadConfig.uniform(loaded.facts, EVERYTHING)):
        full = logits(loaded, ids)
    with apply(loaded, HeadConfig.uniform(loaded.facts, TIGHT)) as active:
        tight = logits(loaded, ids)
    assert (full - before).abs().max() < 1e-4
    assert (tight - before).abs().max() > 1e-3
    assert torch.equal(logits(loaded, ids), before)
    assert set(active.left_alone) == ({0} if family == "Gemma3" else set())


def _gemma3(make_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    """Its first layer slides."""
    import transformers

    from headscope.engine.config.facts import facts_of

    base = make_tiny("Llama").model.config.to_dict()
    keep = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    keep += ["num_key_value_heads", "head_dim", "max_position_embeddings", "pad_token_id", "eos_token_id"]
    torch.manual_seed(0)
    types = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8}
    config = transformers.Gemma3TextConfig(**{key: base[key] for key in keep}, query_pre_attn_scalar=16, **types)
    model = transformers.Gemma3ForCausalLM(config).eval()
    for module in attention_modules(model):
        module.scaling = 4.0  # its queries and keys are normalised, so unevenness must come from the scale
    facts = facts_of(model, name="tiny Gemma3")
    return LoadedModel(model, None, facts.name, facts.fingerprint, facts)


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_layers_that_may_not_be_touched_stay_exact(make_tiny: Callable[..., LoadedModel], family: str) -> None:
    settings: dict[str, Any] = {"sliding_window": 8, "attn_implementation": "eager"}
    if family == "GptOss":
        settings |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    loaded = make_tiny(family, **settings)
    ids = tokens(2, 40)
    before = logits(loaded, ids)
    with pytest.raises(ModelError, match="no layer that this config makes sparse can be served"):
        apply(loaded, HeadConfig.uniform(loaded.facts, TIGHT))
    with apply(loaded, HeadConfig.uniform(loaded.facts, Dense())) as active:
        during = logits(loaded, ids)
    assert set(active.left_alone) == {0, 1, 2}
    assert torch.equal(during, before)
    assert torch.equal(logits(loaded, ids), before)


def test_mistral_with_a_sliding_window_is_left_alone(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny("Mistral", sliding_window=8)
    ids = tokens(1, 40)
    before = logits(loaded, ids)
    with apply(loaded, HeadConfig.uniform(loaded.facts, TIGHT)) as active:
        assert torch.equal(logits(loaded, ids), before)
    assert set(active.left_alone) == {0, 1, 2}


def test_left_padding_and_batch_change_nothing(tiny_llama: LoadedModel) -> None:
    long, short = tokens(1, 400, 1), tokens(1, 317, 2)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 83, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :83] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    config = HeadConfig.uniform(tiny_llama.facts, VerticalSlash(vertical=6, slash=9, sink=1, local=4))
    with apply(tiny_llama, config):
        alone = logits(tiny_llama, short)
        together = logits(tiny_llama, batch, attention_mask=mask, position_ids=positions)
        assert (together[0] - logits(tiny_llama, long)[0]).abs().max() < 1e-5
    assert (together[1, 83:] - alone[0]).abs().max() < 1e-5
    assert (alone - logits(tiny_llama, short)).abs().max() > 1e-3


def test_right_padding_is_refused(tiny_llama: LoadedModel) -> None:
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, -3:] = 0
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT)
    with apply(tiny_llama, config), pytest.raises(ModelError, match="padding_side"):
        logits(tiny_llama, tokens(1, 20), attention_mask=mask)


def test_packed_sequences_are_refused(tiny_llama: LoadedModel) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT)
    with apply(tiny_llama, config), pytest.raises(ModelError, match="packed"):
        logits(tiny_llama, tokens(1, 8), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("pattern", [TIGHT, Dense()], ids=["a-shape", "dense"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_chunked_prefill_and_decode_equal_one_pass(tiny_llama: LoadedModel, pattern: Any, static: bool) -> None:
    from transformers import DynamicCache, StaticCache

    model = tiny_llama.model
    ids = tokens(1, 50)
    config = HeadConfig.uniform(tiny_llama.facts, pattern)
    argument = _cache_argument(model)
    with apply(tiny_llama, config, prefill_from=2), torch.no_grad():
        whole = logits(tiny_llama, ids)
        cache = StaticCache(config=model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
        parts = [
            model(input_ids=chunk, use_cache=True, **{argument: cache}).logits
            for chunk in ids.split([20, 13, 17], dim=1)
        ]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_full_budgets_gives_the_dense_tokens(tiny_llama: LoadedModel, cache: str, padded: bool) -> None:
    ids = tokens(2, 30)
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :11] = 0
        mask[1, :11] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    if cache == "static":
        options["cache_implementation"] = "static"
    expected = tiny_llama.model.generate(ids, **options)
    with apply(tiny_llama, HeadConfig.uniform(tiny_llama.facts, EVERYTHING)):
        got = tiny_llama.model.generate(ids, **options)
    assert torch.equal(got, expected)


def test_decode_is_dense(tiny_llama: LoadedModel) -> None:
    """One new token after a dense prefill has dense logits, however tight the config."""
    model, argument = tiny_llama.model, _cache_argument(tiny_llama.model)
    ids = tokens(1, 40)

    def step(config: HeadConfig | None) -> torch.Tensor:
        with torch.no_grad():
            result = model(input_ids=ids[:, :-1], use_cache=True)
            cache = result["cache" if "cache" in result else "past_key_values"]
            if config is None:
                return model(input_ids=ids[:, -1:], use_cache=True, **{argument: cache}).logits
            with apply(tiny_llama, config):
                return model(input_ids=ids[:, -1:], use_cache=True, **{argument: cache}).logits

    assert torch.equal(step(HeadConfig.uniform(tiny_llama.facts, TIGHT)), step(None))


def test_each_head_gets_its_own_pattern(tiny_llama: LoadedModel) -> None:
    ids = tokens(1, 60)
    dense = HeadConfig.uniform(tiny_llama.facts, Dense())
    base = logits(tiny_llama, ids)
    results = []
    for head in range(6):
        with apply(tiny_llama, dense.with_heads({(1, head): HeadEntry(TIGHT)})):
            results.append(logits(tiny_llama, ids))
    for head, changed in enumerate(results):
        assert (changed - base).abs().max() > 1e-5, head
        assert all(not torch.equal(changed, other) for other in results[:head])


def test_two_models_at_once_keep_apart(make_tiny: Callable[..., LoadedModel]) -> None:
    first, second = make_tiny("Llama"), make_tiny("Llama", num_hidden_layers=2)
    ids = tokens(1, 40)
    plain = logits(second, ids)
    tight = apply(first, HeadConfig.uniform(first.facts, TIGHT))
    assert torch.equal(logits(second, ids), plain)
    with apply(second, HeadConfig.uniform(second.facts, BlockSparse(1, 16))):
        blocks = logits(second, ids)
        tight.remove()
        assert torch.equal(logits(second, ids), blocks)
    assert not torch.equal(blocks, plain)
    assert torch.equal(logits(second, ids), plain)


def test_nested_use_is_refused_and_leaves_the_first_working(tiny_llama: LoadedModel) -> None:
    ids = tokens(1, 30)
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT)
    with apply(tiny_llama, config):
        tight = logits(tiny_llama, ids)
        with pytest.raises(ModelError, match="already"):
            apply(tiny_llama, config)
        assert torch.equal(logits(tiny_llama, ids), tight)


def test_remove_twice_and_after_an_error(tiny_llama: LoadedModel) -> None:
    ids = tokens(1, 30)
    before = logits(tiny_llama, ids)
    implementation = tiny_llama.model.config._attn_implementation
    applied = apply(tiny_llama, HeadConfig.uniform(tiny_llama.facts, TIGHT))
    applied.remove()
    applied.remove()
    with pytest.raises(RuntimeError, match="boom"), apply(tiny_llama, HeadConfig.uniform(tiny_llama.facts, TIGHT)):
        raise RuntimeError("boom")
    assert tiny_llama.model.config._attn_implementation == implementation
    assert torch.equal(logits(tiny_llama, ids), before)


def test_a_config_of_another_model_is_refused_with_all_reasons(
    tiny_llama: LoadedModel, make_tiny: Callable[..., LoadedModel]
) -> None:
    other = make_tiny("Qwen2", num_hidden_layers=2)
    with pytest.raises(ConfigMismatch, match=r"(?s)architecture.*layers.*weights"):
        apply(tiny_llama, HeadConfig.uniform(other.facts, TIGHT))
    assert not hasattr(attention_modules(tiny_llama.model)[0], "_headscope_hook")


def test_short_prompts_run_dense_where_the_host_says_so(tiny_llama: LoadedModel) -> None:
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT)
    short, long = tokens(1, 30), tokens(1, 50)
    host = HostProfile(dense_below={1: 40})
    with apply(tiny_llama, config, host):
        below, above = logits(tiny_llama, short), logits(tiny_llama, long)
        batch = logits(tiny_llama, tokens(2, 30))
    assert torch.equal(below, logits(tiny_llama, short))
    assert not torch.equal(above, logits(tiny_llama, long))
    assert not torch.equal(batch, logits(tiny_llama, tokens(2, 30))), "an unmeasured batch size is never dense"


def test_a_prompt_outside_the_calibrated_lengths_is_one_warning(tiny_llama: LoadedModel) -> None:
    """One for those too short and one for those too long, of all layers, steps and prompts."""
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT, provenance={"lengths": [40, 60]})

    def said(lengths: tuple[int, ...], config: HeadConfig | ConfigSet, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found, apply(tiny_llama, config, **options):
            warnings.simplefilter("always")
            for length in lengths:
                ids = tokens(1, length)
                mask = torch.ones_like(ids)
                tiny_llama.model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        return [str(one.message) for one in found if one.category is CalibrationWarning]

    assert said((40, 50, 60), config) == []
    short, long = said((39, 20, 61, 70), config)
    assert "40 to 60" in short and "39" in short and "61" in long
    assert said((39,), config, host=HostProfile(dense_below={1: 40})) == [], "it ran dense"
    assert said((39,), HeadConfig.uniform(tiny_llama.facts, TIGHT)) == [], "no lengths to be outside of"
    other = HeadConfig.uniform(tiny_llama.facts, TIGHT, provenance={"lengths": [10]})
    both = ConfigSet((Member(other, most=19), Member(config, least=20)))
    assert len(said((10, 45, 9, 30), both)) == 2


def test_each_row_of_a_batch_counts_without_its_padding(tiny_llama: LoadedModel) -> None:
    config = HeadConfig.uniform(tiny_llama.facts, TIGHT, provenance={"lengths": [50, 60]})
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :20] = 0
    with apply(tiny_llama, config), pytest.warns(CalibrationWarning, match="40") as found:
        logits(tiny_llama, tokens(2, 60), attention_mask=mask)
    assert len(found) == 1


def test_unknown_arguments_keep_the_models_own_attention(tiny_llama: LoadedModel) -> None:
    ids = tokens(1, 30)
    before = logits(tiny_llama, ids)
    module = attention_modules(tiny_llama.model)[0]
    forward = module.forward
    module.forward = lambda *args, **options: forward(*args, **options, position_bias=torch.zeros(1))
    try:
        with apply(tiny_llama, HeadConfig.uniform(tiny_llama.facts, TIGHT)) as active, pytest.warns(UserWarning):
            logits(tiny_llama, ids)
    finally:
        del module.forward
    assert "position_bias" in active.left_alone[0]
    assert torch.equal(logits(tiny_llama, ids), before)


@pytest.mark.parametrize(
    ("local", "total", "rank", "offset"), [(9, 9, 2, 0), (3, 9, 0, 0), (3, 9, 1, 3), (3, 9, 2, 6), (8, 32, 3, 24)]
)
def test_head_offset(local: int, total: int, rank: int, offset: int) -> None:
    assert head_offset(local, total, rank) == offset


@pytest.mark.parametrize(("local", "total", "rank"), [(4, 9, 1), (3, 9, 3), (0, 9, 0)])
def test_head_offset_refuses_what_cannot_be(local: int, total: int, rank: int) -> None:
    with pytest.raises(ModelError):
        head_offset(local, total, rank)


def test_rows_behind_padding() -> None:
    padding = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert rows_behind(padding, 2, 4) == Rows((0, 2), 4)
    assert rows_behind(None, 2, 7) == Rows((0, 0), 7)
    with pytest.raises(ModelError, match="padding_side"):
        rows_behind(padding, 2, 5)


def _cache_argument(model: Any) -> str:
    from inspect import signature

    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"

"""Unusual calls of a model under `apply`: each works or is refused in one sentence, and undo is exact in all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headscope.engine import AShape, Dense, HeadConfig, VerticalSlash, apply
from headscope.engine.base.errors import ModelError, OptionError
from headscope.engine.config.facts import facts_of
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.modules import attention_modules, check_tensor_parallel, tensor_parallel_rank
from tests.engine.test_apply import logits, tokens

TIGHT = AShape(sink=1, window=4)


@pytest.fixture
def llama(make_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return make_tiny("Llama")


def tight(loaded: LoadedModel, pattern: Any = TIGHT) -> HeadConfig:
    return HeadConfig.uniform(loaded.facts, pattern)


def repeated(times: int = 20) -> torch.Tensor:
    """A prompt that repeats itself, so that prompt lookup finds guesses at once."""
    return torch.tensor([[5, 9, 17, 23, 41] * times])


@pytest.mark.parametrize("pattern", [TIGHT, VerticalSlash(vertical=2, slash=2, sink=1, local=1)], ids=["a", "vs"])
@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_speculative_decoding_gives_the_same_text(
    llama: LoadedModel, make_tiny: Callable[..., LoadedModel], pattern: Any, how: str
) -> None:
    speculation: dict[str, Any] = {"prompt_lookup_num_tokens": 6}
    if how == "assistant":
        speculation = {"assistant_model": make_tiny("Llama", num_hidden_layers=2).model}
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    ids = repeated()
    options["attention_mask"] = torch.ones_like(ids)
    with apply(llama, tight(llama, pattern)):
        plain = llama.model.generate(ids, **options)
        speculative = llama.model.generate(ids, **options, **speculation)
    assert torch.equal(plain, speculative)
    with apply(llama, tight(llama, pattern)):
        sparse = logits(llama, ids)
    assert not torch.equal(sparse, logits(llama, ids)), "the patterns change nothing here"


def test_few_new_tokens_on_a_cache_run_dense_and_a_new_turn_does_not(llama: LoadedModel) -> None:
    ids = tokens(1, 120)

    def second_turn(first: int, config: HeadConfig | None, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            cache = llama.model(ids[:, :first], use_cache=True)
            name = "cache" if "cache" in cache else "past_key_values"
            if config is None:
                return llama.model(ids[:, first:], **{name: cache[name]}).logits
            with apply(llama, config, **options):
                return llama.model(ids[:, first:], **{name: cache[name]}).logits

    config = tight(llama)
    assert torch.equal(second_turn(57, config), second_turn(57, None)), "63 new tokens continue"
    assert not torch.equal(second_turn(56, config), second_turn(56, None)), "64 are a new turn"
    assert not torch.equal(second_turn(110, config, prefill_from=10), second_turn(110, None))
    with pytest.raises(OptionError, match="at least 2"):
        apply(llama, config, prefill_from=1)


def test_gradients_are_refused_on_the_way_back_only(llama: LoadedModel) -> None:
    ids = tokens(1, 30)
    with apply(llama, tight(llama)):
        with torch.no_grad():
            quiet = llama.model(ids).logits
        loud = llama.model(ids).logits
        assert torch.equal(loud, quiet)
        with pytest.raises(ModelError, match="no gradients"):
            loud.sum().backward()
    llama.model(ids).logits.sum().backward()
    llama.model.zero_grad(set_to_none=True)


def test_two_models_that_share_one_config(llama: LoadedModel) -> None:
    other = type(llama.model)(llama.model.config).eval()
    ids = tokens(1, 30)
    facts = facts_of(other)
    implementation = llama.model.config._attn_implementation
    with torch.no_grad():
        before, mine = other(ids).logits, logits(llama, ids)
        first = apply(llama, tight(llama))
        assert torch.equal(other(ids).logits, before), "the other one is not served"
        second = apply(other, HeadConfig.uniform(facts, TIGHT))
        sparse = other(ids).logits
        first.remove()
        assert torch.equal(other(ids).logits, sparse) and not torch.equal(sparse, before)
        assert torch.equal(logits(llama, ids), mine)
        second.remove()
        assert torch.equal(other(ids).logits, before)
    assert llama.model.config._attn_implementation == implementation


def test_copies_and_pickles_are_refused_while_a_config_is_on(llama: LoadedModel) -> None:
    for make in (copy.deepcopy, pickle.dumps):
        with apply(llama, tight(llama)), pytest.raises(ModelError, match="take the config off first"):
            make(llama.model)
        make(llama.model)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_attention_weights_are_refused(make_tiny: Callable[..., LoadedModel], base: str) -> None:
    loaded = make_tiny("Llama", attn_implementation=base)
    with apply(loaded, tight(loaded)), pytest.raises(ModelError, match="no attention weights"):
        loaded.model(tokens(1, 20), output_attentions=True)
    if base == "eager":
        assert loaded.model(tokens(1, 20), output_attentions=True).attentions[0] is not None


def test_autocast(llama: LoadedModel) -> None:
    ids = tokens(1, 60)
    everything = VerticalSlash(vertical=4096, slash=4096)
    with torch.autocast("cpu", torch.bfloat16):
        dense = logits(llama, ids)
        with apply(llama, tight(llama, everything)) as active:
            full = logits(llama, ids)
        with apply(llama, tight(llama)):
            sparse = logits(llama, ids)
        assert torch.equal(logits(llama, ids), dense)
    assert active.left_alone == {}
    assert (full - dense).abs().max() < 0.05 * dense.abs().max() < (sparse - dense).abs().max() * 20


def test_attention_without_parameters(llama: LoadedModel) -> None:
    """Quantised linears keep their weights as buffers."""
    ids = tokens(1, 30)
    with apply(llama, tight(llama)):
        expected = logits(llama, ids)
    for module in attention_modules(llama.model):
        for linear in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
            weight = linear.weight.data
            del linear.weight
            linear.register_buffer("weight", weight)
    assert tensor_parallel_rank(attention_modules(llama.model)[0]) == 0
    with apply(llama, tight(llama)):
        assert torch.equal(logits(llama, ids), expected)


@pytest.mark.slow
def test_a_compiled_model(llama: LoadedModel) -> None:
    ids = tokens(2, 40)
    padding = torch.ones_like(ids)
    padding[1, :7] = 0
    calls: dict[str, dict[str, Any]] = {"plain": {}, "no cache": {"use_cache": False}, "padded": {}}
    calls["padded"]["attention_mask"] = padding
    with apply(llama, tight(llama)), torch.no_grad():
        expected = {name: llama.model(ids, **options).logits for name, options in calls.items()}
    compiled = torch.compile(llama.model, backend="eager")
    before = logits(llama, ids)
    with apply(compiled, tight(llama)) as active, torch.no_grad():
        for name, options in calls.items():
            torch.testing.assert_close(compiled(ids, **options).logits[:, 7:], expected[name][:, 7:], msg=name)
        forward = torch.compile(llama.model.forward, backend="eager")
        torch.testing.assert_close(forward(ids, use_cache=False).logits, expected["no cache"])
    assert active.left_alone == {}
    assert torch.equal(logits(llama, ids), before)


def test_a_compiled_model_has_the_facts_of_its_model(llama: LoadedModel) -> None:
    compiled = torch.compile(llama.model, backend="eager")
    assert facts_of(compiled) == facts_of(llama.model)
    with apply(compiled, tight(llama)):
        pass


def test_a_pipeline_stage_cannot_know_its_fingerprint(llama: LoadedModel) -> None:
    llama.model._pp_stage = SimpleNamespace()
    config = tight(llama)
    assert [reason.partition(":")[0] for reason in config.check(llama.model)] == ["weights"]
    assert "not in memory" in config.check(llama.model)[0]
    assert config.check(llama.model, force_weights=True) == []


def test_what_a_pipeline_stage_passes_on_is_no_argument(llama: LoadedModel) -> None:
    """Its forward binds extra arguments under their own name, `kwargs`, and hands that to every layer."""
    with apply(llama, tight(llama)) as active:
        logits(llama, tokens(1, 20), kwargs={})
    assert active.left_alone == {}


@pytest.mark.parametrize(("ranks", "fits"), [(2, True), (3, False), (6, False)])
def test_heads_that_do_not_divide_are_refused_up_front(llama: LoadedModel, ranks: int, fits: bool) -> None:
    mesh = SimpleNamespace(mesh_dim_names=("tp",), size=lambda dimension: ranks)
    modules = attention_modules(llama.model)
    for module in modules:
        next(module.parameters()).device_mesh = mesh
    if fits:
        check_tensor_parallel(modules, 6)
        return
    with pytest.raises(ModelError, match=f"6 query heads and 2 KV heads do not divide over {ranks}"):
        check_tensor_parallel(modules, 6)


def test_all_dense_asks_nothing_of_decoding(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One new token goes straight to the stock attention: no hook, no masks of ours, no extra tensor."""
    from headscope.engine.model.hook import Hook

    with apply(llama, tight(llama, Dense())), torch.no_grad():
        first = llama.model(tokens(1, 20), use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"
        monkeypatch.setattr(Hook, "run", lambda *_: pytest.fail("the hook ran"))
        llama.model(tokens(1, 1), **{name: first[name]})

"""The mask function under our attention: what it hands out is what the stock one would have made, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headscope.engine import AShape, Dense, HeadConfig, VerticalSlash, apply
from headscope.engine.base.errors import ModelError
from headscope.engine.config.facts import facts_of
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.masks import CausalMask, mask_function
from headscope.engine.model.modules import attention_modules
from headscope.engine.model.rows import Rows
from tests.engine.test_apply import logits, tokens

TIGHT = AShape(sink=1, window=4)
PADDING = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])


def both(base: str, **call: Any) -> tuple[Any, Any]:
    """Our mask and the stock one for the same call."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6} | call
    return mask_function(base)(**sizes), ALL_MASK_ATTENTION_FUNCTIONS[base](**sizes)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"attention_mask": PADDING},
        {"allow_is_causal_skip": False},
        {"kv_length": 9},
        {"kv_length": 9, "q_offset": 2},
        {"kv_length": 9, "q_offset": 3, "attention_mask": torch.ones(2, 9, dtype=torch.bool)},
        {"q_length": 1, "q_offset": 5, "attention_mask": PADDING},
        {"kv_offset": 2, "q_offset": 2},
    ],
)
def test_equal_to_the_stock_mask(base: str, call: dict[str, Any]) -> None:
    ours, stock = both(base, **call)
    if stock is None:
        assert ours is None
        return
    assert ours.shape == stock.shape and ours.dtype == stock.dtype and ours.device == stock.device
    assert torch.equal(ours + 0 if base == "eager" else ours & True, stock)
    assert torch.equal(ours[:, :, :, :4], stock[:, :, :, :4]) and type(ours[:, :, :, :4]) is torch.Tensor


def test_prefix_and_sliding_masks_are_the_stock_tensor() -> None:
    from transformers.masking_utils import causal_mask_function, or_masks, sliding_window_causal_mask_function

    def prefix(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return kv < 3

    for function, size in ((or_masks(causal_mask_function, prefix), None), (sliding_window_causal_mask_function(2), 2)):
        ours, stock = both("eager", mask_function=function, local_size=size)
        assert type(ours) is torch.Tensor and torch.equal(ours, stock)


def test_an_untouched_mask_knows_its_rows_and_a_changed_one_says_so() -> None:
    mask, _ = both("sdpa", kv_length=9, q_offset=0, attention_mask=PADDING)
    assert isinstance(mask, CausalMask) and mask.rows() == Rows((0, 2), 6) and not mask.changed
    assert mask.to("cpu") is mask and mask.to(mask.dtype) is mask and mask.to(device="cpu", dtype=torch.bool) is mask
    assert type(mask.to(torch.float32)) is torch.Tensor and type(mask.to(dtype=torch.float32)) is torch.Tensor
    elsewhere = mask.to("meta", non_blocking=True)
    assert isinstance(elsewhere, CausalMask) and elsewhere.device.type == "meta" and elsewhere.rows() == mask.rows()
    mask[:, :, 0, 5] = True
    assert mask.changed and bool(mask.stock()[0, 0, 0, 5])


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_layers_that_are_left_alone_keep_their_mask(make_tiny: Callable[..., LoadedModel], base: str) -> None:
    """All layers of these are left alone for a reason that has nothing to do with sliding windows."""
    loaded = make_tiny("Llama", attn_implementation=base)
    for module in attention_modules(loaded.model):
        module.attn_logit_softcapping = 50.0  # its own attention takes no notice of it
    facts = facts_of(loaded.model)
    ids = tokens(2, 40)
    padding = torch.ones_like(ids)
    padding[1, :7] = 0
    before, padded = logits(loaded, ids), logits(loaded, ids, attention_mask=padding)
    with apply(loaded.model, HeadConfig.uniform(facts, Dense())) as active:
        assert torch.equal(logits(loaded, ids), before)
        assert torch.equal(logits(loaded, ids, attention_mask=padding), padded)
        cache = loaded.model(ids[:, :25], use_cache=True)
        name = "cache" if "cache" in cache else "past_key_values"
        with torch.no_grad():
            second = loaded.model(ids[:, 25:], **{name: cache[name]}).logits
    assert (second - before[:, 25:]).abs().max() < 1e-4
    assert set(active.left_alone.values()) == {"soft-capped logits"}


def test_arguments_that_the_stock_attention_ignores_change_nothing(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny("Mixtral", sliding_window=None, num_local_experts=2, num_experts_per_tok=1)
    with apply(loaded, HeadConfig.uniform(loaded.facts, TIGHT)) as active:
        logits(loaded, tokens(1, 30), output_router_logits=True)
    assert active.left_alone == {}


def test_latent_attention_is_served_with_smaller_values() -> None:
    import transformers

    from tests.helpers.tiny_families import tiny_model

    model = tiny_model(transformers.DeepseekV3Config, "sdpa", qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    facts = facts_of(model)
    assert facts.head_dim == 24
    ids = tokens(1, 50)
    with torch.no_grad():
        dense = model(ids).logits
        with apply(model, HeadConfig.uniform(facts, VerticalSlash(vertical=4096, slash=4096))) as active:
            full = model(ids).logits
    assert active.left_alone == {} and (full - dense).abs().max() < 1e-4 * dense.abs().max()


def test_other_numbers_of_heads_are_left_alone(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny("Llama")
    loaded.model.config.num_attention_heads = 12
    facts = facts_of(loaded.model)
    with apply(loaded.model, HeadConfig.uniform(facts, TIGHT)) as active:
        logits(loaded, tokens(1, 20))
    assert set(active.left_alone.values()) == {"6 query heads where the model has 12"}


def test_models_without_attention_are_refused_in_a_sentence() -> None:
    import transformers

    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ModelError, match="attention heads"):
        facts_of(model)

"""A tiny model of any causal-LM type of transformers: its default config with every size shrunk by name."""

from __future__ import annotations

import re
from typing import Any

import torch

LAYERS = 4
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCABULARY = 64, 4, 2, 16, 99

_SIZES: tuple[tuple[str, int], ...] = (
    # The first expression that matches the whole name of a whole-number setting gives its value.
    (r"(num_hidden_layers|num_layers|n_layers?|(num_)?(decoder|encoder)_layers|n_blocks)", LAYERS),
    (r"(depth|num_nextn_predict_layers|num_mtp_.*)", 1),
    (r"(vocab_size|.*_vocab_size|vocab_size_.*|type_vocab_size)", _VOCABULARY),
    (r"(num_attention_heads(_per_layer)?|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads)", _HEADS),
    (r"(num_(key_value|kv)_heads|multi_query_group_num|n_kv_heads|num_(global|swa)_key_value_heads)", _KV_HEADS),
    (r"(head_dim|.*_head_dim|d_kv|attention_head_dim|d_head|head_size|rotary_dim)", _HEAD_DIM),
    (r"(hidden_size|d_model|n_embd|n_embed|word_embed_proj_dim|dim|embed_dim|embedding_size)", _WIDTH),
    (r"(.*intermediate_size.*|d_ff|ffn_dim|n_inner|.*ffn_dim|ffn_hidden_size|d_inner|dim_feedforward)", _WIDTH),
    (r"(.*hidden_size.*|lru_width)", _WIDTH),
    (r"(mamba_n_heads|n_mamba_heads|mamba_num_heads|num_mamba_heads)", 8),
    (r"(mamba_d_head|mamba_head_dim|mamba_headdim|mamba_d_state|mamba_d_ssm)", 16),
    (r"(expand)", 1),
    (r"(.*chunk_size)", 16),
    (r"(.*lora_rank|.*rank|.*_dim_rank)", 16),
    (r"(num_experts_per_tok|moe_top_?k|top_k_experts|num_selected_experts|moe_k|experts_per_token)", 2),
    (r"(n_group|topk_group|num_expert_group.*|n_groups|mamba_n_groups|first_k_dense_replace)", 1),
    (r"(.*num_experts|num_local_experts|n_routed_experts|num_.*_experts|moe_num_.*|n_shared_experts)", 4),
    (r"(max_position_embeddings|n_positions|max_sequence_length|seq_length|n_ctx)", 256),
    (r"(sliding_window|attention_chunk_size|local_attention_window|window_size|attention_window)", 16),
)


_WHEN_ABSENT = {"head_dim": _HEAD_DIM, "num_key_value_heads": _HEADS}
"""Sizes that some configs leave open although their models need them."""

_DERIVED = {"transformers_version", "model_type", "architectures", "layers_block_type"}

_SHARED = ["linear_attention", "linear_attention", "hybrid", "hybrid"]
_HYBRID = ["linear_attention", "full_attention"] * 2

_SETTINGS: dict[str, dict[str, Any]] = {
    # What shrinking by name cannot know.
    "bailing_hybrid": {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"num_experts": 8, "num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba": {"layer_types": _SHARED, "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_expand": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
}


def tiny_config(config_class: Any, **settings: Any) -> Any:
    """The config of a type, with layers, widths, heads and vocabulary shrunk; `settings` have the last word."""
    small = _shrunk(config_class().to_dict())
    return config_class(**{**small, **_SETTINGS.get(config_class.model_type, {}), **settings})


def tiny_model(config_class: Any, implementation: str, **settings: Any) -> Any:
    """A seeded random model in evaluation mode, its attention uneven enough for patterns to matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(config_class, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and re.search(r"(q_proj|k_proj|qkv|c_attn|query|key)", name):
            parameter.data.mul_(8)
    return model


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    chosen = _representatives(kinds)
    small = {name: _small(name, value) for name, value in values.items() if name not in _DERIVED}
    for name, value in small.items():
        if isinstance(value, list) and chosen and len(value) == len(kinds):
            small[name] = [value[layer] for layer in chosen]
    if values.get("per_layer_config"):
        overrides = {int(layer): _shrunk(each) for layer, each in values["per_layer_config"].items()}
        small["per_layer_config"] = {i: overrides[layer] for i, layer in enumerate(chosen) if layer in overrides}
    if "kv_lora_rank" in values:  # latent attention has as many keys as queries, and derives its head size
        small |= {"num_key_value_heads": _HEADS}
        small.pop("head_dim", None)
    return small


def _representatives(kinds: list[str]) -> list[int]:
    """Original numbers of the layers to keep: one of each kind, then those that come next."""
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:LAYERS]
    others = [layer for layer in range(len(kinds)) if layer not in firsts]
    return sorted(firsts + others[: LAYERS - len(firsts)])


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict) and name.endswith("_config"):
        return _shrunk(value) | ({"model_type": value["model_type"]} if "model_type" in value else {})
    if isinstance(value, list):
        return [_small(name, item) for item in value]
    if value is None:
        return _WHEN_ABSENT.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("token_id"):
        return min(value, _VOCABULARY - 1)
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)
    return min(size, value) if value > 0 else value

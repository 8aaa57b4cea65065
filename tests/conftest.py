"""Shared fixtures and the rules that skip what this machine cannot run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headscope.engine.config.facts import facts_of
from headscope.engine.model.load import LoadedModel, load_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("--slow") or any(os.environ.get(name) for name in ("SLOW", "CI"))
    browser = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    reasons = {
        "slow": None if slow else "slow: give --slow or set SLOW=1",
        "gpu": None if torch.cuda.is_available() else "needs an NVIDIA GPU",
        "browser": None if browser or os.environ.get("CI") else "needs chromium",
    }
    for item in items:
        for mark, reason in reasons.items():
            if reason and mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The packaged model, loaded once per test process."""
    return load_model("smollm2", device="cpu")


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., LoadedModel]:
    """Makes a small random model of a family: `make_tiny("Llama")`, `make_tiny("Mistral", sliding_window=8)`."""
    import transformers

    def make(family: str, **settings: Any) -> LoadedModel:
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = getattr(transformers, f"{family}Config")(**{**sizes, **settings})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        # Larger queries and keys than at a random start, so that attention is uneven and patterns matter.
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")):
                parameter.data.mul_(8)
        facts = facts_of(model, name=f"tiny {family}")
        return LoadedModel(model, None, facts.name, facts.fingerprint, facts)

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    """Three layers, 6 query and 2 KV heads, 512 positions."""
    return make_tiny("Llama")

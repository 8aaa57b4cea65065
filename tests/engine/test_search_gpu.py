"""The search on a GPU: synthetic layers of an 8B shape, with the portable kernels."""

from __future__ import annotations

import pytest
import torch

from headscope.engine.bench.rate import rate


@pytest.mark.gpu
@pytest.mark.slow
def test_synthetic_layers_are_searched_and_the_winner_is_timed() -> None:
    found = rate("llama3-8b", 8192, 2, torch.bfloat16, "triton")
    assert found["impl"] == "triton" and found["heads_per_second"] > 1
    for made in found["winners"]:
        limit = made["target"]["max_missed"]
        assert limit is None or made["missed_mass_worst_head"] <= limit + 1e-5
        expected = made["predicted_ms"] * made["dense_ms"] / made["predicted_dense_ms"]
        assert made["measured_ms"] == pytest.approx(expected, rel=0.3)

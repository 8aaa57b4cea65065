"""How fast this machine searches: synthetic layers of a known shape, every candidate, timed as in a search.

No weights are needed: the heads have sinks, near keys, marked columns and distances of several strengths.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.machine import hardware, versions
from headscope.engine.bench.layers import check_impl
from headscope.engine.bench.shapes import SHAPES, Shape
from headscope.engine.search.cost import CostModel, fit
from headscope.engine.search.grid import SAMPLING, check_length, default_grid
from headscope.engine.search.measure import measure_layer, time_beside_dense
from headscope.engine.search.results import MIXED, PromptResult, SearchPrompt, Settings
from headscope.engine.search.table import Table, Target, allocate


def synthetic_layer(shape: Shape, tokens: int, seed: int, device: torch.device, dtype: torch.dtype) -> LayerInputs:
    """q [1, heads, tokens, dim], k and v [1, kv_heads, tokens, dim] with attention that is uneven in known ways."""
    heads, kv_heads, dim = shape.query_heads, shape.kv_heads, shape.head_dim
    generator = torch.Generator(device="cpu").manual_seed(seed)
    place = torch.arange(tokens, device=device).float()
    half = dim // 2 - 2
    lags = (torch.rand(kv_heads, half, generator=generator) ** 3 * 1.5 + 1e-4).to(device)
    phase = place[None, :, None] * lags[:, None, :]
    k = torch.zeros(kv_heads, tokens, dim, device=device)
    k[..., : 2 * half] = torch.cat([phase.cos(), phase.sin()], -1)
    columns = torch.randint(0, tokens, (kv_heads, tokens // 64), generator=generator).to(device)
    k[..., -2].scatter_(1, columns, 1.0)
    k[:, :4, -1] = 1.0
    group = heads // kv_heads
    q = torch.zeros(heads, tokens, dim, device=device)
    for head in range(heads):
        strength = torch.rand(4, generator=generator).tolist()
        distance = int(torch.randint(0, tokens // 2, (1,), generator=generator))
        wave = phase[head // group]
        near = torch.cat([wave.cos(), wave.sin()], -1)
        shifted = wave - distance * lags[head // group]
        far = torch.cat([shifted.cos(), shifted.sin()], -1)
        q[head, :, : 2 * half] = (near * strength[0] + far * strength[1] * 0.7) * (24.0 / half)
        q[head, :, -2], q[head, :, -1] = 12.0 * strength[2], 16.0 * strength[3]
    v = torch.randn(kv_heads, tokens, dim, generator=generator).to(device)
    # The scale of the scores is 1; q carries it, so that a caller passes scale = 1.
    return LayerInputs(q[None].to(dtype), k[None].to(dtype), v[None].to(dtype), 1.0)


def rate(shape: str, tokens: int, layers: int, dtype: torch.dtype, impl: str = "auto") -> dict[str, Any]:
    """Heads a second over `layers` layers, and what the time went to. One more, the first, pays for compiling and is
    left out. OptionError for an implementation that cannot serve, PromptError where no candidate leaves anything out.
    """
    heads, head_dim = SHAPES[shape].query_heads, SHAPES[shape].head_dim
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grid = default_grid()
    check_impl(impl, head_dim, dtype, device)
    check_length(grid, "synthetic", tokens)
    settings = Settings(tuple(range(layers + 1)), grid, SAMPLING, impl)
    prompt = SearchPrompt("synthetic", "synthetic", (0,) * tokens, "0" * 64)
    measured, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for layer in settings.layers:
        inputs = synthetic_layer(SHAPES[shape], tokens, layer, device, dtype)
        began = time.perf_counter()
        measured.append(measure_layer(inputs, layer, prompt, settings))
        seconds.append(time.perf_counter() - began)
    result = PromptResult(prompt.to_dict(), 0.0, tuple(measured[1:]))
    cost = fit([result], grid, {"hardware": hardware(device), "versions": versions()})
    timed = sorted(seconds[1:])
    median = timed[len(timed) // 2]
    rows = [
        {
            "pattern": pattern.label,
            "index_ms": min(layer["rows"][at]["index_ms"] for layer in measured[1:]),
            "kernel_ms": min(layer["rows"][at]["kernel_ms"] for layer in measured[1:]),
            "missed_mass_mean": sum(sum(layer["rows"][at]["mean"]) for layer in measured[1:]) / (layers * heads),
            "computed_density": sum(sum(layer["rows"][at]["computed_pairs"]) for layer in measured[1:])
            / (layers * heads * tokens * (tokens + 1) / 2),
        }
        for at, pattern in enumerate(grid.candidates)
    ]
    targets = [Target(max_missed=share) for share in (0.005, 0.02, 0.05, 0.1)]
    targets += [Target(speedup=most_speedup(result, cost, settings) * share) for share in (0.5, 0.8)]
    winners = [winner(result, cost, shape, settings, device, dtype, target) for target in targets]
    return {
        "winners": winners,
        "shape": shape,
        "tokens": tokens,
        "layers": layers,
        "candidates": len(grid),
        "mixed_layers": MIXED,
        "impl": measured[-1]["impl"],
        "hardware": hardware(device),
        "heads_per_second": heads / median,
        "seconds_per_layer": median,
        "first_layer_seconds": seconds[0],
        "dense_ms": min(layer["dense_ms"] for layer in measured[1:]),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None,
        "cost_model": cost.to_dict(),
        "rows": rows,
    }


def most_speedup(result: PromptResult, cost: CostModel, settings: Settings) -> float:
    """The highest speed-up that any choice is predicted to reach."""
    table = Table.of([result], settings.grid)
    return allocate(table, cost, Target(max_missed=1.0)).prediction.speedup


def winner(
    result: PromptResult,
    cost: CostModel,
    shape: str,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    target: Target,
) -> dict[str, Any]:
    """The choice for a target, timed: best of five a layer in turn with dense, beside what the cost model says."""
    table = Table.of([result], settings.grid)
    allocation = allocate(table, cost, target)
    measured, dense = 0.0, 0.0
    for at, layer in enumerate(table.layers):
        inputs = synthetic_layer(SHAPES[shape], result.tokens, layer, device, dtype)
        patterns = [allocation.pattern(settings.grid, at, head) for head in range(table.heads)]
        timed = time_beside_dense(inputs, patterns, settings.estimator, settings.impl, 5)
        measured += timed.index_ms + timed.kernel_ms if allocation.picked[at].any() else timed.dense_ms
        dense += timed.dense_ms
    predicted = allocation.prediction
    return {
        "target": target.to_dict(),
        "predicted_ms": predicted.attention_ms,
        "predicted_dense_ms": predicted.dense_attention_ms,
        "measured_ms": measured,
        "dense_ms": dense,
        "missed_mass_mean": predicted.loss_mean,
        "missed_mass_worst_head": predicted.loss_worst,
        "computed_density": predicted.computed_pairs / predicted.causal_pairs,
        "stayed_dense": len(allocation.stayed_dense),
    }

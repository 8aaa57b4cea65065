"""How `headscope bench` takes times, what it compares with, and the check that a result passes before it is timed."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.base.machine import versions
from headscope.engine.base.timing import timed
from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import Layout

_sdpa = torch.nn.functional.scaled_dot_product_attention

_GATE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Largest relative error of the sampled rows."""

_ENOUGH_S = 30.0
"""No further round begins after so many seconds of them: a million tokens get one."""

_QUEUE_CYCLES = 16_000_000
"""About 8 ms of waiting on the device, in which Python queues the call that is timed."""


@dataclass(frozen=True)
class Timing:
    """Median in milliseconds, the distance between the quartiles, and how many rounds there were."""

    median: float
    spread: float
    rounds: int


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    facts: dict[str, Any] = versions() | {"device": str(device.type)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "hardware": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        facts |= {"hardware": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    return facts


def baseline(inputs: LayerInputs) -> torch.Tensor:
    """Causal SDPA, forced to cuDNN on CUDA."""
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    if q.device.type == "cuda":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return _sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def interleaved(
    work: dict[str, Callable[[], Any]], repeats: int, device: torch.device, warm: dict[str, Callable[[], Any]]
) -> dict[str, Timing]:
    """Times of each entry of `work`, after one call of each of `warm`; at most `repeats` rounds, each in a new random
    order, since a power-limited card is slower after heavy work.

    On CUDA a call is queued behind a short wait, so that what is timed is the device and not Python: in a prefill the
    queue is never empty.
    """
    for call in warm.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in work}
    order = list(work)
    began = time.perf_counter()
    for done in range(repeats):
        if done and time.perf_counter() - began > _ENOUGH_S:
            break
        random.shuffle(order)
        for name in order:
            times[name].append(_time(work[name], device))
    return {name: summary(values) for name, values in times.items()}


def _time(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        return timed(call, device)[1]
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_QUEUE_CYCLES)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def summary(values: list[float]) -> Timing:
    """The median and spread of some times."""
    if len(values) < 2:
        return Timing(values[0], 0.0, 1)
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(statistics.median(values), quartiles[2] - quartiles[0], len(values))


def gate(
    name: str,
    result: tuple[torch.Tensor, torch.Tensor],
    inputs: LayerInputs,
    layout: Layout | None,
) -> float:
    """Relative error of sampled rows of the first and last head against float64.

    `HeadscopeError` beyond the bound, and where any row of any head is not finite.
    """
    q, length = inputs.q, inputs.length
    rows = torch.tensor(sorted({0, length // 3, length // 2, max(0, length - 65), length - 1}), device=q.device)
    columns = torch.arange(length, device=q.device)
    table = membership.tables(layout) if layout is not None else None
    if not bool(torch.isfinite(result[0]).all()):
        raise HeadscopeError(f"{name} at {length} tokens gives values that are not finite, so it is not timed")
    worst = 0.0
    for head in {0, inputs.query_heads - 1}:
        mask = columns[None, :] <= rows[:, None]
        if layout is not None and table is not None:
            mask = membership.cells(layout, table, slice(head, head + 1), rows, columns)[0]
        keys, values = (x[0, head // inputs.group].double() for x in (inputs.k, inputs.v))
        scores = (q[0, head, rows].double() @ keys.T * inputs.scale).masked_fill(~mask, -torch.inf)
        expected = scores.softmax(-1) @ values
        error = (result[0][0, head, rows].double() - expected).norm() / expected.norm()
        # Compared before `max`, which would lose a NaN.
        if not float(error) <= _GATE[q.dtype]:
            raise HeadscopeError(f"{name} at {length} tokens is wrong by {error:.1e} (relative), so it is not timed")
        worst = max(worst, float(error))
    return worst

"""How long a run will take and how much memory it needs, before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from headscope.engine.config.facts import ModelFacts
from headscope.studio.base.words import milliseconds, size
from headscope.studio.store.rows import RunRow


@dataclass(frozen=True)
class Estimate:
    """Time in ms, memory in bytes, and how many earlier runs the time rests on (0: a rough guess)."""

    ms: float
    memory: int
    runs: int

    @property
    def sentence(self) -> str:
        """Such as "about 24 s (from 3 earlier runs here) · about 0.9 GiB of memory"."""
        basis = f"from {self.runs} earlier run{'s' if self.runs > 1 else ''} here" if self.runs else "a rough guess"
        return f"about {milliseconds(self.ms)} ({basis}) · about {size(self.memory)} of memory"


def estimate(
    facts: ModelFacts, itemsize: int, weights: int, tokens: int, device: str, runs: Sequence[RunRow]
) -> Estimate:
    """From runs of the same model on the same device, scaled by their lengths; else from a measured speed.

    A run's work is taken as linear in tokens for the weights and quadratic for attention, of which it reads three
    passes (prefill, dense, sparse).
    """
    capture = facts.layers * (facts.query_heads + 2 * facts.kv_heads) * facts.head_dim * tokens * itemsize
    working = 8 * facts.query_heads * facts.head_dim * tokens * 4 + 2**27
    like = [run for run in runs if run.fingerprint == facts.fingerprint and run.device == device]
    work = _work(facts, weights / itemsize, tokens)
    if like:
        rates = [(run.capture_ms + run.measure_ms) / _work(facts, weights / itemsize, run.tokens) for run in like[:5]]
        ms = work * sorted(rates)[len(rates) // 2]
    else:
        ms = work / _speed(device)
    return Estimate(ms, int(weights + capture + working), len(like[:5]))


def _work(facts: ModelFacts, parameters: float, tokens: int) -> float:
    """Floating-point operations, roughly."""
    attention = 3 * 4 * facts.layers * facts.query_heads * facts.head_dim * tokens**2
    return 2 * parameters * tokens + attention


@cache
def _speed(device: str) -> float:
    """Operations per ms of a float32 product here, discounted to a third for everything that is no product."""
    kind = torch.device(device)
    a = torch.ones(768, 768, device=kind)
    a @ a
    began = time.perf_counter()
    for _ in range(3):
        total = (a @ a).sum()
    float(total)
    return 3 * 2 * 768**3 / max(1e-6, (time.perf_counter() - began) * 1e3) / 3

"""What a run is said to take and to need before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headscope.engine.model.load import LoadedModel
from headscope.studio.store.rows import RunRow, now
from headscope.studio.work import estimates


def run(facts, tokens: int, ms: float, **more) -> RunRow:  # type: ignore[no-untyped-def]
    row = RunRow(
        "r",
        "m",
        facts.fingerprint,
        "p",
        tokens,
        False,
        "cpu",
        "float32",
        "torch",
        "tiles/1",
        {},
        ms / 2,
        ms / 2,
        {},
        now(),
    )
    return replace(row, **more)


def test_time_comes_from_the_median_of_like_runs_and_scales_with_the_work(tiny_llama: LoadedModel) -> None:
    facts = tiny_llama.facts
    runs = [run(facts, 200, ms) for ms in (90.0, 100.0, 900.0)]
    others = [run(facts, 200, 1.0, device="cuda:0"), run(facts, 200, 1.0, fingerprint="other")]
    same = estimates.estimate(facts, 4, 10**6, 200, "cpu", [*others, *runs])
    assert same.ms == pytest.approx(100.0) and same.runs == 3 and "from 3 earlier runs here" in same.sentence
    longer = estimates.estimate(facts, 4, 10**6, 400, "cpu", runs)
    assert 2 * same.ms < longer.ms < 4 * same.ms  # the weights' part doubles, attention's is four times as much
    guess = estimates.estimate(facts, 4, 10**6, 200, "cpu", others)
    assert guess.runs == 0 and guess.ms > 0 and "a rough guess" in guess.sentence


def test_memory_holds_the_weights_and_the_capture_and_grows_linearly(tiny_llama: LoadedModel) -> None:
    facts = tiny_llama.facts
    short, middle, long = (estimates.estimate(facts, 4, 10**6, n, "cpu", ()).memory for n in (1000, 2000, 3000))
    assert long - middle == middle - short > 0
    capture = facts.layers * (facts.query_heads + 2 * facts.kv_heads) * facts.head_dim * 1000 * 4
    assert short > 10**6 + capture

"""The lab behind the pages: nothing is made twice, times are a run's own, and a model that cannot load is let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
import torch

from headscope.engine.attend.index import build_index
from headscope.engine.attend.inputs import LayerInputs, ScoreInputs
from headscope.engine.base.errors import ConfigError, ModelError
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss import mass, measure
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, VerticalSlash
from headscope.studio.data.profiles import head_profiles, kept_lines
from headscope.studio.data.results import HeadCase
from headscope.studio.lab import measurements, models, runs
from headscope.studio.lab.lab import Lab
from headscope.studio.ui import state
from headscope.studio.work import exports
from tests.helpers import studio_pages
from tests.helpers.studio_pages import SESSION, ok, page, run_now, shown

lab = studio_pages.lab


def together(work: Any, count: int = 2) -> list[Any]:
    """What the same work gives to threads that start at once."""
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_two_sessions_that_ask_for_one_head_have_it_measured_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lab.runs.open(run_now(lab))
    calls, real = list[int](), measurements.head_maps

    def slow(*given: Any, **named: Any) -> Any:
        calls.append(1)
        time.sleep(0.1)
        return real(*given, **named)

    monkeypatch.setattr(measurements, "head_maps", slow)
    case = HeadCase(run, 1, 2, AShape(4, 32))
    one, other = together(lambda: lab.measurements.detail(case))
    assert one is other and len(calls) == 1


def test_two_sessions_that_open_a_run_load_its_model_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = run_now(lab)
    lab.runs._runs.clear()
    lab.models._models.clear()
    loads, real = list[str](), models.load_model

    def slow(name: str, progress: Any = None) -> Any:
        loads.append(name)
        time.sleep(0.1)
        return real(name, progress)

    monkeypatch.setattr(models, "load_model", slow)
    one, other = together(lambda: lab.runs.open(run_id))
    assert one is other and one is not None and loads == ["smollm2"]


def test_stored_times_leave_out_other_sessions_short_calls(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, real, calls = 0.4, runs.measure_patterns, list[threading.Thread]()

    def measured(*given: Any, **named: Any) -> Any:
        """While a layer is measured, somebody else asks for something slow, which is served before the next one."""
        thread = threading.Thread(target=lambda: lab.worker.quick(lambda: time.sleep(pause)))
        thread.start()
        calls.append(thread)
        while lab.worker._quick.empty():
            time.sleep(0.001)
        return real(*given, **named)

    lab.models.load("smollm2")
    monkeypatch.setattr(runs, "measure_patterns", measured)
    began = time.perf_counter()
    row = lab.store.run(run_now(lab))
    assert time.perf_counter() - began > 3 * pause
    assert row is not None and row.measure_ms + row.capture_ms < 2 * pause * 1e3
    for thread in calls:
        thread.join()


def test_a_model_that_cannot_be_loaded_ahead_is_not_waited_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def fail(name: str, progress: Any = None) -> None:
        go_on.wait(30)
        raise ModelError("The weights are damaged: fetch them again.")

    monkeypatch.setattr(models, "load_model", fail)
    monkeypatch.setattr(models, "_on_this_machine", lambda name: True)
    test = ok(page("heads"))
    assert lab.models.is_warming("smollm2")
    thread = lab.models._warming["smollm2"]
    go_on.set()
    thread.join(30)
    assert not lab.models.is_warming("smollm2"), "the page would ask again and again for a load that has failed"
    ok(test.run())
    assert not test.button(key="run").disabled and "once smollm2 is loaded" in shown(test)
    assert lab.models._warming["smollm2"] is thread, "it is not tried again and again either"


def test_an_import_of_too_many_heads_is_refused_before_it_is_stored() -> None:
    model = {"layers": 600, "query_heads": 128, "layer_types": ["full_attention"] * 600}
    config = HeadConfig.uniform({**dict.fromkeys(("name", "fingerprint")), **model}, Dense())
    with pytest.raises(ConfigError, match=r"76,800 heads.*65,536"):
        exports.read_import("large.json", config.to_json().encode(), None)


def head(length: int, pattern: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """q, k, dense lse, the index of one head, and its probabilities in float64."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 1, length, 16) * 2 for _ in range(3))
    dense = measure.dense_pass(LayerInputs(q, k, v))
    index = build_index(q, k, [pattern], 0.25)
    logits = (q[0, 0].double() @ k[0, 0].double().T) * 0.25
    exact = logits.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).softmax(1)
    return q, k, dense.lse, index, exact


@pytest.mark.parametrize("spans", [1024, 50])
def test_profiles_pool_the_exact_sums(spans: int) -> None:
    length = 333
    q, k, lse, index, exact = head(length, VerticalSlash(20, 40, sink=3, local=5))
    profiles = head_profiles(ScoreInputs(q, k), lse, index, spans)
    by_column = exact.sum(0).numpy() / length
    by_distance = np.array([exact.diagonal(-distance).sum().item() for distance in range(length)]) / length
    kept_columns, kept_distances = kept_lines(index.requested)
    assert (
        kept_columns.sum() == 20 and kept_distances.sum() == 40 and kept_columns[:3].all() and kept_distances[:5].all()
    )
    for profile, values, kept in (
        (profiles.columns, by_column, kept_columns),
        (profiles.distances, by_distance, kept_distances),
    ):
        assert len(profile.share) <= spans and len(set(np.diff(profile.edges)[:-1])) == 1
        assert profile.share.sum() == pytest.approx(1, abs=1e-5)
        for at, (first, stop) in enumerate(zip(profile.edges, profile.edges[1:], strict=False)):
            assert profile.share[at] == pytest.approx(values[first:stop].sum(), abs=1e-5)
            assert profile.kept[at] == pytest.approx(kept[first:stop].mean())
            assert profile.kept_share[at] == pytest.approx((values * kept)[first:stop].sum(), abs=1e-5)


@pytest.mark.parametrize(
    ("pattern", "columns", "distances"),
    [(AShape(4, 32), 4, 32), (BlockSparse(2), 0, 0), (Dense(), 0, 300)],
    ids=lambda one: getattr(one, "kind", str(one)),
)
def test_what_a_pattern_keeps_of_columns_and_distances(pattern: Any, columns: int, distances: int) -> None:
    index = head(300, pattern)[3]
    kept_columns, kept_distances = kept_lines(index.requested)
    assert (kept_columns.sum(), kept_distances.sum()) == (columns, distances)


def test_a_moving_window_keeps_a_distance_for_the_share_of_rows_that_it_covers() -> None:
    length = 400
    index = head(length, VerticalSlash(8, windows=1))[3]
    mask = index.requested_mask()[0, 0]
    kept_columns, kept_distances = kept_lines(index.requested)
    mask[:, torch.from_numpy(kept_columns > 0)] = False
    for distance in (0, 20, 63, 64, 100, 127, 150):
        rows = torch.arange(length // 2 // 64 * 64, length // 64 * 64)  # whole groups of rows that share a window
        keys = rows - distance
        open_keys = torch.from_numpy(kept_columns[keys.numpy()] == 0)
        share = mask[rows[open_keys], keys[open_keys]].double().mean().item()
        assert kept_distances[distance] == pytest.approx(share, abs=0.02)


def test_the_profiles_of_a_head_are_made_once_and_shown(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = list[int](), mass.profiles

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return real(*given, **named)

    monkeypatch.setattr(mass, "profiles", counted)
    view = studio_pages.View(SESSION, run_id=run_now(lab), look="columns and distances", layer=1, head=3)
    test = ok(page("heads", view))
    ok(test.run())
    assert len(calls) == 1 and "in kept columns" in shown(test) and "in kept distances" in shown(test)


def test_a_model_that_overflows_gives_no_run_but_a_sentence(
    make_tiny: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = make_tiny("Llama")
    loaded.model.to(torch.float16)
    with torch.no_grad():
        loaded.model.model.layers[1].input_layernorm.weight.fill_(6e4)
    lab = studio_pages.make_lab(studio_pages.toy(loaded), tmp_path, monkeypatch)
    try:
        with pytest.raises(AssertionError, match=r"of layer 1 are not finite in float16: .*bfloat16 or float32"):
            run_now(lab)
        assert lab.store.runs() == []
    finally:
        lab.close()


def test_a_stored_measurement_that_is_not_finite_counts_as_not_measured(lab: Lab) -> None:
    run_id = run_now(lab)
    bodies = lab.store.measurements(run_id)
    damaged = bodies[0] | {"missed_mass_mean": float("nan"), "missed_mass_thirds": [float("nan")] * 3}
    lab.store.add_measurements(run_id, "isolated", [damaged])
    lab.runs._runs.clear()
    lab.measurements._known.clear()
    lab.measurements.take_stored(run_id, {})
    assert len(lab.measurements._known.items()) == len(bodies)
    assert all(one.missed_mass_mean >= 0 for _, one in lab.measurements._known.items())


def test_a_file_of_another_tool_is_called_that(tmp_path: Path) -> None:
    text = b'[{"0": ["vertical_and_slash", 1000, 6096, 1.0]}]'
    with pytest.raises(ConfigError, match=r"x\.json is a config of MInference or SGLang: run headscope convert"):
        exports.read_import("x.json", text, None)


def test_a_browser_that_clears_streamlits_caches_drops_no_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_DB", str(tmp_path / "studio.duckdb"))
    monkeypatch.setenv("HEADSCOPE_CAPTURES", str(tmp_path / "captures"))
    monkeypatch.setattr(state, "_labs", [])
    lab = state.lab()
    st.cache_resource.clear()
    st.cache_data.clear()
    assert state.lab() is lab
    lab.close()

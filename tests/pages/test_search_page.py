"""The search page and its store: a search lands by itself, the slider moves stored fronts, both figures are shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import ConfigError
from headscope.engine.base.places import ROOT
from headscope.engine.model.load import LoadedModel
from headscope.engine.search.cost import CostModel
from headscope.engine.search.grid import SAMPLING, default_grid
from headscope.engine.search.table import Allocation, Target
from headscope.studio.base import words
from headscope.studio.data import prompts
from headscope.studio.lab.lab import Lab
from headscope.studio.ui.view import SearchForm, TargetForm, View
from headscope.studio.work import search as search_view
from headscope.studio.work.search import SearchRequest
from tests.helpers.studio_toy import make_lab, toy

SESSION = "abcdefghij"
GRID = "\n".join(
    [
        '{"pattern": "a-shape", "sink": 2, "window": 24}',
        '{"pattern": "a-shape", "sink": 2, "window": 64}',
        '{"pattern": "vertical-slash", "vertical": 16, "slash": 16, "sink": 2, "local": 4}',
        '{"pattern": "block-sparse", "blocks": 2, "block_size": 32}',
    ]
)


@pytest.fixture
def lab(tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = make_lab(toy(tiny_llama), tmp_path, monkeypatch)
    monkeypatch.setattr(search_view, "data_dir", lambda: tmp_path)
    # Times of so small a model are noise; a millisecond a tile is the same everywhere.
    monkeypatch.setattr(search_view.search_cost, "fit", lambda *_: replace(CostModel.tiles(), machine={}))
    yield made
    made.close()


def page(view: View) -> AppTest:
    test = AppTest.from_file(str(ROOT / "pages" / "search.py"), default_timeout=60)
    test.session_state["view"] = view
    test.run()
    assert not test.exception, test.exception
    return test


def press(test: AppTest, key: str) -> AppTest:
    test.button(key=key).click().run()
    assert not test.exception, test.exception
    return test


def shown(test: AppTest) -> str:
    kinds = ("title", "markdown", "caption", "text", "error", "warning", "info", "success")
    return "\n".join(str(item.value) for kind in kinds for item in test.get(kind)).replace("\\", "")


def wait(lab: Lab) -> None:
    job = lab.worker.latest(SESSION)
    assert job is not None and job.finished.wait(120) and job.state == "done", job and job.error


def searched(lab: Lab) -> str:
    plan = SearchRequest("smollm2", ("code", "prose"), 200, search_view.parse_grid(GRID))
    job = lab.worker.submit(
        SESSION,
        "search",
        "Search",
        lambda context: search_view.run_search(lab, context, plan, Target(max_missed=0.05)),
    )
    wait(lab)
    return str(job.result)


def test_a_search_started_on_the_page_lands_in_the_store_as_rows_and_a_version(lab: Lab) -> None:
    view = View(SESSION)
    view.search.form = SearchForm(("code", "prose"), "whole", GRID, 0.05)
    test = page(view)
    assert "No search is stored yet" in shown(test)
    press(test, "search-start")
    wait(lab)
    test.run()
    assert not test.exception, test.exception
    row = lab.store.searches()[0]
    assert lab.store.search_rows(row["id"]).height == 2 * 18 * 5
    version = lab.store.config(row["config_id"])
    assert version is not None and version.config.provenance["made_by"] == "search" and len(version.config.heads) == 3
    found = view.search.search
    target = Target(max_missed=0.05)
    assert "cpu" in version.config.provenance["hardware"]
    found.cost.machine["hardware"] = "a machine"
    assert found.config(found.allocate(target), target).provenance["hardware"] == "a machine"
    evidence = version.config.heads[0][0].evidence
    assert evidence is not None and "missed_mass_mean" in evidence
    assert "Cost model" in shown(test) and test.metric[0].label == "attention, predicted"


def test_the_slider_moves_time_and_loss_without_a_run(lab: Lab) -> None:
    searched(lab)
    view = View(SESSION)
    test = page(view)
    jobs = lab.worker.latest(SESSION)
    shares = []
    for limit in (0.0005, 0.1, 0.5):
        test.select_slider(key="search-limit").set_value(limit).run()
        assert not test.exception, test.exception
        shares.append(float(test.metric[3].value.replace("\u00a0", "").rstrip("%")))
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert lab.worker.latest(SESSION) is jobs


def test_the_choice_becomes_the_draft_and_is_measured_beside_its_prediction(lab: Lab) -> None:
    searched(lab)
    view = View(SESSION)
    test = page(view)
    test.select_slider(key="search-limit").set_value(0.1).run()
    press(test, "search-apply")
    found = view.search.search
    allocation = found.allocate(Target(max_missed=0.1))
    config = found.config(allocation, Target(max_missed=0.1))
    draft_id = f"{SESSION}-{found.facts['fingerprint'][:12]}"
    draft = lab.drafts.get(draft_id)
    assert draft is not None and draft.patterns == tuple(config.patterns(layer) for layer in range(3))
    assert "your draft now" in shown(test)
    press(test, "search-check")
    wait(lab)
    test.run()
    assert not test.exception, test.exception
    checked = view.search.checked
    said, got = checked.predicted, checked.measured
    assert checked.search_id == found.id and got["attention_ms"] > 0
    assert got["missed_mass_mean"] == pytest.approx(said.missed_mass_mean, abs=1e-5)
    assert "predicted and measured" in shown(test)


def test_the_figures_of_a_choice_are_the_engines(lab: Lab) -> None:
    searched(lab)
    view = View(SESSION)
    test = page(view)
    test.select_slider(key="search-limit").set_value(0.1).run()
    found, target = view.search.search, Target(max_missed=0.1)
    allocation = found.allocate(target)
    said, told = allocation.prediction, search_view.figures(found, allocation, target)
    metrics = {item.label: (item.value, item.delta) for item in test.metric}
    attention = words.milliseconds(said.attention_ms), f"dense {words.milliseconds(said.dense_attention_ms)}"
    assert metrics["attention, predicted"] == attention
    assert metrics["whole prefill, dense over sparse"][0] == f"{said.speedup:.2f}×"
    missed = words.percent(said.loss_mean), f"worst head {words.percent(said.loss_worst)}"
    assert metrics["missed mass, mean"] == missed
    computed = words.percent(said.computed_pairs / said.causal_pairs)
    assert metrics["computes, of causal pairs"][0] == computed
    losses = found.table.stats["mean"][
        np.arange(2)[:, None, None], np.arange(3)[:, None], np.arange(6), allocation.picked
    ]
    assert told["missed_mass_worst_prompt"] == pytest.approx(losses.mean((1, 2)).max())
    text = shown(test)
    assert f"Worst prompt misses {words.percent(told['missed_mass_worst_prompt'])}" in text
    assert f"{words.count(len(allocation.stayed_dense), 'head')} with no candidate" in text
    kinds = [found.settings.grid.candidates[int(number)].kind for number in allocation.picked.ravel()]
    assert all(f"{kinds.count(kind)} {kind}" in text for kind in set(kinds))
    _check_download(found, allocation, losses)


def _check_download(found: search_view.StoredSearch, allocation: Allocation, losses: np.ndarray) -> None:
    """The figure's numbers, a head a row: the candidate, its loss on the worst prompt, its cost, mean over prompts."""
    rows = search_view.heads_frame(found, allocation).to_dicts()
    places = [(layer, head) for layer in range(len(found.table.layers)) for head in range(found.table.heads)]
    assert [(row["layer"], row["head"]) for row in rows] == [(found.table.layers[at], head) for at, head in places]
    cells = found.table.stats["tile_cells"]
    for row, (at, head) in zip(rows, places, strict=True):
        number = int(allocation.picked[at, head])
        pattern = found.settings.grid.candidates[number]
        assert row["pattern"] == words.label(pattern)
        assert row["missed_mass_worst_prompt"] == pytest.approx(losses[:, at, head].max(), abs=1e-5)
        costs = [
            float(np.ravel(found.cost.head_ms(pattern, n, cells[prompt, at, head, number]))[0])
            for prompt, n in enumerate(found.table.tokens)
        ]
        assert row["predicted_ms"] == pytest.approx(sum(costs) / len(costs))


def test_the_draft_samples_as_the_search_did(lab: Lab) -> None:
    searched(lab)
    view = View(SESSION)
    press(page(view), "search-apply")
    draft = lab.drafts.get(f"{SESSION}-{view.search.search.facts['fingerprint'][:12]}")
    assert draft is not None and draft.estimator == SAMPLING != Estimator()
    assert draft.undone().estimator == Estimator()


def test_a_target_out_of_reach_is_said_and_bad_candidates_too(lab: Lab) -> None:
    searched(lab)
    view = View(SESSION)
    view.search.target = TargetForm(by="speed", limit=0.02, speedup=5.0)
    found = search_view.load_search(lab, lab.store.searches()[0])
    fastest = found.allocate(Target(max_missed=1.0)).prediction.speedup
    assert 1.0 < fastest < 5.0
    assert f"reach {fastest:.2f} of the whole prefill" in shown(page(view))
    view.search.form = SearchForm(("code",), "whole", '{"pattern": "spiral"}', 0.05)
    test = page(view)
    assert "pattern must be one of" in shown(test) and test.button(key="search-start").disabled


def test_a_stored_search_is_the_measured_one(lab: Lab) -> None:
    found_id = searched(lab)
    row = next(row for row in lab.store.searches() if row["id"] == found_id)
    found = search_view.load_search(lab, row)
    again = search_view.rows_of(found.table)
    stored = lab.store.search_rows(row["id"])
    key = ["prompt_sha256", "layer", "head", "candidate"]
    assert again.sort(key).select(stored.columns).equals(stored)
    version = lab.store.config(row["config_id"])
    assert version is not None
    assert version.note == "chosen by a search"
    config = found.config(found.allocate(Target(max_missed=0.05)), Target(max_missed=0.05))
    patterns = [[entry.pattern for entry in layer] for layer in version.config.heads]
    assert patterns == [[entry.pattern for entry in layer] for layer in config.heads]
    assert np.isfinite(found.table.stats["mean"]).all()


def test_a_run_folder_of_the_command_line_is_taken_in_once_it_is_whole(lab: Lab, tmp_path: Path) -> None:
    first = searched(lab)
    folder = next(path for path in (tmp_path / "searches").iterdir() if (path / "search.json").exists())
    view = View(SESSION)
    test = page(view)
    test.text_input(key="search-folder").set_value(str(folder)).run()
    press(test, "search-bring")
    assert "winner at 2 % is a version" in shown(test)
    taken = lab.store.searches()[0]
    assert taken["id"] != first
    assert lab.store.search_rows(taken["id"]).equals(lab.store.search_rows(first))
    test.text_input(key="search-folder").set_value(str(tmp_path / "nothing")).run()
    press(test, "search-bring")
    assert "There is no file" in shown(test)


def test_tiles_can_be_the_cost_and_the_page_says_so(lab: Lab) -> None:
    searched(lab)
    view = View(SESSION)
    test = page(view)
    assert [metric.label for metric in test.metric][:2] == ["attention, predicted", "whole prefill, dense over sparse"]
    test.button_group(key="search-cost").set_value("tiles").run()
    assert not test.exception, test.exception
    assert [metric.label for metric in test.metric][:2] == ["computed tiles, of dense", "attention, predicted"]
    counted = view.search.by_tiles
    assert counted.unit == "tiles" and counted.cost == CostModel.tiles()
    test.button_group(key="search-by").set_value("speed").run()
    assert not test.exception, test.exception
    assert test.select_slider(key="search-speedup").label == "Dense over sparse computed tiles"
    test.button_group(key="search-cost").set_value("ms").run()
    assert test.select_slider(key="search-speedup").label == "Dense over sparse prefill time"


def test_a_run_folder_is_measured_for_real_from_the_ids_that_it_keeps(lab: Lab, tmp_path: Path) -> None:
    searched(lab)
    folder = next(path for path in (tmp_path / "searches").iterdir() if (path / "search.json").exists())
    kept = tmp_path / "searches" / "prompts"
    for path in kept.iterdir():
        path.unlink()
    view = View(SESSION)
    test = page(view)
    test.text_input(key="search-folder").set_value(str(folder)).run()
    press(test, "search-bring")
    assert len(list(kept.iterdir())) == 2
    press(test, "search-check")
    wait(lab)
    test.run()
    assert "predicted and measured" in shown(test)
    for path in (*kept.iterdir(), *(folder / "prompts").iterdir()):  # as of an earlier version, which kept none
        path.unlink()
    press(test, "search-bring")
    press(test, "search-check")
    job = lab.worker.latest(SESSION)
    assert job is not None and job.finished.wait(120) and "give its `headscope search` command once more" in job.error


def test_a_cancelled_search_goes_on_where_it_was(lab: Lab) -> None:
    plan = SearchRequest("smollm2", ("code", "prose"), 200, search_view.parse_grid(GRID))
    steps = []

    def work(context):  # type: ignore[no-untyped-def]
        told = context.step

        def step(done: int, total: int, words: str) -> None:
            steps.append(words)
            if sum("layer" in word for word in steps) == 15:  # a layer has 13
                job.cancel()
            told(done, total, words)

        context.step = step
        return search_view.run_search(lab, context, plan, Target(max_missed=0.05))

    job = lab.worker.submit(SESSION, "search", "Search", work)
    assert job.finished.wait(120) and job.state == "cancelled"
    assert lab.store.searches() == []
    assert "what was measured is kept" in shown(page(View(SESSION, born=0.0)))
    parts = list(search_view.folder_of(plan, lab.models.load("smollm2").fingerprint, SAMPLING).glob("parts/*/*.json"))
    assert len(parts) == 1
    searched(lab)
    assert len(lab.store.searches()) == 1


def test_candidates_survive_being_shown() -> None:
    assert search_view.parse_grid(search_view.grid_text(default_grid())) == default_grid()
    assert search_view.parse_grid(default_grid().to_json()) == default_grid()
    with pytest.raises(ConfigError, match="Line 2"):
        search_view.parse_grid(GRID.splitlines()[0] + "\n{oops")


def query(test: AppTest) -> dict[str, str]:
    """The address's parameters; AppTest gives what the script wrote as text, what it was given as a list."""
    return {name: text if isinstance(text, str) else text[-1] for name, text in test.query_params.items()}


def reloaded(test: AppTest) -> AppTest:
    """The page as F5 brings it: a new tab, of which only the address is left."""
    again = AppTest.from_file(str(ROOT / "pages" / "search.py"), default_timeout=60)
    for name, value in query(test).items():
        again.query_params[name] = value
    again.run()
    assert not again.exception, again.exception
    return again


def test_a_running_search_is_still_there_after_a_reload_and_can_be_cancelled(lab: Lab) -> None:
    def endless(context):  # type: ignore[no-untyped-def]
        while True:
            context.step(3, 10, "code: layer 3")
            time.sleep(0.01)

    lab.worker.submit(SESSION, "search", "Searching smollm2", endless)
    test = reloaded(page(View(SESSION)))
    assert test.session_state["view"].session == SESSION
    assert any("layer 3" in one.proto.text for one in test.get("progress"))
    assert test.button(key="search-start").disabled
    next(button for button in test.button if button.label == "Cancel").click().run()
    job = lab.worker.latest(SESSION)
    assert job is not None and job.finished.wait(60) and job.state == "cancelled"


def test_a_search_that_ended_is_the_one_looked_at_after_a_reload(lab: Lab) -> None:
    first = searched(lab)
    folder = next(path for path in (lab.database.path.parent / "searches").iterdir() if (path / "search.json").exists())
    search_view.take_in(lab, folder, Target(max_missed=0.02))  # a newer one, by somebody else
    assert lab.store.searches()[0]["id"] != first
    test = reloaded(page(View(SESSION)))
    assert test.session_state["view"].search.search.id == first


def test_the_address_of_the_search_page_keeps_the_open_run(lab: Lab) -> None:
    job = lab.worker.submit(
        SESSION,
        "run",
        "Run",
        lambda context: lab.runs.make(
            context, "smollm2", prompts.sample("prose"), False, lambda facts: lab.drafts.of(SESSION, facts)
        ),
    )
    wait(lab)
    link = {
        "s": SESSION,
        "model": "smollm2",
        "prompt": "prose",
        "run": job.result,
        "layer": "2",
        "head": "1",
        "metric": "missed_mass_mean",
    }
    test = page(View(SESSION, sample="prose", run_id=job.result, layer=2, head=1))
    assert query(test) == link
    assert query(reloaded(test)) == link

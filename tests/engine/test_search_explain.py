"""Explanations, checks on held-out prompts, and the search command on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError, OptionError
from headscope.engine.cli import main as cli
from headscope.engine.cli import search as cli_search
from headscope.engine.cli.options import parse_numbers
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.oracle import LossSplit
from headscope.engine.model.load import LoadedModel
from headscope.engine.search import run as search
from headscope.engine.search.check import calibrated_losses, check_prompt, drift, one_against_all
from headscope.engine.search.cost import CostModel, fit
from headscope.engine.search.explain import blame, explain, splits
from headscope.engine.search.grid import SAMPLING
from headscope.engine.search.table import Table, Target, allocate, fronts
from tests.engine.test_search import run
from tests.engine.test_search_choice import GRID, made_results
from tests.helpers.planted import PlantedSource, planted_prompts


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = PlantedSource(layers=1)
    prompts = planted_prompts(2, 512)
    return source, prompts, run(tmp_path_factory.mktemp("run"), source, prompts, Target(max_missed=0.05))


def test_every_head_is_explained_from_stored_numbers(planted: Any) -> None:
    _, _, found = planted
    told = explain(found.table, found.cost, found.target, found.allocation)
    assert [(each.layer, each.head) for each in told] == [(0, head) for head in range(4)]
    for each in told:
        pattern = found.config.heads[0][each.head].pattern
        assert each.chosen.label == pattern.label and each.chosen.loss <= 0.05
        assert 0 <= each.same_rate <= each.win_rate <= 1
        assert all(a.ms < b.ms and a.loss > b.loss for a, b in zip(each.front, each.front[1:], strict=False))
        assert each.runner_up is None or each.runner_up.kind != each.chosen.kind
        if each.larger is not None:
            assert each.larger.ms >= each.chosen.ms
        files.check_plain(each.to_dict(), "")
    diffuse = told[3]
    assert diffuse.chosen.kind == "dense" and "Stays dense" in diffuse.sentence and "nearest" in diffuse.sentence
    assert told[0].win_rate == 1.0


def test_the_loss_split_adds_up_to_what_was_measured(planted: Any) -> None:
    source, prompts, found = planted
    parts = splits(source, prompts[0], found.config, [(0, 0), (0, 2)])
    measured = check_prompt(source, prompts[0], found.config, [0], repeats=1)
    for (_, head), split in parts.items():
        assert split.computed == pytest.approx(measured.mean[0, head], abs=1e-5)
        assert sum(split.steps) == pytest.approx(split.computed, abs=1e-9)


def test_no_sentence_contradicts_the_figures_beside_it() -> None:
    """Layers that stay dense since no mix pays: there "as fast as any sparse candidate" stood beside a faster one."""
    results = made_results(layers=12)
    table, cost = Table.of(results, GRID), fit(results, GRID, {})
    told = [
        (front, each)
        for target in (
            *(Target(max_missed=limit) for limit in (0.01, 0.03, 0.06, 0.1)),
            Target(max_missed=0.1, layer_limits=((0, 0.0), (1, 0.02))),
        )
        for front, each in zip(
            fronts(table, cost, target), explain(table, cost, target, allocate(table, cost, target)), strict=True
        )
    ]
    reasons = set()
    for front, each in told:
        limit = float(re.findall(r"([0-9.]+)%", each.sentence)[0]) / 100 if "at most" in each.sentence else None
        fastest = min(point.ms for point in front.every if point.loss <= max(each.chosen.loss, limit or 0))
        if "is as fast here as any" in each.sentence:
            assert each.chosen.ms <= each.runner_up.ms * 1.02, each.sentence  # type: ignore[union-attr]
            assert each.chosen.ms <= each.runner_up.ms or "tie" in each.sentence  # type: ignore[union-attr]
        if "is the fastest that" in each.sentence:
            assert each.chosen.ms <= fastest, each.sentence
        if each.runner_up is not None and each.runner_up.ms < each.chosen.ms * 0.98 and "best is" in each.sentence:
            reasons.add(each.sentence.partition("since ")[2].partition(":")[0])
    assert "its whole layer is faster in the dense kernel than in any mix of sparse heads" in reasons
    assert any("Stays dense: no candidate misses at most 0.00%" in each.sentence for _, each in told)


def test_the_largest_step_is_blamed() -> None:
    assert "pattern family" in blame(LossSplit(0.01, 0.2, 0.21, 0.2, 10, False))
    assert "sampled rows" in blame(LossSplit(0.01, 0.02, 0.3, 0.29, 10, False))
    assert "budget" in blame(LossSplit(0.2, 0.21, 0.22, 0.2, 10, False))
    assert blame(LossSplit(0.0, 0.0, 0.0, 0.0, 10, False)) == ""


def test_drift_is_what_held_out_prompts_lose_beyond_the_calibrated(planted: Any) -> None:
    source, prompts, found = planted
    stored = calibrated_losses(found.table, found.allocation.picked)
    own = [check_prompt(source, prompt, found.config, [0], repeats=1) for prompt in prompts]
    same = drift(own, stored)
    assert same.worst <= 1e-6 and same.mean <= 1e-6  # the stored loss is the worst of these two prompts
    shifted = drift(own, stored - 0.02)
    assert shifted.worst == pytest.approx(same.worst + 0.02) and shifted.mean == pytest.approx(same.mean + 0.02)
    assert [row["prompt"] for row in shifted.by_prompt] == ["planted-0", "planted-1"]


def test_one_prompt_is_judged_on_all(planted: Any) -> None:
    _, _, found = planted
    rows = one_against_all(found.table, found.cost, found.target)
    assert [row["calibrated_on"] for row in rows][-1] == "all prompts" and len(rows) == 3
    assert rows[-1]["heads_over_target"] == 0 and rows[-1]["mean_drift"] == 0
    assert all(row["mean_drift"] >= 0 for row in rows)


def test_a_search_of_a_model_by_command_is_resumable_and_its_digest_is_frozen_by_a_cost_model(
    tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Characters:
        """One token a character."""

        chat_template = None

        def __call__(self, text: str, verbose: bool = True):  # type: ignore[no-untyped-def]
            return type("Ids", (), {"input_ids": [3 + ord(letter) % 90 for letter in text]})

    loaded = LoadedModel(tiny_llama.model, Characters(), tiny_llama.name, tiny_llama.fingerprint, tiny_llama.facts)
    monkeypatch.setattr("headscope.engine.model.load.load_model", lambda *args, **options: loaded)
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, text in (("a", "the quick brown fox "), ("b", "def f(x): return x\n"), ("c", "0123 4567 ")):
        (folder / f"{name}.txt").write_text(text * 40)
    held = tmp_path / "held"
    held.mkdir()
    (held / "d.txt").write_text("once upon a time " * 20)
    CostModel.tiles().save(tmp_path / "cost.json")

    def search_once(out: str, *more: str) -> dict[str, Any]:
        arguments = [
            "search",
            "--model",
            "tiny",
            "--prompts",
            str(folder),
            "--out",
            str(tmp_path / out),
            "--tokens",
            "300",
        ]
        arguments += ["--max-missed", "0.05", "--json", str(tmp_path / f"{out}.report"), *more]
        result = CliRunner().invoke(cli.build(), arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return files.read_json(tmp_path / f"{out}.report")

    frozen = ("--cost-model", str(tmp_path / "cost.json"))
    first = search_once("c1.json", *frozen, "--held-out", str(held))
    second = search_once("c2.json", *frozen)
    assert first["digest"] == second["digest"] == HeadConfig.load(tmp_path / "c1.json").digest()
    assert first["heads"] == 18 and first["candidates"] >= 13 and len(first["explained"]) == 8
    assert first["checked"]["held_out"]["prompts"][0]["prompt"] == "d.txt"
    lead = first["checked"]["held_out"]["against_uniform"][0]
    assert lead["prompt"] == "d.txt" and lead["lead"] == pytest.approx(lead["uniform"] - lead["searched"])
    assert HeadConfig.load(tmp_path / "c1.json").check(tiny_llama) == []
    # Another target over the same folder needs no model pass.
    again = search_once("c3.json", "--run", str(tmp_path / "c1.json.run"), "--explain", "0", "--layer-limit", "1=0")
    bound = HeadConfig.load(tmp_path / "c3.json").heads[1]
    assert all(entry.evidence is not None and entry.evidence["missed_mass_mean"] < 1e-5 for entry in bound)
    weighted = search_once(
        "c4.json", "--run", str(tmp_path / "c1.json.run"), "--explain", "0", "--weight", "logits", *frozen
    )
    assert weighted["target"]["weight"] == "logits" and weighted["loss_worst_head"] <= 0.05
    assert again["cost_fit"]["samples"] > 0 and (tmp_path / "c1.json.run" / "cost-model.json").exists()


def test_bad_options_are_one_sentence(tmp_path: Path) -> None:
    runner = CliRunner()
    grid = tmp_path / "grid.json"
    assert runner.invoke(cli.build(), ["search", "--write-grid", str(grid)]).exit_code == 0 and grid.exists()
    base = ["search", "--model", "none", "--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "c.json")]
    for more, words in (
        ([], "exactly one of them"),
        (["--max-missed", "0.1", "--speedup", "2"], "exactly one of them"),
        (["--max-missed", "0.1", "--layer-limit", "x"], "LAYER=SHARE"),
        (["--max-missed", "7"], "between 0 and 1"),
        (["--max-missed", "0.1", "--estimator", "rows=x"], "Estimator.rows"),
        (["--max-missed", "0.1", "--cost-model", str(grid)], "cost model is a JSON object"),
    ):
        result = runner.invoke(cli.build(), [*base, *more])
        assert result.exit_code != 0 and words in str(result.exception), (more, result.exception)
    with pytest.raises(OptionError, match="numbers with commas"):
        parse_numbers("--lengths", "many", int)
    with pytest.raises(ConfigError, match="no field"):
        cli_search.parse_estimator("colour=red")
    assert cli_search.parse_estimator("rows=32, where=tail") == Estimator(32, "tail", overlap="removed")
    assert cli_search.parse_estimator(None) == SAMPLING


def test_predictions_and_targets_move_without_a_run(planted: Any) -> None:
    source, _, found = planted
    from tests.engine.test_search import settings

    tight = search.with_target(found, Target(max_missed=0.001), settings(source), source.facts())
    loose = search.with_target(found, Target(max_missed=0.5), settings(source), source.facts())
    assert tight.allocation.prediction.attention_ms >= found.allocation.prediction.attention_ms
    assert loose.allocation.prediction.attention_ms < found.allocation.prediction.attention_ms
    assert np.all(tight.allocation.prediction.loss_worst <= 0.001)
    assert tight.config.provenance["hardware"] == found.config.provenance["hardware"]
    assert tight.config.provenance["parent"] == found.config.provenance["parent"]

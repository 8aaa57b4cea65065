"""The search on planted heads: what is planted is found, runs can be killed and resumed, bad input is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.index import build_index
from headscope.engine.base import files
from headscope.engine.base.errors import Cancelled, ConfigError, OptionError, PromptError
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.measure import measure_heads
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Fraction, VerticalSlash
from headscope.engine.search import run as search
from headscope.engine.search.cost import CostModel
from headscope.engine.search.grid import Grid, default_grid
from headscope.engine.search.ranks import Ranks
from headscope.engine.search.results import (
    MIXED,
    STATS,
    SearchError,
    SearchPrompt,
    Settings,
    prompt_path,
    read_prompt,
    read_result,
    result_path,
)
from headscope.engine.search.table import Target
from tests.helpers.planted import COLUMNS, DISTANCES, PlantedSource, planted_layer, planted_prompts

ROOT = Path(__file__).resolve().parents[2]
EDITED = Grid((*default_grid().candidates, VerticalSlash(24, 20, sink=4, local=16)))
"""The default grid with a candidate of few distances: scattered ones expand to most of a short prompt."""

SMALL = Grid(
    (
        AShape(4, 48),
        AShape(4, 256),
        VerticalSlash(32, 64, sink=4, local=16),
        VerticalSlash(32, sink=4, windows=2),
        BlockSparse(4),
        BlockSparse(6),
    )
)


def settings(source: PlantedSource, grid: Grid = SMALL) -> Settings:
    return Settings(tuple(range(source.count)), grid, Estimator(where="half"))


def run(folder: Path, source: PlantedSource, prompts: list[SearchPrompt], target: Target, grid: Grid = SMALL, **more):  # type: ignore[no-untyped-def]
    wanted = settings(source, grid)
    results = search.measure(source, prompts, wanted, folder, facts=source.facts(), **more)
    return search.choose(results, wanted, target, folder, source.facts(), CostModel.tiles())


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("run")
    source = PlantedSource(layers=2)
    return source, folder, run(folder, source, planted_prompts(2), Target(max_missed=0.01), EDITED)


def test_every_planted_head_is_returned_as_what_it_is(planted) -> None:  # type: ignore[no-untyped-def]
    source, _, found = planted
    for layer in range(source.count):
        assert [pattern.kind for pattern in found.config.patterns(layer)] == list(source.order(layer))


def test_the_diffuse_head_stays_dense_and_is_named(planted) -> None:  # type: ignore[no-untyped-def]
    source, _, found = planted
    diffuse = [[layer, source.order(layer).index("dense")] for layer in range(source.count)]
    assert set(map(tuple, diffuse)) <= set(map(tuple, found.summary["stayed_dense"]))
    assert all(found.config.heads[layer][head].pattern == Dense() for layer, head in diffuse)


def test_planted_columns_and_distances_are_found(planted) -> None:  # type: ignore[no-untyped-def]
    source, _, found = planted
    for prompt in planted_prompts(2):
        q, k, _ = planted_layer(prompt.ids[0] * 100, len(prompt.ids), source.order(0))
        index = build_index(q, k, found.config.patterns(0), scale=1.0, estimator=found.config.estimator)
        head = source.order(0).index("vertical-slash")
        columns = set(index.requested.columns[head].tolist())
        assert set(COLUMNS) <= columns
        mask = index.requested_mask()[0, head]
        for distance in DISTANCES:
            assert all(bool(mask[row, row - distance]) for row in range(distance, len(prompt.ids)))


def test_stored_scores_are_what_a_measurement_from_the_file_gives(planted, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, _, found = planted
    found.config.save(tmp_path / "c.json")
    config = HeadConfig.load(tmp_path / "c.json")
    by_sha = {prompt.sha256: prompt for prompt in planted_prompts(2)}
    for layer in range(source.count):
        for head, entry in enumerate(config.heads[layer]):
            assert entry.evidence is not None
            prompt = by_sha[entry.evidence["prompt"]]
            q, k, v = planted_layer(prompt.ids[0] * 100 + layer, len(prompt.ids), source.order(layer))
            again = measure_heads(q, k, v, config.patterns(layer), scale=1.0, estimator=config.estimator).heads[head]
            assert again.missed_mass_mean == pytest.approx(entry.evidence["missed_mass_mean"], abs=1e-6)
            assert again.output_error == pytest.approx(entry.evidence["output_error"], abs=1e-5)
            assert again.computed_pairs == entry.evidence["computed_pairs"]
            assert again.missed_mass_mean <= 0.01


def test_a_finished_run_is_not_measured_again_and_order_does_not_matter(planted) -> None:  # type: ignore[no-untyped-def]
    _, folder, found = planted
    idle = PlantedSource(layers=2)
    again = run(folder, idle, planted_prompts(2)[::-1], Target(max_missed=0.01), EDITED)
    assert idle.streamed == []
    assert again.config.digest() == found.config.digest()


def test_a_run_folder_of_other_settings_is_refused(planted) -> None:  # type: ignore[no-untyped-def]
    source, folder, _ = planted
    with pytest.raises(SearchError, match=r"another search .*candidates"):
        run(folder, source, planted_prompts(2), Target(max_missed=0.02), SMALL)


def test_cancel_stops_within_a_layer_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    source, prompts = PlantedSource(layers=2), planted_prompts(2, 512)
    steps = []
    with pytest.raises(Cancelled):
        run(tmp_path, source, prompts, Target(max_missed=0.02), progress=steps.append, cancel=lambda: len(steps) >= 15)
    assert len(steps) == 15 and steps[-1].seconds_left > 0
    assert len(source.streamed) == 2  # layer 0 was done, layer 1 was under way
    resumed = PlantedSource(layers=2)
    found = run(tmp_path, resumed, prompts, Target(max_missed=0.02))
    assert resumed.streamed == [1, 0, 1]
    whole = run(tmp_path / "whole", PlantedSource(layers=2), prompts, Target(max_missed=0.02))
    assert found.config.digest() == whole.config.digest()
    for name, values in whole.table.stats.items():
        assert (values == found.table.stats[name]).all(), name
    assert not any((tmp_path / "parts").glob("*"))


KILLED = """
import sys
from pathlib import Path
from tests.helpers.planted import PlantedSource, planted_prompts
from tests.engine.test_search import run
from headscope.engine.search.ranks import Ranks
from headscope.engine.search.table import Target
found = run(Path(sys.argv[1]), PlantedSource(2), planted_prompts(2, 512), Target(max_missed=0.02), ranks=Ranks.join())
print(found.config.digest())
"""


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_in_the_same_result(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    parts = tmp_path / "run" / "parts"
    for wanted in (1, 3):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            done = len(list(parts.glob("*/*.json"))) + 2 * len(list((tmp_path / "run" / "results").glob("*.json")))
            if done >= wanted:
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    whole = subprocess.run(
        [*command[:-1], str(tmp_path / "whole")], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert finished.stdout == whole.stdout and len(whole.stdout.strip()) == 64


@pytest.mark.slow
def test_two_processes_give_the_digest_of_one(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(KILLED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    both = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "two")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    alone = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "one")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # Two processes write to one pipe, so that a line break may come late.
    digests = re.findall(r"[0-9a-f]{64}", both.stdout)
    assert digests == [alone.stdout.strip()] * 2


def test_a_search_that_is_not_asked_to_join_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_: pytest.fail("waits for other processes"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = run(tmp_path, PlantedSource(1), planted_prompts(1, 512), Target(max_missed=0.02))
    assert len(found.table.prompts) == 1


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "abc"}, "RANK, MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "WORLD_SIZE": "abc"}, "WORLD_SIZE must be a number from 1 on, got 'abc'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE must"),
        ({**TORCHRUN, "WORLD_SIZE": "-3"}, "WORLD_SIZE must"),
        ({**TORCHRUN, "RANK": "2"}, "RANK must be a number from 0 to 1"),
        ({**TORCHRUN, "RANK": "first"}, "RANK must"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT must"),
    ],
)
def test_half_of_what_torchrun_says_is_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_: pytest.fail("waits for other processes"))
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=words):
        Ranks.join()


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0"}])
def test_one_process_is_alone(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Ranks.join() == Ranks(0, 1)


def test_results_beyond_the_limit_of_foreign_files_are_read_back(tmp_path: Path) -> None:
    layers, heads, grid = 64, 128, default_grid()
    wanted = Settings(tuple(range(layers)), grid, Estimator())
    prompt = planted_prompts(1, 8)[0]
    whole = {"worst_row", "requested_pairs", "computed_pairs", "tile_cells"}
    shares = [(head + 1) / 777.7 for head in range(heads)]
    numbers = [10**9 + head for head in range(heads)]
    row = {"index_ms": 1.0, "kernel_ms": 2.0, "dense_ms": 3.0}
    row |= {name: numbers if name in whole else shares for name in STATS}
    layer = json.dumps({"dense_ms": 3.0, "rows": [row] * len(grid), "mixed": []})[1:]
    head = {
        "format": "headscope.search-result/1",
        "prompt": prompt.to_dict(),
        "candidates": files.plain(grid.to_list()),
        "estimator": Estimator().to_dict(),
        "prefill_ms": 1.0,
    }
    path = result_path(tmp_path, prompt)
    path.parent.mkdir()
    body = ",".join(f'{{"layer": {number}, {layer}' for number in range(layers))
    path.write_text(json.dumps(head)[:-1] + f', "layers": [{body}]}}')
    assert path.stat().st_size > files.LARGEST_FILE
    result = read_result(path, wanted)
    assert len(result.layers) == layers and result.layers[63]["rows"][-1]["p99"] == shares


def test_disk_full_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, prompts = PlantedSource(layers=2), planted_prompts(1, 512)
    real, calls = os.replace, []

    def full(*paths: object) -> None:
        calls.append(paths)
        if len(calls) == 3:  # the manifest and the first layer fit
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*paths)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SearchError, match="disk is full"):
        run(tmp_path, source, prompts, Target(max_missed=0.02))
    monkeypatch.setattr(os, "replace", real)
    resumed = PlantedSource(layers=2)
    run(tmp_path, resumed, prompts, Target(max_missed=0.02))
    assert resumed.streamed == [1]


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    source, prompts = PlantedSource(layers=1), planted_prompts(1, 512)
    run(tmp_path, source, prompts, Target(max_missed=0.02))
    path = result_path(tmp_path, prompts[0])
    path.write_text(path.read_text()[:500])
    with pytest.raises(SearchError, match="not valid JSON"):
        run(tmp_path, source, prompts, Target(max_missed=0.02))


def test_a_run_folder_keeps_the_ids_of_its_prompts_even_of_an_old_run(planted, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, folder, _ = planted
    for prompt in planted_prompts(2):
        assert read_prompt(folder, prompt.key) == prompt
    path = prompt_path(folder, planted_prompts(2)[0].key)
    path.unlink()
    assert read_prompt(folder, planted_prompts(2)[0].key) is None
    idle = PlantedSource(layers=2)
    run(folder, idle, planted_prompts(2), Target(max_missed=0.01), EDITED)
    assert idle.streamed == [] and read_prompt(folder, planted_prompts(2)[0].key) == planted_prompts(2)[0]
    path.write_text(path.read_text().replace('"ids": [', '"ids": [7, '))
    with pytest.raises(SearchError, match="other tokens"):
        read_prompt(folder, planted_prompts(2)[0].key)
    path.unlink()


def test_the_timed_mixes_are_layers_as_an_allocation_makes_them(planted) -> None:  # type: ignore[no-untyped-def]
    _, folder, _ = planted
    for prompt in planted_prompts(2):
        for layer in json.loads(result_path(folder, prompt).read_text())["layers"]:
            picks = [mix["picked"] for mix in layer["mixed"]]
            families = {frozenset(EDITED.candidates[number].kind for number in picked) for picked in picks}
            assert len(picks) == MIXED and all(any(picked) for picked in picks) and len(families) > 1
            assert all(entry["dense_ms"] > 0 for entry in (*layer["rows"], *layer["mixed"]))


def test_two_searches_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    source, prompts = PlantedSource(layers=1), planted_prompts(1, 512)
    refused = []

    def second(step: object) -> None:
        if not refused:
            refused.append(True)
            with pytest.raises(SearchError, match="Another search is at work"):
                run(tmp_path, source, prompts, Target(max_missed=0.02))

    run(tmp_path, source, prompts, Target(max_missed=0.02), progress=second)
    assert refused


def test_short_prompts_and_no_prompts_are_refused(tmp_path: Path) -> None:
    source = PlantedSource(layers=1)
    with pytest.raises(PromptError, match="32 tokens, fewer than the smallest candidate"):
        run(tmp_path / "a", source, planted_prompts(1, 32), Target(max_missed=0.02))
    with pytest.raises(PromptError, match="at least one"):
        run(tmp_path / "b", source, [], Target(max_missed=0.02))
    twice = [planted_prompts(1, 512)[0]] * 2
    with pytest.raises(PromptError, match="same tokens"):
        run(tmp_path / "c", source, twice, Target(max_missed=0.02))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "at least one candidate"),
        ([{"pattern": "dense"}], "at least one candidate"),
        ([{"pattern": "a-shape", "sink": -1, "window": 4}], "candidate 0.*AShape.sink"),
        ([{"pattern": "a-shape", "sink": 4, "window": 4}] * 2, "0 and 1 are the same"),
        ([{"pattern": "spiral"}], "candidate 0.*pattern must be one of"),
        ([{"pattern": "fixed", "columns": [1]}], "fits one prompt only"),
        ("none", "must be a list"),
        ([7], "candidate 0"),
        ([{"pattern": "block-sparse", "blocks": {"of": 2}}], "candidate 0.*Fraction.of"),
    ],
)
def test_a_grid_with_nonsense_is_refused(tmp_path: Path, entries: object, words: str) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"format": "headscope.search-grid/1", "candidates": entries}))
    with pytest.raises(ConfigError, match=words):
        Grid.load(path)


def test_a_grid_survives_its_file(tmp_path: Path) -> None:
    grid = default_grid()
    assert len(grid) >= 13
    assert Grid.load(grid.save(tmp_path / "grid.json")) == grid
    assert Grid((AShape(4, Fraction(0.1)),)).candidates[0] == Dense()
    with pytest.raises(ConfigError, match="one prompt only"):
        Grid((Fixed(columns=(1,)),))

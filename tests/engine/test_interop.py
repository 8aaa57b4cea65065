"""Configs of MInference and SGLang: what their code would run, out again as they were, and losses by name."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import ConfigError
from headscope.engine.cli.convert import convert
from headscope.engine.config import interop
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Fraction, Pattern, VerticalSlash
from tests.engine.test_config import FACTS

DATA = Path(__file__).parent / "data"
MINFERENCE = json.loads((DATA / "minference_small.json").read_text())
SGLANG = json.loads((DATA / "sglang_small.json").read_text())


def small_facts() -> dict[str, Any]:
    return {**copy.deepcopy(FACTS), "layers": 2, "query_heads": 2, "kv_heads": 1, "layer_types": ["full_attention"] * 2}


def one(pattern: Pattern, evidence: dict[str, Any] | None = None, estimator: Estimator | None = None) -> HeadConfig:
    return HeadConfig(
        {"layers": 1, "query_heads": 1}, {}, "tiles/1", estimator or Estimator(), ((HeadEntry(pattern, evidence),),)
    )


def test_minference_entries_mean_what_its_code_runs() -> None:
    config = interop.import_foreign(MINFERENCE, "minference")
    # At least 30 columns and 50 distances; the first 30 columns and last 100 distances are forced and charged.
    assert config.patterns(0) == (
        VerticalSlash(1000, 6096, sink=30, local=100),
        VerticalSlash(30, 50, sink=30, local=50),
    )
    # stream_llm is its A-shape; its block-sparse kernel ignores the numbers and takes 100 blocks of 64.
    assert config.patterns(1) == (AShape(100, 800), BlockSparse(100, 64))
    assert config.heads[0][1].foreign == {"format": "minference", "entry": ["vertical_and_slash", 10, 20, 26473]}
    assert config.heads[0][1].evidence is None  # the score is a note, not evidence
    assert config.estimator == Estimator(rows=64, where="tail")


def test_sglang_reads_thirty_columns_as_130() -> None:
    config = interop.import_foreign(SGLANG, "sglang")
    assert config.patterns(0)[0] == VerticalSlash(130, 800, sink=30, local=100)
    with pytest.raises(ConfigError, match=r"layer 1 head 0.*vertical_and_slash only"):
        interop.import_foreign(MINFERENCE, "sglang")


@pytest.mark.parametrize(("value", "form"), [(MINFERENCE, "minference"), (SGLANG, "sglang")])
def test_import_and_export_give_the_file_back(value: Any, form: str) -> None:
    config = interop.import_foreign(value, form)
    config = HeadConfig.from_json(config.to_json())
    export = interop.export_foreign(config, form)
    assert export.layers == value and export.notes == ()
    assert json.loads(export.to_json()) == value


def test_facts_come_from_a_model_or_are_unknown() -> None:
    unknown = interop.import_foreign(MINFERENCE, "minference").check(small_facts(), force_weights=True)
    assert len(unknown) == 1 and unknown[0].startswith("unknown facts")
    assert interop.import_foreign(MINFERENCE, "minference", small_facts()).check(small_facts()) == []
    with pytest.raises(ConfigError, match="layer 2 is missing"):
        interop.import_foreign(MINFERENCE, "minference", FACTS)


BAD = {
    "empty": ([], "1 to"),
    "object": ({}, "list"),
    "layer is a list": ([[1]], "layer 0"),
    "no heads": ([{}], "layer 0"),
    "missing head": ([{"0": ["stream_llm", 1, 1, 1], "2": ["stream_llm", 1, 1, 1]}], "layer 0 head 1 is missing"),
    "leading zero": ([{"00": ["stream_llm", 1, 1, 1]}], "layer 0 head 0 is missing"),
    "fewer heads later": (
        [{"0": ["stream_llm", 1, 1, 1], "1": ["stream_llm", 1, 1, 1]}, {"0": ["stream_llm", 1, 1, 1]}],
        "layer 1 head 1 is missing",
    ),
    "unknown pattern": ([{"0": ["spiral", 1, 1, 1]}], "layer 0 head 0"),
    "three items": ([{"0": ["stream_llm", 1, 1]}], "layer 0 head 0"),
    "negative": ([{"0": ["vertical_and_slash", -1, 100, 1]}], "layer 0 head 0"),
    "bool": ([{"0": ["vertical_and_slash", True, 100, 1]}], "layer 0 head 0"),
    "float": ([{"0": ["vertical_and_slash", 10.5, 100, 1]}], "layer 0 head 0"),
    "huge": ([{"0": ["vertical_and_slash", 10**18, 100, 1]}], "layer 0 head 0"),
    "text score": ([{"0": ["vertical_and_slash", 10, 100, "good"]}], "layer 0 head 0"),
    "no window": ([{"0": ["stream_llm", 100, 0, 1]}], "layer 0 head 0"),
}


@pytest.mark.parametrize(("value", "word"), BAD.values(), ids=BAD.keys())
def test_a_bad_foreign_file_is_one_sentence(value: Any, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        interop.import_foreign(value, "minference", name="their.json")
    message = str(caught.value)
    assert message.startswith("their.json: ") and word in message and "\n" not in message


LOSSES: list[tuple[str, Pattern, list[Any]]] = [
    ("minference", Dense(), ["vertical_and_slash", 2**30 - 1, 100]),
    ("minference", Fixed(columns=(1, 2), distances=(0,)), ["vertical_and_slash", 30, 50]),
    ("minference", VerticalSlash(20, 800, sink=4), ["vertical_and_slash", 30, 800]),
    ("minference", VerticalSlash(100, 800), ["vertical_and_slash", 100, 800]),
    ("minference", VerticalSlash(100, windows=7), ["vertical_and_slash", 100, 896]),
    ("minference", VerticalSlash(Fraction(0.01), 800, sink=30, local=100), ["vertical_and_slash", 1311, 800]),
    ("minference", AShape(Fraction(0.01, most=64), 512), ["stream_llm", 64, 512]),
    ("minference", BlockSparse(8), ["block_sparse", 100, 1]),
    ("sglang", AShape(64, 512), ["vertical_and_slash", 64, 512]),
    ("sglang", BlockSparse(100), ["vertical_and_slash", 6400, 6096]),
    ("sglang", VerticalSlash(30, 800, sink=30, local=100), ["vertical_and_slash", 30, 800]),
    ("sglang", Dense(), ["vertical_and_slash", 2**30 - 1, 100]),
]


@pytest.mark.parametrize(("target", "pattern", "written"), LOSSES)
def test_what_the_other_form_cannot_say_names_the_head_unless_lossy(
    target: str, pattern: Pattern, written: list[Any]
) -> None:
    with pytest.raises(ConfigError, match=r"layer 0 head 0.*--lossy"):
        interop.export_foreign(one(pattern), target)
    export = interop.export_foreign(one(pattern), target, lossy=True)
    assert export.layers[0]["0"][:3] == written and len(export.notes) == 1


def test_the_sglang_label_says_which_versions() -> None:
    with pytest.raises(ConfigError, match=r"SGLang \(0\.5\.19 and earlier\)"):
        interop.export_foreign(one(Dense()), "sglang")


def test_every_head_that_is_lost_is_named() -> None:
    config = HeadConfig.uniform(FACTS, AShape(30, 200)).with_heads(dict.fromkeys([(0, 3), (2, 1), (2, 2)], Dense()))
    with pytest.raises(ConfigError, match=r"dense heads \(layer 0 head 3; layer 2 heads 1, 2\)"):
        interop.export_foreign(config, "minference")


def test_exact_patterns_need_no_lossy_and_carry_the_captured_mass() -> None:
    exact = VerticalSlash(500, 700, sink=30, local=100)
    export = interop.export_foreign(one(exact, {"missed_mass_mean": 0.25}), "minference")
    assert export.layers == [{"0": ["vertical_and_slash", 500, 700, 0.75]}]
    assert interop.export_foreign(one(AShape(4, 256)), "minference").layers == [{"0": ["stream_llm", 4, 256, 0.0]}]


def test_another_estimator_is_a_loss_for_online_heads_only() -> None:
    spread = Estimator(where="half", overlap="removed")
    with pytest.raises(ConfigError, match="estimator"):
        interop.export_foreign(one(VerticalSlash(500, 700, sink=30, local=100), None, spread), "minference")
    assert interop.export_foreign(one(AShape(4, 256), None, spread), "minference").notes == ()


def test_a_changed_head_is_not_written_as_it_was() -> None:
    config = interop.import_foreign(MINFERENCE, "minference")
    changed = config.with_heads(
        {(0, 0): HeadEntry(VerticalSlash(900, 6096, sink=30, local=100), foreign=config.heads[0][0].foreign)}
    )
    assert interop.export_foreign(changed, "minference").layers[0]["0"] == ["vertical_and_slash", 900, 6096, 0.0]


@given(
    st.sampled_from(["vertical_and_slash", "stream_llm", "block_sparse"]),
    st.integers(0, 20000),
    st.integers(1, 20000),
    st.sampled_from(["minference", "sglang"]),
)
@settings(max_examples=100, deadline=None)
def test_without_its_note_an_imported_head_still_means_the_same(kind: str, first: int, second: int, form: str) -> None:
    if form == "sglang":
        kind = "vertical_and_slash"
    value = [{"0": [kind, first, second, 0.5]}]
    imported = interop.import_foreign(value, form)
    bare = one(imported.patterns(0)[0])
    # SGLang has no way to write 30 columns, which is what any smaller number means there.
    if form == "sglang" and first < 30:
        with pytest.raises(ConfigError, match="exactly 30"):
            interop.export_foreign(bare, form)
        return
    again = interop.import_foreign(interop.export_foreign(bare, form).layers, form)
    assert again.patterns(0) == imported.patterns(0)


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(convert)
    return CliRunner().invoke(app, list(arguments))


def test_convert_there_and_back(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    result = run(str(DATA / "minference_small.json"), str(ours), "--to", "headscope")
    assert result.exit_code == 0 and "--model" in result.stderr
    assert HeadConfig.load(ours).provenance["imported_from"] == "minference"
    assert run(str(ours), str(theirs), "--to", "minference").exit_code == 0
    assert theirs.read_text() == (DATA / "minference_small.json").read_text()
    assert run(str(DATA / "sglang_small.json"), str(ours), "--to", "headscope", "--from", "sglang").exit_code == 0
    assert run(str(ours), str(theirs), "--to", "sglang").exit_code == 0
    assert theirs.read_text() == (DATA / "sglang_small.json").read_text()


def test_convert_writes_nothing_when_it_refuses(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(str(DATA / "minference_small.json"), str(out), "--to", "sglang")
    assert isinstance(result.exception, ConfigError) and not out.exists()
    result = run(str(DATA / "minference_small.json"), str(out), "--to", "sglang", "--lossy")
    assert result.exit_code == 0 and result.stderr.count("Lost: ") == 3 and out.exists()
    (tmp_path / "text.json").write_text('"hello"')
    result = run(str(tmp_path / "text.json"), str(out), "--to", "minference")
    assert isinstance(result.exception, ConfigError) and "neither" in str(result.exception)


@pytest.mark.skipif("MINFERENCE_CONFIGS" not in os.environ, reason="MINFERENCE_CONFIGS names no folder")
def test_published_files_come_back_to_the_byte() -> None:
    paths = sorted(Path(os.environ["MINFERENCE_CONFIGS"]).glob("*.json"))
    assert paths
    for path in paths:
        value = json.loads(path.read_text())
        config = HeadConfig.from_json(interop.import_foreign(value, "minference", name=path.name).to_json())
        assert interop.export_foreign(config, "minference").to_json().strip() == path.read_text().strip()


@pytest.mark.parametrize(
    "entry", [["xattention", 0.9, 16, 0.1], ["flex_prefill", 0.9, 512, 0.1, 3], {"pattern": "flex"}, ["duo", "x"]]
)
def test_a_pattern_of_another_tool_is_the_reason_and_not_its_numbers(entry: Any) -> None:
    name = entry["pattern"] if isinstance(entry, dict) else entry[0]
    known = ["vertical_and_slash", 1000, 6096, 1.0]
    value = [{"0": known, "1": known}, {"0": entry, "1": ["mine", 1, 2, 3]}]
    with pytest.raises(ConfigError, match=rf"layer 1 head 0: unknown pattern '{name}', 'mine'; known are"):
        interop.import_foreign(value, "minference")
    with pytest.raises(ConfigError, match=f"layer 1 head 0: SGLang knows .* only, got '{name}', 'mine'"):
        interop.import_foreign(value, "sglang")

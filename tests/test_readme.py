"""The README's commands and code, run as they stand there, in the order in which they stand."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
HEADSCOPE = str(Path(sys.executable).with_name("headscope"))


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[list[str]]:
    """Every command line of the sh blocks, as words, without its comment."""
    lines = [line for block in blocks("sh", text) for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_make_targets_exist() -> None:
    targets = [words[1] for words in commands() if words[0] == "make"]
    assert {"run", "test"} <= set(targets)
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_lead_somewhere() -> None:
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "FIGURES.md",
        "engine/README.md",
        "kernels/README.md",
        "studio/README.md",
    ):
        text = (ROOT / page).read_text()
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_every_command_is_listed() -> None:
    from headscope.engine.cli.main import COMMANDS

    listed = re.findall(r"^\| `(\w+)", README, re.MULTILINE)
    assert set(listed) == set(COMMANDS) | {"studio"}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_commands_and_code_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sample_prompts", tmp_path / "sample_prompts")
    ours = [words for words in commands() if words[0] == ".venv/bin/headscope"]
    assert len(ours) >= 3
    for words in ours:
        done = subprocess.run([HEADSCOPE, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr[-2000:])
    (code,) = blocks("python")
    code += "print(answer.shape[1] - question.input_ids.shape[1])\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and 1 <= int(done.stdout) <= 8, done.stderr[-2000:]

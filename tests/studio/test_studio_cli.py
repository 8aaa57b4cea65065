"""`headscope studio`: the port it takes, what it needs, and the server that takes its place."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headscope.engine.cli import main as cli
from headscope.studio.serve import cli as studio_cli
from headscope.studio.serve import port as studio_port
from headscope.studio.serve import server


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Another server on a port of its own."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((studio_port.ADDRESS, 0))
        other.listen()
        yield other


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of what would take this process's place."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(studio_cli.os, "execve", lambda _, command, environment: calls.append((command, environment)))
    return calls


def leave(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["studio", *options])
    shown = capsys.readouterr()
    return int(left.value.code or 0), shown.out, shown.err


def test_a_taken_port_is_one_sentence_before_any_address(
    listener: socket.socket, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    port = listener.getsockname()[1]
    code, out, err = leave(capsys, "--port", str(port))
    assert (code, out) == (1, "") and err == f"Port {port} is in use: end the other studio or give --port.\n"
    assert not started


def test_a_port_that_the_system_keeps_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(studio_port.socket.socket, "bind", refuse)
    code, out, err = leave(capsys, "--port", "80")
    assert (code, out) == (1, "") and err == "Port 80 cannot be opened (Permission denied): give --port.\n"
    assert not started


def test_a_free_port_is_printed_and_the_server_takes_the_process(
    listener: socket.socket, started: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """A port whose last server has just ended, with a connection in its last wait, is free."""
    port = listener.getsockname()[1]
    with socket.create_connection((studio_port.ADDRESS, port)):
        listener.accept()[0].close()
    listener.close()
    code, out, err = leave(capsys, "--port", str(port), "--db", str(tmp_path / "mine.duckdb"))
    assert code == 0 and f"http://127.0.0.1:{port} " in out and not err
    [(command, environment)] = started
    assert command[0] == sys.executable and command[-2:] == [server.__name__, str(port)]
    assert environment["HEADSCOPE_DB"] == str(tmp_path / "mine.duckdb")


def test_a_port_taken_while_the_server_starts_is_the_same_sentence(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", server.__name__, str(port)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1] == f"Port {port} is in use: end the other studio or give --port."


def test_without_the_extra_it_is_named(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    known = studio_cli._installed
    monkeypatch.setattr(studio_cli, "_installed", lambda name: name not in ("streamlit", "duckdb") and known(name))
    code, out, err = leave(capsys)
    assert (code, out) == (1, "") and not started
    assert err == "The studio needs packages that are not installed (streamlit, duckdb): install headscope[studio].\n"


def test_the_command_is_there_without_the_extra() -> None:
    """It loads with the command line, so it may load nothing that the extra brings."""
    code = "import sys\nimport headscope.studio.serve.cli\n"
    code += (
        "print(sorted({'streamlit', 'starlette', 'uvicorn', 'plotly', 'duckdb', 'polars', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

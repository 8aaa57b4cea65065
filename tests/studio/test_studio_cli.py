"""`headscope studio`: the port it takes, and the code it leaves with."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from headscope.engine.cli import main as cli
from headscope.studio.serve import cli as studio_cli


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Another server on a port of its own."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((studio_cli.ADDRESS, 0))
        other.listen()
        yield other


def leave(capsys: pytest.CaptureFixture[str], port: int) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["studio", "--port", str(port)])
    shown = capsys.readouterr()
    return int(left.value.code or 0), shown.out, shown.err


def test_a_taken_port_is_one_sentence_before_any_address(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studio_cli.subprocess, "call", lambda *_, **__: pytest.fail("started"))
    port = listener.getsockname()[1]
    code, out, err = leave(capsys, port)
    assert (code, out) == (1, "") and err == f"Port {port} is in use: end the other studio or give --port.\n"


def test_a_port_that_the_system_keeps_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(studio_cli.socket.socket, "bind", refuse)
    code, out, err = leave(capsys, 80)
    assert (code, out) == (1, "") and err == "Port 80 cannot be opened (Permission denied): give --port.\n"


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 1), (-9, 1), (130, 130)])
def test_a_free_port_is_printed_and_only_known_codes_come_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, code: int
) -> None:
    """A port whose last server has just ended, with a connection in its last wait, is free."""
    port = listener.getsockname()[1]
    with socket.create_connection((studio_cli.ADDRESS, port)):
        listener.accept()[0].close()
    listener.close()
    monkeypatch.setattr(studio_cli.subprocess, "call", lambda *_, **__: status)
    got, out, err = leave(capsys, port)
    assert got == code and f"http://127.0.0.1:{port} " in out and not err


def test_a_port_taken_while_the_server_starts_is_the_same_sentence(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listener.getsockname()[1]
    listener.close()

    def serve(*_: Any, **__: Any) -> int:
        taken.bind((studio_cli.ADDRESS, port))
        taken.listen()
        return 3

    monkeypatch.setattr(studio_cli.subprocess, "call", serve)
    with socket.socket() as taken:
        code, _, err = leave(capsys, port)
    assert code == 1 and err == f"Port {port} is in use: end the other studio or give --port.\n"

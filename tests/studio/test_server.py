"""The studio's own server: what it insists on, whom it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from headscope.engine.base.places import ROOT

pytest.importorskip("streamlit")

HOSTILE = """
[server]
maxUploadSize = 200
enableCORS = false
corsAllowedOrigins = ["https://example.org"]
enableXsrfProtection = false
allowedHosts = ["*"]
baseUrlPath = "elsewhere"
enableAgentApi = true
enableStaticServing = true
[browser]
gatherUsageStats = true
[client]
showErrorDetails = "full"
toolbarMode = "developer"
"""

_PROGRAM = """
import json, sys, streamlit as st, uvicorn
from headscope.studio.serve import server

uvicorn.run = lambda app, **how: print(json.dumps(
    {name: st.get_option(name) for name in sys.argv[1:]} | {"host": how["host"], "port": how["port"]}
))
server.main(PORT)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_settings_hold_against_those_of_a_person(tmp_path: Path) -> None:
    folder = tmp_path / ".streamlit"
    folder.mkdir()
    (folder / "config.toml").write_text(HOSTILE)
    ours = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())
    theirs = tomllib.loads(HOSTILE)
    wanted = {
        f"{section}.{name}": value
        for section, options in ours.items()
        for name, value in options.items()
        if section != "theme"
    }
    told_otherwise = {f"{section}.{name}" for section, options in theirs.items() for name in options}
    assert told_otherwise <= set(wanted), "a setting that loosens security is not written out in our file"
    port = free_port()
    environment = os.environ | {"HOME": str(tmp_path), "STREAMLIT_SERVER_ENABLE_CORS": "false"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("PORT", str(port)), *wanted],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == wanted | {"host": "127.0.0.1", "port": port}


def test_only_public_parts_of_streamlit_are_used() -> None:
    """No private module of Streamlit's, and nothing of its own files."""
    for path in (ROOT / "studio" / "serve").glob("*.py"):
        text = path.read_text()
        assert "from streamlit" not in text and "import streamlit." not in text, path.name
    assert not list(ROOT.glob("studio/**/*.js"))


def test_what_is_loaded_before_the_first_request_is_not_looked_through_again() -> None:
    """Streamlit collects garbage after each run of a page: with all modules it took 0.1 s of every thread's time."""
    code = "import asyncio, gc\nfrom headscope.studio.serve import server\n"
    code += (
        "async def serve():\n    async with server._ready(None): print(gc.get_freeze_count(), len(gc.get_objects()))\n"
    )
    code += "asyncio.run(serve())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, looked_through = map(int, done.stdout.split())
    assert looked_through < kept / 10


def ask(kind: str, **headers: str) -> tuple[bool, list[dict[str, Any]]]:
    """One request through the guard: whether the app behind it was reached, and what was sent back."""
    from headscope.studio.serve.guard import OwnPagesOnly

    reached, sent = [], list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)
        if kind == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"in"})

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": "/", "method": "GET", "headers": named, "extensions": {}}
    asyncio.run(OwnPagesOnly(app)(scope, receive, send))
    return bool(reached), sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("origin", ["http://example.org", "http://127.0.0.1:9999", "null", "https://example.org:8501"])
def test_a_foreign_page_is_refused_before_streamlit_sees_it(kind: str, origin: str) -> None:
    """Streamlit itself would look up this machine's address on the internet to judge the origin."""
    reached, sent = ask(kind, host="127.0.0.1:8501", origin=origin)
    assert not reached
    assert sent[0].get("status") == 403 or sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("host", ["", "example.org:8501", "127.0.0.1.example.org", "[::", "user@example.org"])
def test_a_name_that_is_not_ours_is_refused(kind: str, host: str) -> None:
    """A foreign page whose own name was made to lead here (DNS rebinding) has an origin of that name too."""
    reached, _ = ask(kind, host=host, origin=f"http://{host}")
    assert not reached
    assert not ask(kind, host=host)[0]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("headers", [{}, {"origin": "http://localhost:8501"}])
def test_our_own_pages_and_programs_get_in(kind: str, headers: dict[str, str]) -> None:
    reached, sent = ask(kind, host="localhost:8501", **headers)
    assert reached
    if kind == "http":
        names = dict(sent[0]["headers"])
        assert names[b"x-content-type-options"] == b"nosniff" and names[b"x-frame-options"] == b"SAMEORIGIN"


class Server:
    """`headscope studio` as a person starts it."""

    def __init__(self, folder: Path, program: str = "") -> None:
        self.port = free_port()
        self.log = folder / "server.log"
        command = ["-m", "headscope.engine.cli.main", "studio", "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *(["-c", program.replace("PORT", str(self.port))] if program else command)],
                cwd=folder,
                env=os.environ | {"HEADSCOPE_DB": str(folder / "studio.duckdb")},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Until it answers."""
        for _ in range(480):
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.get("/_stcore/health")
                return
            except (URLError, OSError):
                time.sleep(0.125)
        raise AssertionError(self.log.read_text())

    def get(self, path: str, **headers: str) -> Any:
        """An answer, whatever its status."""
        request = Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            return urlopen(request, timeout=5)
        except HTTPError as refusal:
            return refusal

    def socket_status(self, host: str, origin: str) -> int:
        """What a page of `origin` is answered that opens a web socket to `host`, a name of this server or not."""
        lines = (
            "GET /_stcore/stream HTTP/1.1",
            f"Host: {host}:{self.port}",
            f"Origin: {origin}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall("\r\n".join((*lines, "", "")).encode())
            return int(connection.recv(64).split()[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()


def test_the_server_knows_its_names_and_ends_on_term(server: Server) -> None:
    server.wait()
    maps = Path(f"/proc/{server.process.pid}/maps")
    for part in ("libtorch", "pandas"):
        assert not maps.exists() or part in maps.read_text(), f"answers before it has {part} for the first page"
    page = server.get("/learn")
    assert page.status == 200 and page.headers["X-Frame-Options"] == "SAMEORIGIN"
    assert "frame-ancestors 'self'" in page.headers["Content-Security-Policy"]
    assert server.get("/_stcore/health", Host=f"rebound.example.org:{server.port}").status == 403
    assert server.get("/_stcore/health", Origin="http://example.org").status == 403
    own = f"http://localhost:{server.port}"
    assert server.socket_status("localhost", own) == 101
    assert server.socket_status("localhost", "http://example.org") == 403
    assert server.socket_status("localhost", "http://localhost:1") == 403
    rebound = "rebound.example.org"
    assert server.socket_status(rebound, f"http://{rebound}:{server.port}") == 403
    _ends(server, signal.SIGTERM, 128 + signal.SIGTERM)
    assert server.log.read_text() == f"headscope studio: http://127.0.0.1:{server.port}  (Ctrl+C ends it)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 128 + signal.SIGTERM)], ids=["Ctrl-C", "closed terminal"]
)
def test_other_signals_end_it_too(server: Server, number: int, code: int) -> None:
    server.wait()
    _ends(server, number, code)


_AT_WORK = """
import threading, torch
from headscope.studio.serve import server

def multiply():
    x = torch.randn(2000, 2000)
    while True:
        torch.softmax(x @ x, 1)

threading.Thread(target=multiply, daemon=True).start()
server.main(PORT)
"""


@pytest.mark.slow
def test_it_ends_while_the_device_is_at_work(tmp_path: Path) -> None:
    """Python aborts when it takes down a thread that is inside a kernel."""
    server = Server(tmp_path, _AT_WORK)
    try:
        server.wait()
        _ends(server, signal.SIGTERM, 128 + signal.SIGTERM)
        assert server.log.read_text() == ""
    finally:
        server.process.kill()


def _ends(server: Server, number: int, code: int) -> None:
    """A request that never comes to its end is open; the process ends all the same, and leaves its port."""
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.sendall(f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 9\r\n\r\n".encode())
        server.process.send_signal(number)
        assert server.process.wait(20) == code, server.log.read_text()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))

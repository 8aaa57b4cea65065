"""`headscope studio`: starts the app on this machine."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.base.places import ROOT

ADDRESS = "127.0.0.1"


def studio(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
    db: Annotated[
        Path | None, typer.Option("--db", help="Database file; by default studio.duckdb in your data folder.")
    ] = None,
) -> None:
    """Starts the studio on 127.0.0.1 and prints its address."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if db is not None:
        environment["HEADSCOPE_DB"] = str(db.expanduser().resolve())
    check_port(port)
    typer.echo(f"headscope studio: http://{ADDRESS}:{port}  (Ctrl+C ends it)")
    # In the app's folder, where streamlit finds the theme.
    folder = ROOT
    command = [sys.executable, "-m", "headscope.studio.serve.server", str(port)]
    try:
        status = subprocess.call(command, env=environment, cwd=folder)
    except KeyboardInterrupt:
        status = 0
    if status not in (0, 130):
        check_port(port)  # another program may have taken it while the server was starting
        status = 1
    raise typer.Exit(status)


def check_port(port: int) -> None:
    """HeadscopeError where the server could not open `port`: another program has it, or the system keeps it."""
    with socket.socket() as probe:
        if os.name == "posix":  # as the server does: a port is free as soon as its last program has ended
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise HeadscopeError(f"Port {port} is in use: end the other studio or give --port.") from problem
            raise HeadscopeError(f"Port {port} cannot be opened ({problem.strerror}): give --port.") from problem

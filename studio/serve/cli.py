"""`headscope studio`: starts the app on this machine."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from headscope.engine.base.errors import HeadscopeError
from headscope.studio.serve.port import ADDRESS, check_port

EXTRA = "studio"
"""The extra of our distribution that brings what the app needs."""


def studio(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
    db: Annotated[
        Path | None, typer.Option("--db", help="Database file; by default studio.duckdb in your data folder.")
    ] = None,
) -> None:
    """Start the studio on 127.0.0.1 and print its address."""
    check_installed()
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if db is not None:
        environment["HEADSCOPE_DB"] = str(db.expanduser().resolve())
    check_port(port)
    typer.echo(f"headscope studio: http://{ADDRESS}:{port}  (Ctrl+C ends it)")
    # The server takes this process's place, so that whatever ends the command ends it: no child stays behind.
    # -P keeps the folder that the command is called in off the import path.
    command = [sys.executable, "-P", "-m", "headscope.studio.serve.server", str(port)]
    os.execve(sys.executable, command, environment)


def check_installed() -> None:
    """HeadscopeError where packages of the extra are missing."""
    marked = re.compile(rf"extra\s*==\s*['\"]{EXTRA}['\"]")
    required = [line for line in metadata.requires("headscope") or () if marked.search(line)]
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required]
    missing = [name for name in names if not _installed(name)]
    if missing:
        raise HeadscopeError(
            f"The studio needs packages that are not installed ({', '.join(missing)}): install headscope[{EXTRA}]."
        )


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True

"""`headscope studio`: starts the app on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import headscope.engine

APP = Path(str(headscope.engine.__file__)).resolve().parents[1] / "app.py"


def studio(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
    db: Annotated[
        Path | None, typer.Option("--db", help="Database file; by default studio.duckdb in your data folder.")
    ] = None,
) -> None:
    """Starts the studio on 127.0.0.1 and prints its address."""
    environment = dict(os.environ)
    if db is not None:
        environment["HEADSCOPE_DB"] = str(db.expanduser().resolve())
    typer.echo(f"headscope studio: http://127.0.0.1:{port}  (Ctrl+C ends it)")
    raise typer.Exit(subprocess.call(command(port), env=environment, cwd=APP.parent))


def command(port: int) -> list[str]:
    """The streamlit call. Settings are given here as well, since the app's own file is read only from its folder."""
    settings = {
        "server.address": "127.0.0.1",
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "server.maxUploadSize": "8",
        "browser.gatherUsageStats": "false",
        "client.showErrorDetails": "none",
        "client.toolbarMode": "viewer",
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "streamlit", "run", str(APP), *flags]

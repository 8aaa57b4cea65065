"""`headscope studio`: starts the app on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import headscope.engine


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
    typer.echo(f"headscope studio: http://127.0.0.1:{port}  (Ctrl+C ends it)")
    # In the app's folder, where streamlit finds the theme.
    folder = Path(str(headscope.engine.__file__)).resolve().parents[1]
    command = [sys.executable, "-m", "headscope.studio.server", str(port)]
    try:
        status = subprocess.call(command, env=environment, cwd=folder)
    except KeyboardInterrupt:
        status = 0
    raise typer.Exit(status)

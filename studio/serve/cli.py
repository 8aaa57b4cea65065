"""`headscope studio`: starts the app on this machine."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from headscope.engine.base.errors import HeadscopeError, OptionError
from headscope.studio.serve.port import ADDRESS, check_port
from headscope.studio.store.places import default_path, place_problem

EXTRA = "studio"
"""The extra of our distribution that brings what the app needs."""


def studio(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 8501,
    db: Annotated[
        Path | None, typer.Option("--db", help="Database file; by default studio.duckdb in your data folder.")
    ] = None,
    backup: Annotated[
        Path | None,
        typer.Option(
            "--backup", help="Copy the database to this new file and end; of a damaged one, what is readable."
        ),
    ] = None,
) -> None:
    """Start the studio on 127.0.0.1 and print its address."""
    check_installed()
    database = db.expanduser() if db is not None else default_path()
    if problem := place_problem(database):
        raise OptionError(problem)
    if backup is not None:
        back_up_to(database, backup.expanduser())
        return
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if db is not None:
        environment["HEADSCOPE_DB"] = str(database.resolve())
    check_port(port)
    typer.echo(f"headscope studio: http://{ADDRESS}:{port}  (Ctrl+C ends it)")
    # The server takes this process's place, so that whatever ends the command ends it: no child stays behind.
    # -P keeps the folder that the command is called in off the import path.
    command = [sys.executable, "-P", "-m", "headscope.studio.serve.server", str(port)]
    os.execve(sys.executable, command, environment)


def back_up_to(database: Path, target: Path) -> None:
    """Copies the database and says what the copy holds; HeadscopeError if a part could not be read."""
    from headscope.studio.store.salvage import back_up

    backup = back_up(database, target)
    if backup.notice:
        typer.echo(backup.notice, err=True)
    held = f"{backup.rows['configs']} versions, {backup.rows['runs']} runs, {backup.rows['searches']} searches"
    typer.echo(f"Wrote {target}: {held}.")
    if backup.lost:
        parts = ", ".join(f"{rows} of {table.replace('_', ' ')}" for table, rows in backup.lost.items())
        raise HeadscopeError(f"{database} is damaged, and these rows could not be read: {parts}.")


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

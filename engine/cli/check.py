"""`headscope check`: does a head config fit a model?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headscope.engine.cli import output as cli_output
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.options import Force, Model, read_config
from headscope.engine.cli.output import bar


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A head config or a config set.")],
    model: Model,
    force: Force = False,
) -> None:
    """Say whether a head config fits a model, and what each layer will run: exit code 0, or 1 with every reason."""
    candidate = read_config(config)
    with nothing_begun():
        from headscope.engine.model import plan
        from headscope.engine.model.load import load_model
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, progress=progress)
    layers = plan.layer_reasons(loaded.model)
    for place, words in plan.described(candidate, layers):
        typer.echo(f"layers {place}: {words}")
    reasons = candidate.check(loaded, force_weights=force) + plan.problems(candidate, layers)
    for reason in reasons:
        typer.echo(reason + cli_output.force_hint([reason]))
    if reasons:
        raise typer.Exit(1)
    typer.echo(f"{config} fits {model}.")

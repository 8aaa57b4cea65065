"""`headscope convert`: head configs to and from MInference and SGLang."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError, ConfigMismatch
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.output import bar

if TYPE_CHECKING:
    from headscope.engine.config.file import HeadConfig


class Form(StrEnum):
    """Forms of a head config."""

    headscope = "headscope"
    minference = "minference"
    sglang = "sglang"


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The config to convert; its form is recognised.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[Form, typer.Option("--to", help="The form to write. sglang means SGLang 0.5.19 and earlier.")],
    from_: Annotated[
        Form | None,
        typer.Option("--from", help="The form of IN. SGLang's must be named: it looks like MInference's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model that an imported config is for, so that it can be checked later."),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Write the nearest thing where the other form cannot say it exactly.")
    ] = False,
) -> None:
    """Convert a head config between headscope, MInference and SGLang (0.5.19 and earlier).

    Exporting what the other form cannot say is an error that names the heads, unless --lossy is given.
    """
    for note in convert_file(source, destination, to.value, from_.value if from_ else None, model, lossy):
        typer.echo(note, err=True)
    typer.echo(f"Wrote {destination} ({to.value}).", err=True)


def convert_file(
    source: Path,
    destination: Path,
    to: str,
    from_: str | None = None,
    model: str | None = None,
    lossy: bool = False,
) -> list[str]:
    """Convert a file and return notes for the person; `ConfigError` or `ModelError` with one sentence otherwise."""
    from headscope.engine.config import interop
    from headscope.engine.config.file import HeadConfig

    files.check_writable(destination)
    value = files.read_json(source)
    form = from_ or interop.detect(value, str(source))
    if form == "headscope" and model is not None:
        raise ConfigError("--model is for importing; a headscope config already says which model it is for.")
    config = (
        HeadConfig.from_dict(value, str(source)) if form == "headscope" else _import(value, form, source.name, model)
    )
    if to == "headscope":
        config.save(destination)
        unknown = form != "headscope" and model is None
        return ["The model's facts are unknown; give --model to make the config checkable."] if unknown else []
    export = interop.export_foreign(config, to, lossy)
    files.write_atomic(destination, export.to_json())
    return [f"Lost: {note}." for note in export.notes]


def _import(value: Any, form: str, name: str, model: str | None) -> HeadConfig:
    """The config that a foreign file holds; ConfigMismatch with every reason why it cannot be for `model`."""
    from headscope.engine.config import interop

    config = interop.import_foreign(value, form, None, name)
    if model is None:
        return config
    with nothing_begun():
        from headscope.engine.model import plan
        from headscope.engine.model.load import load_model
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, progress=progress)
    facts = loaded.facts
    reasons = []
    if len(config.heads) != facts.layers:
        reasons.append(f"layers: the config is for {len(config.heads)}, the model has {facts.layers}")
    if len(config.heads[0]) != facts.query_heads:
        reasons.append(f"query heads: the config is for {len(config.heads[0])}, the model has {facts.query_heads}")
    reasons += plan.problems(config, plan.layer_reasons(loaded.model))
    if reasons:
        raise ConfigMismatch(loaded.name, reasons)
    return interop.import_foreign(value, form, facts, name)

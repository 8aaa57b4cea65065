"""`headscope prompt`: sample prompts, long prompts and retrieval prompts as files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headscope.engine.base import files
from headscope.engine.base.errors import PromptError, UnusableModel
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.output import bar, check_outputs
from headscope.engine.prompts.retrieval import retrieval_prompt
from headscope.engine.prompts.sources import Encode, list_prompts, long_prompt, read_prompt


class Kind(StrEnum):
    """What a made prompt is."""

    mixed = "mixed"
    docs = "docs"
    code = "code"
    pass_key = "pass-key"
    number = "number"
    needle = "needle"
    key_value = "key-value"


LONG = (Kind.mixed, Kind.docs, Kind.code)


def prompt(
    name: Annotated[str | None, typer.Argument(help="A sample prompt to print; none lists them all.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Make a prompt of this length, 256 to 2097152.")
    ] = None,
    kind: Annotated[
        Kind,
        typer.Option("--kind", help="mixed, docs, code: this machine's Python texts; the others hide one answer."),
    ] = Kind.mixed,
    depth: Annotated[float, typer.Option("--depth", help="Where the answer is hidden, 0 (start) to 1 (end).")] = 0.5,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same prompt.")] = 0,
    model: Annotated[
        str | None, typer.Option("--model", help="Count with this model's tokenizer; otherwise lengths are estimated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write; otherwise standard output.")] = None,
) -> None:
    """List or print the sample prompts, or make a longer one (4K to 1M tokens) from a seed."""
    check_outputs(out=out)
    if tokens is None:
        text = _listing() if name is None else read_prompt(name).text
        _deliver(text, out)
        return
    if name is not None:
        raise PromptError("Give either the name of a sample prompt or --tokens, not both.")
    text, note = make(tokens, kind, depth, seed, _encode(model))
    typer.echo(note, err=True)
    _deliver(text, out)


def make(tokens: int, kind: Kind, depth: float, seed: int, encode: Encode | None) -> tuple[str, str]:
    """A made prompt and one line about it."""
    if kind in LONG:
        written = long_prompt(tokens, seed=seed, encode=encode, source=kind.value)
        return written.text, f"{_count(written.tokens, written.counted)} from {len(written.pieces)} texts, seed {seed}."
    hidden = retrieval_prompt(kind.value, tokens, depth, seed=seed, encode=encode)
    return hidden.text, f"{_count(hidden.tokens, hidden.counted)}, seed {seed}; the answer is: {hidden.expected}"


def _count(tokens: int, counted: bool) -> str:
    return f"{tokens} tokens" if counted else f"About {tokens} tokens (give --model for an exact count)"


def _encode(model: str | None) -> Encode | None:
    if model is None:
        return None
    with nothing_begun():
        from headscope.engine.model.load import load_model
        from headscope.engine.prompts.tokens import counter
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, progress=progress)
    if loaded.tokenizer is None:
        raise UnusableModel(f"{loaded.name} has no tokenizer to count with: leave --model out")
    return counter(loaded)


def _listing() -> str:
    lines = []
    for sample in list_prompts():
        lines.append(f"{sample.name:<10} {sample.title} ({sample.kind})\n           {sample.look_for}")
        if sample.expected is not None:
            lines.append(f"           Expected answer: {sample.expected}")
    return "\n".join(lines)


def _deliver(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text)
    else:
        files.write_atomic(out, text + "\n", PromptError)

"""Options that several commands share, what their texts mean, and the model and prompt that they name."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headscope.engine.base.errors import OptionError
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.output import bar, note

if TYPE_CHECKING:
    from headscope.engine.config.file import HeadConfig
    from headscope.engine.config.sets import ConfigSet
    from headscope.engine.model.load import LoadedModel
    from headscope.engine.prompts.prompt import Prompt
    from headscope.engine.prompts.tokens import Encoded

Model = Annotated[str, typer.Option("--model", help="smollm2, gemma3-270m, a folder, a .gguf file, or a hub id.")]
PromptSource = Annotated[
    str,
    typer.Option("--prompt", help="A text file, the name of a sample prompt such as code, or - for standard input."),
]
Template = Annotated[
    bool | None,
    typer.Option("--template/--no-template", help="Use the chat template; by default where the model has one."),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default the GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; by default float32 on a CPU.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Accept a config made for other weights of the same shape.")]

MOST = 1_000_000
"""The largest count that an option takes where nothing else limits it."""

STDIN = "-"
Number = TypeVar("Number", int, float)


def parse_layers(text: str) -> tuple[int, ...]:
    """`0,4-7` as (0, 4, 5, 6, 7), each once; OptionError for anything else."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?\s*", part)
        if match is None:
            raise OptionError(f"--layers {text[:60]!r} is not understood: write numbers and ranges such as 0,4-7")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise OptionError(f"--layers has the empty range {part.strip()}: write the smaller number first")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def parse_numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Numbers with commas between, in the order given; OptionError for anything else."""
    try:
        return [_plain_number(part, kind) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OptionError(f"{option} {text[:60]!r} is not understood: write numbers with commas between") from None


def _plain_number(text: str, kind: Callable[[str], Number]) -> Number:
    """A number in the digits 0 to 9; Python's own readers take those of every script, and underscores."""
    if not text.isascii() or "_" in text or len(text) > 30:
        raise ValueError
    return kind(text)


def parse_lengths(option: str, text: str) -> list[int]:
    """Whole numbers of tokens, ascending, each once; K and M are 1,024 and its square."""
    lengths = []
    for part in text.upper().replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,9})([KM]?)", part)
        tokens = 0 if match is None else int(match[1]) * {"": 1, "K": 1024, "M": 1024 * 1024}[match[2]]
        if not 1 <= tokens <= 2**24:
            raise OptionError(f"{option} must be whole numbers such as 8K,128K, got {text[:60]!r}")
        lengths.append(tokens)
    return sorted(set(lengths))


def read_given(prompt: str) -> Prompt:
    """The prompt that an option names: a file, a sample prompt, or standard input (`-`)."""
    from headscope.engine.prompts.prompt import Prompt
    from headscope.engine.prompts.sources import LARGEST_PROMPT, checked_text, read_prompt

    if prompt != STDIN:
        return read_prompt(prompt)
    raw = b"" if sys.stdin is None else sys.stdin.buffer.read(LARGEST_PROMPT + 1)
    if len(raw) > LARGEST_PROMPT:
        raise OptionError(f"standard input holds more than {LARGEST_PROMPT >> 20} MiB: give a shorter prompt")
    return Prompt("stdin", "stdin", checked_text(raw, "standard input"), "file")


def load(
    model: str, prompt: str, template: bool | None, device: str | None, dtype: str | None
) -> tuple[LoadedModel, Prompt, Encoded]:
    """Model, prompt, and the prompt as the model reads it. The prompt is read before the model is loaded."""
    text = read_given(prompt)
    with nothing_begun():
        from headscope.engine.model.load import load_model
        from headscope.engine.prompts.tokens import encode
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
    return loaded, text, encode(loaded, text.text, template)


def read_config(path: Path) -> HeadConfig | ConfigSet:
    """A head config, or a config set where there is more than one config or a range of lengths."""
    from headscope.engine.config.sets import ConfigSet

    configs = ConfigSet.load(path)
    single = len(configs.members) == 1 and configs.members[0].least <= 1 and configs.members[0].most is None
    return configs.members[0].config if single else configs


@contextmanager
def told_lengths(config: HeadConfig | None, lengths: Sequence[int]) -> Iterator[list[str]]:
    """Says on stderr, and yields, what a config of the person's own warns about its prompts; `apply` then need not.

    The shortest and the longest prompt speak for those between.
    """
    from headscope.engine.config.warnings import CalibrationWarning

    ends = (min(lengths), max(lengths))
    warned = [] if config is None else list(dict.fromkeys(text for end in ends for text in config.warnings(end)))
    for text in warned:
        note(f"Warning: {text}")
    with warnings.catch_warnings(action="ignore", category=CalibrationWarning):
        yield warned


def run_facts(loaded: LoadedModel, prompt: dict[str, Any]) -> dict[str, Any]:
    """What a report says about the run: model, prompt, device, versions."""
    from headscope.engine.base.machine import hardware, versions

    return {
        "model": loaded.facts.to_dict(),
        "prompt": prompt,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "hardware": hardware(loaded.device),
        "versions": versions(),
        "cpus": os.cpu_count(),
    }

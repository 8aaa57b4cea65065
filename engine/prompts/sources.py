"""Prompts: the sample texts, a user's own files, and long seeded ones from this machine's Python.

Long prompts are made of Python's documentation (`pydoc_data.topics`) and the sources of its standard library, so
nothing is downloaded; the same seed on the same Python version gives the same text.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from headscope.engine.base.errors import PromptError
from headscope.engine.base.files import listing, printable, read_bytes, read_json
from headscope.engine.base.places import ROOT
from headscope.engine.prompts.prompt import Prompt

FOLDER = ROOT / "sample_prompts"
LARGEST_PROMPT = 64 * 2**20
"""Bytes; a million tokens of text are about 4 MB."""

CHARACTERS_PER_TOKEN = 3.3
"""Used where no tokenizer is given, as measured on the mixed material; the documentation alone has about 4."""

LEAST_TOKENS = 256
MOST_TOKENS = 2**21
SOURCES = ("mixed", "docs", "code")
_LONGEST_PIECE = 12_000
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "turtledemo",
    "__pycache__",
    "lib2to3",
}

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class SamplePrompt:
    """One text of `sample_prompts/`: what it is, what a first visit should look at, the answer if there is one."""

    name: str
    title: str
    kind: str
    look_for: str
    expected: str | None
    path: Path

    def read(self) -> Prompt:
        """Its text as a prompt of this kind."""
        return Prompt(self.name, self.kind, _text_of(self.path), "sample")


@dataclass(frozen=True)
class LongPrompt:
    """A long text, made here. `tokens` is counted with the tokenizer given, or estimated (`counted` false)."""

    text: str
    tokens: int
    counted: bool
    seed: int
    source: str
    pieces: tuple[str, ...]


def list_prompts(folder: Path | None = None) -> tuple[SamplePrompt, ...]:
    """The sample prompts in the order of their index."""
    home = FOLDER if folder is None else folder
    index = read_json(home / "index.json", PromptError)
    try:
        return tuple(
            SamplePrompt(
                name=item["name"],
                title=item["title"],
                kind=item["kind"],
                look_for=item["look_for"],
                expected=item["expected"],
                path=home / item["file"],
            )
            for item in index["prompts"]
        )
    except (KeyError, TypeError) as problem:
        raise PromptError(f"{home / 'index.json'} is damaged: install headscope again.") from problem


def read_prompt(source: str | os.PathLike[str]) -> Prompt:
    """The prompt in a file, or a sample prompt by its name (`code`); line breaks at the end are dropped.

    A file of the samples is that sample; any other has its own name, without the ending, for name and kind.
    `PromptError` with one sentence for what is missing, empty, blank, binary, not UTF-8, or above 64 MiB.
    """
    if not os.fspath(source).strip():
        raise PromptError("No prompt is named: give a text file, or the name of a sample prompt such as code.")
    path = Path(source)
    samples = {sample.name: sample for sample in list_prompts()}
    if not os.path.exists(path) and path.suffix in ("", ".txt") and len(path.parts) <= 2:
        if path.stem in samples and (len(path.parts) == 1 or path.parts[0] == FOLDER.name):
            return samples[path.stem].read()
        if len(path.parts) == 1:
            raise PromptError(f"There is no file {str(path)[:200]}, and the sample prompts are {listing(samples, 20)}.")
    text, name = _text_of(path), printable(path.stem)
    same = next((sample for sample in samples.values() if sample.path == path.resolve()), None)
    return Prompt(name, name, text, "file") if same is None else same.read()


def read_folder(folder: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """The prompts of a folder's .txt and .md files, named and sorted by file name; `PromptError` names a bad one."""
    home = Path(folder)
    if not os.path.isdir(home):
        raise PromptError(f"{str(home)[:200]} is not a folder; give one with .txt files.")
    try:
        paths = sorted(path for path in home.iterdir() if path.suffix in (".txt", ".md") and path.is_file())
    except OSError as problem:
        raise PromptError(f"Could not read the folder {home}: {problem.strerror}.") from problem
    if not paths:
        raise PromptError(f"{home} holds no .txt files.")
    return tuple(replace(read_prompt(path), name=printable(path.name)) for path in paths)


def _text_of(path: Path) -> str:
    return checked_text(read_bytes(path, LARGEST_PROMPT, PromptError), str(path))


def checked_text(raw: bytes, name: str) -> str:
    """Bytes as prompt text; `PromptError` if they are no text that a model should read."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise PromptError(f"{name} is UTF-16 text; save it as UTF-8.")
    if b"\x00" in raw:
        raise PromptError(f"{name} is not text: byte {raw.index(0)} is zero.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise PromptError(f"{name} is not UTF-8 text (byte {problem.start}); save it as UTF-8.") from problem
    if not text.strip():
        raise PromptError(f"{name} is {'empty' if not text else 'blank'}; a prompt needs at least a word.")
    return text.replace("\r\n", "\n").rstrip("\n")


def long_prompt(
    tokens: int,
    *,
    seed: int = 0,
    encode: Encode | None = None,
    source: str = "mixed",
    closing: str | None = None,
) -> LongPrompt:
    """A prompt of just under `tokens` tokens from documentation (`docs`), source code (`code`) or both in turn.

    With `encode` (text to token ids) the count is exact and never above `tokens`; without it the length is
    estimated at 3.3 characters a token. `closing` ends the prompt; by default it asks for a summary.
    """
    check_tokens(tokens)
    if source not in SOURCES:
        raise PromptError(f"The source of a long prompt is one of {', '.join(SOURCES)}, got {source[:40]!r}.")
    end = (
        "\n\nIn one paragraph, what are the parts above about, and what do they have in common?\n"
        if closing is None
        else closing
    )
    pieces = _Pieces(haystack(source, seed))
    text, counted = fit(lambda size: pieces.text(size) + end, tokens, encode)
    return LongPrompt(text, counted, encode is not None, seed, source, pieces.names(len(text) - len(end)))


def check_tokens(tokens: int) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        raise PromptError(f"A made prompt has {LEAST_TOKENS} to {MOST_TOKENS} tokens, got {str(tokens)[:40]}.")


def fit(build: Callable[[int], str], tokens: int, encode: Encode | None) -> tuple[str, int]:
    """The text of `build(characters)` with at most `tokens` tokens and close to it, and its count.

    `build` must grow with its argument. Within 0.1 % of the target (at least 8 tokens) is close enough.
    """
    if encode is None:
        text = build(round(tokens * CHARACTERS_PER_TOKEN) - len(build(0)))
        return text, math.ceil(len(text) / CHARACTERS_PER_TOKEN)
    slack = max(8, tokens // 1000)
    least, most = 0, tokens * 64
    size = round(tokens * CHARACTERS_PER_TOKEN)
    best = build(0)
    best_count = len(encode(best))
    if best_count > tokens:
        raise PromptError(f"A prompt of this kind needs at least {best_count} tokens, got {tokens}.")
    for _ in range(24):
        text = build(size)
        count = len(encode(text))
        if count <= tokens:
            if count > best_count:
                best, best_count = text, count
            least = size
        else:
            most = size
        if tokens - slack <= count <= tokens or most - least <= 1:
            break
        # Aim at the middle of the slack by the density seen so far, and stay inside what is known.
        guess = round(size * (tokens - slack / 2) / max(count, 1))
        size = guess if least < guess < most else (least + most) // 2
    return best, best_count


def haystack(source: str, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (name, text) pieces in an order that the seed decides; every piece once before any comes again."""
    docs = _docs() if source in ("mixed", "docs") else ()
    code = _code_paths() if source in ("mixed", "code") else ()
    if not docs and not code:
        raise PromptError("This Python has neither its documentation nor its sources; give a prompt file instead.")
    rng = random.Random(f"headscope {source} {seed}")
    while True:
        order: list[Any] = [*docs, *code]
        if docs and code:  # in turn, or the many files of code would drown the documentation
            order = _in_turn(rng.sample(docs, len(docs)), rng.sample(code, len(code)))
        else:
            rng.shuffle(order)
        for item in order:
            name, text = item if isinstance(item, tuple) else (item, _code(item))
            if text:
                yield name, _cut(text)


class _Pieces:
    """Pieces joined as far as they are asked for."""

    def __init__(self, source: Iterator[tuple[str, str]]) -> None:
        self._source = source
        self._text = ""
        self._starts: list[tuple[int, str]] = []

    def text(self, size: int) -> str:
        parts, length = [self._text], len(self._text)
        while length < size:
            name, text = next(self._source)
            self._starts.append((length, name))
            part = f"### {name}\n\n{text}\n\n"
            parts.append(part)
            length += len(part)
        self._text = "".join(parts)
        return self._text[: max(0, size)]

    def names(self, size: int) -> tuple[str, ...]:
        return tuple(name for start, name in self._starts if start < size)


def _in_turn(first: list[Any], second: list[Any]) -> list[Any]:
    paired = [item for pair in zip(first, second, strict=False) for item in pair]
    both = min(len(first), len(second))
    return [*paired, *first[both:], *second[both:]]


def _cut(text: str) -> str:
    """At most 12,000 characters, up to the end of a line."""
    if len(text) <= _LONGEST_PIECE:
        return text.strip("\n")
    return text[: text.rfind("\n", 0, _LONGEST_PIECE) + 1 or _LONGEST_PIECE].strip("\n")


@lru_cache(maxsize=1)
def _docs() -> tuple[tuple[str, str], ...]:
    """Python's own documentation by topic; empty where a distribution leaves it out."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return ()
    return tuple((f"Python documentation: {name}", topics[name]) for name in sorted(topics) if len(topics[name]) > 200)


@lru_cache(maxsize=1)
def _code_paths() -> tuple[str, ...]:
    """The standard library's modules, relative to its folder, sorted."""
    home = Path(sysconfig.get_path("stdlib"))
    if not home.is_dir():
        return ()
    paths = []
    for folder, folders, names in os.walk(home):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-"))
        paths += [str(Path(folder, name).relative_to(home)) for name in names if name.endswith(".py")]
    return tuple(sorted(name for name in paths if not Path(name).name.startswith(("_sysconfigdata", "topics"))))


def _code(name: str) -> str:
    """The source of one module, or nothing if it is a stub, very long or unreadable."""
    path = Path(sysconfig.get_path("stdlib"), name)
    try:
        if not 1000 <= path.stat().st_size <= 400_000:
            return ""
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""

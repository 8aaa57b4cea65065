"""Candidates of a search: a small grid of patterns that a person can edit, as a file with one candidate a line.

Budgets of the default grid are fractions of the prompt's length, so that short and long prompts share one grid.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files, records
from headscope.engine.base.errors import ConfigError, PromptError
from headscope.engine.base.records import Record
from headscope.engine.patterns.families import (
    AShape,
    BlockSparse,
    Dense,
    Fraction,
    Pattern,
    VerticalSlash,
    from_dict,
)

FORMAT = "headscope.search-grid/1"
MOST_CANDIDATES = 200

SAMPLING = Estimator(rows=64, where="half", overlap="removed")
"""What a search samples unless told otherwise. Under it 249 of smollm2's 270 heads have a candidate that misses at
most 2 % on three prompts of 2,040 tokens; under the published tail of 64 rows 173 have. `Estimator()` itself stays
the tail, whose choice does not change when a prompt is prefilled in chunks."""


class _File(Record):
    format: str
    candidates: list[Any]


@dataclass(frozen=True)
class Grid:
    """The patterns that every head is measured under. `Dense` is always there, as the first.

    `ConfigError` names the candidate that does not fit.
    """

    candidates: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        numbers: dict[Pattern, int] = {}
        for number, pattern in enumerate(self.candidates):
            if not isinstance(pattern, Pattern):
                raise ConfigError(f"Candidate {number} is a {type(pattern).__name__}, not a pattern.")
            if pattern.one_prompt:
                name = type(pattern).__name__
                raise ConfigError(f"Candidate {number} is a {name} pattern, which fits one prompt only.")
            if pattern in numbers:
                raise ConfigError(f"Candidates {numbers[pattern]} and {number} are the same: {pattern.label}.")
            numbers[pattern] = number
        rest = tuple(pattern for pattern in self.candidates if not pattern.is_dense)
        if not rest:
            raise ConfigError("A grid needs at least one candidate that is not dense.")
        if len(rest) > MOST_CANDIDATES:
            raise ConfigError(f"A grid may have {MOST_CANDIDATES} candidates, got {len(rest)}.")
        object.__setattr__(self, "candidates", (Dense(), *rest))

    def __len__(self) -> int:
        return len(self.candidates)

    def to_list(self) -> list[dict[str, Any]]:
        """The candidates as JSON objects, in order."""
        return [pattern.to_dict() for pattern in self.candidates]

    def to_json(self) -> str:
        """The text of a grid file, one candidate a line."""
        lines = ",\n".join(f"    {files.one_line(entry)}" for entry in self.to_list())
        return f'{{\n  "format": "{FORMAT}",\n  "candidates": [\n{lines}\n  ]\n}}\n'

    def digest(self) -> str:
        """sha256 over the candidates in order."""
        return hashlib.sha256(files.one_line(self.to_list()).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the grid whole or not at all."""
        return files.write_atomic(path, self.to_json())

    @classmethod
    def from_list(cls, entries: Any, where: str = "grid") -> Grid:
        """The grid of a parsed list; `ConfigError` names the candidate and the field that is wrong."""
        records.check(list[Any], entries, f"{where}: candidates")
        patterns = []
        for number, entry in enumerate(entries):
            try:
                patterns.append(from_dict(entry))
            except (ValueError, TypeError) as problem:
                raise ConfigError(f"{where}: candidate {number}: {' '.join(str(problem).split())[:200]}.") from problem
        try:
            return cls(tuple(patterns))
        except ConfigError as problem:
            raise ConfigError(f"{where}: {problem}") from problem

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Grid:
        """Read a grid file."""
        value = files.read_json(path)
        records.check_format(value, FORMAT, f"{path}: a grid")
        records.check(_File, value, f"{path}:", whole=f"{path}: the grid")
        return cls.from_list(value["candidates"], str(path))


def default_grid() -> Grid:
    """Eighteen candidates beside dense, from about 5 % to 80 % of the causal cells."""
    shapes = [AShape(4, Fraction(1 / part, least=16)) for part in (32, 16, 8, 4, 2)]
    lines: list[Pattern] = [
        VerticalSlash(Fraction(1 / column, least=8), sink=4, windows=Fraction(1 / window))
        for column, window in ((64, 2048), (16, 2048), (32, 1024), (8, 1024), (16, 512), (4, 512), (4, 256))
    ]
    lines += [
        VerticalSlash(Fraction(1 / column, least=8), Fraction(1 / slash, least=16), sink=4, local=16)
        for column, slash in ((32, 32), (8, 16))
    ]
    blocks = [BlockSparse(Fraction(1 / part, least=2)) for part in (16, 8, 4, 2)]
    return Grid((*shapes, *lines, *blocks))


def simplicity(pattern: Pattern, number: int) -> tuple[int, int]:
    """What ties are decided by: the rank of the family, then the place in the grid."""
    return pattern.rank, number


def check_length(grid: Grid, name: str, tokens: int) -> None:
    """`PromptError` if no candidate leaves anything out of a prompt of this length."""
    if tokens < 1 or all(pattern.covers_all(tokens) for pattern in grid.candidates):
        raise PromptError(
            f"The prompt {name} has {tokens} tokens, fewer than the smallest candidate keeps, so there is nothing to "
            "search: use a longer prompt or smaller budgets."
        )

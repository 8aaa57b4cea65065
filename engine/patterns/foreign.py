"""A head as MInference and SGLang (0.5.19 and earlier) write it: `[name, first, second, score]`.

What their code makes of it: `vertical_and_slash` V, S keeps at least 30 columns and 50 distances, and the first 30
columns and the last 100 distances are forced and charged. `stream_llm` A, B keeps A first tokens and a window of B.
`block_sparse` ignores its two numbers and takes 100 blocks of 64. SGLang knows `vertical_and_slash` only, and reads
V = 30 as 130.
"""

from __future__ import annotations

from dataclasses import dataclass

from headscope.engine.patterns.budgets import LARGEST_BUDGET, Budget, resolve

LINES, SINK, BLOCKS = "vertical_and_slash", "stream_llm", "block_sparse"
KNOWN = {"minference": (LINES, SINK, BLOCKS), "sglang": (LINES,)}
"""The names that each tool knows."""

FORCED_COLUMNS = 30
FORCED_DISTANCES = 100
LEAST_DISTANCES = 50
SGLANG_THIRTY = 130

PUBLISHED_LENGTH = 131072
"""Tokens at which the published files were made: a share of the length is written as its count there."""

SHARES = "budgets as a share of the length"


@dataclass(frozen=True)
class ForeignHead:
    """The entry without its score, and in words what the other tool cannot express of the head (None: nothing)."""

    name: str
    first: int
    second: int
    loss: str | None = None


def whole(budget: Budget) -> int:
    """A budget as a number that the other tools take."""
    return min(resolve(budget, PUBLISHED_LENGTH), LARGEST_BUDGET)


def lines(columns: int, distances: int, loss: str | None) -> ForeignHead:
    """A `vertical_and_slash` entry, of which the tools keep at least 30 columns and 50 distances."""
    return ForeignHead(LINES, max(columns, FORCED_COLUMNS), max(distances, LEAST_DISTANCES), loss)

"""Chapter 5: online softmax, eq. 7 and 8."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.engine import masked_attention
from headscope.studio.lessons.maths import dense, toy

KEYS = 12


SCORES = (1.0, 0.2, -0.5, 2.4, 0.3, -1.0, 0.8, 3.6, 0.0, -0.3, 1.5, 0.5)


VALUES = (
    (0.2, 2.6),
    (0.5, 2.2),
    (1.0, 2.9),
    (2.8, 2.4),
    (2.5, 2.0),
    (3.0, 2.9),
    (2.7, 0.3),
    (3.0, 0.6),
    (2.2, 0.2),
    (0.4, 0.4),
    (0.2, 0.9),
    (0.9, 0.2),
)


@dataclass(frozen=True)
class Step:
    """The running state after a tile, and the tile itself.

    `m`, `l`, `p` as in eq. 7 and 8; `output` is p / l. `rescale` is exp(m before - m now), which shrinks what was
    gathered so far; `added` the tile's own sum of exponentials relative to the new m. `alone` is the tile's softmax
    output if it is normalised by itself.
    """

    keys: tuple[int, ...]
    m: float
    l: float  # noqa: E741 - the article's letter
    p: tuple[float, float]
    output: tuple[float, float]
    rescale: float
    added: float
    alone: tuple[float, float]
    lse: float


@dataclass(frozen=True)
class OnlineLesson:
    """One row read tile by tile: every step, the answer in one go, and the wrong one."""

    scores: tuple[float, ...]
    steps: tuple[Step, ...]
    output: tuple[float, float]
    averaged: tuple[float, float]


def head(boost: float = 0.0) -> toy.Head:
    """One row whose scores over twelve keys are `SCORES`, the strongest key raised by `boost`."""
    raised = [score + boost * (score == max(SCORES)) for score in SCORES]
    q = [[1.0, 0.0]] * KEYS
    return toy.by_hand(q, [[score, 0.0] for score in raised], [list(value) for value in VALUES])


def lesson(tile: int, boost: float = 0.0) -> OnlineLesson:
    """The last row in tiles of `tile` keys. Each number is the engine's attention over the keys it concerns."""
    one = head(boost)
    scores = dense.scores_of(one, KEYS - 1)
    spans = [range(first, min(first + tile, KEYS)) for first in range(0, KEYS, tile)]
    steps, before = [], -float("inf")
    for span in spans:
        output, lse = _attend(one, range(span.stop))
        alone, alone_lse = _attend(one, span)
        m = float(scores[: span.stop].max())
        total = float((lse - m).exp())
        steps.append(
            Step(
                tuple(span),
                m,
                total,
                (output[0] * total, output[1] * total),
                output,
                float(torch.tensor(before - m).exp()),
                float((alone_lse - m).exp()),
                alone,
                float(lse),
            )
        )
        before = m
    averaged = tuple(sum(step.alone[c] for step in steps) / len(steps) for c in (0, 1))
    whole, _ = _attend(one, range(KEYS))
    return OnlineLesson(tuple(scores.tolist()), tuple(steps), whole, (averaged[0], averaged[1]))


def merged(steps: tuple[Step, ...], tiles_merged: int) -> tuple[float, float]:
    """Eq. 7 and 8 carried out: the first `seen` tiles, merged one after the other from their own outputs."""
    total, x, y = 0.0, 0.0, 0.0
    for step in steps[:tiles_merged]:
        total = step.rescale * total + step.added
        x = step.rescale * x + step.added * step.alone[0]
        y = step.rescale * y + step.added * step.alone[1]
    return x / total, y / total


def _attend(one: toy.Head, keys: range) -> tuple[tuple[float, float], torch.Tensor]:
    mask = torch.zeros(1, 1, 1, KEYS, dtype=torch.bool)
    mask[..., keys.start : keys.stop] = True
    out, lse = masked_attention(one.q[:, :, -1:], one.k, one.v, mask, one.scale)
    x, y = out[0, 0, 0].tolist()
    return (x, y), lse[0, 0, 0]

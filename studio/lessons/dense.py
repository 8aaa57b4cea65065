"""Chapter 1: dense causal attention, eq. 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st
import torch

from headscope.engine import Dense, build_index, dense_attention
from headscope.kernels.cells import reference
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts, toy

LONG = 131_072


@dataclass(frozen=True)
class DenseLesson:
    """Attention of one small head: every weight, and one row in detail."""

    n: int
    row: int
    cells: int
    weights: np.ndarray
    scores: np.ndarray
    lse: float

    @property
    def formula_cells(self) -> int:
        """What n (n + 1) / 2 says, to hold against the count."""
        return self.n * (self.n + 1) // 2


def head(n: int, sharpness: float = 1.0) -> toy.Head:
    """A head that likes the first token, the last one read, and a word in the middle."""
    spots = [(range(n), [0], 1.6), (range(n), [n // 3], 1.1)]
    return toy.make(n, distances={0: 1.4, 1: 0.9}, spots=spots, noise=0.7, sharpness=sharpness, seed=7)


def lesson(n: int, row: int, sharpness: float = 1.0) -> DenseLesson:
    """The head of `n` positions, looked at from query `row`."""
    one = head(n, sharpness)
    row = min(row, n - 1)
    index = build_index(one.q, one.k, [Dense()], one.scale, tile=1)
    _, lse = dense_attention(one.q, one.k, one.v, one.scale)
    weights = reference.probabilities(one.q, one.k, index.requested_mask(), one.scale)[0, 0]
    return DenseLesson(
        n, row, int(index.requested_pairs()), weights.numpy(), scores_of(one, row).numpy(), float(lse[0, 0, row])
    )


def scores_of(one: toy.Head, row: int) -> torch.Tensor:
    """Scores of a row's causal keys (eq. 1): the LSE of attention that may read one key alone is that key's score."""
    keys = row + 1
    alone = torch.eye(keys, one.length, dtype=torch.bool)[None, :, None, :]
    q = one.q[:, :, row : row + 1].expand(1, keys, 1, -1)
    return reference.masked(q, one.k, one.v, alone, one.scale)[1][0, :, 0]


def cells_at(n: int) -> int:
    """How many cells dense causal attention has at any length."""
    x = torch.zeros(1, 1, n, 1)
    return int(build_index(x, x, [Dense()], tile=1).requested_pairs())


def draw_map(found: DenseLesson, theme: Theme) -> go.Figure:
    """All weights, the chosen row framed."""
    return figures.weights(found.weights, theme, "Attention weights, every row adds up to 100 %", row=found.row)


def draw_row(found: DenseLesson, theme: Theme) -> go.Figure:
    """The chosen row's weights as bars."""
    values = found.weights[found.row, : found.row + 1].tolist()
    return figures.bars(
        values, theme, f"Row {found.row}: one softmax over {found.row + 1} keys", axes=("key", "weight")
    )


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "Each token asks a question (its **query**) and every token up to itself offers an answer (its **key**). "
            "The score says how well they match. Softmax turns a row of scores into weights that add up to 100 %, "
            "and the output is the weighted mean of the values. A row never reads what comes after it: that is the "
            "blank half of the picture."
        )
        parts.formula(
            r"\begin{aligned}s_{ij}&=\frac{q_i^{\top}k_j}{\sqrt{d_h}}\quad(j\le i)\\[4pt] "
            r"o_i&=\sum_{j\le i}\frac{e^{s_{ij}}}{\sum_{t\le i}e^{s_{it}}}\,v_j\end{aligned}",
            "eq. 1 and 2",
        )
        n = parts.slider("Positions n", 4, 64, 12, "dense-n")
        row = parts.slider("Look at row", 0, 63, 9, "dense-row", help="Rows beyond the last one show the last one.")
        sharpness = parts.amount(
            "Scores times",
            0.0,
            4.0,
            1.0,
            0.25,
            "dense-sharpness",
            help="0 makes every key equally good; more makes the best ones win.",
        )
    found = lesson(n, row, sharpness)
    with right:
        parts.numbers(
            ("cells the engine counts", f"{found.cells:,}", "Query-key pairs with key ≤ query"),
            ("n (n + 1) / 2", f"{found.formula_cells:,}", ""),
            (f"row {found.row} adds up to", f"{found.weights[found.row].sum():.3f}", ""),
            ("LSE of the row", f"{found.lse:.3f}", "Logarithm of the softmax's denominator; chapter 8 uses it"),
        )
        parts.picture(
            draw_map(found, theme),
            "dense-map",
            f"Lower triangle of {found.n} rows; row {found.row} is framed. {found.cells} cells carry weight.",
            lambda: parts.grid_frame(weight=found.weights.tolist()),
        )
        parts.picture(
            draw_row(found, theme),
            "dense-row",
            f"Weights of row {found.row}.",
            lambda: pl.DataFrame(
                {
                    "key": list(range(found.row + 1)),
                    "score": found.scores,
                    "weight": found.weights[found.row, : found.row + 1],
                }
            ),
        )
    twice = cells_at(2 * n)
    parts.check(
        "dense",
        f"With n = {n} there are {found.cells:,} cells. How many are there with twice as many positions?",
        f"{twice:,} cells, {twice / found.cells:.2f} times as many.",
        f"Twice the length costs nearly four times the work. A prompt of {LONG:,} tokens has {cells_at(LONG):,} cells, "
        "for each head of each layer: this is why long prompts are slow to start.",
        value=twice,
        unit="cells",
    )

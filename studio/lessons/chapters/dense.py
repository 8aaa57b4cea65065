"""Chapter 1 on the page: dense causal attention, eq. 1 and 2."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.maths.dense import LONG, DenseLesson, cells_at, lesson


def draw_map(result: DenseLesson, theme: Theme) -> go.Figure:
    """All weights, the chosen row framed."""
    return figures.weights(result.weights, theme, "Attention weights, every row adds up to 100 %", row=result.row)


def draw_row(result: DenseLesson, theme: Theme) -> go.Figure:
    """The chosen row's weights as bars."""
    values = result.weights[result.row, : result.row + 1].tolist()
    return figures.bars(
        values, theme, f"Row {result.row}: one softmax over {result.row + 1} keys", axes=("key", "weight")
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
    result = lesson(n, row, sharpness)
    with right:
        parts.numbers(
            ("cells the engine counts", f"{result.cells:,}", "Query-key pairs with key ≤ query"),
            ("n (n + 1) / 2", f"{result.formula_cells:,}", ""),
            (f"row {result.row} adds up to", f"{result.weights[result.row].sum():.3f}", ""),
            ("LSE of the row", f"{result.lse:.3f}", "Logarithm of the softmax's denominator; chapter 8 uses it"),
        )
        parts.picture(
            draw_map(result, theme),
            "dense-map",
            f"Lower triangle of {result.n} rows; row {result.row} is framed. {result.cells} cells carry weight.",
            lambda: parts.grid_frame(weight=result.weights.tolist()),
        )
        parts.picture(
            draw_row(result, theme),
            "dense-row",
            f"Weights of row {result.row}.",
            lambda: pl.DataFrame(
                {
                    "key": list(range(result.row + 1)),
                    "score": result.scores,
                    "weight": result.weights[result.row, : result.row + 1],
                }
            ),
        )
    twice = cells_at(2 * n)
    parts.check(
        "dense",
        f"With n = {n} there are {result.cells:,} cells. How many are there with twice as many positions?",
        f"{twice:,} cells, {twice / result.cells:.2f} times as many.",
        f"Twice the length costs nearly four times the work. A prompt of {LONG:,} tokens has {cells_at(LONG):,} cells, "
        "for each head of each layer: this is why long prompts are slow to start.",
        value=twice,
        unit="cells",
    )

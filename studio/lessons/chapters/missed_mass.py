"""Chapter 8 on the page: missed mass from two LSEs, and how it becomes an error of the output."""

from __future__ import annotations

from functools import partial

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.base.words import percent
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.maths.missed_mass import PLACES, SHARPNESS, MissedLesson, N, lesson


def draw_row(result: MissedLesson, name: str, theme: Theme) -> go.Figure:
    """The last row's dense weights; what the pattern leaves out is striped."""
    title = f"{name}: {percent(result.captured)} captured, output off by {percent(result.error)}"
    return figures.bars(
        result.weights.tolist(),
        theme,
        title,
        axes=("key", "dense weight"),
        on=result.kept.tolist(),
        on_name="kept",
        height=250,
        top=max(0.25, float(result.weights.max()) * 1.05),
    )


def draw_curve(curve: list[MissedLesson], sharpness: float, theme: Theme) -> go.Figure:
    """Captured mass and output error as the scores are multiplied, the cells unchanged."""
    figure = figures.lines(
        [
            ("captured mass", [one.captured for one in curve], theme.accent, "solid"),
            ("output error (relative L2)", [one.error for one in curve], theme.missed, "dash"),
        ],
        theme,
        "Same cells, other sharpness: the last row",
        axes=("scores times", "share"),
        x=list(SHARPNESS),
        height=300,
        top=max(1.03, max(one.error for one in curve) * 1.05),
    )
    figure.add_vline(x=sharpness, line={"color": theme.ink, "width": 1.5, "dash": "dot"})
    return figure


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "How much did a row lose by not reading everything? The dense softmax divides by the sum over all keys, "
            "the sparse one by the sum over its own. Their **quotient** is exactly the dense probability that the kept "
            "cells hold: the captured mass. A kernel returns the logarithm of its sum, the LSE, anyway, so this costs "
            "two numbers a row, at any length, and no matrix."
        )
        parts.formula(
            r"\begin{aligned}\text{captured}_i&=\sum_{j\in\mathcal N(i)}\frac{e^{s_{ij}}}{\sum_{t\le i}e^{s_{it}}}\\ "
            r"&=e^{\,\mathrm{lse}^{\text{sparse}}_i-\mathrm{lse}^{\text{dense}}_i}\\ "
            r"\text{missed}_i&=1-\text{captured}_i\end{aligned}",
            "eq. 2 and section 5.1",
        )
        peak = PLACES[parts.choice("The row's best key is", list(PLACES), "missed-peak")]
        window = parts.slider("Window (the sink is 1 token)", 1, 16, 4, "missed-window")
        sharpness = parts.amount("Sharp head: scores times", 0.0, 5.0, 2.5, 0.25, "missed-sharpness")
        st.caption("The flat head has the same scores times 0.25. Both read the same cells.")
    sharp, flat = lesson(sharpness, peak, window), lesson(0.25, peak, window)
    with right:
        for key, name, one in (("sharp", "Sharp", sharp), ("flat", "Flat", flat)):
            parts.picture(
                draw_row(one, name, theme),
                f"missed-{key}",
                f"{name} row: {percent(one.captured)} captured by {int(one.kept.sum())} of {N} cells.",
                partial(_row_frame, one),
            )
    parts.numbers(
        ("sharp: LSE sparse", f"{sharp.lse_sparse:.4f}", ""),
        ("LSE dense", f"{sharp.lse_dense:.4f}", ""),
        ("captured = exp(difference)", percent(sharp.captured), "From the two LSEs"),
        ("kept weights added up", percent(sharp.summed), "The slow way, with the whole row written out"),
        ("output error", percent(sharp.error), "Relative L2 against the dense output"),
        ("flat: captured", percent(flat.captured), "Same cells"),
        ("output error", percent(flat.error), "Same cells"),
    )
    curve = [lesson(one, peak, window) for one in SHARPNESS]
    parts.picture(
        draw_curve(curve, sharpness, theme),
        "missed-curve",
        "Captured mass and output error against sharpness.",
        lambda: pl.DataFrame(
            {
                "sharpness": SHARPNESS,
                "captured": [one.captured for one in curve],
                "output_error": [one.error for one in curve],
            }
        ),
    )
    st.markdown(
        "A **sharp** row lives from few keys: keep those, and nearly nothing is lost. A **flat** row spreads its "
        "weight thin: the same budget drops many small weights, and their sum is not small. But sharpness is no "
        "promise: let the best key lie where the pattern does not look, and the sharp row loses everything. That is "
        "why the studio shows the worst row beside the mean."
    )
    gone, stays = lesson(4.0, PLACES["key 12"], 4), lesson(0.25, PLACES["key 12"], 4)
    parts.check(
        "missed",
        "The best key is number 12, which a sink of 1 and a window of 4 do not reach. Which row captures "
        "more of its mass: the sharp one (scores times 4) or the flat one (times 0.25)?",
        f"The flat one: {percent(stays.captured)} against {percent(gone.captured)}.",
        "With the peak left out, the sharper the row, the less remains. Tell them apart before choosing a budget: by "
        "measuring, not by the look of the map.",
    )


def _row_frame(result: MissedLesson) -> pl.DataFrame:
    return pl.DataFrame({"key": list(range(N)), "weight": result.weights, "kept": result.kept})

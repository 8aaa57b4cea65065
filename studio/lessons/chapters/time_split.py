"""Chapter 9 on the page: where the time of a layer goes, eq. 13, and the ceiling of any speed-up of attention."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.base.words import milliseconds, percent
from headscope.studio.charts import charts
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, measuring, parts
from headscope.studio.lessons.maths.time_split import EXAMPLE, LENGTHS, Measured, TimeSplit, measure


def draw_bars(split: TimeSplit, theme: Theme) -> go.Figure:
    """The two layers as stacked bars on one time axis."""
    figure = go.Figure()
    for name, dense, sparse, colour, stripes in (
        ("projections", split.projections_ms, split.projections_ms, theme.patterns["dense"], ""),
        ("dense attention", split.attention_ms, 0.0, theme.missed, "/"),
        ("index", 0.0, split.index_ms, theme.patterns["a-shape"], "x"),
        ("sparse attention", 0.0, split.sparse_ms, theme.accent, ""),
        ("other", split.other_ms, split.other_ms, theme.faint, "."),
    ):
        figure.add_bar(
            x=[dense, sparse],
            y=["dense", "sparse"],
            orientation="h",
            name=name,
            marker={"color": colour, "pattern": figures.stripe(stripes, theme)},
            hovertemplate=name + ": %{x:.2f} ms<extra>%{y}</extra>",
        )
    charts.layout(figure, theme, "One layer, in ms", 260, barmode="stack", bargap=0.35)
    figures.keys_below(figure, theme)
    figure.update_layout(font={"size": 13}, legend={"traceorder": "normal"})
    figure.update_xaxes(title="time (ms)", showgrid=True, gridcolor=theme.grid)
    figure.update_yaxes(autorange="reversed")
    return figure


def draw_ceiling(split: TimeSplit, theme: Theme) -> go.Figure:
    """The ceiling against attention's share, with this layer on it and below it."""
    shares = [step / 100 for step in range(0, 97)]
    fixed = 1.0
    ceilings = [TimeSplit(fixed, fixed * f / (1 - f), 0, 1, 0).ceiling for f in shares]
    figure = go.Figure()
    figure.add_scatter(
        x=shares,
        y=ceilings,
        mode="lines",
        name="ceiling 1 / (1 − f)",
        line={"color": theme.faint, "width": 2, "dash": "dash"},
        hovertemplate="f = %{x:.0%}: at most %{y:.2f}×<extra></extra>",
    )
    for name, value, colour, mark in (
        ("ceiling of this layer", split.ceiling, theme.ink, "circle-open"),
        ("this layer", split.speedup, theme.accent, "circle"),
        ("kernel alone, index left out", split.kernel_speedup, theme.missed, "x"),
    ):
        figure.add_scatter(
            x=[split.share],
            y=[value],
            mode="markers",
            name=name,
            hovertemplate=f"{name}: %{{y:.2f}}×<extra></extra>",
            marker={"size": 13, "symbol": mark, "color": colour, "line": {"width": 2.5, "color": colour}},
        )
    charts.layout(figure, theme, "What the rest of the layer allows", 360)
    figures.plain(figure, theme, ("attention's share f of the dense layer", "speed-up (×)"))
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure.update_yaxes(type="log", tickvals=[1, 2, 3, 5, 8, 12, 20], range=[-0.15, 1.4])
    figures.keys_below(figure, theme, lines=2)
    return figure


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "A layer does more than attention: it projects queries, keys and values, and it multiplies and adds around "
            "them. Sparse attention replaces one part, and brings a new one along: finding out **where** to look, the "
            "index. What counts is the layer before and after, all parts in."
        )
        parts.formula(
            r"\begin{gathered}T=T_{\text{proj}}+T_{\text{index}}+T_{\text{sparse}}+T_{\text{other}}\\[4pt] "
            r"\text{speed-up}\le\frac{1}{1-f}\end{gathered}",
            "eq. 13 and section 5.2",
            "f is attention's share of the dense layer.",
        )
        split = TimeSplit(
            projections_ms=parts.amount("Projections (ms)", 0.5, 10.0, EXAMPLE.projections_ms, 0.5, "time-proj"),
            attention_ms=parts.amount("Dense attention (ms)", 0.5, 40.0, EXAMPLE.attention_ms, 0.5, "time-dense"),
            index_ms=parts.amount("Index (ms)", 0.0, 5.0, EXAMPLE.index_ms, 0.1, "time-index"),
            sparse_ms=parts.amount("Sparse attention (ms)", 0.1, 20.0, EXAMPLE.sparse_ms, 0.1, "time-sparse"),
            other_ms=parts.amount("Other (ms)", 0.5, 10.0, EXAMPLE.other_ms, 0.5, "time-other"),
        )
    with right:
        parts.numbers(
            ("dense layer", f"{split.dense_ms:.1f} ms", ""),
            ("sparse layer", f"{split.layer_ms:.1f} ms", "Index time in"),
            ("speed-up", f"{split.speedup:.2f}×", "Dense layer over sparse layer"),
            ("kernel alone", f"{split.kernel_speedup:.1f}×", "Leaves out the index and the rest of the layer"),
            ("ceiling 1 / (1 − f)", f"{split.ceiling:.2f}×", f"f = {split.share:.2f}"),
        )
        parts.picture(
            draw_bars(split, theme),
            "time-bars",
            f"Dense {split.dense_ms} ms, sparse {split.layer_ms} ms.",
            lambda: pl.DataFrame([vars(split)]),
        )
        parts.picture(
            draw_ceiling(split, theme),
            "time-ceiling",
            f"Share {split.share:.2f}: ceiling {split.ceiling:.2f}, reached {split.speedup:.2f}.",
            lambda: pl.DataFrame([{"share": split.share, "ceiling": split.ceiling, "speedup": split.speedup}]),
        )
        if split.speedup < 1:
            st.warning(
                "Slower than dense: the index costs more than the sparse attention saves. Short prompts are like this."
            )
    st.caption(
        f"At first: {EXAMPLE.dense_ms:.0f} ms of which {EXAMPLE.attention_ms:.0f} ms are attention. Sparse attention "
        f"takes {EXAMPLE.sparse_ms:.0f} ms and its index {EXAMPLE.index_ms:.1f} ms: {EXAMPLE.speedup:.2f} times as "
        f"fast, not {EXAMPLE.kernel_speedup:.0f} times."
    )
    _measured()
    parts.check(
        "time",
        f"In the article's layer ({EXAMPLE.dense_ms:.0f} ms, attention {EXAMPLE.attention_ms:.0f} ms), make "
        "sparse attention and index infinitely fast. How many times as fast does the layer get?",
        f"{EXAMPLE.ceiling:.0f} times.",
        f"The other {EXAMPLE.dense_ms - EXAMPLE.attention_ms:.0f} ms stay. With longer prompts attention's share f "
        "grows, and with it the ceiling.",
        value=EXAMPLE.ceiling,
        unit="times",
    )


def _measured() -> None:
    st.markdown("#### On this machine")
    st.markdown(
        "The same split for attention of one small layer, measured: dense, index and kernel at several lengths."
    )
    working = measuring.under_way("time")
    times: list[Measured] | None = measuring.results("time").get(None)
    if not working:
        lengths = ", ".join(f"{tokens:,}" for tokens in LENGTHS[:-1])
        measuring.button(
            "time",
            f"Measure {lengths} and {LENGTHS[-1]:,} tokens",
            "Timing one layer",
            measure,
            icon=":material/timer:",
        )
    if times is None:
        st.caption(f"Takes a few seconds. Nothing is measured until you press. {measuring.IN_LINE}")
        return
    st.dataframe(
        pl.DataFrame(
            [
                {
                    "tokens": f"{one.tokens:,}",
                    "dense": milliseconds(one.dense_ms),
                    "index": milliseconds(one.index_ms),
                    "sparse": milliseconds(one.kernel_ms),
                    "speed-up of attention, index in": f"{one.speedup:.2f}×",
                    "density": percent(one.density),
                    "missed mass": percent(one.missed),
                    "kernels": one.impl,
                }
                for one in times
            ]
        ),
        hide_index=True,
        width="content",
    )
    best = max(times, key=lambda one: one.speedup)
    st.caption(
        f"Best at {best.tokens:,} tokens: {best.speedup:.2f}×. Below 1× dense wins; the length where it turns is the "
        "crossover, and it belongs to a machine."
    )

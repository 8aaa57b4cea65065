"""Chapter 2 on the page: the A-shape, eq. 3 and 4."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.base.words import percent
from headscope.studio.charts import charts
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.figures import Kind
from headscope.studio.lessons.maths.a_shape import DRAWING, LENGTHS, AShapeLesson, growth, lesson


def names(theme: Theme) -> tuple[Kind, ...]:
    """Classes of the picture."""
    return figures.kinds(
        theme,
        Kind("sink", theme.patterns["a-shape"], "┃"),
        Kind("window", theme.accent, "╲"),
        Kind("in both: counted once", theme.missed, "●"),
    )


def draw_cells(result: AShapeLesson, theme: Theme) -> go.Figure:
    """The pattern, coloured by where a cell comes from."""
    title = f"{result.cells} of {result.dense_cells} cells are read"
    return figures.cells(result.classes, names(theme), theme, title)


def draw_growth(sink: int, window: int, sparse: list[int], dense: list[int], theme: Theme) -> go.Figure:
    """Cells against length, both on logarithmic axes."""
    figure = go.Figure()
    for name, values, colour, mark, dash in (
        ("dense", dense, theme.patterns["dense"], "square-open", "dot"),
        (f"a-shape {sink}/{window}", sparse, theme.patterns["a-shape"], "triangle-up", "solid"),
    ):
        figure.add_scatter(
            x=list(LENGTHS),
            y=values,
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"symbol": mark, "size": 8},
            hovertemplate="n = %{x:,}: %{y:,} cells<extra>" + name + "</extra>",
        )
    charts.layout(figure, theme, "Cells as the prompt grows", 280)
    figures.plain(figure, theme, ("positions n", "cells"))
    figure.update_xaxes(type="log", tickvals=LENGTHS[::2], tickformat=",")
    figure.update_yaxes(type="log", dtick=1, tickformat="~s")
    return figure


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "Some heads only look at two places: the **first tokens** (the sink) and the **most recent ones** (the "
            "window, the row's own token included). Drawn as cells this is a bar on the left and a band along the "
            "diagonal, the two strokes of an A. Nothing has to be searched: the cells follow from the position."
        )
        parts.formula(
            r"\begin{aligned}\mathcal N_A(i)=\;&\{0,\dots,\min(g-1,i)\}\\ \cup\;&\{\max(0,i-w+1),\dots,i\}\\ "
            r"E_A=\;&\textstyle\sum_i|\mathcal N_A(i)|\end{aligned}",
            "eq. 3 and 4",
            "g is the sink, w the window, E the cells.",
        )
        n = parts.slider("Positions n", 4, 64, 8, "ashape-n")
        sink = parts.slider("Sink g", 0, 16, 1, "ashape-sink")
        window = parts.slider("Window w", 1, 32, 2, "ashape-window")
        drawn = lesson(*DRAWING)
        st.caption(
            f"With {drawn.n} positions, sink {drawn.sink} and window {drawn.window} this is the article's drawing, "
            f"with {drawn.cells} cells."
        )
    result = lesson(n, sink, window)
    with right:
        parts.numbers(
            ("cells", str(result.cells), "Counted once each, by the engine"),
            ("in the sink", str(result.sink_cells), ""),
            ("in the window", str(result.window_cells), ""),
            ("in both", str(result.both), "Near the start the window reaches the sink"),
            ("of dense", percent(result.cells / result.dense_cells), f"Dense has {result.dense_cells} cells"),
        )
        parts.legend(names(theme))
        parts.picture(
            draw_cells(result, theme),
            "ashape-cells",
            f"{result.cells} cells: {result.sink_cells} in the sink columns, {result.window_cells} in the window, "
            f"{result.both} in both.",
            lambda: parts.grid_frame(cell=[[names(theme)[c].name for c in row] for row in result.classes.tolist()]),
        )
        sparse, dense = growth(sink, window)
        parts.picture(
            draw_growth(sink, window, sparse, dense, theme),
            "ashape-growth",
            "Cells against length: dense grows with the square, the a-shape in a straight line.",
            lambda: pl.DataFrame({"n": LENGTHS, "a_shape": sparse, "dense": dense}),
        )
        st.caption(
            f"Dense grows with the square of n, the A-shape only with n: at {LENGTHS[-1]:,} positions "
            f"{dense[-1]:,} cells against {sparse[-1]:,}."
        )
    parts.check(
        "ashape",
        "Add the cells of the sink and the cells of the window. By how much is that too many?",
        f"By {result.both}: {result.sink_cells} + {result.window_cells} − {result.both} = {result.cells}.",
        "In the first rows the window reaches the sink, and such a cell belongs to both parts. It is read once. A "
        "kernel that reads it twice gets a wrong softmax: chapter 3 shows how wrong.",
        value=result.both,
        unit="cells",
    )

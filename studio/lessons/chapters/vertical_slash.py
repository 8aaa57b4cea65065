"""Chapter 3 on the page: the picture to click on, the hand calculation, and the wrong answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.charts.theme import GLYPHS, Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.figures import Kind
from headscope.studio.lessons.maths import vertical_slash as maths
from headscope.studio.lessons.maths.vertical_slash import COLUMNS, DISTANCES, GIVEN, ROW, N, VerticalSlashLesson

CHART = "vslash-cells"
BELOW, BESIDE = N, -1
"""Where the picture has its column buttons (a row below) and distance buttons (a column beside)."""


def names(theme: Theme) -> tuple[Kind, ...]:
    """Classes of the picture."""
    return figures.kinds(
        theme,
        Kind("column", theme.patterns["a-shape"], "┃"),
        Kind("distance", theme.accent, "╲"),
        Kind("both: the same cell named twice", theme.missed, "2"),
    )


def draw_cells(result: VerticalSlashLesson, theme: Theme) -> go.Figure:
    """The eight rows with buttons around them: below for columns, beside for distances."""
    title = f"{result.cells} cells are read"
    figure = figures.cells(result.classes, names(theme), theme, title, row=result.row, height=520, hover=False)
    places = np.argwhere(np.tri(N, dtype=bool))
    _add_buttons(figure, theme, "columns", list(range(N)), [BELOW] * N, result.columns, "column")
    _add_buttons(figure, theme, "distances", [BESIDE] * N, list(range(N)), result.distances, "distance")
    hidden = {"marker": {"opacity": 0}}
    figure.add_scatter(
        x=places[:, 1],
        y=places[:, 0],
        mode="markers",
        name="cells",
        showlegend=False,
        hoverinfo="text",
        text=[
            f"row {i}, key {j}: distance {i - j}, {names(theme)[result.classes[i, j]].name}<br>click: look at row {i}"
            for i, j in places
        ],
        marker={"symbol": "square", "size": 30, "opacity": 0},
        selected=hidden,
        unselected=hidden,
    )
    figure.update_xaxes(range=[-1.55, N - 0.5], title="key position · click a number to keep its column", tickvals=[])
    figure.update_yaxes(range=[N + 0.55, -0.5], title="query row · click a number to keep its distance", tickvals=[])
    return figure


def _add_buttons(
    figure: go.Figure, theme: Theme, name: str, x: list[int], y: list[int], chosen: tuple[int, ...], what: str
) -> None:
    colour = theme.patterns["a-shape"] if what == "column" else theme.accent
    on = [at in chosen for at in range(N)]
    same = {"marker": {"opacity": 1}}
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers+text",
        name=name,
        showlegend=False,
        hoverinfo="text",
        text=[str(at) for at in range(N)],
        hovertext=[f"{what} {at}: click to {'drop' if kept else 'keep'}" for at, kept in enumerate(on)],
        textfont={"size": 13, "color": [theme.background if kept else theme.ink for kept in on]},
        marker={
            "symbol": "square" if what == "column" else "circle",
            "size": 27,
            "opacity": 1,
            "color": [colour if kept else theme.panel for kept in on],
            "line": {"width": 1.5, "color": colour},
        },
        selected=same,
        unselected=same,
    )


def draw_covers(covers: list[maths.Cover], classes: np.ndarray, theme: Theme) -> go.Figure:
    """The three patterns over the same cells; what they read in vain is striped by its sign."""
    kept = figures.kinds(theme, Kind("asked for", theme.accent, "·"), Kind("extra", theme.wash, "+"))
    pictures = []
    for cover in covers:
        shown = np.where(cover.mask, 3, np.minimum(classes, 1))
        pictures.append((f"{GLYPHS[cover.name]} {cover.name}: {cover.cells}", np.where(classes > 1, 2, shown)))
    return figures.cell_row(pictures, kept, theme, "What each pattern reads to hold the same cells")


def toggle_from_click() -> None:
    """Turns a click on the picture into a changed column, distance or row."""
    mark = parts.clicked(CHART)
    if mark is None:
        return
    x, y = round(mark[0]), round(mark[1])
    if y == BELOW and 0 <= x < N:
        _toggle("vslash-columns", x)
    elif x == BESIDE and 0 <= y < N:
        _toggle("vslash-distances", y)
    elif 0 <= x <= y < N:
        st.session_state["vslash-row"] = y


def _toggle(key: str, value: int) -> None:
    lines = list(st.session_state.get(key) or [])
    st.session_state[key] = sorted(set(lines) ^ {value})


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "Two things repeat in many heads. Some **tokens** are read by everybody: a column of the picture. Some "
            "**distances** are kept by everybody, such as “the word two back”: a slash. A vertical-slash head keeps a "
            "few of each, chosen anew for every input. Here you choose: click the squares below the picture for "
            "columns and the circles beside it for distances, or use the buttons here."
        )
        parts.formula(
            r"\begin{aligned}\mathcal N_{VS}(i)=\;&\{j\in C:\;j\le i\}\\ "
            r"\cup\;&\{i-\delta:\delta\in D,\;0\le i-\delta\le i\}\end{aligned}",
            "eq. 5",
            "C are the columns, D the distances.",
        )
        columns = _several("Columns C", COLUMNS, "vslash-columns")
        distances = _several("Distances D", DISTANCES, "vslash-distances")
        row = parts.slider("Look at row", 0, N - 1, ROW, "vslash-row")
        forget = parts.switch(
            "Forget to de-duplicate",
            "vslash-forget",
            "Reads the list of columns and the list of distances one after the other, as a careless kernel would",
        )
    result = maths.lesson(columns, distances, row)
    with right:
        parts.legend(names(theme))
        parts.picture(
            draw_cells(result, theme),
            CHART,
            f"Columns {result.columns} and distances {result.distances}: {result.cells} cells; row {result.row} reads "
            f"keys {result.right.keys}.",
            lambda: parts.grid_frame(cell=[[names(theme)[c].name for c in line] for line in result.classes.tolist()]),
            on_select=toggle_from_click,
        )
    _by_hand(result, forget)
    _all_three(result, theme)
    _question()


def _several(label: str, default: tuple[int, ...], key: str) -> list[int]:
    return list(
        st.pills(
            label,
            list(range(N)),
            selection_mode="multi",
            default=list(default),
            key=key,
            bind="query-params",
            persist_state="session",
            wrap=True,
        )
    )


def _by_hand(result: VerticalSlashLesson, forget: bool) -> None:
    shown = result.doubled if forget else result.right
    st.markdown(f"#### Row {result.row} by hand")
    if not shown.keys:
        st.info("This row reads nothing, so its output is 0. Keep a column or a distance that it can reach.")
        return
    listed = ", ".join(map(str, shown.keys))
    reads = f"[{listed}]" if forget else "{" + listed + "}"
    parts.numbers(
        (f"row {result.row} reads", reads, "Key positions, in the order in which they are listed"),
        ("weights", _tuple(shown.weights), "Softmax of the scores over these keys alone"),
        ("output", _tuple(shown.output), "Weights times values"),
        ("denominator Z", f"{shown.denominator:.3f}", "Sum of the exponentials of the scores, eq. 10"),
    )
    st.dataframe(_table(shown), hide_index=True, width="content")
    if result.cut:
        gone = ", ".join(f"{result.row} − {distance} = {result.row - distance}" for distance in result.cut)
        st.caption(
            f"Cut: {gone}. There is no such position, so row {result.row} reads fewer keys than the budget allows."
        )
    if forget:
        _wrong(result)
    elif (result.columns, result.distances, result.row) == (COLUMNS, DISTANCES, ROW):
        st.caption(
            f"The article (eq. 9 to 11) gets {_tuple(result.right.rounded_output)}: it rounds the weights to three "
            f"digits before it multiplies. Keys and values {_set(GIVEN)} are the article's, the other positions are "
            "ours."
        )


def _wrong(result: VerticalSlashLesson) -> None:
    if not result.repeated:
        st.info(
            f"In row {result.row} no column meets a distance, so nothing is read twice and the answer is right by luck."
        )
        st.button("Add column 6, which row 6 also reaches by distance 0", on_click=_show_overlap)
        return
    right, wrong = result.right, result.doubled
    share = sum(w for w, j in zip(wrong.weights, wrong.keys, strict=True) if j in result.repeated)
    fair = sum(w for w, j in zip(right.weights, right.keys, strict=True) if j in result.repeated)
    st.error(
        f"Wrong. Key {', '.join(map(str, result.repeated))} stands in both lists, so its exponential enters Z twice "
        f"and its value is added twice: its weight is {share:.3f} instead of {fair:.3f}, and the output "
        f"{_tuple(wrong.output)} instead of {_tuple(right.output)}."
    )


def _show_overlap() -> None:
    st.session_state["vslash-columns"] = sorted({*(st.session_state.get("vslash-columns") or []), 6})
    st.session_state["vslash-distances"] = sorted({*(st.session_state.get("vslash-distances") or []), 0})
    st.session_state["vslash-row"] = 6


def _all_three(result: VerticalSlashLesson, theme: Theme) -> None:
    covers = maths.covers(result.columns, result.distances)
    if not covers:
        return
    st.markdown("#### The same cells under all three patterns")
    st.markdown(
        "Each pattern can hold any set of cells if it is made wide enough. The question is what else it then reads."
    )
    kept = figures.kinds(theme, Kind("asked for", theme.accent, "·"), Kind("extra", theme.wash, "+"))
    parts.legend(kept)
    parts.picture(
        draw_covers(covers, result.classes, theme),
        "vslash-covers",
        "; ".join(f"{one.name} needs {one.needs}: {one.cells} cells, {one.extra} extra" for one in covers),
        lambda: _cover_table(covers),
    )
    st.dataframe(_cover_table(covers), hide_index=True, width="content")


def _question() -> None:
    n, columns = 1024, (0, 512)
    cells = maths.column_cells(n, columns)
    parts.check(
        "vslash",
        f"A prompt of {n:,} tokens keeps the columns {columns[0]} and {columns[1]} and nothing else. "
        "How many cells are that?",
        f"{cells:,} cells.",
        f"A column starts at its own row, since earlier rows may not look ahead: {n:,} − {columns[0]} cells and "
        f"{n:,} − {columns[1]} cells.",
        value=cells,
        unit="cells",
    )


def _table(shown: maths.Reading) -> pl.DataFrame:
    rows: list[dict[str, Any]] = [
        {
            "key": j,
            "k": str(tuple(maths.KEYS[j])),
            "score q·k": f"{score:.3g}",
            "weight": f"{weight:.3f}",
            "v": str(tuple(maths.VALUES[j])),
        }
        for j, score, weight in zip(shown.keys, shown.scores, shown.weights, strict=True)
    ]
    return pl.DataFrame(rows)


def _cover_table(covers: list[maths.Cover]) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {"pattern": f"{GLYPHS[c.name]} {c.name}", "needs": c.needs, "cells": c.cells, "extra": c.extra}
            for c in covers
        ]
    )


def _tuple(values: tuple[float, ...]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"


def _set(values: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"

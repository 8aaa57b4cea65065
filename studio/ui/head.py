"""One head as several pages draw it: its choice, its three maps, its numbers and the line along the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import streamlit as st

from headscope.engine.loss.measure import HeadMeasurement
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.maps import pooled_map
from headscope.studio.charts.theme import GLYPHS
from headscope.studio.data.results import METRICS, HeadDetail, worst_order
from headscope.studio.ui import state
from headscope.studio.ui.context import PageContext, RunContext
from headscope.studio.ui.widgets import figure


def head_picker(page: RunContext, order: Sequence[tuple[int, int]], key: str) -> None:
    """Layer and head as boxes, previous and next in the chosen order."""
    here = (page.view.layer, page.view.head)
    at = order.index(here) if here in order else 0
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        st.selectbox(
            "Layer",
            range(page.run.facts.layers),
            width=84,
            **state.bind(f"{key}-layer", page.view.layer, lambda value: page.view.go(value, page.view.head)),
        )
        st.selectbox(
            "Head",
            range(page.run.facts.query_heads),
            width=84,
            **state.bind(f"{key}-head", page.view.head, lambda value: page.view.go(page.view.layer, value)),
        )
        st.button(
            "Previous",
            key=f"{key}-previous",
            icon=":material/chevron_left:",
            disabled=at == 0,
            shortcut="K",
            on_click=lambda: page.view.go(*order[max(0, at - 1)]),
            help="The head before this one in the chosen order",
        )
        st.button(
            "Next",
            key=f"{key}-next",
            icon=":material/chevron_right:",
            disabled=at >= len(order) - 1,
            shortcut="J",
            on_click=lambda: page.view.go(*order[min(len(order) - 1, at + 1)]),
            help="The head after this one",
        )
        st.segmented_control(
            "Order",
            ["worst first", "by layer"],
            required=True,
            **state.bind(f"{key}-order", page.view.order, lambda value: setattr(page.view, "order", value)),
        )


def head_order(page: PageContext, values: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The order that Previous and Next follow."""
    if page.view.order == "by layer":
        return [(layer, head) for layer, row in enumerate(values) for head in range(len(row))]
    return worst_order(values)


def map_controls(page: RunContext, key: str) -> None:
    """Scale and crop of the three maps."""
    tokens = page.run.row.tokens
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control(
            "Scale of the maps",
            ["logarithmic", "linear"],
            required=True,
            **state.bind(
                f"{key}-log",
                "logarithmic" if page.view.logarithmic else "linear",
                lambda value: setattr(page.view, "logarithmic", value == "logarithmic"),
            ),
        )

        def crop(value: tuple[int, int]) -> None:
            page.view.crop = None if value == (0, tokens) or value[1] - value[0] < 8 else value

        st.slider(
            "Rows shown (query positions)",
            0,
            tokens,
            width=320,
            step=max(1, tokens // 256),
            format="%,d",
            **state.bind(f"{key}-crop", page.view.crop or (0, tokens), crop),
        )


def maps(page: RunContext, detail: HeadDetail, key: str) -> None:
    """The three pictures, on one scale."""
    pictures = detail.maps
    peak, side = _peak(pictures.dense), pictures.row_edges[1] - pictures.row_edges[0]
    marked = [(place.query, place.key) for place in pictures.places[:5]]
    first, second, third = st.columns(3, gap="small")

    def one(name: str, title: str, values: np.ndarray, **more: Any) -> None:
        drawn = pooled_map(
            values,
            pictures.row_edges,
            pictures.column_edges,
            title,
            page.theme,
            logarithmic=page.view.logarithmic,
            top=peak,
            **more,
        )
        figure(
            drawn,
            f"{key}-{name}",
            f"{title}. Rows are query positions, columns key positions, {len(pictures.row_edges) - 1} by "
            f"{len(pictures.column_edges) - 1} cells of about {side} tokens; colour is the share of a row's mass.",
            lambda: map_frame(detail, values),
        )

    with first:
        one("dense", "Dense, exact", pictures.dense)
    with second:
        one("computed", "Computed", pictures.dense, computed=pictures.computed)
    with third:
        one("missed", "Missed, exact", pictures.missed, marked=marked)
    st.caption(
        "Colour is the share of a row's probability in a cell, one scale for all heads. Orange is never computed; "
        "circles mark the largest missed cells."
    )


def map_frame(detail: HeadDetail, values: np.ndarray) -> pl.DataFrame:
    """A map's cells as rows: query and key ranges and the share."""
    pictures = detail.maps
    rows, columns = values.shape
    kept = [(r, c) for r in range(rows) for c in range(columns) if values[r, c] == values[r, c]]
    return pl.DataFrame(
        {
            "query_from": [pictures.row_edges[r] for r, _ in kept],
            "query_to": [pictures.row_edges[r + 1] for r, _ in kept],
            "key_from": [pictures.column_edges[c] for _, c in kept],
            "key_to": [pictures.column_edges[c + 1] for _, c in kept],
            "share_of_row": [float(values[r, c]) for r, c in kept],
            "computed_share_of_pairs": [float(pictures.computed[r, c]) for r, c in kept],
        }
    )


def along(page: RunContext, detail: HeadDetail, key: str, before: HeadDetail | None = None) -> None:
    """Missed mass along the prompt."""
    tokens = len(detail.missed)
    edges = tuple(tokens * index // min(160, tokens) for index in range(min(160, tokens) + 1))
    hover = [words.inert(words.excerpt(page.run.pieces, first, 5)) for first in edges[:-1]]
    figure(
        charts.missed_along(
            detail.missed, edges, page.theme, hover=hover, before=None if before is None else before.missed
        ),
        f"{key}-along",
        f"Missed mass along the prompt: mean {words.percent(detail.measurement.missed_mass_mean)}, worst row "
        f"{words.percent(detail.measurement.missed_mass_worst)} at token {detail.measurement.missed_mass_worst_row}.",
        lambda: pl.DataFrame({"query": list(range(tokens)), "missed_mass": detail.missed}),
    )


def sentence(detail: HeadDetail) -> str:
    """The finding of a head in words."""
    one = detail.measurement
    return words.finding(
        one.missed_mass_mean,
        one.missed_mass_worst,
        one.missed_mass_worst_row,
        one.missed_mass_thirds,
        detail.maps.near,
        detail.maps.far,
    )


def numbers(detail: HeadDetail, before: HeadDetail | None = None) -> None:
    """Four numbers of a head; with `before`, how they changed."""
    one = detail.measurement

    def change(now: float, then: float | None) -> str | None:
        return None if then is None or abs(now - then) < 5e-6 else f"{(now - then) * 100:+.2f} points"

    old = None if before is None else before.measurement
    row = st.container(horizontal=True, gap="small")
    row.metric(
        "misses, mean",
        words.percent(one.missed_mass_mean),
        delta_color="inverse",
        width=152,
        delta=change(one.missed_mass_mean, None if old is None else old.missed_mass_mean),
    )
    row.metric(
        "worst row",
        words.percent(one.missed_mass_worst),
        delta_color="inverse",
        width=152,
        delta=change(one.missed_mass_worst, None if old is None else old.missed_mass_worst),
    )
    row.metric(
        "computes, of causal pairs",
        words.percent(one.computed_density),
        delta_color="inverse",
        width=152,
        delta=change(one.computed_density, None if old is None else old.computed_density),
    )
    row.metric(
        "this head alone, sparse",
        words.milliseconds(detail.sparse_ms),
        delta_color="off",
        width=152,
        delta=f"dense {words.milliseconds(detail.dense_ms)}",
        delta_arrow="off",
        help=f"Measured: index {words.milliseconds(detail.index_ms)}, kernel {words.milliseconds(detail.kernel_ms)}, "
        f"{detail.impl}. All heads of a layer run in one launch in production.",
    )


def pattern_text(measurement: HeadMeasurement) -> str:
    """A pattern with its mark."""
    return f"{GLYPHS.get(measurement.pattern.kind, '')} {words.label(measurement.pattern)}"


def choose_metric(page: PageContext, key: str) -> None:
    """Which number the overview shows."""
    st.selectbox(
        "Colour shows",
        list(METRICS),
        format_func=METRICS.__getitem__,
        **state.bind(key, page.view.metric, lambda value: setattr(page.view, "metric", value)),
    )


def _peak(values: np.ndarray) -> float:
    known = values[values == values]
    return float(known.max()) if known.size else 1.0

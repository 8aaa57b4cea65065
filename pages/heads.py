"""Which heads lose what on this prompt, and where."""

from __future__ import annotations

import numpy as np
import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.studio.base import words
from headscope.studio.charts.overview import overview as draw_overview
from headscope.studio.charts.theme import GLYPHS
from headscope.studio.data.results import METRICS, metric_grid, worst_order
from headscope.studio.lab.jobs import sentence
from headscope.studio.ui import head, setup, widgets
from headscope.studio.ui.context import RunContext
from headscope.studio.ui.measured import MeasuredGrid, measured
from headscope.studio.ui.opening import open_run
from headscope.studio.ui.panels import more_about


def main() -> None:
    page = widgets.open_page("Heads")
    opened = open_run(page)
    if opened is None:
        setup.first_visit(page)
        return
    widgets.strip(opened)
    with st.expander("Another prompt or model", icon=":material/edit_note:"):
        setup.choose(opened)
    widgets.progress(opened)
    results(opened)


def results(page: RunContext) -> None:
    """The overview and the head that it is opened on."""
    grid = measured(page)
    values = metric_grid(grid, page.view.metric)
    left, right = st.columns([5, 8], gap="large")
    with left:
        overview(page, values, grid)
    with right:
        one_head(page, values)


def overview(page: RunContext, values: list[list[float]], grid: MeasuredGrid) -> None:
    """Layers x heads, and the same heads as a table, worst first."""
    head.choose_metric(page, "heads-metric")
    table, draft = np.asarray(values), page.draft
    mean = float(np.nanmean(table)) if np.isfinite(table).any() else float("nan")
    name = METRICS[page.view.metric]
    st.caption(
        f"Mean of all heads {words.percent(mean)}, isolated: on the Q/K/V of the dense prefill. Each cell is a head, "
        "its mark the pattern, orange the head on the right; click another."
    )
    labels = [[words.label(pattern) for pattern in row] for row in draft.patterns]
    kinds = [[pattern.kind for pattern in row] for row in draft.patterns]
    selected = (page.view.layer, page.view.head)
    widgets.figure(
        draw_overview(table, labels, kinds, selected, draft.changed, name, page.theme),
        "overview",
        f"Layers by heads, {name}. Mean {words.percent(mean)}. The table below holds the same numbers, worst first.",
        lambda: all_heads(grid),
        on_select=lambda: clicked(page),
    )
    worst_first(page, values, grid)


def clicked(page: RunContext) -> None:
    """A click on a cell. Clicking the same cell again arrives as an empty selection."""
    points = st.session_state["overview"]["selection"]["points"]
    cell = None
    if points:
        cell = round(points[0]["y"]), round(points[0]["x"])
    elif page.view.last_click is not None:
        cell = page.view.last_click
    if cell is not None and 0 <= cell[1] < page.run.facts.query_heads:
        page.view.last_click = cell
        page.view.go(*cell)


def worst_first(page: RunContext, values: list[list[float]], grid: MeasuredGrid) -> None:
    """The heads as a table; a chosen row is looked at."""
    order = worst_order(values)
    rows = [(place, one) for place in order if (one := grid[place[0]][place[1]]) is not None]
    top = max((values[layer][number] for (layer, number), _ in rows), default=1.0)
    frame = pl.DataFrame(
        {
            "head": [f"L{layer} H{number}" for (layer, number), _ in rows],
            "pattern": [f"{GLYPHS[one.pattern.kind]} {words.budgets(one.pattern)}" for _, one in rows],
            "shown": [100 * values[layer][number] for (layer, number), _ in rows],
            "worst row": [100 * one.missed_mass_worst for _, one in rows],
            "cost": [100 * one.computed_density for _, one in rows],
        }
    )

    def picked() -> None:
        picked_rows = st.session_state["worst"]["selection"]["rows"]
        if picked_rows and picked_rows[0] < len(rows):
            page.view.go(*rows[picked_rows[0]][0])

    percent = "%.1f %%"
    st.dataframe(
        frame,
        key="worst",
        on_select=picked,
        selection_mode="single-row",
        hide_index=True,
        height=318,
        alt="Heads, the worst first",
        column_config={
            "head": st.column_config.TextColumn(width=64),
            "pattern": st.column_config.TextColumn(width=98),
            "shown": st.column_config.ProgressColumn(
                METRICS[page.view.metric].removeprefix("missed mass, "),
                min_value=0.0,
                max_value=max(100 * top, 1e-4),
                format=percent,
                width=122,
            ),
            "worst row": st.column_config.NumberColumn(format=percent, width=74),
            "cost": st.column_config.NumberColumn(format=percent, width=60, help="Computed share of the causal pairs"),
        },
    )


def one_head(page: RunContext, values: list[list[float]]) -> None:
    """One head: what it misses, where, and in numbers."""
    order = head.head_order(page, values)
    head.head_picker(page, order, "heads")
    view, case = page.view, page.case()
    try:
        detail = page.lab.measurements.detail(case, rows=view.crop)
    except HeadscopeError as error:
        st.subheader(f"Layer {case.layer} · Head {case.head}")
        st.info(words.plain_markdown(str(error)), icon=":material/info:")
        return
    except Exception as error:  # the worker hands on whatever its work raised, torch's errors too
        st.error(words.plain_markdown(sentence(error)))
        return
    rank = order.index((case.layer, case.head)) + 1
    place = f"number {rank} of {len(order)} by {METRICS[view.metric]}" if view.order == "worst first" else ""
    st.subheader(f"Layer {case.layer} · Head {case.head}", anchor=False)
    st.caption(f"{head.pattern_text(detail.measurement)}{' · ' if place else ''}{place}")
    st.markdown(head.sentence(detail))
    head.numbers(detail)
    head.maps(page, detail, "heads")
    head.map_controls(page, "heads")
    head.along(page, detail, "heads")
    more_about(page, detail)


def all_heads(grid: MeasuredGrid) -> pl.DataFrame:
    """Every head's numbers, for the download."""
    flat = [one for row in grid for one in row if one is not None]
    numbers = (
        "missed_mass_mean",
        "missed_mass_worst",
        "missed_mass_p99",
        "output_error",
        "output_cosine",
        "requested_density",
        "computed_density",
        "time_share_ms",
    )
    return pl.DataFrame(
        {
            "layer": [one.layer for one in flat],
            "head": [one.head for one in flat],
            "pattern": [words.label(one.pattern) for one in flat],
        }
        | {name: [getattr(one, name) for one in flat] for name in numbers}
    )


main()

"""Which heads lose what on this prompt, and where."""

from __future__ import annotations

import numpy as np
import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.theme import GLYPHS
from headscope.studio.ui import setup, state, widgets
from headscope.studio.ui.panels import more_about
from headscope.studio.ui.state import View
from headscope.studio.work.draft import Draft
from headscope.studio.work.jobs import sentence
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import METRICS, HeadDetail, Run


def main() -> None:
    held, seen = widgets.page("Heads")
    run = state.current_run(held, seen)
    state.keep_link(seen, run)
    if run is None:
        setup.first_visit(held, seen)
        return
    draft = state.draft_of(held, seen.session, run.facts)
    state.land(held, seen, run, draft)
    widgets.strip(run, draft)
    with st.expander("Another prompt or model", icon=":material/edit_note:"):
        setup.choose(held, seen)
    widgets.progress(held, seen)
    results(held, seen, run, draft)


def results(held: Lab, seen: View, run: Run, draft: Draft) -> None:
    """The overview and the head that it is opened on."""
    grid = setup.measured(held, seen, run, draft)
    values = widgets.metric_grid(grid, seen.metric)
    left, right = st.columns([5, 8], gap="large")
    with left:
        overview(seen, run, draft, values, grid)
    with right:
        head(held, seen, run, draft, values)


def overview(seen: View, run: Run, draft: Draft, values: list[list[float]], grid: list) -> None:
    """Layers x heads, and the same heads as a table, worst first."""
    widgets.choose_metric(seen, "heads-metric")
    table = np.asarray(values)
    mean = float(np.nanmean(table)) if np.isfinite(table).any() else float("nan")
    name = METRICS[seen.metric]
    st.caption(
        f"Mean of all heads {words.percent(mean)}, isolated: on the Q/K/V of the dense prefill. Each cell is a head, "
        "its mark the pattern, orange the head on the right; click another."
    )
    labels = [[words.label(pattern) for pattern in row] for row in draft.patterns]
    kinds = [[pattern.kind for pattern in row] for row in draft.patterns]
    widgets.figure(
        charts.overview(table, labels, kinds, (seen.layer, seen.head), draft.changed, name, state.colours()),
        "overview",
        f"Layers by heads, {name}. Mean {words.percent(mean)}. The table below holds the same numbers, worst first.",
        lambda: all_heads(grid),
        on_select=lambda: clicked(seen, run.facts.query_heads),
    )
    worst_first(seen, values, grid)


def clicked(seen: View, heads: int) -> None:
    """A click on a cell. Clicking the same cell again arrives as an empty selection."""
    points = st.session_state["overview"]["selection"]["points"]
    cell = None
    if points:
        cell = round(points[0]["y"]), round(points[0]["x"])
    elif seen.last_click is not None:
        cell = seen.last_click
    if cell is not None and 0 <= cell[1] < heads:
        seen.last_click = cell
        seen.go(*cell)


def worst_first(seen: View, values: list[list[float]], grid: list) -> None:
    """The heads as a table; a chosen row is looked at."""
    order = state.worst_order(values)
    rows = [(layer, head, grid[layer][head]) for layer, head in order if grid[layer][head] is not None]
    top = max((values[layer][head] for layer, head, _ in rows), default=1.0)
    frame = pl.DataFrame(
        {
            "head": [f"L{layer} H{head}" for layer, head, _ in rows],
            "pattern": [f"{GLYPHS[one.pattern.kind]} {words.budgets(one.pattern)}" for _, _, one in rows],
            "shown": [100 * values[layer][head] for layer, head, _ in rows],
            "worst row": [100 * one.missed_mass_worst for _, _, one in rows],
            "cost": [100 * one.computed_density for _, _, one in rows],
        }
    )

    def picked() -> None:
        chosen = st.session_state["worst"]["selection"]["rows"]
        if chosen and chosen[0] < len(rows):
            seen.go(rows[chosen[0]][0], rows[chosen[0]][1])

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
                METRICS[seen.metric].removeprefix("missed mass, "),
                min_value=0.0,
                max_value=max(100 * top, 1e-4),
                format=percent,
                width=122,
            ),
            "worst row": st.column_config.NumberColumn(format=percent, width=74),
            "cost": st.column_config.NumberColumn(format=percent, width=60, help="Computed share of the causal pairs"),
        },
    )


def head(held: Lab, seen: View, run: Run, draft: Draft, values: list[list[float]]) -> None:
    """One head: what it misses, where, and in numbers."""
    order = widgets.head_order(seen, values)
    widgets.head_picker(seen, run, order, "heads")
    pattern = draft.patterns[seen.layer][seen.head]
    try:
        detail = held.detail(run, seen.layer, seen.head, pattern, rows=seen.crop, estimator=draft.estimator)
    except HeadscopeError as error:
        st.subheader(f"Layer {seen.layer} · Head {seen.head}")
        st.info(words.plain_markdown(str(error)), icon=":material/info:")
        return
    except Exception as error:
        st.error(words.plain_markdown(sentence(error)))
        return
    rank = order.index((seen.layer, seen.head)) + 1
    place = f"number {rank} of {len(order)} by {METRICS[seen.metric]}" if seen.order == "worst first" else ""
    st.subheader(f"Layer {seen.layer} · Head {seen.head}", anchor=False)
    st.caption(f"{widgets.pattern_text(detail.measurement)}{' · ' if place else ''}{place}")
    st.markdown(widgets.sentence(detail))
    body(seen, run, detail)
    more_about(held, seen, run, draft, detail)


def body(seen: View, run: Run, detail: HeadDetail) -> None:
    """Numbers, maps and the line along the prompt."""
    widgets.numbers(detail)
    widgets.maps(detail, seen, "heads")
    widgets.map_controls(seen, run, "heads")
    widgets.along(detail, run, "heads")


def all_heads(grid: list) -> pl.DataFrame:
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

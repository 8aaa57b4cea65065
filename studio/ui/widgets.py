"""Pieces that several pages draw: figures with their data, the strip on top, progress, the choice of a head.

Text that comes from a person (a prompt, a file's name, a version's name) goes to `st.text` or into a table, which
show it as it is; markdown gets our own words only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.engine.attend.estimator import Estimator
from headscope.engine.loss.measure import HeadMeasurement
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.theme import GLYPHS
from headscope.studio.ui import state
from headscope.studio.ui.state import View
from headscope.studio.work.draft import Draft
from headscope.studio.work.jobs import Job
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import METRICS, HeadDetail, Run, metric_value

ICON = str(Path(__file__).parent / "assets" / "icon.png")

QUICK_S = 5.0
"""Seconds for which a job is taken for a quick one, whose progress is shown at once."""

STYLE = """<style>
[data-testid="stMainBlockContainer"] { padding-top: 3.6rem; padding-bottom: 3rem; max-width: 1560px; }
[data-testid="stMetric"] [data-testid="stMetricLabel"] p { font-size: 0.82rem; }
[data-testid="stCaptionContainer"] p { line-height: 1.35; }
[class*="st-key-strip"] { border-bottom: 1px solid rgba(128, 140, 150, 0.25); padding-bottom: 0.35rem; }
[class*="st-key-strip"] [data-testid="stText"] { font-size: 0.88rem; opacity: 0.85; white-space: normal; }
[class*="st-key-csv"] { margin-top: -0.9rem; }
[class*="st-key-csv"] button { font-size: 0.78rem; min-height: 1.5rem; padding: 0 0.4rem; opacity: 0.75; }
@media (min-width: 900px) {
  [data-testid="stColumn"]:has(.st-key-controls) > div { height: 100%; }
  .st-key-controls { position: sticky; top: 4.2rem; }
}
[data-testid="stProgress"] p { font-size: 0.9rem; }
</style>"""


def page(title: str) -> tuple[Lab, View]:
    """Starts a page: title of the tab, style, and whatever must be said first."""
    st.set_page_config(page_title=f"{title} · headscope", page_icon=ICON, layout="wide")
    st.html(STYLE)
    held, seen = state.lab(), state.view()
    if held.problem:
        with st.container(horizontal=True, vertical_alignment="center"):
            problem = f"{held.problem} Until then nothing is kept beyond this session."
            st.warning(words.escaped(problem), icon=":material/database:")
            if st.button("Try again", key="reopen") and held.reopen():
                seen.good_news = "The database is open; what this session made is in it now."
                st.rerun()
    if seen.notice:
        st.error(words.plain_markdown(seen.notice))
        seen.notice = ""
    if seen.good_news:
        st.success(words.plain_markdown(seen.good_news))
        seen.good_news = ""
    finished(held, seen)
    return held, seen


def strip(run: Run | None, draft: Draft | None) -> None:
    """One line that says what the page is about."""
    if run is None:
        return
    row = run.row
    parts = [
        row.model,
        run.prompt_name + (" in chat template" if row.chat_template else ""),
        words.count(row.tokens, "token"),
        f"{row.device} {row.dtype}",
        f"{row.impl} kernels",
    ]
    if draft is not None:
        parts.append(f"draft “{draft.title}”")
        if draft.estimator != Estimator():
            parts.append(f"sampling {words.sampling(draft.estimator)}")
    with st.container(key="strip"):
        st.text(" · ".join(parts))


def figure(
    drawn: go.Figure,
    key: str,
    alt: str,
    data: Callable[[], pl.DataFrame],
    on_select: Callable[[], None] | None = None,
) -> None:
    """A figure with a description for screen readers and its data as a download."""
    options: dict[str, Any] = {}
    if on_select is not None:
        options = {"on_select": on_select, "selection_mode": "points"}
    st.plotly_chart(drawn, theme=None, key=key, config=charts.CONFIG, alt=alt, **options)
    download(key, data)


def download(key: str, data: Callable[[], pl.DataFrame]) -> None:
    """A figure's numbers as a download, under it."""
    with st.container(horizontal=True, horizontal_alignment="right", key=f"csv-{key}"):
        st.download_button(
            "data",
            lambda: data().write_csv().encode(),
            f"headscope-{key}.csv",
            "text/csv",
            key=f"download-{key}",
            on_click="ignore",
            type="tertiary",
            icon=":material/download:",
            help="The figure's numbers as CSV",
        )


def progress(held: Lab, seen: View) -> Job | None:
    """Shows this session's open job with its Cancel button, polling; returns it, or None if none is open.

    A job of many seconds is asked less often: on a small machine every answer, and the drawing of it, is taken from the
    work, and some jobs are measuring its time.
    """
    job = held.worker.latest(seen.session)
    if job is None or not job.open:
        return None
    seldom = job.seconds >= QUICK_S

    @st.fragment(run_every=2.0 if seldom else 0.4)
    def poll() -> None:
        if not job.open or (not seldom and job.seconds >= QUICK_S):
            st.rerun()
        ahead = held.worker.position(job)
        text = job.words or job.title
        if job.state == "queued":
            text = f"Waiting: {words.count(ahead, 'run')} before this one" if ahead else "About to start"
        elif job.stop.is_set():
            text = "Stopping after this layer"
        left, right = st.columns([6, 1], vertical_alignment="bottom")
        left.progress(job.share, text=words.escaped(f"{text} · {words.milliseconds(job.seconds * 1e3)}"))
        if right.button("Cancel", key=f"cancel-{job.id}", width="stretch", disabled=job.stop.is_set()):
            job.cancel()

    poll()
    return job


def finished(held: Lab, seen: View) -> None:
    """Takes what this session's last job brought, once a tab, on whatever page it ends; failures are said.

    A tab that was opened after the job had ended takes its run only if its link names none.
    """
    job = held.worker.latest(seen.session)
    if job is None or job.open or job.id in seen.told:
        return
    seen.told.add(job.id)
    if job.ended < seen.born and (job.state != "done" or seen.run_id):
        return
    if job.warning:
        st.warning(words.plain_markdown(job.warning))
    if job.state == "failed":
        st.error(words.plain_markdown(job.error))
    elif job.state == "cancelled":
        kept = "what was measured is kept, and the same search goes on from there"
        nothing = "nothing of it was kept, and what you had is unchanged"
        st.info(f"Cancelled: {kept if job.kind == 'search' else nothing}.")
    elif job.kind == "run":
        seen.run_id, seen.extra["fresh"] = job.result, True
    elif job.kind == "compare":
        seen.extra["comparison"] = job.result
    elif job.kind == "export":
        seen.extra["export"] = (job.title, job.result)


def head_picker(seen: View, run: Run, order: Sequence[tuple[int, int]], key: str) -> None:
    """Layer and head as boxes, previous and next in the chosen order."""
    here = (seen.layer, seen.head)
    at = order.index(here) if here in order else 0
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        st.selectbox(
            "Layer",
            range(run.facts.layers),
            width=92,
            **state.bind(f"{key}-layer", seen.layer, lambda value: seen.go(value, seen.head)),
        )
        st.selectbox(
            "Head",
            range(run.facts.query_heads),
            width=92,
            **state.bind(f"{key}-head", seen.head, lambda value: seen.go(seen.layer, value)),
        )
        st.button(
            "Previous",
            key=f"{key}-previous",
            icon=":material/chevron_left:",
            disabled=at == 0,
            shortcut="K",
            on_click=lambda: seen.go(*order[max(0, at - 1)]),
            help="The head before this one in the chosen order",
        )
        st.button(
            "Next",
            key=f"{key}-next",
            icon=":material/chevron_right:",
            disabled=at >= len(order) - 1,
            shortcut="J",
            on_click=lambda: seen.go(*order[min(len(order) - 1, at + 1)]),
            help="The head after this one",
        )
        st.segmented_control(
            "Order",
            ["worst first", "by layer"],
            required=True,
            **state.bind(f"{key}-order", seen.order, lambda value: setattr(seen, "order", value)),
        )


def head_order(seen: View, values: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The order that Previous and Next follow."""
    if seen.order == "by layer":
        return [(layer, head) for layer, row in enumerate(values) for head in range(len(row))]
    return state.worst_order(values)


def metric_grid(grid: Sequence[Sequence[HeadMeasurement | None]], metric: str) -> list[list[float]]:
    """Values of a metric, NaN where a head is not measured."""
    return [[float("nan") if one is None else metric_value(one, metric) for one in row] for row in grid]


def map_controls(seen: View, run: Run, key: str) -> None:
    """Scale and crop of the three maps."""
    tokens = run.row.tokens
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control(
            "Scale of the maps",
            ["logarithmic", "linear"],
            required=True,
            **state.bind(
                f"{key}-log",
                "logarithmic" if seen.logarithmic else "linear",
                lambda value: setattr(seen, "logarithmic", value == "logarithmic"),
            ),
        )

        def crop(value: tuple[int, int]) -> None:
            seen.crop = None if value == (0, tokens) or value[1] - value[0] < 8 else value

        st.slider(
            "Rows shown (query positions)",
            0,
            tokens,
            width=320,
            step=max(1, tokens // 256),
            **state.bind(f"{key}-crop", seen.crop or (0, tokens), crop),
        )


def maps(detail: HeadDetail, seen: View, key: str) -> None:
    """The three pictures, on one scale."""
    found = detail.maps
    peak, side = _peak(found.dense), found.row_edges[1] - found.row_edges[0]
    marked = [(place.query, place.key) for place in found.places[:5]]
    first, second, third = st.columns(3, gap="small")

    def one(name: str, title: str, values: np.ndarray, **more: Any) -> None:
        drawn = charts.pooled_map(
            values,
            found.row_edges,
            found.column_edges,
            title,
            state.colours(),
            logarithmic=seen.logarithmic,
            top=peak,
            **more,
        )
        figure(
            drawn,
            f"{key}-{name}",
            f"{title}. Rows are query positions, columns key positions, {len(found.row_edges) - 1} by "
            f"{len(found.column_edges) - 1} cells of about {side} tokens; colour is the share of a row's mass.",
            lambda: map_frame(detail, values),
        )

    with first:
        one("dense", "Dense, exact", found.dense)
    with second:
        one("computed", "Computed", found.dense, computed=found.computed)
    with third:
        one("missed", "Missed, exact", found.missed, marked=marked)
    st.caption(
        "Colour is the share of a row's probability in a cell, one scale for all heads. Orange is never computed; "
        "circles mark the largest missed cells."
    )


def map_frame(detail: HeadDetail, values: np.ndarray) -> pl.DataFrame:
    """A map's cells as rows: query and key ranges and the share."""
    found = detail.maps
    rows, columns = values.shape
    kept = [(r, c) for r in range(rows) for c in range(columns) if values[r, c] == values[r, c]]
    return pl.DataFrame(
        {
            "query_from": [found.row_edges[r] for r, _ in kept],
            "query_to": [found.row_edges[r + 1] for r, _ in kept],
            "key_from": [found.column_edges[c] for _, c in kept],
            "key_to": [found.column_edges[c + 1] for _, c in kept],
            "share_of_row": [float(values[r, c]) for r, c in kept],
            "computed_share_of_pairs": [float(found.computed[r, c]) for r, c in kept],
        }
    )


def along(detail: HeadDetail, run: Run, key: str, before: HeadDetail | None = None) -> None:
    """Missed mass along the prompt."""
    tokens = len(detail.missed)
    edges = tuple(tokens * index // min(160, tokens) for index in range(min(160, tokens) + 1))
    hover = [words.inert(words.excerpt(run.pieces, first, 5)) for first in edges[:-1]]
    figure(
        charts.missed_along(
            detail.missed, edges, state.colours(), hover=hover, before=None if before is None else before.missed
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


def choose_metric(seen: View, key: str) -> None:
    """Which number the overview shows."""
    st.selectbox(
        "Colour shows",
        list(METRICS),
        format_func=METRICS.__getitem__,
        **state.bind(key, seen.metric, lambda value: setattr(seen, "metric", value)),
    )


def _peak(values: np.ndarray) -> float:
    known = values[values == values]
    return float(known.max()) if known.size else 1.0

"""Pieces that every page draws: its frame, figures with their data, the strip on top, progress.

Text that comes from a person (a prompt, a file's name, a version's name) goes to `st.text` or into a table, which
show it as it is; markdown gets our own words only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.engine.attend.estimator import Estimator
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.data import tables
from headscope.studio.lab.jobs import Job
from headscope.studio.ui import state
from headscope.studio.ui.context import PageContext, RunContext

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


def open_page(title: str) -> PageContext:
    """Starts a page: title of the tab, style, and whatever must be said first."""
    st.set_page_config(page_title=f"{title} · headscope", page_icon=ICON, layout="wide")
    st.html(STYLE)
    page = state.page()
    lab, view = page.lab, page.view
    if lab.problem:
        with st.container(horizontal=True, vertical_alignment="center"):
            problem = f"{lab.problem} Until then nothing is kept beyond this session."
            st.warning(words.escaped(problem), icon=":material/database:")
            if st.button("Try again", key="reopen") and lab.reopen():
                view.good_news = "The database is open; what this session made is in it now."
                st.rerun()
    for notice in lab.notices:
        st.warning(words.escaped(notice), icon=":material/database:")
    if lab.database.notices:
        st.button("Put away", key="notices-read", on_click=lab.put_notices_away)
    if view.notice:
        st.error(words.plain_markdown(view.notice))
        view.notice = ""
    if view.good_news:
        st.success(words.plain_markdown(view.good_news))
        view.good_news = ""
    finished(page)
    return page


def strip(page: RunContext) -> None:
    """One line that says what the page is about."""
    run, draft = page.run, page.draft
    row = run.row
    parts = [
        row.model,
        run.prompt_name + (" in chat template" if row.chat_template else ""),
        words.count(row.tokens, "token"),
        f"{row.device} {row.dtype}",
        f"{row.impl} kernels",
    ]
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
            lambda: tables.csv(data()),
            f"headscope-{key}.csv",
            "text/csv",
            key=f"download-{key}",
            on_click="ignore",
            type="tertiary",
            icon=":material/download:",
            help="The figure's numbers as CSV",
        )


def progress(page: PageContext) -> Job | None:
    """Shows this session's open job with its Cancel button, polling; returns it, or None if none is open.

    A job of many seconds is asked less often: on a small machine every answer, and the drawing of it, is taken from the
    work, and some jobs are measuring its time.
    """
    job = page.job
    if job is None or not job.open:
        return None
    seldom = job.seconds >= QUICK_S

    @st.fragment(run_every=2.0 if seldom else 0.4)
    def poll() -> None:
        if not job.open or (not seldom and job.seconds >= QUICK_S):
            st.rerun()
        ahead = page.lab.worker.position(job)
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


def finished(page: PageContext) -> None:
    """Takes what this session's last job brought, once a tab, on whatever page it ends; failures are said.

    A tab that was opened after the job had ended takes its run only if its link names none.
    """
    job, view = page.job, page.view
    if job is None or job.open or job.id in view.told:
        return
    view.told.add(job.id)
    if job.ended < view.born and (job.state != "done" or view.run_id):
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
        view.open(job.result)
    elif job.kind == "compare":
        view.comparison = job.result
    elif job.kind == "export":
        view.export = (job.title, job.result)

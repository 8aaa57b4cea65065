"""Opening the run that a view names, with the session's draft for it."""

from __future__ import annotations

import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.studio.base import words
from headscope.studio.data import prompts
from headscope.studio.data.results import Run, metric_grid, worst_order
from headscope.studio.ui import state
from headscope.studio.ui.context import PageContext, RunContext


def open_run(page: PageContext) -> RunContext | None:
    """The page with its run and draft, and its place in the URL; None if there is no run, or it cannot be had.

    What cannot be had is said. A run that was just made or opened is looked at where it loses most.
    """
    run = _current_run(page)
    state.keep_link(page.view, run)
    if run is None:
        return None
    draft = page.lab.drafts.of(page.view.session, run.facts)
    opened = RunContext(page.lab, page.view, page.theme, run, draft)
    if page.view.fresh:
        page.view.fresh = False
        grid = page.lab.measurements.grid(run.id, draft.patterns, draft.estimator)
        page.view.go(*worst_order(metric_grid(grid, "missed_mass_mean"))[0])
        page.view.last_click = None
        state.keep_link(page.view, run)
    return opened


def _current_run(page: PageContext) -> Run | None:
    """The run looked at, with layer and head inside it."""
    view = page.view
    if not view.run_id and view.linked and view.source == "sample":
        # A link made elsewhere names model and prompt: the latest run of both stands for it.
        sha = prompts.sample(view.sample).sha256
        runs = page.lab.store.runs()
        view.run_id = next((row.id for row in runs if row.prompt_sha256 == sha and row.model == view.model), "")
    run = _opened(page) if view.run_id else None
    if run is None:
        if view.lost:
            st.warning(words.plain_markdown(view.lost), icon=":material/link_off:")
        return None
    view.lost = ""
    view.layer = min(view.layer, run.facts.layers - 1)
    view.head = min(view.head, run.facts.query_heads - 1)
    return run


def _opened(page: PageContext) -> Run | None:
    """The run that the view names; if it cannot be had, the view names none and `lost` says why."""
    view, runs = page.view, page.lab.runs
    problem, run = "", None
    try:
        if runs.has(view.run_id):
            run = runs.open(view.run_id)
        else:
            with st.spinner("Opening the run"):
                run = runs.open(view.run_id)
    except HeadscopeError as error:
        problem = str(error)
    if run is None:
        view.lost = problem or (
            f"The run {view.run_id} is not kept here: run its prompt again on the Heads page, or open an earlier run "
            "there."
        )
        view.run_id = ""
        view.linked = False  # no other run may stand for it without a word
    return run

"""Starting a search, or taking one in from the command line."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.model.packaged import PACKAGED
from headscope.engine.search.grid import default_grid
from headscope.engine.search.table import Target
from headscope.studio.base import words
from headscope.studio.data import prompts
from headscope.studio.ui import state
from headscope.studio.ui.context import PageContext
from headscope.studio.work import search as search_view
from headscope.studio.work.search import SearchRequest

LENGTHS = {"512": 512, "1,024": 1024, "2,048": 2048, "whole": None}


def start(page: PageContext) -> None:
    """Model, prompts, length, candidates, and the button."""
    form = page.view.search.form
    left, right = st.columns(2, gap="large")
    with left:
        _what(page)
    with right:
        st.text_area(
            "Candidates, one a line",
            height=230,
            help="Budgets are counts or fractions of the length; dense is always in",
            **state.bind("search-grid", _grid_text(page), lambda text: setattr(form, "grid", text)),
        )
    problem, grid = "", None
    try:
        grid = search_view.parse_grid(_grid_text(page))
    except HeadscopeError as error:
        problem = str(error)
    if not form.samples:
        problem = problem or "Choose at least one calibration prompt."
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        pressed = st.button(
            "Search",
            type="primary",
            key="search-start",
            icon=":material/play_arrow:",
            width=140,
            disabled=bool(problem) or page.busy,
        )
        if problem:
            st.error(words.plain_markdown(problem))
        elif grid is not None:
            st.text(
                f"{words.count(len(grid), 'candidate')} a head on {words.count(len(form.samples), 'prompt')}; "
                "a search that is stopped goes on where it was"
            )
    if pressed and grid is not None:
        _submit(page, SearchRequest(page.view.model, form.samples, LENGTHS[form.length], grid))
        st.rerun()


def _what(page: PageContext) -> None:
    """The model, and the prompts that it is calibrated on."""
    samples, view, form = prompts.samples(), page.view, page.view.search.form
    st.selectbox(
        "Model",
        list(dict.fromkeys([*PACKAGED, view.model])),
        **state.bind("search-model", view.model, lambda name: setattr(view, "model", name)),
    )
    st.multiselect(
        "Calibration prompts",
        list(samples),
        format_func=lambda name: f"{samples[name].kind}: {samples[name].title}",
        help="Several kinds: a pattern that suits one text need not suit another",
        **state.bind("search-samples", list(form.samples), lambda names: setattr(form, "samples", tuple(names))),
    )
    st.segmented_control(
        "Tokens of each prompt",
        list(LENGTHS),
        required=True,
        **state.bind("search-length", form.length, lambda length: setattr(form, "length", length)),
    )


def _grid_text(page: PageContext) -> str:
    return page.view.search.form.grid or search_view.grid_text(default_grid())


def _submit(page: PageContext, request: SearchRequest) -> None:
    """Queues the search as this session's job; a refusal becomes the page's notice."""
    lab, target = page.lab, Target(max_missed=page.view.search.form.limit)
    try:
        lab.worker.submit(
            page.view.session,
            "search",
            f"Searching {request.model}",
            lambda context: search_view.run_search(lab, context, request, target),
        )
    except HeadscopeError as error:
        page.view.notice = str(error)


def bring(page: PageContext) -> None:
    """A run folder of `headscope search` becomes rows of the store."""
    named = st.text_input("Run folder", key="search-folder", placeholder="such as config.json.run")
    if st.button("Take it in", key="search-bring", icon=":material/download_done:"):
        folder, target = Path(named.strip()).expanduser(), Target(max_missed=0.02)
        try:
            page.view.search.search_id = search_view.take_in(page.lab, folder, target)
            page.view.good_news = "The run's measurements are stored, and its winner at 2 % is a version."
        except HeadscopeError as error:
            page.view.notice = str(error)
        st.rerun()

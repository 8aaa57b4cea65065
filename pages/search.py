"""Search: measure candidates for every head, then trade time against loss on the stored fronts."""

from __future__ import annotations

from typing import Any

import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.search.table import Target
from headscope.studio.base import words
from headscope.studio.ui import search_choice, search_start, state, widgets
from headscope.studio.ui.context import PageContext
from headscope.studio.ui.view import CheckedChoice
from headscope.studio.work import search as search_view
from headscope.studio.work.search import StoredSearch

SPEEDUPS = tuple(round(0.5 + 0.05 * step, 2) for step in range(0, 91))
COSTS = {"ms": "predicted time", "tiles": "computed tiles"}


def main() -> None:
    page = widgets.open_page("Search")
    state.keep_link(page.view, None)
    take(page)
    st.title("Search patterns and budgets", anchor=False)
    st.markdown(
        "Every head runs every candidate on a few prompts, once. The fronts of time and loss are kept, so that a "
        "target can be moved afterwards without another run."
    )
    widgets.progress(page)
    rows = page.lab.store.searches()
    with st.expander("Start a search", expanded=not rows, icon=":material/travel_explore:"):
        search_start.start(page)
    with st.expander("Take in a run of the command line", icon=":material/folder_open:"):
        search_start.bring(page)
    search = choose(page, rows)
    if search is None:
        return
    target = slider(page)
    search = counted(page, search)
    try:
        allocation = search.allocate(target)
    except HeadscopeError as error:
        st.warning(words.plain_markdown(str(error)), icon=":material/speed:")
        return
    search_choice.outcome(page, search, allocation, target)


def take(page: PageContext) -> None:
    """Takes what this session's last search or check brought, once."""
    job, view = page.job, page.view.search
    if job is None or job.state != "done" or view.taken == job.id:
        return
    if job.kind == "search":
        view.search_id = job.result
    elif job.kind == "search-check":
        search_id, predicted, measured = job.result
        view.checked = CheckedChoice(search_id, job.title, predicted, measured)
    view.taken = job.id


def choose(page: PageContext, rows: list[dict[str, Any]]) -> StoredSearch | None:
    """Which stored search is looked at."""
    if not rows:
        st.info("No search is stored yet. Start one above; it lands here by itself.", icon=":material/info:")
        return None
    view, by_id = page.view.search, {row["id"]: row for row in rows}
    if view.search_id not in by_id:
        view.search_id = rows[0]["id"]
    labels = search_labels(rows)
    st.selectbox(
        "Search",
        list(by_id),
        format_func=labels.__getitem__,
        **state.bind("search-chosen", view.search_id, lambda row_id: setattr(view, "search_id", row_id)),
    )
    if view.search is None or view.search.id != view.search_id:
        view.search = None
        try:
            view.search = search_view.load_search(page.lab, by_id[view.search_id])
        except HeadscopeError as error:
            st.error(words.plain_markdown(str(error)))
    return view.search


def search_labels(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Searches by id as a select box names them, which tells options apart by their labels."""

    def name(row: dict[str, Any]) -> str:
        kinds = ", ".join(prompt["name"] for prompt in row["settings"]["prompts"])
        return f"{row['created_at']:%Y-%m-%d %H:%M} · {row['model']} · {kinds}"

    names = {row["id"]: name(row) for row in rows}
    same = list(names.values())
    return {row_id: f"{label} · {row_id[:4]}" if same.count(label) > 1 else label for row_id, label in names.items()}


def slider(page: PageContext) -> Target:
    """What counts as cost, and the target; the choice follows from the stored fronts."""
    form = page.view.search.target
    by = {"loss": "no head misses more than", "speed": "faster by" if form.cost == "ms" else "fewer tiles by"}
    with st.container(horizontal=True, gap="medium"):
        st.segmented_control(
            "Least",
            list(COSTS),
            format_func=COSTS.__getitem__,
            required=True,
            help="Time is predicted for the machine that ran the search. Tiles of 64 x 128 cells are the work itself: "
            "count them to choose for a machine other than this one, such as a GPU",
            **state.bind("search-cost", form.cost, lambda cost: setattr(form, "cost", cost)),
        )
        st.segmented_control(
            "Target",
            list(by),
            format_func=by.__getitem__,
            required=True,
            **state.bind("search-by", form.by, lambda by_what: setattr(form, "by", by_what)),
        )
    if form.by == "loss":
        st.select_slider(
            "Largest missed mass of any head",
            search_choice.LIMITS,
            format_func=words.percent,
            width=520,
            **state.bind("search-limit", form.limit, lambda limit: setattr(form, "limit", limit)),
        )
        return Target(max_missed=form.limit)
    st.select_slider(
        "Dense over sparse prefill time" if form.cost == "ms" else "Dense over sparse computed tiles",
        SPEEDUPS,
        format_func=lambda value: f"{value:.2f}×",
        width=520,
        **state.bind("search-speedup", form.speedup, lambda speedup: setattr(form, "speedup", speedup)),
    )
    return Target(speedup=form.speedup)


def counted(page: PageContext, search: StoredSearch) -> StoredSearch:
    """The search with costs in the unit that is chosen; counting in tiles is done once."""
    view = page.view.search
    if view.target.cost == search.unit:
        return search
    if view.by_tiles is None or view.by_tiles.id != search.id:
        view.by_tiles = search.counting("tiles")
    return view.by_tiles


main()

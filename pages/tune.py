"""What one head needs: change its pattern and budgets, see every number follow, and try the whole model."""

from __future__ import annotations

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.patterns.families import Pattern
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.theme import GLYPHS
from headscope.studio.data import editor
from headscope.studio.data.draft import SCOPES
from headscope.studio.data.results import HeadDetail, metric_grid
from headscope.studio.lab.jobs import sentence
from headscope.studio.ui import budgets, head, state, trial, widgets
from headscope.studio.ui.context import RunContext
from headscope.studio.ui.opening import open_run
from headscope.studio.ui.panels import loss


def main() -> None:
    page = open_run(widgets.open_page("Tune"))
    if page is None:
        st.title("Nothing to tune yet", anchor=False)
        st.markdown("Run a prompt on the Heads page first: tuning replays its captured queries, keys and values.")
        if st.button("Go to Heads", icon=":material/grid_view:", type="primary"):
            st.switch_page("pages/heads.py")
        return
    widgets.strip(page)
    left, right = st.columns([9, 16], gap="large")
    with left, st.container(key="controls"):
        controls(page)
    with right:
        outcome(page)
    st.divider()
    widgets.progress(page)
    trial.whole_model(page)


def controls(page: RunContext) -> None:
    """Which head, which pattern, which budgets; where else to use them; undo."""
    draft, pattern, tokens = page.draft, page.pattern, page.run.row.tokens
    # By what the heads lost before the edits: a head that is mended keeps its place in the queue.
    before = page.lab.measurements.grid(page.run.id, draft.unedited.patterns, draft.estimator)
    head.head_picker(page, head.head_order(page, metric_grid(before, "missed_mass_mean")), "tune")
    st.segmented_control(
        "Pattern",
        editor.KINDS,
        format_func=lambda kind: f"{GLYPHS[kind]} {kind}",
        required=True,
        wrap=True,
        **state.bind(
            "kind",
            pattern.kind if pattern.kind in editor.KINDS else "dense",
            lambda kind: budgets.edit(page, editor.default(kind, tokens)),
        ),
    )
    if pattern.one_prompt:
        st.caption("This head has fixed positions from a file; choosing a pattern above replaces them.")
    budgets.budgets(page)
    scopes(page)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Undo",
            icon=":material/undo:",
            key="undo",
            disabled=not draft.edits,
            on_click=budgets.undo,
            args=(page,),
        )
        last = draft.edits[-1].label if draft.edits else "no edits yet"
        st.text(f"{draft.title}\nlast: {last}" if draft.edits else draft.title)


def scopes(page: RunContext) -> None:
    """Where else the head's pattern may be used."""
    view, draft, pattern = page.view, page.draft, page.pattern
    st.markdown("**Use this pattern for**")
    with st.container(horizontal=True):
        for scope in SCOPES[1:]:
            heads = draft.scope(scope, view.layer, view.head, page.run.facts.group)
            if scope == "same pattern":
                base = previous(page)
                heads = [
                    (layer, number)
                    for layer, row in enumerate(draft.patterns)
                    for number, one in enumerate(row)
                    if one == base
                ]
            others = [place for place in heads if draft.patterns[place[0]][place[1]] != pattern]
            label = "heads as it was" if scope == "same pattern" else scope
            st.button(
                f"{label} ({len(others)})",
                key=f"scope-{scope}",
                disabled=not others,
                help=f"Gives {words.label(pattern)} to {words.count(len(others), 'other head')}",
                on_click=budgets.spread,
                args=(page, label, others, pattern),
            )


def previous(page: RunContext) -> Pattern:
    """The pattern that this head had in the version that the draft stands on."""
    return page.draft.unedited.patterns[page.view.layer][page.view.head]


def outcome(page: RunContext) -> None:
    """The head under its pattern now, against the one it had before."""
    view, measurements = page.view, page.lab.measurements
    now, then = page.case(), page.case(previous(page))
    st.subheader(f"Layer {view.layer} · Head {view.head}", anchor=False)
    try:
        before = None if then == now else measurements.detail(then, rows=view.crop)
        detail = measurements.detail(now, rows=view.crop)
    except HeadscopeError as error:
        st.info(words.plain_markdown(str(error)), icon=":material/info:")
        return
    except Exception as error:  # the worker hands on whatever its work raised, torch's errors too
        st.error(words.plain_markdown(sentence(error)))
        return
    was = "" if before is None else f", before {words.label(then.pattern)}"
    st.caption(f"{head.pattern_text(detail.measurement)}{was} · isolated loss, on the Q/K/V of the dense prefill")
    st.markdown(head.sentence(detail))
    head.numbers(detail, before)
    head.maps(page, detail, "tune")
    head.map_controls(page, "tune")
    head.along(page, detail, "tune", before)
    deeper(page, detail)


def deeper(page: RunContext, detail: HeadDetail) -> None:
    """The curve of loss against cost, and the loss in steps; each measured when asked for."""
    view, one = page.view, detail.measurement
    with st.expander(
        "Would another budget or family do better?", icon=":material/show_chart:", expanded=view.curve is not None
    ):
        by_time = (
            st.segmented_control(
                "Cost as",
                ["computed pairs", "measured time"],
                default="computed pairs",
                required=True,
                key="curve-cost",
            )
            == "measured time"
        )
        place = (page.run.id, one.layer, one.head)
        if st.button("Measure the curve", key="curve", help="Each family at several budgets, this head alone"):
            view.curve = place
        if view.curve == place:
            curve(page, detail, by_time)
    if st.toggle("Why does it lose this?", key="why"):
        loss(page, detail)


def curve(page: RunContext, detail: HeadDetail, by_time: bool) -> None:
    """Loss against cost of this head under each family."""
    one = detail.measurement
    with st.spinner("Measuring this head under each family"):
        patterns = editor.sweep(one.pattern, page.run.row.tokens)
        points = page.lab.measurements.curve(detail.case(page.run), patterns)
    widgets.figure(
        charts.trade_off(points, words.label(one.pattern), by_time, page.theme),
        "trade-off",
        f"Missed mass against cost, {len(points)} patterns; now {words.percent(one.missed_mass_mean)} missed.",
        lambda: pl.DataFrame(
            points,
            orient="row",
            schema=["family", "pattern", "computed_density", "sparse_ms", "missed_mass_mean"],
        ),
    )


main()

"""What one head needs: change its pattern and budgets, see every number follow, and try the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.patterns.families import Fraction, Pattern
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.theme import GLYPHS
from headscope.studio.ui import state, trial, widgets
from headscope.studio.ui.panels import loss
from headscope.studio.ui.state import View
from headscope.studio.work import editor
from headscope.studio.work.draft import SCOPES, Draft
from headscope.studio.work.jobs import sentence
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import HeadDetail, Run


def main() -> None:
    held, seen = widgets.page("Tune")
    run = state.current_run(held, seen)
    state.keep_link(seen, run)
    if run is None:
        st.title("Nothing to tune yet", anchor=False)
        st.markdown("Run a prompt on the Heads page first: tuning replays its captured queries, keys and values.")
        if st.button("Go to Heads", icon=":material/grid_view:", type="primary"):
            st.switch_page("pages/heads.py")
        return
    draft = state.draft_of(held, seen.session, run.facts)
    state.land(held, seen, run, draft)
    widgets.strip(run, draft)
    left, right = st.columns([9, 16], gap="large")
    with left, st.container(key="controls"):
        controls(held, seen, run, draft)
    with right:
        outcome(held, seen, run, state.draft_of(held, seen.session, run.facts))
    st.divider()
    widgets.progress(held, seen)
    trial.whole_model(held, seen, run, draft)


def controls(held: Lab, seen: View, run: Run, draft: Draft) -> None:
    """Which head, which pattern, which budgets; where else to use them; undo."""
    # By what the heads lost before the edits: a head that is mended keeps its place in the queue.
    values = widgets.metric_grid(held.grid(run.id, draft.unedited.patterns, draft.estimator), "missed_mass_mean")
    widgets.head_picker(seen, run, widgets.head_order(seen, values), "tune")
    pattern = draft.patterns[seen.layer][seen.head]
    tokens = run.row.tokens
    st.segmented_control(
        "Pattern",
        editor.KINDS,
        format_func=lambda kind: f"{GLYPHS[kind]} {kind}",
        required=True,
        wrap=True,
        **state.bind(
            "kind",
            pattern.kind if pattern.kind in editor.KINDS else "dense",
            lambda kind: edit(held, seen, draft, editor.default(kind, tokens)),
        ),
    )
    if pattern.one_prompt:
        st.caption("This head has fixed positions from a file; choosing a pattern above replaces them.")
    budgets(held, seen, draft, pattern, tokens)
    st.markdown("**Use this pattern for**")
    with st.container(horizontal=True):
        for scope in SCOPES[1:]:
            heads = draft.scope(scope, seen.layer, seen.head, run.facts.group)
            if scope == "same pattern":
                base = previous(draft, seen)
                heads = [
                    (layer, head)
                    for layer, row in enumerate(draft.patterns)
                    for head, one in enumerate(row)
                    if one == base
                ]
            others = [place for place in heads if draft.patterns[place[0]][place[1]] != pattern]
            label = "heads as it was" if scope == "same pattern" else scope
            st.button(
                f"{label} ({len(others)})",
                key=f"scope-{scope}",
                disabled=not others,
                help=f"Gives {words.label(pattern)} to {words.count(len(others), 'other head')}",
                on_click=spread,
                args=(held, seen, draft, label, others, pattern),
            )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Undo",
            icon=":material/undo:",
            key="undo",
            disabled=not draft.edits,
            on_click=undo,
            args=(held, seen, draft),
        )
        last = draft.edits[-1].label if draft.edits else "no edits yet"
        st.text(f"{draft.title}\nlast: {last}" if draft.edits else draft.title)


def previous(draft: Draft, seen: View) -> Pattern:
    """The pattern that this head had in the version that the draft stands on."""
    return draft.unedited.patterns[seen.layer][seen.head]


def budgets(held: Lab, seen: View, draft: Draft, pattern: Pattern, tokens: int) -> None:
    """One number field a budget; in tokens, or as a share of the prompt."""
    found = editor.fields_of(pattern)
    if not found:
        st.caption("Dense computes every causal pair: nothing to choose.")
        return
    numbers = editor.values_of(pattern)
    share = any(isinstance(value, Fraction) for value in numbers.values())

    def write(name: str, value: Any) -> None:
        if value is None:
            return
        rebuild(held, seen, draft, pattern, lambda now: now | {name: editor.entered(numbers[name], value)})

    shared = {field.name for field in found if field.share and field.grows}
    columns = st.columns(2)
    for index, field in enumerate(found):
        value = numbers[field.name]
        # A key of the head's own: text that was refused stays in its field, and belongs to this head. With None for a
        # value, an emptied field says None, which is no edit, and not the least number.
        key = f"budget-{field.name}-{seen.layer}-{seen.head}"
        with columns[index % 2]:
            if isinstance(value, Fraction):
                st.number_input(
                    field.label + ", % of prompt",
                    0.01,
                    100.0,
                    None,
                    step=0.5,
                    format="%.2f",
                    help=field.help,
                    **state.bind(key, round(value.of * 100, 2), lambda new, name=field.name: write(name, new)),
                )
            else:
                st.number_input(
                    field.label,
                    field.least if field.offered is None else field.offered,
                    max(tokens, int(value)) if field.most is None else field.most,
                    None,
                    step=step(field, int(value)),
                    help=field.help,
                    **state.bind(key, int(value), lambda new, name=field.name: write(name, new)),
                )

    def switch(on: bool) -> None:
        rebuild(
            held,
            seen,
            draft,
            pattern,
            lambda now: {
                name: editor.as_share(value, tokens, on) if name in shared else value for name, value in now.items()
            },
        )

    with st.container(horizontal=True):
        st.toggle(
            "As a share of the prompt",
            **state.bind("share", share, switch),
            help="Budgets then grow with the length of the prompt",
        )
        if pattern.variant:

            def vary(on: bool) -> None:
                rebuild(
                    held,
                    seen,
                    draft,
                    pattern,
                    lambda now: editor.values_of(editor.build(pattern.kind, now).switched(on)),
                )

            st.toggle(
                pattern.variant.label,
                **state.bind("windowed", pattern.variant.on, vary),
                help=pattern.variant.help,
            )


def step(field: editor.Field, value: int) -> int:
    """How much a click on + or - changes a budget."""
    return field.step or (8 if value < 128 else 32)


def rebuild(
    held: Lab, seen: View, draft: Draft, drawn: Pattern, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """The head's pattern with its numbers changed; what does not fit becomes a sentence and changes nothing.

    The newest numbers count, so that an edit of another tab stays, unless it chose other fields than were drawn here.
    """
    newest = (held.draft(draft.id) or draft).patterns[seen.layer][seen.head]
    same = newest.kind == drawn.kind and editor.fields_of(newest) == editor.fields_of(drawn)
    try:
        edit(held, seen, draft, editor.build(drawn.kind, change(editor.values_of(newest if same else drawn))))
    except ValueError as error:
        seen.notice = f"That budget does not fit: {error}."


def edit(held: Lab, seen: View, draft: Draft, pattern: Pattern) -> None:
    """One edit of this head; the newest draft counts, so edits of another tab stay."""
    spread(held, seen, draft, "this head", [(seen.layer, seen.head)], pattern)


def spread(held: Lab, seen: View, draft: Draft, where: str, heads: list[tuple[int, int]], pattern: Pattern) -> None:
    """The pattern on these heads."""
    newest = held.draft(draft.id) or draft
    name = f"L{seen.layer} H{seen.head}" if where == "this head" else f"{where} of L{seen.layer} H{seen.head}"
    changed = newest.edited(f"{name}: {words.label(pattern)}", heads, pattern)
    if changed is not newest:
        held.keep_draft(changed)


def undo(held: Lab, seen: View, draft: Draft) -> None:
    """Takes the last edit back and looks at the head that it changed."""
    newest = held.draft(draft.id) or draft
    if not newest.edits:
        return
    changes = newest.edits[-1].changes
    held.keep_draft(newest.undone())
    if changes:
        seen.go(*changes[0][0])


def outcome(held: Lab, seen: View, run: Run, draft: Draft) -> None:
    """The head under its pattern now, against the one it had before."""
    pattern, old = draft.patterns[seen.layer][seen.head], previous(draft, seen)
    st.subheader(f"Layer {seen.layer} · Head {seen.head}", anchor=False)
    try:
        place = {"rows": seen.crop, "estimator": draft.estimator}
        before = None if old == pattern else held.detail(run, seen.layer, seen.head, old, **place)
        detail = held.detail(run, seen.layer, seen.head, pattern, **place)
    except HeadscopeError as error:
        st.info(words.plain_markdown(str(error)), icon=":material/info:")
        return
    except Exception as error:
        st.error(words.plain_markdown(sentence(error)))
        return
    was = "" if before is None else f", before {words.label(old)}"
    st.caption(f"{widgets.pattern_text(detail.measurement)}{was} · isolated loss, on the Q/K/V of the dense prefill")
    st.markdown(widgets.sentence(detail))
    widgets.numbers(detail, before)
    widgets.maps(detail, seen, "tune")
    widgets.map_controls(seen, run, "tune")
    widgets.along(detail, run, "tune", before)
    deeper(held, seen, run, detail)


def deeper(held: Lab, seen: View, run: Run, detail: HeadDetail) -> None:
    """The curve of loss against cost, and the loss in steps; each measured when asked for."""
    one = detail.measurement
    with st.expander(
        "Would another budget or family do better?",
        icon=":material/show_chart:",
        expanded=bool(seen.extra.get("curve")),
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
        place = (run.id, one.layer, one.head)
        if st.button("Measure the curve", key="curve", help="Each family at several budgets, this head alone"):
            seen.extra["curve"] = place
        if seen.extra.get("curve") == place:
            with st.spinner("Measuring this head under each family"):
                tried = editor.sweep(one.pattern, run.row.tokens)
                points = held.curve(run, one.layer, one.head, tried, detail.estimator)
            widgets.figure(
                charts.trade_off(points, words.label(one.pattern), by_time, state.colours()),
                "trade-off",
                f"Missed mass against cost, {len(points)} patterns; now {words.percent(one.missed_mass_mean)} missed.",
                lambda: pl.DataFrame(
                    points,
                    orient="row",
                    schema=["family", "pattern", "computed_density", "sparse_ms", "missed_mass_mean"],
                ),
            )
    if st.toggle("Why does it lose this?", key="why"):
        loss(held, run, detail)


main()

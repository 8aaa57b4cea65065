"""Versions of the head config: keep the draft, compare, go back, take a checked file home, bring one in."""

from __future__ import annotations

import polars as pl
import streamlit as st

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.evidence import read_evidence, read_provenance
from headscope.engine.config.facts import ModelFacts
from headscope.studio.base import words
from headscope.studio.store.store import ConfigRow
from headscope.studio.ui import setup, state, widgets
from headscope.studio.ui.state import View
from headscope.studio.work import exports
from headscope.studio.work.draft import Draft, Grid, differences
from headscope.studio.work.exports import RoundTrip
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import Run


def main() -> None:
    held, seen = widgets.page("Configs")
    run = state.current_run(held, seen)
    state.keep_link(seen, run)
    draft = None if run is None else state.draft_of(held, seen.session, run.facts)
    widgets.strip(run, draft)
    left, right = st.columns([4, 7], gap="large")
    with left:
        keep(held, seen, run, draft)
        bring_in(held, seen, None if run is None else run.facts)
    with right:
        versions(held, seen, run, draft)


def keep(held: Lab, seen: View, run: Run | None, draft: Draft | None) -> None:
    """The draft, and saving it under a name."""
    st.subheader("Your draft", anchor=False)
    if run is None or draft is None:
        st.markdown(
            "No run is open, so there is no draft. Run a prompt on the Heads page, or choose one of the saved versions."
        )
        return
    changed = len(draft.changed)
    st.text(
        f"{draft.title}: {words.count(changed, 'head differs', 'heads differ') if changed else 'nothing changed yet'}"
    )
    missing = sum(one is None for row in setup.measured(held, seen, run, draft) for one in row)
    if missing:
        st.caption(
            f"{words.count(missing, 'head has', 'heads have')} no measurement and would be saved without evidence."
        )
    name = st.text_input("Name of the version", max_chars=120, key="save-name", placeholder="such as calm start")
    note = st.text_input("Note", max_chars=400, key="save-note", placeholder="why, for whoever reads it next")
    pressed = st.button("Save version", type="primary", key="save", icon=":material/save:")
    if pressed and not name.strip():
        st.error("Give the version a name first.")
    elif pressed:
        try:
            held.reopen()
            stored, _ = exports.save_draft(held, draft, run, name, note)
        except HeadscopeError as error:
            seen.notice = f"{error} Your draft is untouched."
        else:
            seen.version = stored.id
            seen.good_news = f"Saved as version {stored.number}."
        st.rerun()


def bring_in(held: Lab, seen: View, facts: ModelFacts | None) -> None:
    """Import of a config file."""
    st.subheader("Bring a config in", anchor=False)
    file = st.file_uploader("A headscope config, JSON", key="import", label_visibility="collapsed")
    if file is None:
        st.caption("A JSON file in the format headscope.head-config/1. Other tools' files: `headscope convert` first.")
        return
    try:
        config = exports.read_import(file.name, file.getvalue(), facts)
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error), file.name[:80]))
        return
    st.text(f"{file.name}: {len(config.heads)} layers of {len(config.heads[0])} heads, for {config.model.get('name')}")
    if facts is None:
        st.caption("No run is open, so whether it fits a model is checked when you restore it.")
    if st.button("Save as a version", key="import-save", icon=":material/download_done:"):
        try:
            stored = exports.save_imported(held, config, file.name.removesuffix(".json")[:120])
        except HeadscopeError as error:
            seen.notice = str(error)
        else:
            seen.version = stored.id
            seen.good_news = f"Imported as version {stored.number}."
        st.rerun()


def versions(held: Lab, seen: View, run: Run | None, draft: Draft | None) -> None:
    """All versions, and the chosen one."""
    st.subheader("Versions", anchor=False)
    frame = held.store.configs()
    if frame.is_empty():
        st.markdown("Nothing is saved yet. Tune a head or two, give the draft a name, and it stays here for good.")
        return
    ids = frame["id"].to_list()

    def picked() -> None:
        chosen = st.session_state["versions"]["selection"]["rows"]
        if chosen and chosen[0] < len(ids):
            seen.version = ids[chosen[0]]

    parent = pl.col("parent").cast(pl.String).fill_null("–")
    shown = frame.select("number", "name", parent, "model", "heads", "note", "created_at")
    st.dataframe(
        shown,
        key="versions",
        on_select=picked,
        selection_mode="single-row",
        hide_index=True,
        alt="Saved versions",
        height=min(320, 38 + 35 * len(ids)),
        column_config={
            "number": st.column_config.NumberColumn("v", width=48),
            "parent": st.column_config.TextColumn("from v", width=64),
            "created_at": st.column_config.DatetimeColumn("saved (UTC)"),
        },
    )
    if seen.version not in ids:
        seen.version = ids[0]
    row = held.store.config(seen.version)
    if row is not None:
        one_version(held, seen, run, draft, row, frame)


def one_version(
    held: Lab, seen: View, run: Run | None, draft: Draft | None, row: ConfigRow, frame: pl.DataFrame
) -> None:
    """One version: go back to it, take it home, what it differs in, where it comes from."""
    st.subheader(f"Version {row.number}", anchor=False)
    st.text(row.name + (f"\n{row.note}" if row.note else ""))
    with st.container(horizontal=True):
        fits = run is not None and (len(row.heads), len(row.heads[0])) == (run.facts.layers, run.facts.query_heads)
        st.button(
            "Restore as the draft",
            key="restore",
            icon=":material/history:",
            disabled=not fits or draft is None,
            help="The draft then stands on this version; Undo on the Tune page takes it back",
            on_click=restore,
            args=(held, seen, run, draft, row),
        )
        job = held.worker.latest(seen.session)
        if st.button(
            "Check the export",
            key="export",
            icon=":material/fact_check:",
            disabled=job is not None and job.open,
            help="Writes the file, loads it with the engine, measures every head again and compares",
        ):
            try:
                evidence_run = None if row.run_id is None else held.run(row.run_id)
                held.worker.submit(
                    seen.session, "export", row.id, lambda context: exports.round_trip(held, context, row, evidence_run)
                )
            except HeadscopeError as error:
                seen.notice = str(error)
            st.rerun()
    widgets.progress(held, seen)
    checked = seen.extra.get("export")
    if checked is not None and checked[0] == row.id:
        exported(checked[1])
    differs(held, row, draft, frame)
    comes_from(row)


def restore(held: Lab, seen: View, run: Run | None, draft: Draft | None, row: ConfigRow) -> None:
    """Puts the draft onto a version, if the version fits the model."""
    if run is None or draft is None:
        return
    reasons = exports.head_config(row).check(run.facts)
    if reasons:
        seen.notice = "This version does not fit the model of the open run: " + "; ".join(reasons) + "."
        return
    newest = held.draft(draft.id) or draft
    held.keep_draft(newest.onto(exports.title(row), row.id, exports.grid_of(row), Estimator.from_dict(row.estimator)))
    seen.good_news = f"The draft stands on version {row.number} now."


def exported(made: RoundTrip) -> None:
    """What the check said, and the file if it is good."""
    if not made.good:
        st.error(words.plain_markdown("The export is not good: " + "; ".join(made.problems) + "."))
        return
    st.success(
        f"Good: the engine loaded the file, and {made.heads} heads measured again from it agree with their evidence "
        f"(largest difference in missed mass {made.largest_difference:.1e})."
    )
    st.download_button(
        "Download the config",
        made.text,
        made.file_name,
        "application/json",
        key="take",
        type="primary",
        icon=":material/download:",
        on_click="ignore",
    )


def differs(held: Lab, row: ConfigRow, draft: Draft | None, frame: pl.DataFrame) -> None:
    """The heads that differ from another version, or from the draft."""
    others: dict[str, Grid] = {}
    if draft is not None:
        others["the draft"] = draft.patterns
    for other in frame.filter(pl.col("id") != row.id).iter_rows(named=True):
        others[f"version {other['number']}"] = ()
    if not others:
        return
    parent = frame.filter(pl.col("id") == row.id)["parent"].to_list()[0]
    names = list(others)
    wanted = f"version {parent}"
    against = st.selectbox(
        "Compare with", names, index=names.index(wanted) if wanted in names else 0, key=f"against-{row.id}"
    )
    other_row = None
    if against != "the draft":
        number = int(against.removeprefix("version "))
        other_row = held.store.config(frame.filter(pl.col("number") == number)["id"].to_list()[0])
    other_grid = others[against] if other_row is None else exports.grid_of(other_row)
    grid = exports.grid_of(row)
    if (len(grid), len(grid[0])) != (len(other_grid), len(other_grid[0])):
        st.caption("They are for models of different shape, so there is nothing to compare head by head.")
        return
    sampling = Estimator.from_dict(row.estimator)
    other_sampling = Estimator.from_dict(other_row.estimator) if other_row is not None else None
    if against == "the draft" and draft is not None:
        other_sampling = draft.estimator
    if other_sampling is not None and other_sampling != sampling:
        st.caption(f"Sampling differs: here {words.sampling(sampling)}; in {against} {words.sampling(other_sampling)}.")
    found = differences(other_grid, grid)
    if not found:
        st.caption(f"No head differs from {against}.")
        return
    st.markdown(f"**{words.count(len(found), 'head differs', 'heads differ')}** from {against}")
    table = pl.DataFrame(
        {
            "head": [f"L{layer} H{head}" for layer, head, _, _ in found],
            f"in {against}": [words.label(one) for _, _, one, _ in found],
            f"in version {row.number}": [words.label(two) for _, _, _, two in found],
            f"missed, {against}": [_missed(other_row, layer, head) for layer, head, _, _ in found],
            f"missed, version {row.number}": [_missed(row, layer, head) for layer, head, _, _ in found],
        }
    )
    percent = st.column_config.NumberColumn(format="percent")
    st.dataframe(
        table,
        hide_index=True,
        alt="Heads that differ",
        height=min(340, 38 + 35 * len(found)),
        column_config={name: percent for name in table.columns if name.startswith("missed")},
    )


def _missed(row: ConfigRow | None, layer: int, head: int) -> float | None:
    notes = None if row is None else row.heads[layer][head][1]
    proof = read_evidence((notes or {}).get("evidence"))
    value = proof.get("missed_mass_mean")
    return float(value) if isinstance(value, int | float) else None


def comes_from(row: ConfigRow) -> None:
    """Provenance, as it goes into the file."""
    with st.expander("Where it comes from", icon=":material/account_tree:"):
        st.json(read_provenance(row.provenance), expanded=1)
        st.caption("The model that it is for")
        st.json(row.model, expanded=False)


main()

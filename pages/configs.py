"""Versions of the head config: keep the draft, compare, go back, take a checked file home, bring one in."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import streamlit as st

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.evidence import read_evidence, read_provenance
from headscope.engine.config.facts import ModelFacts
from headscope.engine.config.file import HeadConfig
from headscope.studio.base import words
from headscope.studio.data.draft import HeadPatterns, differences
from headscope.studio.store.rows import ConfigRow
from headscope.studio.ui import widgets
from headscope.studio.ui.context import PageContext, RunContext
from headscope.studio.ui.measured import measured
from headscope.studio.ui.opening import open_run
from headscope.studio.work import exports
from headscope.studio.work.exports import RoundTrip


def main() -> None:
    page = widgets.open_page("Configs")
    opened = open_run(page)
    if opened is not None:
        widgets.strip(opened)
    left, right = st.columns([4, 7], gap="large")
    with left:
        keep(opened)
        bring_in(page, None if opened is None else opened.run.facts)
    with right:
        versions(page, opened)


def keep(opened: RunContext | None) -> None:
    """The draft, and saving it under a name."""
    st.subheader("Your draft", anchor=False)
    if opened is None:
        st.markdown(
            "No run is open, so there is no draft. Run a prompt on the Heads page, or choose one of the saved versions."
        )
        return
    draft, changed = opened.draft, len(opened.draft.changed)
    st.text(
        f"{draft.title}: {words.count(changed, 'head differs', 'heads differ') if changed else 'nothing changed yet'}"
    )
    missing = sum(one is None for row in measured(opened) for one in row)
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
        save(opened, name, note)
        st.rerun()


def save(page: RunContext, name: str, note: str) -> None:
    """Stores the draft as a version, or says why not."""
    lab, view = page.lab, page.view
    try:
        lab.reopen()
        row, _ = exports.save_draft(lab, page.draft, page.run, name, note)
    except HeadscopeError as error:
        view.notice = f"{error} Your draft is untouched."
    else:
        view.version = row.id
        view.good_news = f"Saved as version {row.number}."


def bring_in(page: PageContext, facts: ModelFacts | None) -> None:
    """Import of a config file."""
    st.subheader("Bring a config in", anchor=False)
    file = st.file_uploader("A headscope config, JSON", key="import", label_visibility="collapsed")
    accepted = "A JSON file in the format headscope.head-config/1. Other tools' files: `headscope convert` first."
    if file is None:
        st.caption(accepted)
        return
    try:
        config = exports.read_import(file.name, file.getvalue(), facts)
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error), file.name[:80]))
        st.caption(accepted)
        return
    st.text(f"{file.name}: {len(config.heads)} layers of {len(config.heads[0])} heads, for {config.model.get('name')}")
    if facts is None:
        st.caption("No run is open, so whether it fits a model is checked when you restore it.")
    if st.button("Save as a version", key="import-save", icon=":material/download_done:"):
        try:
            row = page.lab.store.save_config(file.name.removesuffix(".json")[:120], config, note="imported")
        except HeadscopeError as error:
            page.view.notice = str(error)
        else:
            page.view.version = row.id
            page.view.good_news = f"Imported as version {row.number}."
        st.rerun()


def versions(page: PageContext, opened: RunContext | None) -> None:
    """All versions, and the chosen one."""
    st.subheader("Versions", anchor=False)
    frame = page.lab.store.configs()
    if frame.is_empty():
        st.markdown("Nothing is saved yet. Tune a head or two, give the draft a name, and it stays here for good.")
        return
    ids = frame["id"].to_list()

    def picked() -> None:
        picked_rows = st.session_state["versions"]["selection"]["rows"]
        if picked_rows and picked_rows[0] < len(ids):
            page.view.version = ids[picked_rows[0]]

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
    if page.view.version not in ids:
        page.view.version = ids[0]
    try:
        row = page.lab.store.config(page.view.version)
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error)))
        return
    if row is not None:
        one_version(page, opened, row, frame)


def one_version(page: PageContext, opened: RunContext | None, row: ConfigRow, frame: pl.DataFrame) -> None:
    """One version: go back to it, take it home, what it differs in, where it comes from."""
    st.subheader(f"Version {row.number}", anchor=False)
    st.text(row.name + (f"\n{row.note}" if row.note else ""))
    with st.container(horizontal=True):
        st.button(
            "Restore as the draft",
            key="restore",
            icon=":material/history:",
            disabled=opened is None or not _same_shape(exports.patterns_of(row.config), opened.draft.patterns),
            help="The draft then stands on this version; Undo on the Tune page takes it back",
            on_click=restore,
            args=(opened, row),
        )
        if st.button(
            "Check the export",
            key="export",
            icon=":material/fact_check:",
            disabled=page.busy,
            help="Writes the file, loads it with the engine, measures every head again and compares",
        ):
            check_export(page, row)
            st.rerun()
    widgets.progress(page)
    if page.view.export is not None and page.view.export[0] == row.id:
        exported(page.view.export[1])
    differs(page, opened, row, frame)
    comes_from(row)


def check_export(page: PageContext, row: ConfigRow) -> None:
    """Queues the check as this session's job; a refusal becomes the page's notice."""
    lab = page.lab
    try:
        evidence_run = None if row.run_id is None else lab.runs.open(row.run_id)
        lab.worker.submit(
            page.view.session, "export", row.id, lambda context: exports.round_trip(lab, context, row, evidence_run)
        )
    except HeadscopeError as error:
        page.view.notice = str(error)


def restore(page: RunContext, row: ConfigRow) -> None:
    """Puts the draft onto a version, if the version fits the model."""
    reasons = exports.to_file(row).check(page.run.facts)
    if reasons:
        page.view.notice = "This version does not fit the model of the open run: " + "; ".join(reasons) + "."
        return
    newest = page.lab.drafts.newest(page.draft)
    page.lab.drafts.keep(newest.onto(row.title, row.id, exports.patterns_of(row.config), row.config.estimator))
    page.view.good_news = f"The draft stands on version {row.number} now."


def _same_shape(one: HeadPatterns, other: HeadPatterns) -> bool:
    return (len(one), len(one[0])) == (len(other), len(other[0]))


def exported(check: RoundTrip) -> None:
    """What the check said, and the file if it is good."""
    if not check.good:
        st.error(words.plain_markdown("The export is not good: " + "; ".join(check.problems) + "."))
        return
    st.success(
        f"Good: the engine loaded the file, and {check.heads} heads measured again from it agree with their evidence "
        f"(largest difference in missed mass {check.largest_difference:.1e})."
    )
    st.download_button(
        "Download the config",
        check.text,
        check.file_name,
        "application/json",
        key="take",
        type="primary",
        icon=":material/download:",
        on_click="ignore",
    )


@dataclass(frozen=True)
class Other:
    """What a version is compared with: its name, patterns and sampling; its config if it is a version."""

    name: str
    patterns: HeadPatterns
    estimator: Estimator
    config: HeadConfig | None


def differs(page: PageContext, opened: RunContext | None, row: ConfigRow, frame: pl.DataFrame) -> None:
    """The heads that differ from another version, or from the draft."""
    other = choose_other(page, opened, row, frame)
    if other is None:
        return
    patterns, sampling = exports.patterns_of(row.config), row.config.estimator
    if not _same_shape(patterns, other.patterns):
        st.caption("They are for models of different shape, so there is nothing to compare head by head.")
        return
    if other.estimator != sampling:
        st.caption(
            f"Sampling differs: here {words.sampling(sampling)}; in {other.name} {words.sampling(other.estimator)}."
        )
    changes = differences(other.patterns, patterns)
    if not changes:
        st.caption(f"No head differs from {other.name}.")
        return
    st.markdown(f"**{words.count(len(changes), 'head differs', 'heads differ')}** from {other.name}")
    table = pl.DataFrame(
        {
            "head": [f"L{layer} H{head}" for layer, head, _, _ in changes],
            f"in {other.name}": [words.label(one) for _, _, one, _ in changes],
            f"in version {row.number}": [words.label(two) for _, _, _, two in changes],
            f"missed, {other.name}": [_missed(other.config, layer, head) for layer, head, _, _ in changes],
            f"missed, version {row.number}": [_missed(row.config, layer, head) for layer, head, _, _ in changes],
        }
    )
    percent = st.column_config.NumberColumn(format="%.1f %%")
    st.dataframe(
        table,
        hide_index=True,
        alt="Heads that differ",
        height=min(340, 38 + 35 * len(changes)),
        column_config={name: percent for name in table.columns if name.startswith("missed")},
    )


def choose_other(page: PageContext, opened: RunContext | None, row: ConfigRow, frame: pl.DataFrame) -> Other | None:
    """What to compare with: the draft or a version, at first the one that this one came from; None if there is none."""
    ids = {f"version {other['number']}": other["id"] for other in frame.iter_rows(named=True) if other["id"] != row.id}
    names = [*(["the draft"] if opened is not None else []), *ids]
    if not names:
        return None
    parent = f"version {frame.filter(pl.col('id') == row.id)['parent'].to_list()[0]}"
    at = names.index(parent) if parent in names else 0
    name = st.selectbox("Compare with", names, index=at, key=f"against-{row.id}")
    if name == "the draft" and opened is not None:
        return Other(name, opened.draft.patterns, opened.draft.estimator, None)
    try:
        other = page.lab.store.config(ids[name])
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error)))
        return None
    return (
        None if other is None else Other(name, exports.patterns_of(other.config), other.config.estimator, other.config)
    )


def _missed(config: HeadConfig | None, layer: int, head: int) -> float | None:
    """A head's mean missed mass in percent, if its evidence holds it."""
    evidence = None if config is None else config.heads[layer][head].evidence
    value = read_evidence(evidence).get("missed_mass_mean")
    return 100 * float(value) if isinstance(value, int | float) else None


def comes_from(row: ConfigRow) -> None:
    """Provenance, as it goes into the file."""
    with st.expander("Where it comes from", icon=":material/account_tree:"):
        st.json(read_provenance(row.config.provenance), expanded=1)
        st.caption("The model that it is for")
        st.json(row.config.model, expanded=False)


main()

"""More about one head: the places it misses as text, all numbers, where its loss comes from, its GQA group."""

from __future__ import annotations

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.loss.mass import FLOOR
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.ui import state, widgets
from headscope.studio.ui.state import View
from headscope.studio.work.draft import Draft
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import HeadDetail, Run

LOOKS = ("missed places", "numbers and areas", "where the loss comes from", "GQA group")


def more_about(held: Lab, seen: View, run: Run, draft: Draft, detail: HeadDetail) -> None:
    """One of `LOOKS`, as chosen."""
    st.segmented_control(
        "More about this head",
        list(LOOKS),
        required=True,
        **state.bind("look", seen.look, lambda value: setattr(seen, "look", value)),
    )
    if seen.look == LOOKS[0]:
        places(run, detail)
    elif seen.look == LOOKS[1]:
        all_numbers(detail)
    elif seen.look == LOOKS[2]:
        loss(held, run, detail)
    else:
        group(held, seen, run, draft)


def places(run: Run, detail: HeadDetail) -> None:
    """The largest missed cells: what the reading token is, and what it did not see."""
    found = detail.maps.places
    if not found:
        st.caption("Nothing of note is missed: every row keeps its largest keys.")
        return
    frame = pl.DataFrame(
        {
            "missed": [place.probability for place in found],
            "the token that reads": [words.excerpt(run.pieces, place.query) for place in found],
            "what it did not see": [words.excerpt(run.pieces, place.key) for place in found],
            "tokens": [f"{place.query:,} ← {place.key:,}" for place in found],
            "back": [place.query - place.key for place in found],
        }
    )
    st.dataframe(
        frame,
        hide_index=True,
        alt="Most missed query and key tokens",
        column_config={
            "missed": st.column_config.NumberColumn(format="percent", width="small"),
            "the token that reads": st.column_config.TextColumn(width=250),
            "what it did not see": st.column_config.TextColumn(width=250),
        },
    )
    st.caption("The largest missed cells, one a row at most, among the 192 rows that miss most; ‹ › marks the token.")


def all_numbers(detail: HeadDetail) -> None:
    """Every number of the measurement, and the four areas."""
    one = detail.measurement
    start, middle, end = one.missed_mass_thirds
    rows = [
        ("missed mass, mean of rows", words.percent(one.missed_mass_mean)),
        ("missed mass, 99th percentile of rows", words.percent(one.missed_mass_p99)),
        ("missed mass, worst row", f"{words.percent(one.missed_mass_worst)} at token {one.missed_mass_worst_row:,}"),
        ("missed mass, start / middle / end", " / ".join(words.percent(part) for part in (start, middle, end))),
        ("output error, relative L2", words.percent(one.output_error)),
        ("output cosine to dense", f"{one.output_cosine:.5f}"),
        ("requested pairs", f"{one.requested_pairs:,} ({words.percent(one.requested_density)} of causal)"),
        ("computed pairs", f"{one.computed_pairs:,} ({words.percent(one.computed_density)} of causal)"),
        ("index, this head alone", words.milliseconds(detail.index_ms)),
        ("kernel, this head alone", words.milliseconds(detail.kernel_ms)),
        ("dense, this head alone", words.milliseconds(detail.dense_ms)),
        ("share of the layer's time, an estimate by computed pairs", words.milliseconds(one.time_share_ms)),
    ]
    frame = pl.DataFrame({"number": [name for name, _ in rows], "value": [value for _, value in rows]})
    st.dataframe(frame, hide_index=True, alt="All numbers of this head", height=38 + 35 * len(rows))
    widgets.figure(
        charts.areas(one.areas, state.colours()),
        "areas",
        "Computed pairs by kind: "
        + ", ".join(f"{name} {value:,}" for name, value in zip(charts.AREA_NAMES, one.areas, strict=True)),
        lambda: pl.DataFrame({"area": charts.AREA_NAMES, "pairs": one.areas}),
    )
    st.caption(
        "Isolated loss: on the Q/K/V of the dense prefill. Missed mass comes from two float32 log-sum-exps, so values "
        f"below {100 * FLOOR:g} % are rounding."
    )


STEPS = ("budget", "pattern family", "online choice", "tiles")


def loss(held: Lab, run: Run, detail: HeadDetail) -> None:
    """The four steps of the loss, and the remedy that fits the largest."""
    one = detail.measurement
    try:
        split = held.loss_split(run, one.layer, one.head, one.pattern, detail.estimator)
    except HeadscopeError as error:
        st.info(words.plain_markdown(str(error)))
        return
    widgets.figure(
        charts.loss_steps(split.steps, STEPS, state.colours()),
        "loss",
        "Missed mass in steps: "
        + ", ".join(f"{n} {words.percent(v)}" for n, v in zip(STEPS, split.steps, strict=True)),
        lambda: pl.DataFrame({"step": STEPS, "missed_mass": split.steps}),
    )
    st.markdown(remedy(split.steps, detail))
    rows = f"{split.rows:,} sampled rows" if split.sampled else f"all {split.rows:,} rows"
    st.caption(
        f"At equal requested cells, over {rows}: the best keys of each row; the best geometry, greedily chosen with "
        "all rows known; what the online index chose; what the tiles add. Steps may be negative: greedy is not optimal."
    )


def remedy(steps: tuple[float, float, float, float], detail: HeadDetail) -> str:
    """What would help, by the largest step."""
    if detail.measurement.missed_mass_mean < 0.01:
        if detail.sparse_ms > detail.dense_ms:
            return "The loss is small but sparse is slower than dense here: keep this head dense at this length."
        return "The loss is small: a smaller budget may do, and would be faster."
    largest = max(range(3), key=lambda index: steps[index])
    advice = (
        "**More budget.** Even the best keys of each row would miss most of this: no other choice of cells helps.",
        "**Another pattern.** The budget would do, but this family cannot lay its cells where the probability is.",
        "**More sampling.** The family and budget would do, but the rows sampled for the index do not speak for all.",
    )[largest]
    slow = detail.sparse_ms > detail.dense_ms
    return advice + (" It is slower than dense here as well, so dense below some length may be best." if slow else "")


def group(held: Lab, seen: View, run: Run, draft: Draft) -> None:
    """The query heads that share this head's keys and values."""
    size = run.facts.group
    first = seen.head // size * size
    members = range(first, first + size)
    patterns = draft.patterns[seen.layer]
    found = [held.known(run.id, seen.layer, head, patterns[head], draft.estimator) for head in members]
    frame = pl.DataFrame(
        {
            "head": [f"L{seen.layer} H{head}" for head in members],
            "pattern": [words.label(patterns[head]) for head in members],
            "missed, mean": [None if one is None else one.missed_mass_mean for one in found],
            "missed, worst row": [None if one is None else one.missed_mass_worst for one in found],
            "computes": [None if one is None else one.computed_density for one in found],
        }
    )
    percent = st.column_config.NumberColumn(format="percent")
    st.dataframe(
        frame,
        hide_index=True,
        alt="Heads of the group",
        column_config=dict.fromkeys(("missed, mean", "missed, worst row", "computes"), percent),
    )
    st.caption(f"These {size} query heads read the same keys and values (KV head {seen.head // size}).")

"""More about one head: the places it misses as text, all numbers, where its loss comes from, its GQA group."""

from __future__ import annotations

from functools import partial

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.loss.mass import MISSED_MASS_FLOOR
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.profile import profile_chart
from headscope.studio.data.profiles import Profile
from headscope.studio.data.results import HeadDetail
from headscope.studio.ui import state, widgets
from headscope.studio.ui.context import RunContext

LOOKS = ("missed places", "numbers and areas", "where the loss comes from", "columns and distances", "GQA group")


def more_about(page: RunContext, detail: HeadDetail) -> None:
    """One of `LOOKS`, as chosen."""
    st.segmented_control(
        "More about this head",
        list(LOOKS),
        required=True,
        **state.bind("look", page.view.look, lambda value: setattr(page.view, "look", value)),
    )
    if page.view.look == LOOKS[0]:
        places(page, detail)
    elif page.view.look == LOOKS[1]:
        all_numbers(page, detail)
    elif page.view.look == LOOKS[2]:
        loss(page, detail)
    elif page.view.look == LOOKS[3]:
        by_position(page, detail)
    else:
        group(page)


def places(page: RunContext, detail: HeadDetail) -> None:
    """The largest missed cells: what the reading token is, and what it did not see."""
    missed_cells = detail.maps.places
    if not missed_cells:
        st.caption("Nothing of note is missed: every row keeps its largest keys.")
        return
    frame = pl.DataFrame(
        {
            "missed": [100 * place.probability for place in missed_cells],
            "the token that reads": [words.excerpt(page.run.pieces, place.query) for place in missed_cells],
            "what it did not see": [words.excerpt(page.run.pieces, place.key) for place in missed_cells],
            "tokens": [f"{place.query:,} ← {place.key:,}" for place in missed_cells],
            "back": [f"{place.query - place.key:,}" for place in missed_cells],
        }
    )
    st.dataframe(
        frame,
        hide_index=True,
        alt="Most missed query and key tokens",
        column_config={
            "missed": st.column_config.NumberColumn(format="%.2f %%", width="small"),
            "the token that reads": st.column_config.TextColumn(width=250),
            "what it did not see": st.column_config.TextColumn(width=250),
            "back": st.column_config.TextColumn(alignment="right"),
        },
    )
    st.caption("The largest missed cells, one a row at most, among the 192 rows that miss most; ‹ › marks the token.")


def all_numbers(page: RunContext, detail: HeadDetail) -> None:
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
        charts.areas(one.areas, page.theme),
        "areas",
        "Computed pairs by kind: "
        + ", ".join(f"{name} {value:,}" for name, value in zip(charts.AREA_NAMES, one.areas, strict=True)),
        lambda: pl.DataFrame({"area": charts.AREA_NAMES, "pairs": one.areas}),
    )
    st.caption(
        "Isolated loss: on the Q/K/V of the dense prefill. Missed mass comes from two float32 log-sum-exps, so values "
        f"below {100 * MISSED_MASS_FLOOR:g} % are rounding."
    )


STEPS = ("budget", "pattern family", "online choice", "tiles")


def loss(page: RunContext, detail: HeadDetail) -> None:
    """The four steps of the loss, and the remedy that fits the largest."""
    try:
        split = page.lab.measurements.loss_split(detail.case(page.run))
    except HeadscopeError as error:
        st.info(words.plain_markdown(str(error)))
        return
    widgets.figure(
        charts.loss_steps(split.steps, STEPS, page.theme),
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
        f"**More budget.** Even the best keys of each row, as many as this pattern asks for, would miss "
        f"{words.percent(steps[0])}.",
        "**Another pattern.** With this budget, this family cannot lay its cells where the probability is.",
        "**More sampling.** The family and budget would do, but the rows sampled for the index do not speak for all."
        if detail.measurement.pattern.online
        else "**Other budgets.** The same family with as many cells, shared out otherwise, would miss less.",
    )[largest]
    slow = detail.sparse_ms > detail.dense_ms
    return advice + (" It is slower than dense here as well, so dense below some length may be best." if slow else "")


def by_position(page: RunContext, detail: HeadDetail) -> None:
    """Where the head's probability lies, by column and by distance, with what the pattern keeps."""
    try:
        profiles = page.lab.measurements.profiles(detail.case(page.run))
    except HeadscopeError as error:
        st.info(words.plain_markdown(str(error)))
        return
    parts = (
        ("columns", profiles.columns, "key position (token)", "Probability by column"),
        ("distances", profiles.distances, "distance back (tokens)", "Probability by distance"),
    )
    kept_words = []
    for name, profile, axis, title in parts:
        kept = float(profile.kept_share.sum())
        span = profile.edges[1] - profile.edges[0]
        kept_words.append(f"{words.percent(kept)} in kept {name}")
        widgets.figure(
            profile_chart(profile, title, axis, page.theme, logarithmic=page.view.logarithmic),
            f"profile-{name}",
            f"{title}: share of all probability of the head in {words.count(len(profile.share), 'span')} of "
            f"{words.count(span, 'token')}; {words.percent(kept)} lies in what the pattern keeps.",
            partial(profile_frame, profile),
        )
    st.caption(
        f"Exact sums over all rows of the dense probability: {' and '.join(kept_words)}. Marks are the "
        "columns and distances that the pattern asks for, before tiles are added; blocks are neither. A distance that "
        "moving windows keep for some rows only counts by their share."
    )


def profile_frame(profile: Profile) -> pl.DataFrame:
    """A profile as rows: the span, its share of all probability, and what of it the pattern keeps."""
    return pl.DataFrame(
        {
            "from": profile.edges[:-1],
            "to": profile.edges[1:],
            "share_of_probability": profile.share,
            "kept_part_of_span": profile.kept,
            "kept_share_of_probability": profile.kept_share,
        }
    )


def group(page: RunContext) -> None:
    """The query heads that share this head's keys and values."""
    size, layer, draft = page.run.facts.group, page.view.layer, page.draft
    first = page.view.head // size * size
    members = range(first, first + size)
    patterns = draft.patterns[layer]
    known = [page.lab.measurements.known(page.run.id, layer, head, patterns[head], draft.estimator) for head in members]
    frame = pl.DataFrame(
        {
            "head": [f"L{layer} H{head}" for head in members],
            "pattern": [words.label(patterns[head]) for head in members],
            "missed, mean": [None if one is None else 100 * one.missed_mass_mean for one in known],
            "missed, worst row": [None if one is None else 100 * one.missed_mass_worst for one in known],
            "computes": [None if one is None else 100 * one.computed_density for one in known],
        }
    )
    percent = st.column_config.NumberColumn(format="%.1f %%")
    st.dataframe(
        frame,
        hide_index=True,
        alt="Heads of the group",
        column_config=dict.fromkeys(("missed, mean", "missed, worst row", "computes"), percent),
    )
    st.caption(f"These {size} query heads read the same keys and values (KV head {page.view.head // size}).")

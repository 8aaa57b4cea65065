"""What a search chooses at a target, on the page: its figures, its curve, and what can be done with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.facts import ModelFacts
from headscope.engine.config.file import HeadConfig
from headscope.engine.search.explain import explain
from headscope.engine.search.table import Allocation, Target
from headscope.studio.base import words
from headscope.studio.charts import search as search_charts
from headscope.studio.charts.overview import overview
from headscope.studio.ui import widgets
from headscope.studio.ui.context import PageContext
from headscope.studio.ui.view import CheckedChoice
from headscope.studio.work import search as search_view
from headscope.studio.work.search import StoredSearch

LIMITS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Stops of the slider: the largest missed mass that any head may have."""

BUSY = 1.3  # dense attention this much slower than in the search means that something else is at work


def outcome(page: PageContext, search: StoredSearch, allocation: Allocation, target: Target) -> None:
    """What the choice is predicted to take and to lose, and what can be done with it."""
    figures = search_view.figures(search, allocation, target)
    metrics(search, allocation)
    caveats(search, allocation, figures)
    rows = curve_rows(page, search)
    prediction = allocation.prediction
    left, right = st.columns(2, gap="medium")
    with left:
        widgets.figure(
            search_charts.curve(rows, (prediction.loss_mean, prediction.attention_ms), page.theme, search.unit),
            "search-curve",
            search_charts.describe_curve(rows, search.unit),
            lambda: pl.DataFrame(rows),
        )
        act(page, search, allocation, target)
        why(page, search, allocation, target)
    with right:
        heads_map(page, search, allocation, families(figures))


def families(figures: dict[str, Any]) -> str:
    """How many heads have which pattern."""
    return " · ".join(f"{count} {kind}" for kind, count in figures["families"].items())


def caveats(search: StoredSearch, allocation: Allocation, figures: dict[str, Any]) -> None:
    """How far the choice may be trusted: heads without a candidate, the cost model's error, layers left dense."""
    prediction, fit = allocation.prediction, search.fitted.fit
    uniform = figures["uniform_at_equal_pairs"]["missed_mass_worst_prompt"]
    st.caption(
        f"{families(figures)}. {words.count(len(allocation.stayed_dense), 'head')} with no candidate in reach. Losses "
        f"are isolated. Worst prompt misses {words.percent(figures['missed_mass_worst_prompt'])}; the best single "
        f"setting at equal computed pairs {words.percent(uniform)}. Cost model: {words.percent(fit.mixed_error)} "
        f"median error over the mixed ones of {fit.samples:,} timed layers."
    )
    if prediction.dense_layers and search.unit == "ms":
        st.info(
            f"{words.count(len(prediction.dense_layers), 'layer')} of {len(search.table.layers)} stay dense: no mix "
            "within reach is predicted faster at these lengths on the machine of the search. `headscope bench --host` "
            "finds the length where sparse wins; to choose for another machine, take computed tiles as the cost.",
            icon=":material/info:",
        )
    if figures.get("gap") is not None:
        st.caption(
            f"Total loss {figures['total_loss']:.4f}; no choice can be below {figures['relaxed_total_loss']:.4f} "
            f"(gap {figures['gap']:.4f})."
        )


def curve_rows(page: PageContext, search: StoredSearch) -> list[dict[str, float]]:
    """Cost and loss at every limit of the slider, worked out once for a search."""
    view, key = page.view.search, (search.id, search.unit)
    if view.sweep is None or view.sweep[0] != key:
        view.sweep = key, search_view.sweep(search, LIMITS)
    return view.sweep[1]


def heads_map(page: PageContext, search: StoredSearch, allocation: Allocation, alt: str) -> None:
    """Layers by heads of the choice, each with its loss on the worst prompt."""
    candidates = search.settings.grid.candidates
    losses = np.take_along_axis(search.table.loss(), allocation.picked[:, :, None], 2)[:, :, 0]
    patterns = [[candidates[int(number)] for number in row] for row in allocation.picked]
    widgets.figure(
        overview(
            losses,
            [[words.label(pattern) for pattern in row] for row in patterns],
            [[pattern.kind for pattern in row] for row in patterns],
            None,
            (),
            "missed mass, worst prompt",
            page.theme,
            clicks=True,
        ),
        "search-heads",
        f"Layers by heads of the choice: {alt}.",
        lambda: search_view.heads_frame(search, allocation),
    )


def metrics(search: StoredSearch, allocation: Allocation) -> None:
    """The choice in four figures."""
    prediction = allocation.prediction
    timed = search.in_ms(allocation)
    first, second, third, fourth = st.columns(4)
    if search.unit == "tiles":
        first.metric(
            "computed tiles, of dense",
            words.percent(prediction.attention_ms / max(1e-9, prediction.dense_attention_ms)),
            delta=f"{prediction.attention_ms:,.0f} of {prediction.dense_attention_ms:,.0f}",
            delta_arrow="off",
            delta_color="off",
        )
    (second if search.unit == "tiles" else first).metric(
        "attention, predicted",
        words.milliseconds(timed.attention_ms),
        delta_arrow="off",
        delta_color="off",
        delta=f"dense {words.milliseconds(timed.dense_attention_ms)}",
    )
    if search.unit == "ms":
        second.metric("whole prefill, dense over sparse", f"{prediction.speedup:.2f}×")
    third.metric(
        "missed mass, mean",
        words.percent(prediction.loss_mean),
        delta_arrow="off",
        delta_color="off",
        delta=f"worst head {words.percent(prediction.loss_worst)}",
    )
    fourth.metric(
        "computes, of causal pairs", words.percent(prediction.computed_pairs / max(1, prediction.causal_pairs))
    )


def act(page: PageContext, search: StoredSearch, allocation: Allocation, target: Target) -> None:
    """Make it the draft, measure it for real, take it as a file; and the comparison of both."""
    label = f"search at {words.percent(target.max_missed)}" if target.max_missed is not None else "search by speed"
    label += " by tiles" if search.unit == "tiles" else ""
    config = search.config(allocation, target)
    with st.container(horizontal=True):
        if st.button("Apply as draft", type="primary", key="search-apply", icon=":material/edit_note:"):
            apply_as_draft(page, search, config, label)
            st.rerun()
        if st.button(
            "Measure it for real",
            key="search-check",
            icon=":material/timer:",
            disabled=page.busy,
            help="Runs this choice on the first calibration prompt and times it",
        ):
            measure_for_real(page, search, config, allocation, label)
            st.rerun()
        st.download_button(
            "Config file",
            lambda: config.to_json().encode(),
            "headscope-search.json",
            "application/json",
            key="search-download",
            on_click="ignore",
            icon=":material/download:",
        )
    checked = page.view.search.checked
    if checked is not None and checked.search_id == search.id:
        both(checked)


def apply_as_draft(page: PageContext, search: StoredSearch, config: HeadConfig, label: str) -> None:
    """The session's draft for the searched model stands on the choice."""
    try:
        facts = ModelFacts(**{**search.facts, "layer_types": tuple(search.facts["layer_types"])})
        search_view.to_draft(page.lab, page.lab.drafts.of(page.view.session, facts), config, label)
        page.view.good_news = "The choice is your draft now: see it on Heads and Tune, save it on Configs."
    except HeadscopeError as error:
        page.view.notice = str(error)


def measure_for_real(
    page: PageContext, search: StoredSearch, config: HeadConfig, allocation: Allocation, label: str
) -> None:
    """Queues the measurement of the choice as this session's job."""
    lab, predicted = page.lab, search_view.expected(search, allocation)
    try:
        lab.worker.submit(
            page.view.session,
            "search-check",
            label,
            lambda context: (search.id, predicted, search_view.check_for_real(lab, context, search, config)),
        )
    except HeadscopeError as error:
        page.view.notice = str(error)


def both(checked: CheckedChoice) -> None:
    """Predicted beside measured, on one prompt."""
    predicted, measured = checked.predicted, checked.measured
    st.text(f"{checked.name}, on {measured['prompt']} ({measured['tokens']:,} tokens): predicted and measured")
    attention, dense = measured["attention_ms"], measured["dense_attention_ms"]
    beside = predicted.beside(dense)
    rows = [
        ("attention, this choice (ms)", f"{beside:.1f}", f"{attention:.1f}"),
        ("this choice over dense", f"{beside / dense:.3f}", f"{attention / dense:.3f}"),
        ("missed mass, mean over heads", f"{predicted.missed_mass_mean:.4f}", f"{measured['missed_mass_mean']:.4f}"),
    ]
    frame = pl.DataFrame(rows, orient="row", schema=["figure", "predicted", "measured"])
    st.dataframe(frame, hide_index=True, key="search-both", alt="Predicted and measured figures of the choice")
    st.caption(
        f"Measured time is {attention / max(1e-9, beside) - 1:+.0%} of the prediction. Dense attention took "
        f"{words.milliseconds(dense)} in this measurement and {words.milliseconds(predicted.dense_attention_ms)} when "
        "the search ran; the prediction is what the choice takes beside dense, at the present speed."
    )
    if dense > BUSY * predicted.dense_attention_ms:
        st.caption(
            "The machine is much slower now than it was: other programs disturb many small steps more than a large "
            "one, so measure again when it is quiet."
        )


def why(page: PageContext, search: StoredSearch, allocation: Allocation, target: Target) -> None:
    """One head's story, from the stored figures."""
    with st.expander("Why did a head get its pattern?", icon=":material/help:"):
        left, right = st.columns(2)
        layer = left.selectbox("Layer", search.table.layers, key="search-why-layer")
        head = right.selectbox("Head", range(search.table.heads), key="search-why-head")
        explanation = explain(search.table, search.cost, target, allocation, [(layer, head)])[0]
        st.markdown(explanation.sentence)
        prompts_word = words.count(len(search.table.prompts), "prompt")
        story = (
            f"On its own, {explanation.win_rate:.0%} of {prompts_word} would choose this family and "
            f"{explanation.same_rate:.0%} this candidate. It loses most on {explanation.worst_prompt}: "
            f"{words.percent(explanation.worst_loss)}."
        )
        st.caption(words.escaped(story))  # prompts of a run folder have names of a person's own
        for option, what in ((explanation.smaller, "Less budget"), (explanation.larger, "More budget")):
            if option is not None:
                st.caption(
                    f"{what}: {option.label} misses {words.percent(option.loss)} in {option.ms:.2f} {search.unit}."
                )
        at = search.table.layers.index(layer)
        ms, loss = search.table.head_ms(search.cost)[at, head], search.table.loss(target.metric)[at, head]
        every = [
            (pattern.kind, words.label(pattern), float(ms[number]), float(loss[number]))
            for number, pattern in enumerate(search.settings.grid.candidates)
        ]
        widgets.figure(
            search_charts.head_front(explanation, every, target.max_missed, page.theme, search.unit),
            "search-front",
            f"Candidates of layer {layer} head {head} by cost and loss; {explanation.chosen.label} is chosen.",
            lambda: pl.DataFrame(every, orient="row", schema=["family", "pattern", search.unit, "missed_mass"]),
        )

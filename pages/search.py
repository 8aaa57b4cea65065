"""Search: measure candidates for every head, then trade time against loss on the stored fronts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.facts import ModelFacts
from headscope.engine.model.packaged import PACKAGED
from headscope.engine.search.check import Expected
from headscope.engine.search.explain import explain
from headscope.engine.search.grid import default_grid
from headscope.engine.search.table import Allocation, Target
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts import search as search_charts
from headscope.studio.ui import state, widgets
from headscope.studio.ui.state import View
from headscope.studio.work import prompts
from headscope.studio.work import search as search_view
from headscope.studio.work.lab import Lab
from headscope.studio.work.search import Found, Plan

LIMITS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
SPEEDUPS = tuple(round(0.5 + 0.05 * step, 2) for step in range(0, 91))
COSTS = {"ms": "predicted time", "tiles": "computed tiles"}
BUSY = 1.3  # dense attention this much slower than in the search means that something else is at work

LENGTHS = {"512": 512, "1,024": 1024, "2,048": 2048, "whole": None}


def main() -> None:
    held, seen = widgets.page("Search")
    state.keep_link(seen, None)
    take(held, seen)
    st.title("Search patterns and budgets", anchor=False)
    st.markdown(
        "Every head runs every candidate on a few prompts, once. The fronts of time and loss are kept, so that a "
        "target can be moved afterwards without another run."
    )
    widgets.progress(held, seen)
    rows = held.store.searches()
    with st.expander("Start a search", expanded=not rows, icon=":material/travel_explore:"):
        start(held, seen)
    with st.expander("Take in a run of the command line", icon=":material/folder_open:"):
        bring(held, seen)
    found = choose(held, seen, rows)
    if found is None:
        return
    found, target = slider(seen, found)
    try:
        allocation = found.allocate(target)
    except HeadscopeError as error:
        st.warning(words.plain_markdown(str(error)), icon=":material/speed:")
        return
    outcome(held, seen, found, allocation, target)


def take(held: Lab, seen: View) -> None:
    """Takes what this session's last search or check brought, once."""
    job = held.worker.latest(seen.session)
    if job is None or job.state != "done" or seen.extra.get("search-taken") == job.id:
        return
    if job.kind == "search":
        seen.extra["search"] = job.result
    elif job.kind == "search-check":
        seen.extra["search-checked"] = (job.title, job.result)
    seen.extra["search-taken"] = job.id


def start(held: Lab, seen: View) -> None:
    """Model, prompts, length, candidates, and the button."""
    known = prompts.samples()
    plan: dict[str, Any] = seen.extra.setdefault(
        "search-plan", {"samples": ["code", "prose", "dialogue"], "length": "512", "grid": None, "limit": 0.02}
    )
    left, right = st.columns(2, gap="large")
    with left:
        names = list(dict.fromkeys([*PACKAGED, seen.model]))
        st.selectbox("Model", names, **state.bind("search-model", seen.model, lambda new: setattr(seen, "model", new)))
        st.multiselect(
            "Calibration prompts",
            list(known),
            format_func=lambda name: f"{known[name].kind}: {known[name].title}",
            help="Several kinds: a pattern that suits one text need not suit another",
            **state.bind("search-samples", plan["samples"], lambda new: plan.update(samples=list(new))),
        )
        st.segmented_control(
            "Tokens of each prompt",
            list(LENGTHS),
            required=True,
            **state.bind("search-length", plan["length"], lambda new: plan.update(length=new)),
        )
    with right:
        st.text_area(
            "Candidates, one a line",
            height=230,
            help="Budgets are counts or fractions of the length; dense is always in",
            **state.bind(
                "search-grid", plan["grid"] or search_view.grid_text(default_grid()), lambda new: plan.update(grid=new)
            ),
        )
    problem, grid = "", None
    try:
        grid = search_view.parse_grid(plan["grid"] or search_view.grid_text(default_grid()))
    except HeadscopeError as error:
        problem = str(error)
    if not plan["samples"]:
        problem = problem or "Choose at least one calibration prompt."
    job = held.worker.latest(seen.session)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        pressed = st.button(
            "Search",
            type="primary",
            key="search-start",
            icon=":material/play_arrow:",
            width=140,
            disabled=bool(problem) or (job is not None and job.open),
        )
        if problem:
            st.error(words.plain_markdown(problem))
        elif grid is not None:
            st.text(
                f"{words.count(len(grid), 'candidate')} a head on {words.count(len(plan['samples']), 'prompt')}; "
                "a search that is stopped goes on where it was"
            )
    if pressed and grid is not None:
        asked = Plan(seen.model, tuple(plan["samples"]), LENGTHS[plan["length"]], grid)
        target = Target(max_missed=plan["limit"])
        try:
            held.worker.submit(
                seen.session,
                "search",
                f"Searching {seen.model}",
                lambda context: search_view.run_search(held, context, asked, target),
            )
        except HeadscopeError as error:
            seen.notice = str(error)
        st.rerun()


def bring(held: Lab, seen: View) -> None:
    """A run folder of `headscope search` becomes rows of the store."""
    named = st.text_input("Run folder", key="search-folder", placeholder="such as config.json.run")
    if st.button("Take it in", key="search-bring", icon=":material/download_done:"):
        try:
            seen.extra["search"] = search_view.take_in(held, Path(named.strip()).expanduser(), Target(max_missed=0.02))
            seen.good_news = "The run's measurements are stored, and its winner at 2 % is a version."
        except HeadscopeError as error:
            seen.notice = str(error)
        st.rerun()


def choose(held: Lab, seen: View, rows: list[dict[str, Any]]) -> Found | None:
    """Which stored search is looked at."""
    if not rows:
        st.info("No search is stored yet. Start one above; it lands here by itself.", icon=":material/info:")
        return None
    known = {row["id"]: row for row in rows}
    current = seen.extra.get("search")
    if current not in known:
        current = rows[0]["id"]

    def name(row: dict[str, Any]) -> str:
        kinds = ", ".join(prompt["name"] for prompt in row["settings"]["prompts"])
        return f"{row['created_at']:%Y-%m-%d %H:%M} · {row['model']} · {kinds}"

    names = {row_id: name(row) for row_id, row in known.items()}
    # A select box tells options apart by their labels.
    labels = {
        row_id: f"{label} · {row_id[:4]}" if list(names.values()).count(label) > 1 else label
        for row_id, label in names.items()
    }
    st.selectbox(
        "Search",
        list(known),
        format_func=labels.__getitem__,
        **state.bind("search-chosen", current, lambda new: seen.extra.update(search=new)),
    )
    held_found = seen.extra.get("search-found")
    if isinstance(held_found, Found) and held_found.id == current:
        return held_found
    try:
        found = search_view.load_search(held, known[current])
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error)))
        return None
    seen.extra["search-found"] = found
    return found


def slider(seen: View, found: Found) -> tuple[Found, Target]:
    """What counts as cost, and the target; the choice follows from the stored fronts."""
    place: dict[str, Any] = seen.extra.setdefault("search-target", {"by": "loss", "limit": 0.02, "speedup": 1.0})
    unit = place.setdefault("cost", "ms")
    by = {"loss": "no head misses more than", "speed": "faster by" if unit == "ms" else "fewer tiles by"}
    with st.container(horizontal=True, gap="medium"):
        st.segmented_control(
            "Least",
            list(COSTS),
            format_func=COSTS.__getitem__,
            required=True,
            help="Time is predicted for the machine that ran the search. Tiles of 64 x 128 cells are the work itself: "
            "count them to choose for a machine other than this one, such as a GPU",
            **state.bind("search-cost", unit, lambda new: place.update(cost=new)),
        )
        st.segmented_control(
            "Target",
            list(by),
            format_func=by.__getitem__,
            required=True,
            **state.bind("search-by", place["by"], lambda new: place.update(by=new)),
        )
    if place["by"] == "loss":
        st.select_slider(
            "Largest missed mass of any head",
            LIMITS,
            format_func=words.percent,
            width=520,
            **state.bind("search-limit", place["limit"], lambda new: place.update(limit=new)),
        )
        target = Target(max_missed=place["limit"])
    else:
        st.select_slider(
            "Dense over sparse prefill time" if unit == "ms" else "Dense over sparse computed tiles",
            SPEEDUPS,
            format_func=lambda value: f"{value:.2f}×",
            width=520,
            **state.bind("search-speedup", place["speedup"], lambda new: place.update(speedup=new)),
        )
        target = Target(speedup=place["speedup"])
    return counted(seen, found, place["cost"]), target


def counted(seen: View, found: Found, unit: str) -> Found:
    """The search with costs in `unit`, made once."""
    if unit == found.unit:
        return found
    kept = seen.extra.get("search-counted")
    if not isinstance(kept, Found) or (kept.id, kept.unit) != (found.id, unit):
        kept = seen.extra["search-counted"] = found.counting(unit)
    return kept


def metrics(found: Found, allocation: Allocation) -> None:
    """The choice in four figures."""
    said = allocation.prediction
    timed = found.in_ms(allocation)
    first, second, third, fourth = st.columns(4)
    if found.unit == "tiles":
        first.metric(
            "computed tiles, of dense",
            words.percent(said.attention_ms / max(1e-9, said.dense_attention_ms)),
            delta=f"{said.attention_ms:,.0f} of {said.dense_attention_ms:,.0f}",
            delta_arrow="off",
            delta_color="off",
        )
    (second if found.unit == "tiles" else first).metric(
        "attention, predicted",
        words.milliseconds(timed.attention_ms),
        delta_arrow="off",
        delta_color="off",
        delta=f"dense {words.milliseconds(timed.dense_attention_ms)}",
    )
    if found.unit == "ms":
        second.metric("whole prefill, dense over sparse", f"{said.speedup:.2f}×")
    third.metric(
        "missed mass, mean",
        words.percent(said.loss_mean),
        delta_arrow="off",
        delta_color="off",
        delta=f"worst head {words.percent(said.loss_worst)}",
    )
    fourth.metric("computes, of causal pairs", words.percent(said.computed_pairs / max(1, said.causal_pairs)))


def outcome(held: Lab, seen: View, found: Found, allocation: Allocation, target: Target) -> None:
    """What the choice is predicted to take and to lose, and what can be done with it."""
    said = allocation.prediction
    figures = search_view.figures(found, allocation, target)
    metrics(found, allocation)
    families = " · ".join(f"{count} {kind}" for kind, count in figures["families"].items())
    uniform = figures["uniform_at_equal_pairs"]["missed_mass_worst_prompt"]
    fit = found.fitted.fit
    st.caption(
        f"{families}. {words.count(len(allocation.stayed_dense), 'head')} with no candidate in reach. Losses are "
        f"isolated. Worst prompt misses {words.percent(figures['missed_mass_worst_prompt'])}; the best single setting "
        f"at equal computed pairs {words.percent(uniform)}. Cost model: {words.percent(fit.mixed_error)} median error "
        f"over the mixed ones of {fit.samples:,} timed layers."
    )
    if said.dense_layers and found.unit == "ms":
        st.info(
            f"{words.count(len(said.dense_layers), 'layer')} of {len(found.table.layers)} stay dense: no mix within "
            "reach is predicted faster at these lengths on the machine of the search. `headscope bench --host` finds "
            "the length where sparse wins; to choose for another machine, take computed tiles as the cost.",
            icon=":material/info:",
        )
    if figures.get("gap") is not None:
        st.caption(
            f"Total loss {figures['total_loss']:.4f}; no choice can be below {figures['relaxed_total_loss']:.4f} "
            f"(gap {figures['gap']:.4f})."
        )
    swept = seen.extra.get("search-sweep")
    if swept is None or swept[0] != (found.id, found.unit):
        swept = seen.extra["search-sweep"] = ((found.id, found.unit), search_view.sweep(found, LIMITS))
    rows = swept[1]
    left, right = st.columns(2, gap="medium")
    with left:
        widgets.figure(
            search_charts.curve(rows, (said.loss_mean, said.attention_ms), state.colours(), found.unit),
            "search-curve",
            search_charts.describe_curve(rows, found.unit),
            lambda: pl.DataFrame(rows),
        )
        act(held, seen, found, allocation, target)
        why(found, allocation, target)
    with right:
        grid = found.settings.grid
        losses = np.take_along_axis(found.table.loss(), allocation.picked[:, :, None], 2)[:, :, 0]
        patterns = [[grid.candidates[int(number)] for number in row] for row in allocation.picked]
        labels = [[words.label(pattern) for pattern in row] for row in patterns]
        drawn = charts.overview(
            losses,
            labels,
            [[pattern.kind for pattern in row] for row in patterns],
            None,
            (),
            "missed mass, worst prompt",
            state.colours(),
            clicks=True,
        )
        widgets.figure(
            drawn,
            "search-heads",
            f"Layers by heads of the choice: {families}.",
            lambda: search_view.heads_frame(found, allocation),
        )


def act(held: Lab, seen: View, found: Found, allocation: Allocation, target: Target) -> None:
    """Make it the draft, measure it for real, and the comparison of both."""
    label = f"search at {words.percent(target.max_missed)}" if target.max_missed is not None else "search by speed"
    label += " by tiles" if found.unit == "tiles" else ""
    config = found.config(allocation, target)
    job = held.worker.latest(seen.session)
    busy = job is not None and job.open
    with st.container(horizontal=True):
        if st.button("Apply as draft", type="primary", key="search-apply", icon=":material/edit_note:"):
            try:
                facts = ModelFacts(**{**found.facts, "layer_types": tuple(found.facts["layer_types"])})
                draft = state.draft_of(held, seen.session, facts)
                search_view.to_draft(held, draft, found, config, label)
                seen.good_news = "The choice is your draft now: see it on Heads and Tune, save it on Configs."
            except HeadscopeError as error:
                seen.notice = str(error)
            st.rerun()
        if st.button(
            "Measure it for real",
            key="search-check",
            icon=":material/timer:",
            disabled=busy,
            help="Runs this choice on the first calibration prompt and times it",
        ):
            said = search_view.expected(found, allocation)
            try:
                held.worker.submit(
                    seen.session,
                    "search-check",
                    label,
                    lambda context: (found.id, said, search_view.check_for_real(held, context, found, config)),
                )
            except HeadscopeError as error:
                seen.notice = str(error)
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
    name, checked = seen.extra.get("search-checked", ("", None))
    if checked is not None and checked[0] == found.id:
        both(name, checked[1], checked[2])


def both(name: str, said: Expected, got: dict[str, Any]) -> None:
    """Predicted beside measured, on one prompt."""
    st.text(f"{name}, on {got['prompt']} ({got['tokens']:,} tokens): predicted and measured")
    taken, dense = got["attention_ms"], got["dense_attention_ms"]
    beside = said.beside(dense)
    rows = [
        ("attention, this choice (ms)", f"{beside:.1f}", f"{taken:.1f}"),
        ("this choice over dense", f"{beside / dense:.3f}", f"{taken / dense:.3f}"),
        ("missed mass, mean over heads", f"{said.missed_mass_mean:.4f}", f"{got['missed_mass_mean']:.4f}"),
    ]
    frame = pl.DataFrame(rows, orient="row", schema=["figure", "predicted", "measured"])
    st.dataframe(frame, hide_index=True, key="search-both", alt="Predicted and measured figures of the choice")
    st.caption(
        f"Measured time is {taken / max(1e-9, beside) - 1:+.0%} of the prediction. Dense attention took "
        f"{words.milliseconds(dense)} in this measurement and {words.milliseconds(said.dense_attention_ms)} when the "
        "search ran; the prediction is what the choice takes beside dense, at the present speed."
    )
    if dense > BUSY * said.dense_attention_ms:
        st.caption(
            "The machine is much slower now than it was: other programs disturb many small steps more than a large "
            "one, so measure again when it is quiet."
        )


def why(found: Found, allocation: Allocation, target: Target) -> None:
    """One head's story, from the stored figures."""
    with st.expander("Why did a head get its pattern?", icon=":material/help:"):
        left, right = st.columns(2)
        layer = left.selectbox("Layer", found.table.layers, key="search-why-layer")
        head = right.selectbox("Head", range(found.table.heads), key="search-why-head")
        told = explain(found.table, found.cost, target, allocation, [(layer, head)])[0]
        st.markdown(told.sentence)
        prompts_word = words.count(len(found.table.prompts), "prompt")
        story = (
            f"On its own, {told.win_rate:.0%} of {prompts_word} would choose this family and {told.same_rate:.0%} this "
            f"candidate. It loses most on {told.worst_prompt}: {words.percent(told.worst_loss)}."
        )
        st.caption(words.escaped(story))  # prompts of a run folder have names of a person's own
        for option, what in ((told.smaller, "Less budget"), (told.larger, "More budget")):
            if option is not None:
                st.caption(
                    f"{what}: {option.label} misses {words.percent(option.loss)} in {option.ms:.2f} {found.unit}."
                )
        at = found.table.layers.index(layer)
        ms, loss = found.table.head_ms(found.cost)[at, head], found.table.loss(target.metric)[at, head]
        every = [
            (pattern.kind, words.label(pattern), float(ms[number]), float(loss[number]))
            for number, pattern in enumerate(found.settings.grid.candidates)
        ]
        widgets.figure(
            search_charts.head_front(told, every, target.max_missed, state.colours(), found.unit),
            "search-front",
            f"Candidates of layer {layer} head {head} by cost and loss; {told.chosen.label} is chosen.",
            lambda: pl.DataFrame(every, orient="row", schema=["family", "pattern", found.unit, "missed_mass"]),
        )


main()

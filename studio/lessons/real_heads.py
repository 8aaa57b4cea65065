"""Chapter 10: four heads of a real model under the three patterns, at equal cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import plotly.graph_objects as go
import polars as pl
import streamlit as st
import torch

from headscope.engine import build_index
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.loss import measure
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.packaged import PACKAGED, cache_dir
from headscope.engine.runs import capture
from headscope.studio.base import words
from headscope.studio.base.words import percent
from headscope.studio.charts import charts
from headscope.studio.charts.maps import pooled_map
from headscope.studio.charts.theme import GLYPHS, Theme
from headscope.studio.lessons import figures, find_heads, parts
from headscope.studio.lessons.find_heads import FAMILIES, Trial
from headscope.studio.ui import state, widgets
from headscope.studio.work.jobs import Context
from headscope.studio.work.maps import HeadMaps, head_maps

ROLES = {
    "a-shape": "clearest A-shape",
    "vertical-slash": "clearest vertical-slash",
    "block-sparse": "clearest block",
    "dense": "diffuse: keep dense",
}
CELLS = 64
JOB = "real-job"
"""Where a session keeps the id of its measurement under way, and the prompt that it reads."""

NARROW = 0.01
"""A lead below this is called narrow."""


@dataclass(frozen=True)
class KnownHead:
    """A head of the file: its role, its place, and what was measured, by prompt and pattern family."""

    role: str
    layer: int
    head: int
    evidence: dict[str, dict[str, Trial]]

    @property
    def name(self) -> str:
        """Such as "layer 3 head 4"."""
        return f"layer {self.layer} head {self.head}"

    def missed(self, family: str) -> float:
        """Mean over the prompts."""
        return sum(trials[family].missed for trials in self.evidence.values()) / len(self.evidence)

    @property
    def best(self) -> str:
        """The family that misses least."""
        return min(FAMILIES, key=self.missed)


@dataclass(frozen=True)
class HeadsFile:
    """What `find_heads` wrote."""

    model: str
    fingerprint: str
    tokens: int
    prompts: tuple[str, ...]
    heads_measured: int
    heads: tuple[KnownHead, ...]


@dataclass(frozen=True)
class LiveHead:
    """A head measured again: trials by family, and the maps under each family's cells."""

    known: KnownHead
    trials: dict[str, Trial]
    maps: dict[str, HeadMaps]


@cache
def heads_file() -> HeadsFile:
    """The packaged file; ValueError if it is of another format."""
    body = json.loads(find_heads.FILE.read_text(encoding="utf-8"))
    if body.get("format") != find_heads.FORMAT:
        raise ValueError(f"{find_heads.FILE.name} must have format {find_heads.FORMAT}, got {body.get('format')!r}")
    return HeadsFile(
        body["model"],
        body["fingerprint"],
        body["tokens"],
        tuple(body["prompts"]),
        body["heads_measured"],
        tuple(_known(entry) for entry in body["heads"]),
    )


def _known(entry: dict[str, Any]) -> KnownHead:
    evidence = {
        prompt: {family: find_heads.trial_from_dict(trial) for family, trial in trials.items()}
        for prompt, trials in entry["evidence"].items()
    }
    return KnownHead(entry["role"], entry["layer"], entry["head"], evidence)


def fetched(model: str) -> bool:
    """Whether a packaged model lies in the cache; nothing is read or downloaded."""
    known = PACKAGED.get(model)
    return known is not None and (cache_dir() / known.name / known.file_name).is_file()


def live(loaded: LoadedModel, prompt: str, context: Context | None = None) -> tuple[LiveHead, ...]:
    """Reads the prompt with the model and measures the file's heads under the file's patterns again.

    `context` is told of every layer and every head, and stops the work at the next of either.
    """
    known = heads_file()
    found: dict[tuple[int, int], LiveHead] = {}
    layers = max(one.layer for one in known.heads) + 1

    def step(done: int, what: str) -> None:
        if context is not None:
            context.step(done, layers, what)

    def visit(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        for one in known.heads:
            if one.layer == layer:
                step(layer, f"Measuring {one.name}")
                at = one.head // (q.shape[1] // k.shape[1])
                own = (q[:, one.head : one.head + 1], k[:, at : at + 1], v[:, at : at + 1])
                found[layer, one.head] = _again(one, prompt, *own, scale)

    ids = find_heads.prompt_ids(loaded, prompt, known.tokens)
    capture.stream(
        loaded,
        ids,
        visit,
        layers=sorted({one.layer for one in known.heads}),
        logits=False,
        progress=lambda done, _: step(done, f"Reading {prompt}: layer {done} of {layers}"),
    )
    return tuple(found[one.layer, one.head] for one in known.heads)


def _again(one: KnownHead, prompt: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> LiveHead:
    patterns = {family: [trial.pattern] for family, trial in one.evidence[prompt].items()}
    trials = find_heads.try_layer(q, k, v, scale, patterns)[0]
    dense = measure.dense_pass(q, k, v, scale)
    maps = {}
    for family, of_head in patterns.items():
        result = measure.measure_heads(q, k, v, of_head, scale=scale, tile=1, dense=dense)
        index = build_index(q, k, of_head, scale, tile=1)
        maps[family] = head_maps(q, k, dense.lse, index, result.missed[0, 0], cells=CELLS)
    return LiveHead(one, trials, maps)


def draw_evidence(heads: Sequence[KnownHead], theme: Theme) -> go.Figure:
    """Missed mass of the four heads under the three patterns, mean of the prompts."""
    figure = go.Figure()
    stripes = {"a-shape": "", "vertical-slash": "/", "block-sparse": "."}
    for family in FAMILIES:
        values = [one.missed(family) for one in heads]
        figure.add_bar(
            y=[f"{ROLES[one.role]}<br>{one.name}" for one in heads],
            x=values,
            name=f"{GLYPHS[family]} {family}",
            orientation="h",
            marker={"color": theme.patterns[family], "pattern": figures.stripe(stripes[family], theme)},
            text=[percent(value) for value in values],
            textposition="outside",
            textfont={"color": theme.ink, "size": 12},
            hovertemplate=f"{family}: %{{x:.1%}} missed<extra></extra>",
        )
    charts.layout(figure, theme, "Missed mass at equal cells", 470, barmode="group", bargap=0.22)
    figures.keys_below(figure, theme)
    top = max(one.missed(family) for one in heads for family in FAMILIES)
    figure.update_layout(font={"size": 13}, legend={"traceorder": "normal"})
    figure.update_xaxes(
        title="missed mass, mean of all rows",
        tickformat=".0%",
        range=[0, top * 1.2],
        showgrid=True,
        gridcolor=theme.grid,
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def draw_map(found: HeadMaps, family: str | None, missed: float, theme: Theme) -> go.Figure:
    """The dense map, or the same with what a family leaves out washed in orange."""
    title = "Dense, exact" if family is None else f"{GLYPHS[family]} {family}: misses {percent(missed)}"
    return pooled_map(
        found.dense,
        found.row_edges,
        found.column_edges,
        title,
        theme,
        computed=None if family is None else found.computed,
        height=440,
    )


def sentence(one: KnownHead, families: Sequence[str] = FAMILIES) -> str:
    """What the evidence says of a head, in words."""
    best, order = one.best, sorted(families, key=one.missed)
    second = order[1]
    facts = f"{best} misses {percent(one.missed(best))}, {second} {percent(one.missed(second))}"
    if one.role == "dense":
        return f"Even its best pattern misses {percent(one.missed(best))}: no shape fits, so it should stay dense."
    if one.role != best:
        return f"{facts}: no head of this model is served best by {one.role}; this one comes nearest."
    if one.missed(second) - one.missed(best) < NARROW:
        return f"At equal cells {facts}: a narrow win. This model has hardly a head of this kind."
    return f"At equal cells {facts}."


def show(theme: Theme) -> None:
    """The chapter."""
    known = heads_file()
    cells = known.heads[0].evidence[known.prompts[0]]["block-sparse"].cells
    st.markdown(
        f"Toys have the shape they were given. Do real heads have one? All {known.heads_measured} heads of "
        f"**{known.model}** were measured under the three patterns with equally many cells ({cells:,} at most, of "
        f"{known.tokens:,} tokens, on the samples {' and '.join(known.prompts)}). These four stand out."
    )
    parts.formula(
        r"\text{missed}=1-\frac1n\sum_i e^{\,\mathrm{lse}^{\text{sparse}}_i-\mathrm{lse}^{\text{dense}}_i}",
        "sections 3.1 and 5.1",
        "As in chapter 8, mean of all rows.",
    )
    parts.picture(
        draw_evidence(known.heads, theme),
        "real-evidence",
        "; ".join(f"{one.name}: {sentence(one)}" for one in known.heads),
        lambda: _evidence(known),
    )
    for one in known.heads:
        st.markdown(f"- **{ROLES[one.role]}**, {one.name}. {sentence(one)}")
    st.markdown("#### Look at them, and measure again")
    _live(known, theme)
    served = [one for one in known.heads if one.role == one.best]
    widest = max(served, key=lambda one: sorted(one.missed(f) for f in FAMILIES)[1] - one.missed(one.best))
    order = sorted(FAMILIES, key=widest.missed)
    parts.check(
        "real",
        "For which of these heads does the choice of pattern matter most, and by how much?",
        f"{ROLES[widest.role].capitalize()}, {widest.name}: {percent(widest.missed(order[0]))} missed with {order[0]}, "
        f"{percent(widest.missed(order[1]))} with the next best.",
        "The cells are equally many; only their shape differs. This is why patterns are chosen head by head.",
    )


def _live(known: HeadsFile, theme: Theme) -> None:
    if not fetched(known.model):
        st.info(
            f"**{known.model} is not on this machine yet.** The numbers above were measured before and need no "
            f"model. To see the maps and measure again, run `headscope fetch {known.model}` "
            f"({words.size(PACKAGED[known.model].download_bytes)}), then reload this page.",
            icon=":material/download:",
        )
        return
    prompt = parts.choice("Sample prompt", list(known.prompts), "real-prompt")
    results: dict[str, tuple[LiveHead, ...]] = st.session_state.setdefault("real-live", {})
    _take(results)
    working = JOB in st.session_state
    if working and widgets.progress(state.page()) is None:
        st.rerun()
    if prompt in results:
        _pictures(results[prompt], prompt, theme)
    elif not working:
        st.caption(f"Reads {known.tokens:,} tokens of the sample with {known.model}: 10 to 30 s on two cores, once.")
        st.button(
            "Read the prompt and measure the four heads",
            type="primary",
            key="real-run",
            on_click=_start,
            args=(known.model, prompt),
        )
    if problem := st.session_state.pop("real-problem", ""):
        st.error(words.plain_markdown(problem))


def _start(model: str, prompt: str) -> None:
    """Queues the measurement as this session's job."""
    lab = state.lab()

    def work(context: Context) -> tuple[LiveHead, ...]:
        return live(lab.models.load(model, context), prompt, context)

    try:
        job = lab.worker.submit(state.view().session, "lesson", f"Measuring four heads on {prompt}", work)
    except HeadscopeError as error:
        st.session_state["real-problem"] = str(error)
    else:
        st.session_state[JOB] = (job.id, prompt)


def _take(results: dict[str, tuple[LiveHead, ...]]) -> None:
    """Takes what the job brought once it has ended, or says why it brought nothing."""
    if JOB not in st.session_state:
        return
    job_id, prompt = st.session_state[JOB]
    job = state.lab().worker.job(job_id)
    if job is not None and job.open:
        return
    del st.session_state[JOB]
    if job is None:
        return
    if job.state == "done":
        results[prompt] = job.result
    elif job.state == "cancelled":
        st.info("Cancelled: nothing of it was kept.")
    else:
        st.session_state["real-problem"] = job.error


def _pictures(heads: tuple[LiveHead, ...], prompt: str, theme: Theme) -> None:
    role = parts.choice("Head", [ROLES[one.known.role] for one in heads], "real-head")
    one = next(one for one in heads if ROLES[one.known.role] == role)
    pictures: list[tuple[str | None, HeadMaps, float]] = [(None, one.maps[FAMILIES[0]], 0.0)]
    pictures += [(family, one.maps[family], one.trials[family].missed) for family in FAMILIES]
    for pair in (pictures[:2], pictures[2:]):
        for column, (family, found, missed) in zip(st.columns(2, gap="large"), pair, strict=True):
            with column:
                name, what = family or "dense", "all of attention" if family is None else f"{percent(missed)} missed"
                parts.picture(
                    draw_map(found, family, missed, theme),
                    f"real-{name}",
                    f"{one.known.name}, {name}: {what}.",
                    partial(_map_frame, found),
                )
    st.caption("Orange: not computed. The colour scale is logarithmic, from 0.01 % of a row to all of it.")
    st.dataframe(
        pl.DataFrame(
            [
                {
                    "pattern": one.trials[f].pattern.label,
                    "cells": f"{one.trials[f].cells:,}",
                    "missed now": percent(one.trials[f].missed),
                    "in the file": percent(one.known.evidence[prompt][f].missed),
                    "worst row": percent(one.trials[f].worst),
                    "output error": percent(one.trials[f].output_error),
                }
                for f in FAMILIES
            ]
        ),
        hide_index=True,
        width="content",
    )


def _map_frame(found: HeadMaps) -> pl.DataFrame:
    return parts.grid_frame(share_of_row=found.dense.tolist(), computed=found.computed.tolist())


def _evidence(known: HeadsFile) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {
                "role": one.role,
                "layer": one.layer,
                "head": one.head,
                "prompt": prompt,
                "pattern": trial.pattern.label,
                "cells": trial.cells,
                "missed": trial.missed,
                "worst": trial.worst,
                "output_error": trial.output_error,
            }
            for one in known.heads
            for prompt, trials in one.evidence.items()
            for trial in trials.values()
        ]
    )

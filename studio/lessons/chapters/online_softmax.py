"""Chapter 5 on the page: online softmax, eq. 7 and 8."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl
import streamlit as st
import torch

from headscope.studio.charts import charts
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.maths.online_softmax import KEYS, VALUES, OnlineLesson, lesson, merged


def draw_scores(result: OnlineLesson, tiles_merged: int, theme: Theme) -> go.Figure:
    """Scores as bars: tiles already merged, the tile of this step, tiles to come; the running maximum as a line."""
    now = result.steps[tiles_merged - 1]
    done = {key for step in result.steps[: tiles_merged - 1] for key in step.keys}
    figure = go.Figure()
    for name, mine, colour, stripes in (
        ("merged before", done, theme.mass[3], ""),
        ("this tile", set(now.keys), theme.missed, "/"),
        ("still to come", set(range(KEYS)) - done - set(now.keys), theme.grid, "."),
    ):
        if mine:
            figure.add_bar(
                x=sorted(mine),
                y=[result.scores[key] for key in sorted(mine)],
                name=name,
                marker={"color": colour, "pattern": figures.stripe(stripes, theme)},
                hovertemplate="key %{x}: score %{y:.2f}<extra></extra>",
            )
    charts.layout(figure, theme, "Scores of the row, tile by tile", 280, barmode="overlay", bargap=0.2)
    figures.plain(figure, theme, ("key", "score"))
    figure.add_shape(
        type="line",
        x0=-0.5,
        x1=now.keys[-1] + 0.5,
        y0=now.m,
        y1=now.m,
        line={"color": theme.ink, "width": 2, "dash": "dash"},
    )
    figure.add_annotation(
        x=-0.4,
        y=now.m,
        text=f"m = {now.m:.2f}",
        showarrow=False,
        xanchor="left",
        yanchor="bottom",
        font={"color": theme.ink, "size": 13},
    )
    for step in result.steps[1:]:
        figure.add_vline(x=step.keys[0] - 0.5, line={"color": theme.faint, "width": 1, "dash": "dot"})
    figure.update_xaxes(range=[-0.6, KEYS - 0.4], dtick=1)
    figure.update_yaxes(range=[min(-1.3, *result.scores) - 0.2, max(result.scores) * 1.18])
    return figure


def draw_output(result: OnlineLesson, tiles_merged: int, theme: Theme) -> go.Figure:
    """The plane of values: where the output stands after each tile, and where the naive average lands."""
    figure = go.Figure()
    x, y = zip(*VALUES, strict=True)
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers",
        name="values v",
        hovertemplate="v of key %{pointNumber}<extra></extra>",
        marker={"size": 8, "color": theme.faint, "symbol": "circle-open"},
    )
    path = [step.output for step in result.steps[:tiles_merged]]
    figure.add_scatter(
        x=[point[0] for point in path],
        y=[point[1] for point in path],
        mode="lines+markers+text",
        name="output so far",
        text=[str(at) for at in range(1, tiles_merged + 1)],
        textposition="top center",
        textfont={"color": theme.ink, "size": 13},
        line={"color": theme.accent, "width": 2},
        marker={"size": 10, "color": theme.accent},
        hovertemplate="after tile %{text}: (%{x:.3f}, %{y:.3f})<extra></extra>",
    )
    for name, point, colour, mark in (
        ("softmax in one go", result.output, theme.ink, "circle-open"),
        ("tiles normalised alone, then averaged", result.averaged, theme.missed, "x"),
    ):
        figure.add_scatter(
            x=[point[0]],
            y=[point[1]],
            mode="markers",
            name=name,
            hovertemplate="(%{x:.3f}, %{y:.3f})<extra></extra>",
            marker={
                "size": 18 if mark == "circle-open" else 13,
                "color": colour,
                "symbol": mark,
                "line": {"width": 2.5, "color": colour},
            },
        )
    charts.layout(figure, theme, "The output moves with every tile", 380)
    figures.plain(figure, theme, ("first channel", "second channel"))
    figure.update_xaxes(range=[-0.2, 3.4])
    figure.update_yaxes(range=[-0.2, 3.3])
    figures.keys_below(figure, theme, lines=2)
    return figure


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "A kernel never holds a whole row. It loads a **tile** of keys, then the next. Softmax divides by a sum "
            "over all keys, which is known only at the end, so the kernel carries three things along: the highest "
            "score so far (m), the sum of exponentials relative to it (l), and the weighted sum of values (p). "
            "When a tile brings a higher score, what was gathered is shrunk to the new scale. At the end the output is "
            "p / l, exactly."
        )
        parts.formula(
            r"\begin{aligned}m'&=\max(m,\max x)\\ \ell'&=e^{m-m'}\ell+\textstyle\sum_t e^{x_t-m'}\\ "
            r"p'&=e^{m-m'}p+\textstyle\sum_t e^{x_t-m'}v_t\end{aligned}",
            "eq. 7 and 8",
        )
        tile = int(parts.choice("Keys per tile", ["2", "3", "4", "6"], "online-tile", start="3"))
        boost = parts.amount("Raise the best key's score by", 0.0, 4.0, 0.0, 0.5, "online-boost")
        result = lesson(tile, boost)
        count = len(result.steps)
        tiles_merged = min(parts.slider("Tiles merged (step through)", 1, 6, 2, "online-step"), count)
        _stepper(tiles_merged, count)
    now = result.steps[tiles_merged - 1]
    with right:
        parts.picture(
            draw_scores(result, tiles_merged, theme),
            "online-scores",
            f"Tile {tiles_merged} of {count}; the highest score so far is {now.m:.2f}.",
            lambda: pl.DataFrame({"key": list(range(KEYS)), "score": result.scores}),
        )
        parts.numbers(
            ("m", f"{now.m:.2f}", "Highest score so far"),
            ("old sums times", f"{now.rescale:.3f}", "exp(m − m′): below 1 when the tile brought a new highest score"),
            ("tile adds", f"{now.added:.3f}", "The tile's own sum of exponentials, relative to m′"),
            ("l", f"{now.l:.3f}", "Sum of exponentials so far, relative to m"),
            ("p", f"({now.p[0]:.2f}, {now.p[1]:.2f})", "Weighted sum of values, not yet divided"),
            (
                "output p / l",
                f"({now.output[0]:.3f}, {now.output[1]:.3f})",
                "The softmax output over the keys seen so far",
            ),
        )
        parts.picture(
            draw_output(result, tiles_merged, theme),
            "online-output",
            f"Output after {tiles_merged} tiles {now.output}; in one go {result.output}; averaged {result.averaged}.",
            lambda: _frame(result),
        )
    st.dataframe(_frame(result), hide_index=True, width="content")
    by_hand = merged(result.steps, count)
    st.caption(
        f"Merging the tiles with eq. 7 and 8 gives ({by_hand[0]:.6f}, {by_hand[1]:.6f}); the engine's attention over "
        f"all keys at once gives ({result.output[0]:.6f}, {result.output[1]:.6f})."
    )
    off = torch.dist(torch.tensor(result.averaged), torch.tensor(result.output)).item()
    parts.check(
        "online",
        "Each tile could do its own softmax, and one could average the tiles' outputs. Where does that land?",
        f"At ({result.averaged[0]:.3f}, {result.averaged[1]:.3f}) instead of ({result.output[0]:.3f}, "
        f"{result.output[1]:.3f}): {off:.2f} away.",
        "Normalised alone, every tile counts the same, also those that hold no good key. The sums l say how much each "
        "tile is worth; whoever throws them away cannot get the row back.",
    )


def _stepper(tiles_merged: int, count: int) -> None:
    def go_to(step: int) -> None:
        st.session_state["online-step"] = step

    with st.container(horizontal=True):
        st.button(
            "Back",
            icon=":material/skip_previous:",
            disabled=tiles_merged <= 1,
            on_click=go_to,
            args=(tiles_merged - 1,),
            key="online-back",
        )
        st.button(
            f"Next tile ({tiles_merged} of {count})",
            icon=":material/skip_next:",
            disabled=tiles_merged >= count,
            type="primary",
            on_click=go_to,
            args=(tiles_merged + 1,),
            key="online-next",
        )


def _frame(result: OnlineLesson) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {
                "tile": at,
                "keys": f"{step.keys[0]}–{step.keys[-1]}",
                "m": round(step.m, 3),
                "times": round(step.rescale, 3),
                "adds": round(step.added, 3),
                "l": round(step.l, 3),
                "p": f"({step.p[0]:.3f}, {step.p[1]:.3f})",
                "output": f"({step.output[0]:.3f}, {step.output[1]:.3f})",
                "tile alone": f"({step.alone[0]:.3f}, {step.alone[1]:.3f})",
            }
            for at, step in enumerate(result.steps, 1)
        ]
    )

"""Figures of the search page: the curve that the slider runs along, and the front of one head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from headscope.engine.search.explain import Explanation
from headscope.studio.base.words import milliseconds, percent
from headscope.studio.charts.charts import layout
from headscope.studio.charts.theme import MARKS, Theme


def cost(value: float, unit: str) -> str:
    """A cost in words: milliseconds, or computed tiles."""
    return milliseconds(value) if unit == "ms" else f"{value:,.0f}\u00a0tiles"


def curve(rows: Sequence[dict[str, float]], now: tuple[float, float] | None, theme: Theme, unit: str) -> go.Figure:
    """Attention's cost in `unit` against the mean missed mass over heads, one point a limit; `now` is the choice."""
    figure = go.Figure()
    figure.add_scatter(
        x=[row["loss_mean"] for row in rows],
        y=[row[f"attention_{unit}"] for row in rows],
        mode="lines+markers",
        name="sparse, predicted" if unit == "ms" else "sparse",
        line={"color": theme.accent, "width": 2},
        marker={"size": 6},
        customdata=[[row["limit"], row["computed_density"]] for row in rows],
        hovertemplate=f"no head above %{{customdata[0]:.2%}}<br>%{{y:,.0f}} {unit}"
        ", mean missed %{x:.2%}"
        "<br>%{customdata[1]:.0%} of the causal pairs<extra></extra>",
    )
    if rows:
        dense = rows[0][f"dense_attention_{unit}"]
        figure.add_hline(y=dense, line={"color": theme.faint, "dash": "dash", "width": 1.5})
        figure.add_annotation(
            x=1,
            xref="paper",
            y=dense,
            text=f"dense {cost(dense, unit)}",
            showarrow=False,
            xanchor="right",
            yanchor="bottom",
            font={"color": theme.faint, "size": 11},
        )
    if now is not None:
        figure.add_scatter(
            x=[now[0]],
            y=[now[1]],
            mode="markers",
            name="this choice",
            hoverinfo="skip",
            marker={"symbol": "circle-open", "size": 18, "color": theme.missed, "line": {"width": 3}},
        )
    layout(figure, theme, f"{'Time' if unit == 'ms' else 'Tiles'} against loss, searched layers", 300)
    figure.update_xaxes(
        title="missed mass, mean over heads on their worst prompt", tickformat=".1%", rangemode="tozero"
    )
    what = "attention of one prefill (ms)" if unit == "ms" else "computed tiles of one prefill"
    figure.update_yaxes(title=what, rangemode="tozero", showgrid=True, gridcolor=theme.grid)
    figure.update_layout(legend={"y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"})
    return figure


def head_front(
    explanation: Explanation, every: Sequence[Any], limit: float | None, theme: Theme, unit: str
) -> go.Figure:
    """All candidates of one head by cost in `unit` and loss; the front is joined, the choice is circled.

    `every` holds (kind, label, cost, loss) of each candidate.
    """
    figure = go.Figure()
    front = explanation.front
    figure.add_scatter(
        x=[option.ms for option in front],
        y=[option.loss for option in front],
        mode="lines",
        name="front",
        line={"color": theme.faint, "width": 1.5},
        hoverinfo="skip",
    )
    for kind in MARKS:
        mine = [row for row in every if row[0] == kind]
        if not mine:
            continue
        figure.add_scatter(
            x=[row[2] for row in mine],
            y=[row[3] for row in mine],
            mode="markers",
            name=kind,
            marker={
                "symbol": MARKS[kind],
                "size": 10,
                "color": theme.patterns[kind],
                "line": {"width": 1.5, "color": theme.patterns[kind]},
            },
            customdata=[[row[1]] for row in mine],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>%{{x:.2f}} {unit}, misses %{{y:.2%}}<extra></extra>",
        )
    figure.add_scatter(
        x=[explanation.chosen.ms],
        y=[explanation.chosen.loss],
        mode="markers",
        name="chosen",
        hoverinfo="skip",
        marker={"symbol": "circle-open", "size": 19, "color": theme.missed, "line": {"width": 2.5}},
    )
    if limit is not None:
        figure.add_hline(y=limit, line={"color": theme.missed, "dash": "dot", "width": 1.2})
    layout(figure, theme, f"Layer {explanation.layer} · Head {explanation.head}: {len(every)} candidates", 340)
    what = "predicted time of this head (ms)" if unit == "ms" else "computed tiles of this head"
    figure.update_xaxes(title=what, rangemode="tozero")
    figure.update_yaxes(
        title="missed mass, worst prompt", tickformat=".0%", rangemode="tozero", showgrid=True, gridcolor=theme.grid
    )
    figure.update_layout(legend={"y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"})
    return figure


def describe_curve(rows: Sequence[dict[str, float]], unit: str) -> str:
    """The curve in words, for screen readers."""
    if not rows:
        return "No points."
    first, last = rows[0], rows[-1]
    return (
        f"{'Predicted attention time' if unit == 'ms' else 'Computed tiles'} from "
        f"{cost(first[f'attention_{unit}'], unit)} at a limit of {percent(first['limit'])} to "
        f"{cost(last[f'attention_{unit}'], unit)} at {percent(last['limit'])}."
    )

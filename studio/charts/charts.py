"""Figures as pure functions of data. No streamlit, no engine: arrays and names in, a plotly figure out.

Every figure has a title, axis names with units and hover text, and stays under 2 MB at any prompt length, since
maps arrive pooled. Text of the prompt reaches a figure only through `words.inert`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from headscope.studio.base.words import percent
from headscope.studio.charts.theme import MARKS, Theme

CONFIG = {
    "displaylogo": False,
    "modeBarButtons": [["toImage"]],
    "toImageButtonOptions": {"format": "png", "scale": 2},
    "responsive": True,
    "doubleClick": False,
    "scrollZoom": False,
}
"""Plotly's own settings, the same for every figure."""


def layout(
    figure: go.Figure, theme: Theme, title: str, height: int, *, legend: bool = True, **axes: object
) -> go.Figure:
    """The common look: quiet axes, the title at the left, nothing that moves between renders."""
    figure.update_layout(
        title={
            "text": title,
            "font": {"size": 14, "color": theme.ink},
            "x": 0,
            "xanchor": "left",
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 10},
        },
        height=height,
        margin={"l": 8, "r": 8, "t": 70 if legend else 38, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": '"Source Sans", sans-serif', "size": 12, "color": theme.faint},
        hoverlabel={"bgcolor": theme.panel, "bordercolor": theme.grid, "font": {"color": theme.ink, "size": 12}},
        dragmode=False,
        transition={"duration": 0},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.0,
            "x": 0,
            "font": {"color": theme.faint, "size": 11},
            "itemclick": False,
            "itemdoubleclick": False,
        },
        uirevision="keep",
        **axes,
    )
    plain = {
        "showgrid": False,
        "zeroline": False,
        "linecolor": theme.grid,
        "tickcolor": theme.grid,
        "ticks": "outside",
        "ticklen": 3,
        "automargin": True,
        "title_standoff": 6,
    }
    figure.update_xaxes(**plain)
    figure.update_yaxes(**plain)
    return figure


def centres(edges: Sequence[int]) -> np.ndarray:
    """The middle of each span."""
    limits = np.asarray(edges, dtype=np.float64)
    return (limits[:-1] + limits[1:]) / 2


def missed_along(
    missed: np.ndarray,
    row_edges: Sequence[int],
    theme: Theme,
    *,
    hover: Sequence[str] | None = None,
    before: np.ndarray | None = None,
    title: str = "Missed mass along the prompt",
) -> go.Figure:
    """Missed mass of each row, pooled to spans: mean as a filled line, the worst row of each span above it.

    `missed` [rows] in positions `row_edges[0] .. row_edges[-1] - 1`. `hover` names each span's place in the text.
    `before` draws another mean for comparison, dashed.
    """
    starts = np.asarray(row_edges[:-1]) - row_edges[0]
    spans = np.diff(np.asarray(row_edges))
    mean = np.add.reduceat(missed, starts) / spans
    worst = np.maximum.reduceat(missed, starts)
    x = centres(row_edges)
    text = [""] * len(x) if hover is None else list(hover)
    figure = go.Figure()
    figure.add_scatter(
        x=x,
        y=worst,
        mode="lines",
        name="worst row of the span",
        hoverinfo="skip",
        line={"color": theme.missed, "width": 1, "dash": "dot"},
        opacity=0.8,
    )
    figure.add_scatter(
        x=x,
        y=mean,
        mode="lines",
        name="mean of the span",
        fill="tozeroy",
        line={"color": theme.missed, "width": 2},
        fillcolor="rgba(232,133,58,0.18)",
        customdata=np.stack([worst, row_edges[:-1]], 1),
        text=text,
        hovertemplate="from token %{customdata[1]:.0f}<br>mean %{y:.2%}, worst %{customdata[0]:.2%}"
        "<br>%{text}<extra></extra>",
    )
    if before is not None:
        figure.add_scatter(
            x=x,
            y=np.add.reduceat(before, starts) / spans,
            mode="lines",
            name="before the edit",
            hoverinfo="skip",
            line={"color": theme.faint, "width": 1.5, "dash": "dash"},
        )
    top = float(max(worst.max(), 0.0 if before is None else before.max(), 0.01))
    layout(figure, theme, title, 250, hovermode="x")
    _missed_axes(figure, (row_edges[0], row_edges[-1]), top, theme)
    return figure


def _missed_axes(figure: go.Figure, rows: tuple[int, int], top: float, theme: Theme) -> None:
    figure.update_xaxes(title="query position (token)", range=list(rows))
    figure.update_yaxes(
        title="missed share",
        range=[0, min(1.02, top * 1.08)],
        tickformat=".0%" if top > 0.05 else ".1%",
        nticks=5,
        showgrid=True,
        gridcolor=theme.grid,
    )


AREA_NAMES = ("blocks", "columns outside blocks", "causal waste", "padding of the last block")


def areas(values: Sequence[int], theme: Theme) -> go.Figure:
    """What the computed pairs are made of: one bar in four parts, in pairs. Order as `AREA_NAMES`."""
    total = max(1, sum(values))
    colours = (theme.accent, theme.mass[3], theme.wash, theme.faint)
    figure = go.Figure()
    for name, value, colour in zip(AREA_NAMES, values, colours, strict=True):
        figure.add_bar(
            x=[value],
            y=[""],
            orientation="h",
            name=f"{name} {percent(value / total)}",
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"{name}: {value:,} pairs ({percent(value / total)})<extra></extra>",
        )
    layout(figure, theme, "What a kernel touches, in query-key pairs", 165, barmode="stack", bargap=0.1)
    figure.update_layout(legend_traceorder="normal")  # in the order of the bar
    figure.update_xaxes(title="pairs", tickformat="~s", range=[0, total])
    figure.update_yaxes(visible=False)
    return figure


def trade_off(
    points: Sequence[tuple[str, str, float, float, float]], current: str, by_time: bool, theme: Theme
) -> go.Figure:
    """Missed mass against cost for one head. A point: kind, label, computed density, time in ms, missed mean."""
    figure = go.Figure()
    kinds = [kind for kind in MARKS if any(point[0] == kind for point in points)]
    for kind in kinds:
        mine = sorted((point for point in points if point[0] == kind), key=lambda point: point[2])
        figure.add_scatter(
            x=[point[3] if by_time else point[2] for point in mine],
            y=[point[4] for point in mine],
            mode="lines+markers",
            name=kind,
            line={"color": theme.patterns[kind], "width": 1.5},
            marker={
                "symbol": MARKS[kind],
                "size": 9,
                "color": theme.patterns[kind],
                "line": {"width": 1.5, "color": theme.patterns[kind]},
            },
            customdata=[[point[1], point[2], point[3]] for point in mine],
            hovertemplate="<b>%{customdata[0]}</b><br>misses %{y:.2%}<br>computes %{customdata[1]:.1%} of the causal "
            "pairs<br>%{customdata[2]:.2f} ms for this head alone<extra></extra>",
        )
    for point in points:
        if point[1] == current:
            figure.add_scatter(
                x=[point[3] if by_time else point[2]],
                y=[point[4]],
                mode="markers",
                name="now",
                hoverinfo="skip",
                marker={"symbol": "circle-open", "size": 19, "color": theme.missed, "line": {"width": 2.5}},
            )
            break
    layout(figure, theme, "Missed mass against cost, this head", 360)
    if by_time:
        figure.update_xaxes(title="measured time of this head alone (ms)", rangemode="tozero")
    else:
        figure.update_xaxes(title="computed share of the causal pairs", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(
        title="missed mass, mean", tickformat=".0%", rangemode="tozero", showgrid=True, gridcolor=theme.grid
    )
    return figure


def by_layer(layers: Sequence[int], isolated: Sequence[float], in_situ: Sequence[float], theme: Theme) -> go.Figure:
    """Mean missed mass of each layer, measured alone and with the earlier layers sparse too."""
    figure = go.Figure()
    figure.add_bar(
        x=list(layers),
        y=list(isolated),
        name="isolated: on the dense model's Q/K/V",
        marker_color=theme.mass[3],
        hovertemplate="layer %{x}: %{y:.2%}<extra>isolated</extra>",
    )
    figure.add_bar(
        x=list(layers),
        y=list(in_situ),
        name="in situ: earlier layers sparse too",
        marker_color=theme.wash,
        hovertemplate="layer %{x}: %{y:.2%}<extra>in situ</extra>",
    )
    layout(figure, theme, "Missed mass by layer, alone and in place", 280, barmode="group", bargap=0.25)
    figure.update_xaxes(title="layer", dtick=max(1, len(layers) // 15))
    figure.update_yaxes(
        title="missed mass, mean of heads", tickformat=".1%", rangemode="tozero", showgrid=True, gridcolor=theme.grid
    )
    return figure


def loss_steps(steps: Sequence[float], names: Sequence[str], theme: Theme) -> go.Figure:
    """Missed mass in steps that add up to the whole, shown as they are: a step may be negative."""
    figure = go.Figure(
        go.Waterfall(
            x=[*names, "missed in all"],
            y=[*steps, sum(steps)],
            measure=["relative"] * len(steps) + ["total"],
            text=[percent(step) for step in (*steps, sum(steps))],
            textposition="outside",
            cliponaxis=False,
            increasing={"marker": {"color": theme.wash}},
            decreasing={"marker": {"color": theme.mass[3]}},
            totals={"marker": {"color": theme.missed}},
            connector={"line": {"color": theme.grid, "width": 1}},
            hovertemplate="%{x}: %{text}<extra></extra>",
        )
    )
    layout(figure, theme, "Where the loss comes from", 290, legend=False, showlegend=False)
    figure.update_xaxes(title="step, each at the same number of requested cells")
    figure.update_yaxes(title="missed mass, mean", tickformat=".0%", showgrid=True, gridcolor=theme.grid)
    return figure

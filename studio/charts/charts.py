"""Figures as pure functions of data. No streamlit, no engine: arrays and names in, a plotly figure out.

Every figure has a title, axis names with units and hover text, and stays under 2 MB at any prompt length, since
maps arrive pooled. Text of the prompt reaches a figure only through `words.inert`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import plotly.graph_objects as go

from headscope.studio.base.words import percent
from headscope.studio.charts.theme import MARKS, Theme

CLICKABLE_CELLS = 4096
"""Beyond this many heads the invisible markers for clicks make the browser slow, so they are left out."""

MASS_FLOOR = 1e-4
"""The logarithmic mass scale runs from here to 1 in every map of every head, so pictures compare."""

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


def overview(
    values: np.ndarray,
    labels: Sequence[Sequence[str]],
    kinds: Sequence[Sequence[str]],
    selected: tuple[int, int] | None,
    edited: Collection[tuple[int, int]],
    metric: str,
    theme: Theme,
    *,
    clicks: bool = True,
) -> go.Figure:
    """Layers x heads, one cell a head. `values` [layers, heads] are shares, NaN where not measured.

    The heat map itself has no hover, since plotly does not report clicks on it; invisible squares over the cells
    carry hover and clicks: trace "cells", point order row-major.
    """
    layers, heads = values.shape
    known = values[np.isfinite(values)]
    top = float(max(known.max() if known.size else 0.0, 0.01))
    figure = go.Figure(
        go.Heatmap(
            z=values.astype(np.float32),
            zmin=0.0,
            zmax=top,
            hoverinfo="skip",
            xgap=1.5,
            ygap=1.5,
            colorscale=theme.mass_scale,
            colorbar=_bar(theme, [0, top / 2, top]),
        )
    )
    x, y = np.tile(np.arange(heads), layers), np.repeat(np.arange(layers), heads)
    flat = values.ravel()
    if layers * heads <= CLICKABLE_CELLS:
        _pattern_marks(figure, kinds, x, y, np.nan_to_num(flat / top), theme)
    if edited:
        rows, cols = zip(*sorted(edited), strict=True)
        figure.add_scatter(
            x=np.asarray(cols) + 0.34,
            y=np.asarray(rows) - 0.3,
            mode="markers",
            name="edited",
            hoverinfo="skip",
            marker={"symbol": "circle", "size": 5, "color": theme.missed},
        )
    if selected is not None:
        layer, head = selected
        figure.add_shape(
            type="rect",
            x0=head - 0.5,
            x1=head + 0.5,
            y0=layer - 0.5,
            y1=layer + 0.5,
            line={"color": theme.missed, "width": 3},
            fillcolor="rgba(0,0,0,0)",
        )
    if clicks and layers * heads <= CLICKABLE_CELLS:
        text = [
            f"<b>Layer {layer} · Head {head}</b><br>{metric}: {percent(value)}<br>{labels[layer][head]}"
            for layer, head, value in zip(y, x, flat, strict=True)
        ]
        hidden = {"marker": {"opacity": 0}}
        figure.add_scatter(
            x=x,
            y=y,
            mode="markers",
            name="cells",
            showlegend=False,
            text=text,
            hoverinfo="text",
            marker={"symbol": "square", "size": max(6, min(26, 700 // max(layers, heads))), "opacity": 0},
            selected=hidden,
            unselected=hidden,
        )
    layout(figure, theme, f"{metric}, every head", min(860, max(320, 120 + 19 * layers)), clickmode="event+select")
    figure.update_xaxes(title="head (query head of the layer)", range=[-0.5, heads - 0.5], dtick=max(1, heads // 16))
    figure.update_yaxes(title="layer", range=[layers - 0.5, -0.5], dtick=max(1, layers // 15))
    return figure


def _pattern_marks(
    figure: go.Figure, kinds: Sequence[Sequence[str]], x: np.ndarray, y: np.ndarray, depth: np.ndarray, theme: Theme
) -> None:
    flat = np.asarray([kind for row in kinds for kind in row])
    for kind, symbol in MARKS.items():
        here = flat == kind
        if not here.any():
            continue
        light_ink, dark_ink = (theme.background, theme.ink) if theme.name == "light" else (theme.ink, theme.background)
        on_deep = light_ink if theme.name == "light" else dark_ink
        on_pale = dark_ink if theme.name == "light" else light_ink
        colours = [on_deep if value > 0.5 else on_pale for value in depth[here]]
        figure.add_scatter(
            x=x[here],
            y=y[here],
            mode="markers",
            name=kind,
            hoverinfo="skip",
            showlegend=False,
            marker={
                "symbol": symbol,
                "size": 6,
                "color": colours,
                "opacity": 0.6,
                "line": {"width": 1.2, "color": colours},
            },
        )
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=kind,
            marker={"symbol": symbol, "size": 8, "color": theme.faint, "line": {"width": 1.4, "color": theme.faint}},
        )


def _bar(theme: Theme, ticks: Sequence[float]) -> dict[str, object]:
    return {
        "thickness": 8,
        "len": 1.0,
        "y": 0.5,
        "outlinewidth": 0,
        "ticklen": 2,
        "tickvals": list(ticks),
        "x": 1.01,
        "ticktext": [percent(tick) for tick in ticks],
        "tickfont": {"size": 11, "color": theme.faint},
    }


def pooled_map(
    values: np.ndarray,
    row_edges: Sequence[int],
    column_edges: Sequence[int],
    title: str,
    theme: Theme,
    *,
    logarithmic: bool = True,
    top: float = 1.0,
    computed: np.ndarray | None = None,
    marked: Sequence[tuple[int, int]] = (),
    height: int = 330,
) -> go.Figure:
    """A head's attention over query rows x key columns, pooled; `values` are shares of a row's probability.

    `computed` (same shape, 0 to 1) washes what was not computed in orange. The scale is the same for every map:
    logarithmic from 0.01 % to 100 %, or linear up to `top`.
    """
    shares = np.where(np.isnan(values), np.nan, np.maximum(values, MASS_FLOOR if logarithmic else 0.0))
    z = np.log10(shares) if logarithmic else shares
    low, high = (float(np.log10(MASS_FLOOR)), 0.0) if logarithmic else (0.0, max(top, 1e-6))
    ticks = [-4, -2, 0] if logarithmic else [0, high / 2, high]
    names = ["≤ 0.01 %", "1 %", "100 %"] if logarithmic else [percent(tick) for tick in ticks]
    rows, columns = _centres(row_edges), _centres(column_edges)
    extra = "" if computed is None else "<br>computed: %{customdata[1]:.0%} of its pairs"
    layers = [values] if computed is None else [values, computed]
    figure = go.Figure(
        go.Heatmap(
            x=columns,
            y=rows,
            z=z.astype(np.float32),
            zmin=low,
            zmax=high,
            colorscale=theme.mass_scale,
            customdata=np.dstack([np.nan_to_num(layer) for layer in layers]).astype(np.float32),
            hoverongaps=False,
            hovertemplate="query ~%{y:.0f}, key ~%{x:.0f}<br>%{customdata[0]:.3%} of the row"
            + extra
            + "<extra></extra>",
            colorbar={
                "orientation": "h",
                "thickness": 6,
                "len": 1.0,
                "x": 0.5,
                "y": -0.24,
                "yanchor": "top",
                "tickvals": ticks,
                "ticktext": names,
                "outlinewidth": 0,
                "ticklen": 2,
                "tickangle": 0,
                "tickfont": {"size": 10, "color": theme.faint},
            },
        )
    )
    if computed is not None:
        away = np.where(np.isnan(computed), np.nan, 1.0 - computed)
        figure.add_heatmap(
            x=columns,
            y=rows,
            z=away.astype(np.float32),
            zmin=0,
            zmax=1,
            showscale=False,
            hoverinfo="skip",
            colorscale=[[0, "rgba(232,133,58,0)"], [0.5, "rgba(232,133,58,0.28)"], [1, "rgba(232,133,58,0.5)"]],
        )
    if marked:
        queries, keys = zip(*marked, strict=True)
        figure.add_scatter(
            x=list(keys),
            y=list(queries),
            mode="markers",
            hoverinfo="skip",
            showlegend=False,
            marker={"symbol": "circle-open", "size": 9, "color": theme.missed, "line": {"width": 1.6}},
        )
    layout(figure, theme, title, height, legend=False)
    # Fixed margins: the three maps of a head must stand alike, whatever their labels.
    figure.update_layout(margin={"l": 58, "r": 14, "t": 38, "b": 84})
    figure.update_xaxes(
        title="key position (token)", range=[column_edges[0], column_edges[-1]], nticks=5, automargin=False
    )
    figure.update_yaxes(title="query position (token)", range=[row_edges[-1], row_edges[0]], nticks=6, automargin=False)
    return figure


def _centres(edges: Sequence[int]) -> np.ndarray:
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
    x = _centres(row_edges)
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
    layout(figure, theme, title, 250, hovermode="x")
    top = float(max(worst.max(), 0.0 if before is None else before.max(), 0.01))
    figure.update_xaxes(title="query position (token)", range=[row_edges[0], row_edges[-1]])
    figure.update_yaxes(
        title="missed share",
        range=[0, min(1.02, top * 1.08)],
        tickformat=".0%" if top > 0.05 else ".1%",
        nticks=5,
        showgrid=True,
        gridcolor=theme.grid,
    )
    return figure


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
                name="today",
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


def figure_bytes(figure: go.Figure) -> int:
    """The size of what a browser receives for a figure."""
    return len(figure.to_json())


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

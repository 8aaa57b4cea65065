"""The overview: layers x heads, one cell a head."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import plotly.graph_objects as go

from headscope.studio.base.words import percent
from headscope.studio.charts.charts import layout
from headscope.studio.charts.theme import MARKS, Theme

CLICKABLE_CELLS = 4096
"""Beyond this many heads the invisible markers for clicks make the browser slow, so they are left out."""


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
    few = layers * heads <= CLICKABLE_CELLS
    if few:
        _pattern_marks(figure, kinds, values / top, theme)
    if edited:
        _edited_marks(figure, edited, theme)
    if selected is not None:
        _frame(figure, selected, theme)
    if clicks and few:
        _cells(figure, values, labels, metric)
    layout(figure, theme, f"{metric}, every head", min(860, max(320, 120 + 19 * layers)), clickmode="event+select")
    figure.update_xaxes(title="head (query head of the layer)", range=[-0.5, heads - 0.5], dtick=max(1, heads // 16))
    figure.update_yaxes(title="layer", range=[layers - 0.5, -0.5], dtick=max(1, layers // 15))
    return figure


def _places(layers: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y of every cell, row-major."""
    return np.tile(np.arange(heads), layers), np.repeat(np.arange(layers), heads)


def _edited_marks(figure: go.Figure, edited: Collection[tuple[int, int]], theme: Theme) -> None:
    rows, cols = zip(*sorted(edited), strict=True)
    figure.add_scatter(
        x=np.asarray(cols) + 0.34,
        y=np.asarray(rows) - 0.3,
        mode="markers",
        name="edited",
        hoverinfo="skip",
        marker={"symbol": "circle", "size": 5, "color": theme.missed},
    )


def _frame(figure: go.Figure, selected: tuple[int, int], theme: Theme) -> None:
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


def _cells(figure: go.Figure, values: np.ndarray, labels: Sequence[Sequence[str]], metric: str) -> None:
    x, y = _places(*values.shape)
    text = [
        f"<b>Layer {layer} · Head {head}</b><br>{metric}: {percent(value)}<br>{labels[layer][head]}"
        for layer, head, value in zip(y, x, values.ravel(), strict=True)
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
        marker={"symbol": "square", "size": max(6, min(26, 700 // max(values.shape))), "opacity": 0},
        selected=hidden,
        unselected=hidden,
    )


def _pattern_marks(figure: go.Figure, kinds: Sequence[Sequence[str]], depth: np.ndarray, theme: Theme) -> None:
    """A mark a head, a legend entry a pattern. `depth` [layers, heads] is how far up the colour scale a cell is."""
    (x, y), shade = _places(*depth.shape), np.nan_to_num(depth.ravel())
    flat = np.asarray([kind for row in kinds for kind in row])
    for kind, symbol in MARKS.items():
        here = flat == kind
        if not here.any():
            continue
        light_ink, dark_ink = (theme.background, theme.ink) if theme.name == "light" else (theme.ink, theme.background)
        on_deep = light_ink if theme.name == "light" else dark_ink
        on_pale = dark_ink if theme.name == "light" else light_ink
        colours = [on_deep if value > 0.5 else on_pale for value in shade[here]]
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

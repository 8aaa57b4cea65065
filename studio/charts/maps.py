"""A head's attention as a pooled map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from headscope.studio.base.words import percent
from headscope.studio.charts.charts import centres, layout
from headscope.studio.charts.theme import Theme

MASS_FLOOR = 1e-4
"""The logarithmic mass scale runs from here to 1 in every map of every head, so pictures compare."""


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
    low, high = (float(np.log10(MASS_FLOOR)), 0.0) if logarithmic else (0.0, max(top, 1e-6))
    rows, columns = centres(row_edges), centres(column_edges)
    extra = "" if computed is None else "<br>computed: %{customdata[1]:.0%} of its pairs"
    layers = [values] if computed is None else [values, computed]
    figure = go.Figure(
        go.Heatmap(
            x=columns,
            y=rows,
            z=(np.log10(shares) if logarithmic else shares).astype(np.float32),
            zmin=low,
            zmax=high,
            colorscale=theme.mass_scale,
            customdata=np.dstack([np.nan_to_num(layer) for layer in layers]).astype(np.float32),
            hoverongaps=False,
            hovertemplate="query ~%{y:.0f}, key ~%{x:.0f}<br>%{customdata[0]:.3%} of the row"
            + extra
            + "<extra></extra>",
            colorbar=_scale_bar(theme, logarithmic, high),
        )
    )
    if computed is not None:
        _wash(figure, columns, rows, computed)
    if marked:
        _circles(figure, marked, theme)
    layout(figure, theme, title, height, legend=False)
    # Fixed margins: the three maps of a head must stand alike, whatever their labels.
    figure.update_layout(margin={"l": 58, "r": 14, "t": 38, "b": 84})
    figure.update_xaxes(
        title="key position (token)", range=[column_edges[0], column_edges[-1]], nticks=5, automargin=False
    )
    figure.update_yaxes(title="query position (token)", range=[row_edges[-1], row_edges[0]], nticks=6, automargin=False)
    return figure


def _scale_bar(theme: Theme, logarithmic: bool, high: float) -> dict[str, object]:
    ticks = [-4, -2, 0] if logarithmic else [0, high / 2, high]
    return {
        "orientation": "h",
        "thickness": 6,
        "len": 1.0,
        "x": 0.5,
        "y": -0.24,
        "yanchor": "top",
        "tickvals": ticks,
        "ticktext": ["≤ 0.01 %", "1 %", "100 %"] if logarithmic else [percent(tick) for tick in ticks],
        "outlinewidth": 0,
        "ticklen": 2,
        "tickangle": 0,
        "tickfont": {"size": 10, "color": theme.faint},
    }


def _wash(figure: go.Figure, columns: np.ndarray, rows: np.ndarray, computed: np.ndarray) -> None:
    """Orange over what was not computed."""
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


def _circles(figure: go.Figure, marked: Sequence[tuple[int, int]], theme: Theme) -> None:
    queries, keys = zip(*marked, strict=True)
    figure.add_scatter(
        x=list(keys),
        y=list(queries),
        mode="markers",
        hoverinfo="skip",
        showlegend=False,
        marker={"symbol": "circle-open", "size": 9, "color": theme.missed, "line": {"width": 1.6}},
    )

"""A head's probability by column or by distance, with what its pattern keeps."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import plotly.graph_objects as go

from headscope.studio.charts.charts import layout
from headscope.studio.charts.theme import Theme

SHARE_FLOOR = 1e-6
"""The logarithmic scale starts here; smaller shares are drawn at it."""


class ProfileData(Protocol):
    """Spans of positions: their limits, each one's share of all probability, and the part of it that is kept."""

    @property
    def edges(self) -> tuple[int, ...]: ...
    @property
    def share(self) -> np.ndarray: ...
    @property
    def kept(self) -> np.ndarray: ...
    @property
    def kept_share(self) -> np.ndarray: ...


def profile_chart(profile: ProfileData, title: str, axis: str, theme: Theme, *, logarithmic: bool) -> go.Figure:
    """Share of the head's probability in each span as a line of steps; spans with kept positions are marked on it."""
    starts = np.asarray(profile.edges[:-1])
    last = np.asarray(profile.edges[1:]) - 1
    drawn = np.maximum(profile.share, SHARE_FLOOR) if logarithmic else profile.share
    kept = profile.kept > 0
    facts = np.stack([profile.share, profile.kept, profile.kept_share, last], 1)
    figure = go.Figure()
    figure.add_scatter(
        x=starts,
        y=drawn,
        mode="lines",
        line={"color": theme.accent, "width": 1.3, "shape": "hv"},
        name="all",
        customdata=facts,
        hovertemplate="%{x:,} to %{customdata[3]:,}<br>%{customdata[0]:.3%} of the head's probability"
        "<br>kept: %{customdata[1]:.0%} of the positions, %{customdata[2]:.3%}<extra></extra>",
    )
    figure.add_scatter(
        x=starts[kept],
        y=drawn[kept],
        mode="markers",
        name="kept by the pattern",
        hoverinfo="skip",
        marker={"symbol": "circle", "size": 4, "color": theme.missed},
    )
    layout(figure, theme, title, 250, hovermode="x")
    figure.update_xaxes(title=axis, range=[0, profile.edges[-1]], nticks=7)
    span = profile.edges[1] - profile.edges[0]
    unit = "token" if span == 1 else f"{span} tokens"
    low = float(np.log10(SHARE_FLOOR))
    if logarithmic:
        scale: dict[str, object] = {
            "type": "log",
            "range": [low, 0.1],
            "tickvals": [1e-6, 1e-4, 1e-2, 1],
            "tickformat": ".4~%",
        }
    else:
        scale = {"rangemode": "tozero", "tickformat": ".2~%", "nticks": 5}
    figure.update_yaxes(title=f"share of all, each {unit}", showgrid=True, gridcolor=theme.grid, **scale)
    return figure

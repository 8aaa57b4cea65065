"""Pictures of small attention: cells, probabilities, bars. Arrays in, plotly figures out; no streamlit, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from headscope.studio.charts import charts
from headscope.studio.charts.theme import Theme

FUTURE, LEFT_OUT = 0, 1
"""The first two classes of every cell picture: keys that lie ahead, and causal cells that are not read."""

MARKED_UP_TO = 20
"""Signs inside the cells are drawn up to this many positions; beyond it they are too small to read."""


@dataclass(frozen=True)
class Kind:
    """A class of cells: its name, its colour, and a sign that tells it apart without colour."""

    name: str
    colour: str
    sign: str = ""


def kinds(theme: Theme, *named: Kind) -> tuple[Kind, ...]:
    """The two classes that every picture has, and the ones given."""
    return (Kind("future: never read", theme.background), Kind("not read", theme.grid), *named)


def cells(
    classes: np.ndarray,
    names: Sequence[Kind],
    theme: Theme,
    title: str,
    *,
    row: int | None = None,
    height: int = 460,
    hover: bool = True,
) -> go.Figure:
    """Query rows x key columns, one square a cell, coloured by class. `classes` int [n, n]; `row` gets a frame."""
    n = len(classes)
    figure = go.Figure()
    _add_cells(figure, classes, names, theme, hover, 13 if n <= 12 else 10)
    if row is not None:
        figure.add_shape(**_frame(row, row + 1, theme))
    _square(figure, n, theme, title, height)
    return figure


def _add_cells(
    figure: go.Figure, classes: np.ndarray, names: Sequence[Kind], theme: Theme, hover: bool, size: int, **place: int
) -> None:
    n, last = len(classes), len(names) - 1
    scale = [[edge / len(names), kind.colour] for at, kind in enumerate(names) for edge in (at, at + 1)]
    heat = go.Heatmap(
        z=classes.astype(np.int8),
        zmin=-0.5,
        zmax=last + 0.5,
        colorscale=scale,
        showscale=False,
        xgap=1,
        ygap=1,
        hoverinfo="text" if hover else "skip",
        text=[
            [
                f"row {i} reads key {j} (distance {i - j}): {names[classes[i, j]].name}"
                if j <= i
                else f"key {j} lies ahead of row {i}"
                for j in range(n)
            ]
            for i in range(n)
        ]
        if hover
        else None,
    )
    figure.add_trace(heat, **place)
    for code, kind in enumerate(names):
        at = np.argwhere(classes == code)
        if kind.sign and n <= MARKED_UP_TO and len(at):
            signs = go.Scatter(
                x=at[:, 1],
                y=at[:, 0],
                mode="text",
                text=[kind.sign] * len(at),
                hoverinfo="skip",
                showlegend=False,
                textfont={"size": size, "color": theme.background},
            )
            figure.add_trace(signs, **place)


def cell_row(
    pictures: Sequence[tuple[str, np.ndarray]], names: Sequence[Kind], theme: Theme, title: str, height: int = 300
) -> go.Figure:
    """Several cell pictures side by side, each with its own heading."""
    from plotly.subplots import make_subplots

    count = len(pictures)
    figure = make_subplots(rows=1, cols=count, subplot_titles=[name for name, _ in pictures], horizontal_spacing=0.05)
    for at, (_, classes) in enumerate(pictures, 1):
        _add_cells(figure, classes, names, theme, True, 9, row=1, col=at)
        n = len(classes)
        figure.update_xaxes(range=[-0.5, n - 0.5], constrain="domain", row=1, col=at)
        figure.update_yaxes(
            range=[n - 0.5, -0.5], scaleanchor="x" if at == 1 else f"x{at}", constrain="domain", row=1, col=at
        )
    charts.layout(figure, theme, title, height)
    figure.update_annotations(font={"size": 13, "color": theme.ink}, yshift=2)
    figure.update_layout(margin={"t": 64})
    figure.update_xaxes(showticklabels=False, ticks="", showline=False)
    figure.update_yaxes(showticklabels=False, ticks="", showline=False)
    return figure


def weights(
    values: np.ndarray,
    theme: Theme,
    title: str,
    *,
    row: int | None = None,
    height: int = 460,
    top: float | None = None,
    outlined: np.ndarray | None = None,
    unit: str = "of the row",
    axes: tuple[str, str] = ("key", "query row"),
    scale: bool = True,
) -> go.Figure:
    """Shares as colour over rows x columns, blank where not causal; `outlined` (bool) marks cells with a dot."""
    n = len(values)
    shown = np.where(np.tri(n, dtype=bool), values, np.nan)
    high = float(np.nanmax(shown)) if top is None else top
    figure = go.Figure(
        go.Heatmap(
            z=shown,
            zmin=0,
            zmax=max(high, 1e-6),
            colorscale=theme.mass_scale,
            xgap=1,
            ygap=1,
            hoverongaps=False,
            hovertemplate=f"{axes[1]} %{{y}}, {axes[0]} %{{x}}<br>%{{z:.1%}} {unit}<extra></extra>",
            showscale=scale,
            # In the blank half above the diagonal, where it costs the picture no room.
            colorbar={
                "orientation": "h",
                "thickness": 9,
                "len": 0.42,
                "x": 1,
                "xanchor": "right",
                "y": 0.98,
                "yanchor": "top",
                "outlinewidth": 0,
                "tickformat": ".0%",
                "nticks": 4,
                "tickfont": {"size": 12, "color": theme.faint},
            },
        )
    )
    if outlined is not None:
        at = np.argwhere(outlined)
        figure.add_scatter(
            x=at[:, 1],
            y=at[:, 0],
            mode="markers",
            hoverinfo="skip",
            showlegend=False,
            marker={"symbol": "circle-open", "size": 11 if n <= 20 else 7, "color": theme.missed, "line": {"width": 2}},
        )
    if row is not None:
        figure.add_shape(**_frame(row, row + 1, theme))
    _square(figure, n, theme, title, height)
    figure.update_xaxes(title=axes[0])
    figure.update_yaxes(title=axes[1])
    return figure


def bars(
    values: Sequence[float],
    theme: Theme,
    title: str,
    *,
    axes: tuple[str, str],
    names: Sequence[str] | None = None,
    on: Sequence[bool] | None = None,
    on_name: str = "read",
    off_name: str = "left out",
    off_colour: str | None = None,
    share: bool = True,
    height: int = 240,
    top: float | None = None,
) -> go.Figure:
    """One bar a key or row. With `on`, bars that are read are solid blue and the others striped orange."""
    x = list(names) if names is not None else list(range(len(values)))
    figure = go.Figure()
    groups = (
        [(None, theme.accent, "", [True] * len(values))]
        if on is None
        else [
            (on_name, theme.accent, "", list(on)),
            (off_name, off_colour or theme.missed, "/", [not one for one in on]),
        ]
    )
    for name, colour, stripes, mine in groups:
        figure.add_bar(
            x=x,
            y=[value if kept else None for value, kept in zip(values, mine, strict=True)],
            name=name,
            showlegend=name is not None,
            marker={"color": colour, "pattern": stripe(stripes, theme), "line": {"width": 0}},
            hovertemplate=f"{axes[0]} %{{x}}: %{{y:.1%}}<extra></extra>"
            if share
            else f"{axes[0]} %{{x}}: %{{y:.3g}}<extra></extra>",
        )
    charts.layout(figure, theme, title, height, barmode="overlay", bargap=0.2)
    plain(figure, theme, axes)
    figure.update_yaxes(
        tickformat=".0%" if share else None, rangemode="tozero", range=None if top is None else [0, top]
    )
    return figure


def plain(figure: go.Figure, theme: Theme, axes: tuple[str, str]) -> None:
    """Axis names and light horizontal lines."""
    figure.update_xaxes(title=axes[0])
    figure.update_yaxes(title=axes[1], showgrid=True, gridcolor=theme.grid, nticks=6)
    figure.update_layout(font={"size": 13})
    if any(trace.showlegend or (trace.showlegend is None and trace.name) for trace in figure.data):
        keys_below(figure, theme)


def keys_below(figure: go.Figure, theme: Theme, lines: int = 1) -> None:
    """The legend at the very bottom, with room kept for it under the axis name."""
    figure.update_layout(
        margin={"b": 62 + 20 * lines},
        legend={"yref": "container", "y": 0.0, "yanchor": "bottom", "font": {"size": 13, "color": theme.ink}},
    )


def stripe(shape: str, theme: Theme) -> dict[str, object]:
    """A bar's hatching in the background's colour over its own, or none for an empty shape."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": theme.background, "size": 6}


def _frame(row: int, width: int, theme: Theme) -> dict[str, object]:
    return {
        "type": "rect",
        "x0": -0.5,
        "x1": width - 0.5,
        "y0": row - 0.5,
        "y1": row + 0.5,
        "line": {"color": theme.ink, "width": 2},
        "fillcolor": "rgba(0,0,0,0)",
    }


def _square(figure: go.Figure, n: int, theme: Theme, title: str, height: int) -> None:
    charts.layout(figure, theme, title, height)
    step = 1 if n <= 16 else 4 if n <= 32 else 8
    figure.update_layout(font={"size": 13})
    figure.update_xaxes(
        title="key position",
        range=[-0.5, n - 0.5],
        tickvals=list(range(0, n, step)),
        constrain="domain",
        constraintoward="left",
        showline=False,
    )
    figure.update_yaxes(
        title="query position (row)",
        range=[n - 0.5, -0.5],
        dtick=step,
        scaleanchor="x",
        constrain="domain",
        constraintoward="top",
        showline=False,
    )


def lines(
    series: Sequence[tuple[str, Sequence[float] | np.ndarray, str, str]],
    theme: Theme,
    title: str,
    *,
    axes: tuple[str, str],
    x: Sequence[float] | None = None,
    share: bool = True,
    height: int = 270,
    marks: bool = False,
    top: float | None = None,
    log: bool = False,
) -> go.Figure:
    """Lines over rows (or `x`): name, values, colour, and plotly's dash, so that colour is not the only sign."""
    figure = go.Figure()
    for name, values, colour, dash in series:
        figure.add_scatter(
            x=list(range(len(values))) if x is None else list(x),
            y=list(values),
            name=name,
            line={"color": colour, "width": 2.5, "dash": dash},
            mode="lines+markers" if marks else "lines",
            marker={"size": 7},
            hovertemplate=f"{axes[0]} %{{x}}: %{{y:{'.1%' if share else '.3g'}}}<extra>{name}</extra>",
        )
    charts.layout(figure, theme, title, height, showlegend=len(series) > 1)
    plain(figure, theme, axes)
    if log and x is not None:
        figure.update_xaxes(type="log", tickvals=list(x))
    high = top if top is not None else 1.03 if share else None
    figure.update_yaxes(tickformat=".0%" if share else None, range=None if high is None else [0, high])
    return figure

"""Chapter 7 on the page: requested and computed cells, and why more cells can be faster."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.base.words import milliseconds, percent
from headscope.studio.charts import charts
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, measuring, parts
from headscope.studio.lessons.figures import Kind
from headscope.studio.lessons.maths.tiles import SPREADS, TIMED_N, WIDTHS, N, TileLesson, TimedWidth, lesson, measure


def names(theme: Theme) -> tuple[Kind, ...]:
    """Classes of the picture."""
    return figures.kinds(
        theme,
        Kind("distance asked for", theme.accent),
        Kind("column asked for", theme.patterns["a-shape"]),
        Kind("computed on top, because a tile holds it", theme.wash),
    )


def draw_cells(result: TileLesson, theme: Theme) -> go.Figure:
    """The head with its tiles; thin lines where a block of rows ends."""
    title = f"{result.requested:,} cells asked for, {result.computed:,} computed"
    figure = figures.cells(result.classes, names(theme), theme, title, height=500)
    rows = max(1, result.width // 2)
    if rows > 1:
        for edge in range(rows, N, rows):
            figure.add_shape(
                type="line",
                x0=-0.5,
                x1=edge - 0.5,
                y0=edge - 0.5,
                y1=edge - 0.5,
                line={"color": theme.faint, "width": 0.8, "dash": "dot"},
            )
    return figure


def draw_growth(series: dict[str, list[TileLesson]], theme: Theme) -> go.Figure:
    """Computed cells against tile width for both kinds of distances."""
    return figures.lines(
        [
            (f"distances {name}", [one.computed / one.causal for one in of], colour, dash)
            for (name, of), colour, dash in zip(
                series.items(), (theme.accent, theme.missed), ("solid", "dash"), strict=True
            )
        ],
        theme,
        "Computed share of the causal cells",
        axes=("tile width (keys)", "computed"),
        x=list(WIDTHS),
        marks=True,
        log=True,
    )


def draw_times(times: list[TimedWidth], theme: Theme) -> go.Figure:
    """Measured time of each width."""
    figure = go.Figure(
        go.Bar(
            x=[f"{one.width} wide" for one in times],
            y=[one.ms for one in times],
            marker={"color": theme.accent},
            text=[milliseconds(one.ms) for one in times],
            textposition="outside",
            textfont={"color": theme.ink},
            customdata=[[one.computed, one.windows] for one in times],
            hovertemplate="%{x}: %{y:.2f} ms<br>%{customdata[0]:,} cells<extra></extra>",
        )
    )
    charts.layout(figure, theme, f"One head, {TIMED_N:,} tokens, on this machine", 280)
    figures.plain(figure, theme, ("tile", "time (ms)"))
    figure.update_yaxes(range=[0, 1.2 * max(one.ms for one in times)])
    return figure


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "A lone diagonal is awkward for hardware: neighbouring rows need different keys. So a kernel loads whole "
            "**tiles** and computes all of them: a window of W keys for a block of W / 2 rows. What the pattern asked "
            "for is the **requested** set; with the rest of the tiles it becomes the **computed** set. Columns stay "
            "columns: they are gathered one by one."
        )
        parts.formula(
            r"\begin{gathered}\text{requested}\subseteq\text{computed}\subseteq\text{causal}\\[4pt] "
            r"\text{density}=\frac{\text{computed cells}}{n(n+1)/2}\end{gathered}",
            "section 4.1",
            "The rule is part of the index, so every machine computes the same cells.",
        )
        spread = parts.choice("The six distances lie", list(SPREADS), "tiles-spread")
        width = int(
            parts.choice(
                "Tile width W",
                [str(one) for one in WIDTHS],
                "tiles-width",
                start="8",
                help="1 is no expansion; kernels use 128 at full size",
            )
        )
    result = lesson(spread, width)
    with right:
        parts.legend(names(theme))
        parts.picture(
            draw_cells(result, theme),
            "tiles-cells",
            f"{result.requested} cells requested, {result.computed} computed with tiles of width {width}.",
            lambda: parts.grid_frame(cell=[[names(theme)[c].name for c in row] for row in result.classes.tolist()]),
        )
    block, column, waste, padding = result.areas
    parts.numbers(
        ("requested", f"{result.requested:,}", "The pattern's own cells"),
        ("computed", f"{result.computed:,}", "With the rest of the tiles"),
        ("density", percent(result.computed / result.causal), "Computed cells over causal cells"),
        ("windows per block of rows", str(result.windows), "How many pieces a block of rows loads"),
        ("captured mass", percent(result.captured), "Mean of all rows: the extra cells are not wasted, they are exact"),
        ("in tiles", f"{block:,}", "Causal cells in windows and blocks"),
        ("in columns outside", f"{column:,}", "Causal cells of columns that no window covers"),
        ("causal waste", f"{waste:,}", "Loaded, but ahead of their row: masked"),
        ("padding", f"{padding:,}", "Loaded beyond the end of the sequence"),
    )
    series = {name: [lesson(name, one) for one in WIDTHS] for name in SPREADS}
    first, second = st.columns(2, gap="large")
    with first:
        parts.picture(
            draw_growth(series, theme),
            "tiles-growth",
            "Computed share against tile width.",
            lambda: pl.DataFrame(
                {"width": WIDTHS} | {name: [one.computed for one in of] for name, of in series.items()}
            ),
        )
    with second:
        _times(theme)
    _question(series)


def _times(theme: Theme) -> None:
    st.markdown(
        "**Why more cells can be faster.** A processor multiplies a whole tile about as quickly as a sliver of it. "
        "What costs time is the number of pieces to fetch. Measure it:"
    )
    working = measuring.under_way("tiles")
    times: list[TimedWidth] | None = measuring.results("tiles").get(None)
    if not working:
        measuring.button("tiles", "Time four tile widths here", "Timing tiles", measure, icon=":material/timer:")
    if times is None:
        st.caption(
            f"One head of {TIMED_N:,} tokens, takes a few seconds. Nothing is measured until you press. "
            f"{measuring.IN_LINE}"
        )
        return
    parts.picture(
        draw_times(times, theme),
        "tiles-times",
        "; ".join(f"width {one.width}: {one.ms:.2f} ms for {one.computed} cells" for one in times),
        lambda: pl.DataFrame([vars(one) for one in times]),
    )
    slow, fast = max(times, key=lambda one: one.ms), min(times, key=lambda one: one.ms)
    st.markdown(
        f"Width {fast.width} computes {fast.computed / slow.computed:.1f} times the cells of width {slow.width} and "
        f"takes {milliseconds(fast.ms)} instead of {milliseconds(slow.ms)}."
        if fast.computed > slow.computed
        else f"Here width {fast.width} is fastest, with {fast.computed:,} cells."
    )


def _question(series: dict[str, list[TileLesson]]) -> None:
    at = WIDTHS.index(8)
    near, far = series["side by side"][at], series["far apart"][at]
    parts.check(
        "tiles",
        "Six distances side by side, or six distances far apart, both with tiles of 8. Which computes more, "
        "and how much?",
        f"The ones far apart: {far.computed:,} cells against {near.computed:,}.",
        f"Asked for were {far.requested:,} and {near.requested:,}. A lone distance pays for its own windows; "
        "neighbours share theirs. This is why a budget of distances does not bound the cost, and a budget of windows "
        "does.",
    )

"""Chapter 6 on the page: eq. 12 with eight rows, then a longer prompt whose topic moves."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.engine import Estimator
from headscope.studio.base.words import percent
from headscope.studio.charts import charts
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.figures import Kind
from headscope.studio.lessons.maths import estimator as maths
from headscope.studio.lessons.maths.estimator import EARLY_KEY, EARLY_ROW, EARLY_SCORE, EstimatorLesson
from headscope.studio.lessons.maths.toy import Head


def names(theme: Theme) -> tuple[Kind, ...]:
    """Classes of the picture."""
    return figures.kinds(
        theme,
        Kind("read", theme.mass[2] if theme.name == "light" else theme.mass[3]),
        Kind(f"read, holds {maths.STRONG:.0%} of its row or more", theme.accent, "●"),
        Kind(f"lost, though it holds {maths.STRONG:.0%} or more", theme.missed, "×"),
    )


def draw_cells(result: EstimatorLesson, theme: Theme) -> go.Figure:
    """What is read and what is lost; triangles point at the sampled rows."""
    title = f"{result.lost} strong cell{'' if result.lost == 1 else 's'} lost · triangles: sampled rows"
    figure = figures.cells(result.classes, names(theme), theme, title, height=500)
    figure.add_scatter(
        x=[result.n + 0.1] * len(result.sampled),
        y=list(result.sampled),
        mode="markers",
        showlegend=False,
        hovertemplate="row %{y} is sampled<extra></extra>",
        marker={"symbol": "triangle-left", "size": 12 if result.n <= 16 else 8, "color": theme.ink},
    )
    figure.update_xaxes(range=[-0.5, result.n + (0.7 if result.n <= 16 else 1.5)])
    return figure


def draw_captured(result: EstimatorLesson, theme: Theme) -> go.Figure:
    """Captured mass of every row; rows that were not sampled are striped."""
    sampled = [row in result.sampled for row in range(result.n)]
    figure = figures.bars(
        result.captured.tolist(),
        theme,
        "Captured mass of every row",
        axes=("query row", "captured"),
        on=sampled,
        on_name="sampled row",
        off_name="row that nobody looked at",
        off_colour=theme.mass[3],
        top=1.03,
        height=260,
    )
    return figure


def draw_scores(result: EstimatorLesson, theme: Theme) -> go.Figure:
    """What columns and distances scored, the chosen ones solid."""
    figure = go.Figure()
    for name, scores, kept, colour, symbol in (
        ("column", result.column_scores, result.columns, theme.patterns["a-shape"], "square"),
        ("distance", result.distance_scores, result.distances, theme.accent, "circle"),
    ):
        figure.add_scatter(
            x=list(range(result.n)),
            y=scores,
            mode="markers+lines",
            name=f"{name}s (filled: chosen)",
            line={"color": colour, "width": 1, "dash": "solid" if name == "column" else "dot"},
            marker={
                "size": [11 if at in kept else 6 for at in range(result.n)],
                "line": {"width": 1.5, "color": colour},
                "symbol": [symbol if at in kept else f"{symbol}-open" for at in range(result.n)],
                "color": colour,
            },
            hovertemplate=f"{name} %{{x}}: %{{y:.3f}}<extra></extra>",
        )
    charts.layout(figure, theme, "What the sampled rows say", 270)
    figures.plain(figure, theme, ("column or distance", "statistic"))
    return figure


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "To know the best columns one would need all of attention, which is what we wanted to avoid. So the index "
            "looks at **a few rows only**, usually the last ones, adds up what they read, and trusts that the rest "
            "does the same. What only other rows read, it cannot see."
        )
        parts.formula(
            r"\begin{gathered}P=\begin{bmatrix}2.0&0.5&0.2&0.1\\1.8&0.4&0.3&0.2\end{bmatrix}\\[4pt] "
            r"c_j=\sum_{i\in Q_s}\tilde A_{ij},\quad r_\delta=\sum_{i\in Q_s}\tilde A_{i,i-\delta}\end{gathered}",
            "eq. 12 and section 6.2",
            "P: scores of the last two rows at four keys. c and r: sums per column and distance.",
        )
        words = "Eq. 12, or 48 rows whose first and second half read different keys"
        short = parts.choice("Prompt", ["eight rows", "two chapters"], "est-prompt", help=words) == "eight rows"
        one = maths.article_head() if short else maths.long_head()
        vertical, slash, settings = _controls(short)
    result = maths.lesson(one, vertical, slash, settings)
    with right:
        parts.legend(names(theme))
        parts.picture(
            draw_cells(result, theme),
            "est-cells",
            f"Columns {result.columns} and distances {result.distances} are kept; {result.lost} strong cells are lost.",
            lambda: parts.grid_frame(weight=result.weights.tolist(), cell=result.classes.tolist()),
        )
    _numbers(result)
    if short:
        _article(one, result)
    first, second = st.columns(2, gap="large")
    with first:
        parts.picture(
            draw_captured(result, theme),
            "est-captured",
            f"Captured mass, mean {percent(result.mean)}.",
            lambda: pl.DataFrame({"row": list(range(result.n)), "captured": result.captured}),
        )
    with second:
        parts.picture(
            draw_scores(result, theme),
            "est-scores",
            "Statistics of columns and distances from the sampled rows.",
            lambda: pl.DataFrame(
                {"at": list(range(result.n)), "column": result.column_scores, "distance": result.distance_scores}
            ),
        )
    if not short:
        _compare(one, vertical, slash, settings, theme)
    _question()


def _controls(short: bool) -> tuple[int, int, Estimator]:
    prefix = "est8" if short else "est48"
    rows = parts.slider("Sampled rows", 1, 8 if short else 48, 2 if short else 8, f"{prefix}-rows")
    with st.container(horizontal=True):
        where = parts.choice(
            "Which rows",
            ["tail", "spread", "half"],
            f"{prefix}-where",
            help="The last ones, evenly spread ones, or half of each",
        )
        columns = parts.choice(
            "Columns by",
            ["sum", "max"],
            f"{prefix}-columns",
            help="A sum likes what many rows read; a maximum keeps one strong cell",
        )
        slashes = parts.choice(
            "Distances by",
            ["sum", "mean", "shrunk"],
            f"{prefix}-slashes",
            help="A mean is fooled by long distances, which few sampled rows can have",
        )
        overlap = parts.choice(
            "Columns already kept",
            ["keep", "removed"],
            f"{prefix}-overlap",
            help="Whether they still count when distances are added up",
        )
        statistic = parts.choice(
            "Of",
            ["probability", "logit"],
            f"{prefix}-statistic",
            help="Softmax weights, or scores above the row's mean",
        )
    vertical = parts.slider("Columns kept", 0, 6, 1 if short else 3, f"{prefix}-vertical")
    slash = parts.slider("Distances kept (0 is always one)", 1, 6, 1 if short else 3, f"{prefix}-slash")
    return vertical, slash, Estimator(rows, where, statistic, columns, slashes, overlap)


def _numbers(result: EstimatorLesson) -> None:
    start, middle, end = result.thirds
    parts.numbers(
        ("captured, mean", percent(result.mean), "Dense probability on the cells that are read, mean of all rows"),
        ("start", percent(start), "First third of the rows"),
        ("middle", percent(middle), ""),
        ("end", percent(end), "Last third of the rows"),
        ("worst row", f"{int(result.captured.argmin())}: {percent(float(result.captured.min()))}", ""),
        ("columns", _set(result.columns), "Chosen by the index"),
        ("distances", _set(result.distances), "Chosen by the index"),
        ("scores looked at", f"{result.cost:,}", "Causal cells of the sampled rows: the price of the estimate"),
    )


def _article(one: Head, result: EstimatorLesson) -> None:
    scores = maths.proxy_scores(one, [6, 7], 4)
    highest = ", ".join(f"{value:.1f}" for value in scores.max(0))
    sampled_early = EARLY_ROW in result.sampled
    kept = result.classes[EARLY_ROW, EARLY_KEY] == 3
    verdict = (
        f"it is **kept**, and row {EARLY_ROW} captures {percent(float(result.captured[EARLY_ROW]))}."
        if kept
        else f"it is **lost**, and row {EARLY_ROW} captures only {percent(float(result.captured[EARLY_ROW]))}."
    )
    st.markdown(
        f"Rows 6 and 7 have the scores of eq. 12; their column maxima are ({highest}), so key "
        f"{int(scores.max(0).argmax())} comes first. Row {EARLY_ROW} has score {EARLY_SCORE:g} at key {EARLY_KEY}, "
        f"{EARLY_ROW - EARLY_KEY} back. It is {'among' if sampled_early else 'not among'} the sampled rows; {verdict}"
    )
    st.caption(
        f"The article calls the early row q3. Here it stands at {EARLY_ROW}: at 3 the cell would lie on distance 0, "
        "which is always kept, and nothing would be lost. The engine adds up probabilities, not raw scores; the order "
        "is the same."
    )


def _compare(one: Head, vertical: int, slash: int, settings: Estimator, theme: Theme) -> None:
    st.markdown("#### The same budget, looked for in other places")
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            f"All with {settings.rows} sampled rows, {vertical} columns and {slash} distances. The last rows know "
            "nothing of the first chapter; spread rows see both, and each a little less clearly."
        )
        st.dataframe(
            pl.DataFrame(
                [
                    {
                        "rows, columns by": name,
                        "mean": percent(v.mean),
                        "start": percent(v.thirds[0]),
                        "middle": percent(v.thirds[1]),
                        "end": percent(v.thirds[2]),
                        "columns": _set(v.columns),
                    }
                    for name, v in maths.variants(one, vertical, slash, settings)
                ]
            ),
            hide_index=True,
            width="stretch",
        )
    with right:
        counts = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]
        tail, spread = (
            [v.mean for v in maths.by_rows(one, vertical, slash, _at(settings, where), counts)]
            for where in ("tail", "spread")
        )
        parts.picture(
            figures.lines(
                [("last rows", tail, theme.accent, "solid"), ("spread rows", spread, theme.missed, "dash")],
                theme,
                "Captured mass as more rows are sampled",
                axes=("sampled rows", "captured, mean"),
                x=counts,
                marks=True,
            ),
            "est-rows",
            "Captured mass against the number of sampled rows.",
            lambda: pl.DataFrame({"rows": counts, "tail": tail, "spread": spread}),
        )
    _compare_distances(one, vertical, slash, settings)


def _compare_distances(one: Head, vertical: int, slash: int, settings: Estimator) -> None:
    variants = maths.distance_variants(one, vertical, slash, settings)
    far = {d for _, v in variants for d in v.distances if sum(d <= row for row in v.sampled) == 1}
    fluke = (
        f" Here it lets distance {min(far)} in, which a single sampled row can have at all, and which is one column "
        "seen from one row."
        if far
        else ""
    )
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "**Distances** are added up along the diagonals. A sum favours short ones, which more pairs can have; a "
            f"mean is fooled by long ones, which few can have.{fluke} “Shrunk” is a mean that distrusts few pairs. A "
            "strong column also shows up in the distances, once for every sampled row: taking it out first "
            "frees the budget."
        )
    with right:
        st.dataframe(
            pl.DataFrame(
                [
                    {
                        "distances by, columns kept": name,
                        "distances": _set(v.distances),
                        "mean": percent(v.mean),
                        "start": percent(v.thirds[0]),
                        "middle": percent(v.thirds[1]),
                        "end": percent(v.thirds[2]),
                    }
                    for name, v in variants
                ]
            ),
            hide_index=True,
            width="content",
        )


def _at(settings: Estimator, where: str) -> Estimator:
    return Estimator(settings.rows, where, settings.statistic, settings.columns, settings.slashes, settings.overlap)


def _question() -> None:
    one = maths.article_head()
    caught = next(
        rows for rows in range(1, maths.N + 1) if maths.lesson(one, 1, 1, Estimator(rows)).columns == (EARLY_KEY,)
    )
    after = maths.lesson(one, 1, 1, Estimator(caught))
    parts.check(
        "estimator",
        f"Eight rows, one column, sampled from the end: how many rows does it take until key {EARLY_KEY} "
        "is chosen? And who pays for it?",
        f"{caught} rows.",
        f"Row {EARLY_ROW} is sampled from {maths.N - EARLY_ROW} rows on. But the budget is one column, so key 0 is now "
        f"dropped, and the last row captures {percent(float(after.captured[-1]))} instead of "
        f"{percent(float(maths.lesson(one, 1, 1, Estimator(2)).captured[-1]))}. More sampling cannot replace budget.",
        value=caught,
        unit="rows",
    )


def _set(values: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, np.sort(values))) + "}"

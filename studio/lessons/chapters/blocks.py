"""Chapter 4 on the page: block-sparse, eq. 6, and why pooling before the softmax is not pooling after it."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.base.words import percent
from headscope.studio.charts.theme import Theme
from headscope.studio.lessons import figures, parts
from headscope.studio.lessons.figures import Kind
from headscope.studio.lessons.maths.blocks import NEEDLE, BlockLesson, Drawing, N, drawing, lesson


def names(theme: Theme) -> tuple[Kind, ...]:
    """Classes of the drawing."""
    return figures.kinds(
        theme,
        Kind("block, whole", theme.accent, "■"),
        Kind("diagonal block, causal half", theme.patterns["a-shape"], "◣"),
        Kind("loaded with the block, masked", theme.wash, "×"),
    )


def draw_drawing(drawing: Drawing, theme: Theme) -> go.Figure:
    """The eight positions."""
    title = f"{drawing.cells} of {drawing.causal} cells are read, {drawing.masked} masked"
    return figures.cells(drawing.classes, names(theme), theme, title, height=400)


def draw_blocks(values: np.ndarray, marked: np.ndarray, title: str, top: float, theme: Theme, scale: bool) -> go.Figure:
    """Shares per block, the chosen ones ringed."""
    return figures.weights(
        values,
        theme,
        title,
        outlined=marked,
        top=top,
        height=330,
        unit="of the query block",
        scale=scale,
        axes=("key block v", "query block u"),
    )


def draw_captured(result: BlockLesson, theme: Theme) -> go.Figure:
    """Captured mass of every row, for both choices."""
    return figures.lines(
        [
            ("blocks by pooled score (what runs)", result.captured, theme.accent, "solid"),
            ("blocks by true mass (cannot be known in time)", result.captured_best, theme.missed, "dot"),
        ],
        theme,
        "Captured mass of every row",
        axes=("query row", "captured"),
    )


def show(theme: Theme) -> None:
    """The chapter."""
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            "Some heads jump between topics: paragraph three reads paragraph one. That is neither a column nor a slash "
            "but a **square** of rows and keys. Cut both axes into blocks of b tokens, give every pair of blocks one "
            "score, and let each query block keep its best k key blocks. The block on the diagonal is always in, and "
            "only its causal half counts."
        )
        parts.formula(
            r"\begin{aligned}J_u&=\operatorname{TopK}_{v\le u}(r_{uv},\,k_b)\\ "
            r"r_{uv}&=\tfrac{1}{\sqrt{d_h}}\,\bar q_u^{\top}\bar k_v\end{aligned}",
            "eq. 6",
            "The score r compares the mean query of block u with the mean key of block v.",
        )
    drawn = drawing()
    with left:
        parts.numbers(
            ("cells read", str(drawn.cells), "As many as the article's drawing of eight positions keeps"),
            ("of", str(drawn.causal), "All causal cells"),
            ("masked", str(drawn.masked), "Loaded with their block, but ahead of their row"),
        )
    with right:
        parts.legend(names(theme))
        parts.picture(
            draw_drawing(drawn, theme),
            "blocks-drawing",
            f"Six blocks of eight positions: {drawn.cells} cells.",
            lambda: parts.grid_frame(cell=[[names(theme)[c].name for c in row] for row in drawn.classes.tolist()]),
        )
    st.markdown("#### Which blocks? A score for 1/b² of the price, and what it overlooks")
    _online(theme)
    one_block = drawing(((0, 0), (1, 1)), 4)
    parts.check(
        "blocks",
        "Eight positions, blocks of 4, and every query block keeps only its own. How many cells are read?",
        f"{one_block.cells} cells.",
        f"Two diagonal blocks, each with 4 · 5 / 2 cells. The six small blocks above come to {drawn.cells} as well: "
        "the same count says nothing about which keys are reached.",
        value=one_block.cells,
        unit="cells",
    )


def _online(theme: Theme) -> None:
    left, right = st.columns([2, 3], gap="large")
    with left:
        st.markdown(
            f"This head has {N} rows with topics in blocks. Its last rows also need **one single key**, number "
            f"{NEEDLE}, whose neighbours they dislike. Averaging the block first drowns that key in its "
            "neighbours; the softmax would have let it win. Pooling and multiplying can change places, "
            "softmax and pooling cannot."
        )
        block = int(parts.choice("Block size b", ["4", "8", "16"], "blocks-size", start="8"))
        k = parts.slider("Key blocks kept per query block, k", 1, 6, 2, "blocks-k")
        needle = parts.amount("Strength of the lone key", 0.0, 10.0, 7.0, 0.5, "blocks-needle")
    result = lesson(block, k, needle)
    last, last_best = float(result.captured[-8:].mean()), float(result.captured_best[-8:].mean())
    with left:
        parts.numbers(
            ("last 8 rows, by score", percent(last), "Captured mass under the blocks that the index chose"),
            ("by true mass", percent(last_best), "The same number of blocks, chosen with the attention already known"),
            ("cells", percent(result.cells / result.causal), "Of the causal cells"),
        )
        st.markdown(
            f"The score overlooks **{result.overlooked}** of the heaviest blocks here."
            if result.overlooked
            else "Here the score picks the heaviest blocks: make the lone key stronger, or keep fewer blocks."
        )
    top = float(max(result.before.max(), result.after.max()))
    with right:
        first, second = st.columns(2, gap="small")
        with first:
            parts.picture(
                draw_blocks(result.before, result.chosen, "Pooled, then softmax", top, theme, False),
                "blocks-before",
                "Softmax of pooled scores; rings are the chosen blocks.",
                lambda: parts.grid_frame(softmax_of_pooled=result.before.tolist(), chosen=result.chosen.tolist()),
            )
        with second:
            parts.picture(
                draw_blocks(result.after, result.best, "Softmax, then pooled: the truth", top, theme, True),
                "blocks-after",
                "Exact attention mass per block; rings are the heaviest blocks.",
                lambda: parts.grid_frame(exact_mass=result.after.tolist(), heaviest=result.best.tolist()),
            )
        parts.picture(
            draw_captured(result, theme),
            "blocks-captured",
            "Captured mass of every row under both choices.",
            lambda: pl.DataFrame({"row": list(range(N)), "by_score": result.captured, "by_mass": result.captured_best}),
        )

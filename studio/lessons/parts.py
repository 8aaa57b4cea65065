"""What every chapter is put together from: formula with source, sliders that stay in the URL, legend, questions."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from headscope.studio.charts import charts
from headscope.studio.lessons.figures import Kind
from headscope.studio.ui import widgets

PAPER = "[MInference 1.0, arXiv 2407.02490](https://arxiv.org/abs/2407.02490)"


def formula(latex: str, equation: str, words: str = "") -> None:
    """A formula, what its letters mean, and where it comes from."""
    st.latex(latex)
    source = f"Article on {PAPER}, {equation}." if equation else f"After {PAPER}."
    st.caption(f"{words} {source}".strip())


def slider(label: str, least: int, most: int, value: int, key: str, *, step: int = 1, help: str | None = None) -> int:
    """A whole-number slider whose value is part of the page's address."""
    return int(
        st.slider(label, least, most, value, step, key=key, help=help, bind="query-params", persist_state="session")
    )


def amount(
    label: str, least: float, most: float, value: float, step: float, key: str, help: str | None = None
) -> float:
    """The same for a quantity that need not be whole."""
    return float(
        st.slider(label, least, most, value, step, key=key, help=help, bind="query-params", persist_state="session")
    )


def choice(label: str, options: Sequence[str], key: str, help: str | None = None, start: str | None = None) -> str:
    """One of a few words; the first is the default unless `start` names another."""
    return str(
        st.segmented_control(
            label,
            list(options),
            default=start or options[0],
            required=True,
            key=key,
            help=help,
            bind="query-params",
            persist_state="session",
            wrap=True,
        )
    )


def switch(label: str, key: str, help: str | None = None) -> bool:
    """Off by default."""
    return bool(st.toggle(label, key=key, help=help, bind="query-params", persist_state="session"))


def numbers(*entries: tuple[str, str, str]) -> None:
    """Figures side by side: label, value, and a word on what it means."""
    with st.container(horizontal=True, gap="medium"):
        for label, value, words in entries:
            st.metric(label, value, help=words or None, width="content")


def legend(kinds: Sequence[Kind]) -> None:
    """What the colours and signs of a picture mean; outside of the picture, so that it wraps on a phone.

    The first kind is the future, whose colour is the background: signs take it, as in the picture.
    """
    ground = kinds[0].colour
    chips = "".join(
        '<span style="display:inline-flex;align-items:center;vertical-align:top;margin:0 1rem .2rem 0;'
        'white-space:nowrap">'
        f'<span style="width:1.15em;height:1.15em;border-radius:3px;background:{kind.colour};margin-right:.4em;'
        "display:inline-flex;align-items:center;justify-content:center;font-size:.85em;font-weight:600;"
        f'border:1px solid rgba(128,140,150,.45);color:{ground}">{html.escape(kind.sign)}</span>'
        f"{html.escape(kind.name)}</span>"
        for kind in kinds[1:]
    )
    st.html(f'<div style="font-size:.9rem;line-height:1.5">{chips}</div>')


def picture(
    figure: go.Figure, key: str, alt: str, data: Callable[[], pl.DataFrame], on_select: Callable[[], None] | None = None
) -> None:
    """A figure with a description for screen readers and its numbers as a download. After a click on a point
    `on_select` runs and may ask `clicked`."""
    clicks: dict[str, Any] = {} if on_select is None else {"on_select": on_select, "selection_mode": "points"}
    st.plotly_chart(figure, theme=None, key=f"learn-{key}", config=charts.CONFIG, alt=alt, **clicks)
    widgets.download(f"learn-{key}", data)


def clicked(key: str) -> tuple[float, float] | None:
    """The (x, y) of the point of a picture that was clicked last; a second click on it is reported as none."""
    points = st.session_state[f"learn-{key}"]["selection"]["points"]
    last = f"learn-{key}-clicked"
    if points:
        st.session_state[last] = float(points[-1]["x"]), float(points[-1]["y"])
    return st.session_state.get(last)


def grid_frame(**layers: Sequence[Sequence[object]]) -> pl.DataFrame:
    """Matrices of one shape as a table: query, key, and a column a matrix."""
    shape = next(iter(layers.values()))
    table: dict[str, list[object]] = {
        "query": [i for i, row in enumerate(shape) for _ in row],
        "key": [j for row in shape for j, _ in enumerate(row)],
    }
    return pl.DataFrame(table | {name: [value for row in rows for value in row] for name, rows in layers.items()})


def check(key: str, question: str, answer: str, why: str, value: float | None = None, unit: str = "") -> None:
    """A question to think about first. With `value`, a box takes a guess and says whether it is right."""
    with st.container(border=True):
        st.markdown(f"**Check yourself.** {question}")
        if value is not None:
            whole = value == int(value)
            label = f"Your answer{f', in {unit}' if unit else ''}"
            guess = (
                st.number_input(label, value=None, step=1, key=f"{key}-guess", width=240, placeholder="a number")
                if whole
                else st.number_input(
                    label, value=None, step=0.01, key=f"{key}-guess", width=240, placeholder="a number"
                )
            )
            if guess is not None:
                right = abs(guess - value) <= (0 if whole else 0.006)
                (st.success if right else st.info)("Right." if right else "Not yet: try once more, or open the answer.")
        with st.expander("Show the answer"):
            st.markdown(f"**{answer}** {why}")

"""The list of chapters, and the frame around the open one. Only the open chapter is imported and computed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import streamlit as st

from headscope.studio.ui import state


@dataclass(frozen=True)
class Chapter:
    """Number, a short name for the list, the title on top, and the module whose `show(theme)` draws it."""

    number: int
    name: str
    title: str
    module: str


CHAPTERS = tuple(
    Chapter(number, name, title, module)
    for number, (name, title, module) in enumerate(
        (
            ("Dense", "Dense causal attention", "dense"),
            ("A-shape", "A-shape: the beginning and the neighbourhood", "a_shape"),
            ("Vertical-slash", "Vertical-slash: columns and distances", "vertical_slash"),
            ("Blocks", "Block-sparse: squares of rows and keys", "blocks"),
            ("Online softmax", "Online softmax: one answer from many tiles", "online_softmax"),
            ("Estimator", "The estimator, and what it misses", "estimator"),
            ("Tiles", "Tiles: asked for, and computed", "tiles"),
            ("Missed mass", "Missed mass, from two numbers a row", "missed_mass"),
            ("Time", "Where the time goes", "time_split"),
            ("Real heads", "Four heads of a real model", "real_heads"),
        ),
        1,
    )
)

KEY = "learn-chapter"


def show() -> None:
    """The page: choose a chapter, see it, go on to the next."""
    number = _from_address()
    st.title("Learn", anchor=False)
    st.caption(
        "How sparse attention reads less, by hand. Every number here is computed by the engine that runs models."
    )
    st.session_state[KEY] = number
    st.pills(
        "Chapter",
        [chapter.number for chapter in CHAPTERS],
        required=True,
        key=KEY,
        wrap=True,
        format_func=lambda at: f"{at} {CHAPTERS[at - 1].name}",
        label_visibility="collapsed",
        on_change=_opened,
    )
    chapter = CHAPTERS[number - 1]
    st.header(f"{number} · {chapter.title}", anchor=False, divider="gray")
    import_module(f"headscope.studio.lessons.chapters.{chapter.module}").show(state.colours())
    with st.container(horizontal=True, horizontal_alignment="distribute"):
        for step, icon in ((-1, ":material/chevron_left:"), (1, ":material/chevron_right:")):
            at = number + step
            if 1 <= at <= len(CHAPTERS):
                st.button(
                    f"{at} {CHAPTERS[at - 1].name}",
                    key=f"learn-to-{step}",
                    icon=icon,
                    on_click=_open,
                    args=(at,),
                    icon_position="left" if step < 0 else "right",
                )


def _from_address() -> int:
    """The chapter that the page's address names; the first if it names none that exists."""
    text = st.query_params.get("chapter", "1")
    return int(text) if text.isdecimal() and 1 <= int(text) <= len(CHAPTERS) else 1


def _opened() -> None:
    _open(st.session_state[KEY])


def _open(number: int) -> None:
    st.query_params["chapter"] = str(number)

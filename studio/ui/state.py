"""What belongs to one browser tab, kept under one non-widget key.

Widget values vanish when a page is not drawn, so the truth is in the view: before a widget is drawn it is set from the
view, and its callback writes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import streamlit as st

from headscope.engine.base.errors import PromptError
from headscope.studio.charts.theme import Theme, theme
from headscope.studio.data import prompts
from headscope.studio.data.results import Run
from headscope.studio.lab.lab import Lab
from headscope.studio.lab.shelf import Shelf
from headscope.studio.store.places import default_path
from headscope.studio.ui.context import PageContext
from headscope.studio.ui.view import LINK, View, from_query, to_query

T = TypeVar("T")


_labs: list[Lab] = []
_making = threading.Lock()


def lab() -> Lab:
    """The one lab of this process. Not a cached resource of Streamlit's: any browser may have those cleared."""
    with _making:
        if not _labs:
            _labs.append(Lab(default_path(), Shelf.default()))
        return _labs[0]


def view() -> View:
    """This tab's view; made from the URL on its first run."""
    if "view" not in st.session_state:
        st.session_state["view"] = from_query({name: st.query_params[name] for name in st.query_params})
    stored: View = st.session_state["view"]
    return stored


def colours() -> Theme:
    """The palette that fits the browser's mode."""
    return theme(st.context.theme.type)


def page() -> PageContext:
    """What any page draws from."""
    return PageContext(lab(), view(), colours())


def keep_link(view: View, run: Run | None) -> None:
    """Writes the place looked at into the URL, beside what the page itself keeps there."""
    wanted = to_query(view, run)
    for name in LINK:
        if name in st.query_params and name not in wanted:
            del st.query_params[name]
    if any(st.query_params.get(name) != value for name, value in wanted.items()):
        st.query_params.update(wanted)


def prompt(view: View) -> prompts.Prompt:
    """The chosen prompt. PromptError with one sentence if there is none."""
    if view.source == "paste":
        return prompts.pasted(view.pasted)
    if view.source == "upload":
        if view.upload_problem:
            raise PromptError(view.upload_problem)
        if view.upload is None:
            raise PromptError("Choose a text file first.")
        return view.upload
    return prompts.sample(view.sample)


def bind(key: str, value: T, write: Callable[[T], None]) -> dict[str, Any]:
    """Arguments that tie a widget to the view: its key, set to `value` now, and a callback that writes back."""
    st.session_state[key] = value
    return {"key": key, "on_change": lambda: write(st.session_state[key])}

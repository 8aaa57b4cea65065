"""What a chapter measures when asked: on the thread that owns the device, in line with the runs of all sessions.

A time taken in the page's own thread would be taken beside whatever that thread runs, and both would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.studio.base import words
from headscope.studio.lab.jobs import Context
from headscope.studio.ui import state, widgets

IN_LINE = "Nothing is timed while a run is under way: the measurement waits for its end."


def results(key: str) -> dict[Hashable, Any]:
    """What this session has measured under a key, by what it was asked for."""
    kept: dict[Hashable, Any] = st.session_state.setdefault(f"{key}-results", {})
    return kept


def under_way(key: str) -> bool:
    """Shows how far this session's measurement is, or what stopped it; False once there is none to wait for."""
    _take(key)
    working = f"{key}-job" in st.session_state
    if working and widgets.progress(state.page()) is None:
        st.rerun()
    if problem := st.session_state.pop(f"{key}-problem", ""):
        st.error(words.plain_markdown(problem))
    return working


def button(key: str, label: str, title: str, work: Callable[[Context], Any], of: Hashable = None, **look: Any) -> None:
    """Has `work` done as this session's job when it is pressed. `look` goes to the button."""
    st.button(label, key=f"{key}-run", on_click=_start, args=(key, title, work, of), **look)


def _start(key: str, title: str, work: Callable[[Context], Any], of: Hashable) -> None:
    """Queues the measurement."""
    try:
        job = state.lab().worker.submit(state.view().session, "lesson", title, work)
    except HeadscopeError as error:
        st.session_state[f"{key}-problem"] = str(error)
    else:
        st.session_state[f"{key}-job"] = (job.id, of)


def _take(key: str) -> None:
    """Takes what the job brought once it has ended, or says why it brought nothing."""
    if f"{key}-job" not in st.session_state:
        return
    job_id, of = st.session_state[f"{key}-job"]
    job = state.lab().worker.job(job_id)
    if job is not None and job.open:
        return
    del st.session_state[f"{key}-job"]
    if job is None:
        return
    if job.state == "done":
        results(key)[of] = job.result
    elif job.state == "cancelled":
        st.info("Cancelled: nothing of it was kept.")
    else:
        st.session_state[f"{key}-problem"] = job.error

"""Serves the app: `python -m headscope.studio.serve.server PORT`. `headscope studio` becomes this program.

Uvicorn serves Streamlit's `App`. `streamlit run` serves it too, but on a socket of its own making: there every small
file waits 40 ms for the reader's acknowledgement (asyncio sets TCP_NODELAY only on sockets made with the protocol
named), and an open connection keeps the server from ending.

Settings are those of `.streamlit/config.toml` beside `app.py`. Streamlit reads it as the file of the folder that it
works in, and it outranks a person's own file; it reads none of their STREAMLIT_ variables here.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.base.places import ROOT
from headscope.studio.serve.port import ADDRESS, check_port

if TYPE_CHECKING:
    import streamlit as st

ENTRY = Path(__file__).with_name("entry.py")

MESSAGE_BYTES = 16 * 2**20
"""The largest message that a browser may send: an upload's is its name, never its content."""

OPEN_REQUESTS_S = 3
"""How long requests that are still being answered may hold up the end."""

END_S = 10
"""How long anything else may: the worker's thread, a database that writes its last pages."""

_ended_by: list[int] = []
"""The signal that ended this process, once it did."""


def main(port: int) -> None:
    """Serves until a signal ends it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # an import must not be interrupted
    atexit.register(_end)  # what is registered first runs last
    os.umask(0o077)  # database, log and captures hold prompts: for their owner only
    os.chdir(ROOT)
    import uvicorn

    app = build()
    try:
        check_port(port)  # another program may have taken it in the meantime
    except HeadscopeError as error:
        raise SystemExit(str(error)) from None
    _leave_by_signals()
    uvicorn.run(
        app,
        host=ADDRESS,
        port=port,
        access_log=False,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=MESSAGE_BYTES,
        timeout_graceful_shutdown=OPEN_REQUESTS_S,
    )


def build() -> st.App:
    """The app behind its guard."""
    import streamlit as st

    from headscope.studio.serve.guard import MIDDLEWARE

    app = st.App(ENTRY, lifespan=_ready, middleware=MIDDLEWARE)
    # Reads the settings now: read later, they would put a handler of Streamlit's on uvicorn's log of requests.
    st.get_option("server.address")
    return app


@asynccontextmanager
async def _ready(_: st.App) -> AsyncIterator[None]:
    """No request is answered before the first page is imported, so that no reader waits for it.

    Streamlit has Python collect garbage after each run of a page, twice a second while one polls: modules are here to
    stay, and looking through them again took 0.1 s of every thread's time.
    """
    warm()
    gc.collect()
    gc.freeze()
    yield


def warm() -> None:
    """Imports what the first page would import: chapters, what streamlit takes to show them, and plotly's parts."""
    from headscope.studio.charts.theme import LIGHT
    from headscope.studio.lessons.chapters import dense
    from headscope.studio.lessons.contents import CHAPTERS
    from headscope.studio.lessons.maths.dense import lesson

    import_module("pandas")
    for chapter in CHAPTERS:
        import_module(f"headscope.studio.lessons.chapters.{chapter.module}")
    dense.draw_map(lesson(8, 7, 1.0), LIGHT).to_json()


def _leave_by_signals() -> None:
    """Signals end the server after its last answers. Uvicorn takes Ctrl-C and TERM, and passes them on when it is done;
    a closed terminal is a TERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def _leave(number: int, _: FrameType | None) -> None:
    """Ends with what a shell gives a program that the signal ended, in `END_S` at most."""
    _ended_by.append(number)
    code = 128 + number
    watch = threading.Timer(END_S, os._exit, (code,))
    watch.daemon = True
    watch.start()
    sys.exit(code)


def _end() -> None:
    """Leaves when all else that runs at exit has run. Python would now take down its threads, and abort where the
    worker's is inside a kernel."""
    if _ended_by:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + _ended_by[0])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8501)

"""Serves the app: `python -m headscope.studio.server`. `headscope studio` calls it.

Everything that the first page needs is imported before the server answers, so that no reader waits for it. Uvicorn
opens its own port: on the socket that `streamlit run` hands to it, every small file waits 40 ms for the reader's
acknowledgement (asyncio sets TCP_NODELAY only on sockets made with the protocol named), and a page has a hundred.

Streamlit takes a `pages` folder beside the app for a page list of its own until the app has run once, so a link to
a page, opened first, would run that page's file alone. Saying beforehand that the app lists its pages avoids it.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import streamlit as st
import uvicorn
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from streamlit import file_util
from streamlit.runtime.pages_manager import PagesManager

import headscope.engine
from headscope.studio.lessons import chart, dense
from headscope.studio.lessons.chapters import CHAPTERS
from headscope.studio.theme import LIGHT

APP = Path(str(headscope.engine.__file__)).resolve().parents[1] / "app.py"

ADDRESS = "127.0.0.1"

SETTINGS = {
    "server.address": ADDRESS,
    "server.headless": "true",
    "server.fileWatcherType": "none",
    "server.maxUploadSize": "8",
    "browser.gatherUsageStats": "false",
    "client.showErrorDetails": "none",
    "client.toolbarMode": "viewer",
}
"""Streamlit reads the app's own settings file only when started in its folder, so what matters is given here too."""

MESSAGE_BYTES = 16 * 2**20
"""The largest message that a browser may send: an upload's is its name, never its content."""


def main(port: int) -> None:
    """Serves until interrupted."""
    for name, value in (SETTINGS | {"server.port": str(port)}).items():
        os.environ[_variable(name)] = value
    PagesManager.uses_pages_directory = False
    chart.served = True
    warm()
    app = st.App(APP, routes=[Route(f"/{chart.SCRIPT}", _script()), Route("/learn", _learn())])
    uvicorn.run(
        app, host=ADDRESS, port=port, access_log=False, ws="websockets-sansio", ws_per_message_deflate=False,
        ws_max_size=MESSAGE_BYTES, timeout_graceful_shutdown=3,
    )  # fmt: skip


def warm() -> None:
    """Imports what the first page would import: chapters, what streamlit takes to show them, and plotly's parts."""
    import_module("pandas")
    for chapter in CHAPTERS:
        import_module(f"headscope.studio.lessons.{chapter.module}")
    dense.draw_map(dense.lesson(8, 7, 1.0), LIGHT).to_json()


def _variable(name: str) -> str:
    """Streamlit's environment variable for a setting: `server.maxUploadSize` is STREAMLIT_SERVER_MAX_UPLOAD_SIZE."""
    return "STREAMLIT_" + "".join(f"_{one}" if one.isupper() else one for one in name).replace(".", "_").upper()


def _script() -> Callable[[Request], Response]:
    """The script that draws the lessons' figures, packed once."""
    body = gzip.compress(chart.FILE.read_bytes(), 6)
    headers = {"Content-Encoding": "gzip", "Cache-Control": "public, immutable, max-age=31536000"}

    def answer(_: Request) -> Response:
        return Response(body, media_type="text/javascript", headers=headers)

    return answer


def _learn() -> Callable[[Request], Response]:
    """Streamlit's own frame, which also names the script, so that the browser fetches it while the page is made."""
    frame = Path(file_util.get_static_dir(), "index.html").read_text(encoding="utf-8")
    link = f'<link rel="preload" as="script" href="./{chart.SCRIPT}">'
    body = frame.replace("</head>", f"{link}</head>", 1)

    def answer(_: Request) -> Response:
        return HTMLResponse(body, headers={"Cache-Control": "no-cache"})

    return answer


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8501)

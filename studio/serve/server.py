"""Serves the app: `python -m headscope.studio.serve.server`. `headscope studio` calls it.

Everything that the first page needs is imported before the server answers, so that no reader waits for it. Uvicorn
opens its own port: on the socket that `streamlit run` hands to it, every small file waits 40 ms for the reader's
acknowledgement (asyncio sets TCP_NODELAY only on sockets made with the protocol named), and a page has a hundred.

Streamlit takes a `pages` folder beside the app for a page list of its own until the app has run once, so a link to
a page, opened first, would run that page's file alone. Saying beforehand that the app lists its pages avoids it.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import streamlit as st
import uvicorn
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from streamlit import config, file_util
from streamlit.runtime.pages_manager import PagesManager

from headscope.engine.base.places import ROOT
from headscope.studio.charts.theme import LIGHT
from headscope.studio.lessons import chart, dense
from headscope.studio.lessons.chapters import CHAPTERS
from headscope.studio.serve.cli import ADDRESS

APP = ROOT / "app.py"

SETTINGS = {
    "server.address": ADDRESS,
    "server.headless": True,
    "server.fileWatcherType": "none",
    "server.maxUploadSize": 8,
    "browser.gatherUsageStats": False,
    "client.showErrorDetails": "none",
    "client.toolbarMode": "viewer",
}
"""What must hold whatever a person's own settings of Streamlit say."""

MESSAGE_BYTES = 16 * 2**20
"""The largest message that a browser may send: an upload's is its name, never its content."""


def main(port: int) -> None:
    """Serves until interrupted."""
    PagesManager.uses_pages_directory = False
    chart.served = True
    warm()
    app = st.App(APP, routes=[Route(f"/{chart.SCRIPT}", _script()), Route("/learn", _learn())])
    # As `streamlit run` treats its flags: above the settings files, which the app has just had read.
    config.get_config_options(force_reparse=True, options_from_flags=SETTINGS | {"server.port": port})
    uvicorn.run(
        app,
        host=ADDRESS,
        port=port,
        access_log=False,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=MESSAGE_BYTES,
        timeout_graceful_shutdown=3,
    )


def warm() -> None:
    """Imports what the first page would import: chapters, what streamlit takes to show them, and plotly's parts."""
    import_module("pandas")
    for chapter in CHAPTERS:
        import_module(f"headscope.studio.lessons.{chapter.module}")
    dense.draw_map(dense.lesson(8, 7, 1.0), LIGHT).to_json()


def _script() -> Callable[[Request], Response]:
    """The script that draws the lessons' figures, packed once."""
    body = gzip.compress(chart.FILE.read_bytes(), 6)
    headers = {"Content-Encoding": "gzip", "Cache-Control": "public, immutable, max-age=31536000"}

    def answer(_: Request) -> Response:
        return Response(body, media_type="text/javascript", headers=headers)

    return answer


def _learn() -> Callable[[Request], Response]:
    """Streamlit's own frame, which also names the script, so that the browser fetches it while the page is made and
    runs it while it waits for the first answer: the app's root stands and nothing is in it yet."""
    frame = Path(file_util.get_static_dir(), "index.html").read_text(encoding="utf-8")
    early = f"""<link rel="preload" as="script" href="./{chart.SCRIPT}"><script>{chart.LIBRARY}
      const waiting = setInterval(() => {{
        if (!document.querySelector('[data-testid="stApp"]')) return;
        clearInterval(waiting);
        library("{chart.SCRIPT}").catch(() => null);
      }}, 20);
    </script>"""
    body = frame.replace("</head>", f"{early}</head>", 1)

    def answer(_: Request) -> Response:
        return HTMLResponse(body, headers={"Cache-Control": "no-cache"})

    return answer


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8501)

"""Keeps other pages out of the app, and the app out of theirs.

Streamlit checks the name that it is called by and where a request comes from for web sockets only, and an origin that
it does not know makes it look up this machine's public address on the internet, inside the event loop. So what is not
of this server's own pages is refused before Streamlit sees it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

HOSTS = ("127.0.0.1", "localhost")
"""Names of this server. Another name that leads to it is a trick to read it from a foreign page (DNS rebinding)."""

HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'self'",
            "script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "media-src 'self' data: blob:",
            "worker-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'self'",
        )
    ),
    "X-Frame-Options": "SAMEORIGIN",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
"""What a browser may do with an answer: load nothing from elsewhere, and show it in no page but our own. Streamlit's
frame and plotly write scripts and styles into the page, so these cannot be forbidden."""


class OwnPagesOnly:
    """Refuses requests that come under a foreign name or from a page of another server, and adds `HEADERS` to every
    answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif not _own(Headers(scope=scope)):
            if scope["type"] == "websocket":
                await WebSocketClose(1008, "Only this server's own pages may connect.")(scope, receive, send)
            else:
                refusal = PlainTextResponse("Only this server's own pages may ask.\n", 403)
                await refusal(scope, receive, send)
        else:
            await self.app(scope, receive, _with_headers(send))


def _own(headers: Headers) -> bool:
    """Whether a request names this server, and is no browser's for another server's page."""
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        return urlsplit(f"//{host}").hostname in HOSTS and (origin is None or urlsplit(origin).netloc == host)
    except ValueError:  # no address at all
        return False


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            _add(message)
        await send(message)

    return sent


def _add(message: MutableMapping[str, Any]) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in HEADERS.items():
        headers.setdefault(name, value)


MIDDLEWARE = (Middleware(OwnPagesOnly),)

"""How the command line ends: one sentence on stderr, and Ctrl-C before anything began."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def writable_streams() -> None:
    """Characters that a terminal cannot show are written as escapes, such as `\\xe9`, not as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(message: str, code: int) -> int:
    """Prints an error as a sentence, and gives the exit code back."""
    first = message.split(maxsplit=1)[0] if message.strip() else ""
    plain = first.rstrip(",;:").isalpha() and not os.path.exists(first)  # a name stays as it is written
    text = (message[:1].upper() + message[1:] if plain else message).rstrip(".") + "."
    print(text, file=sys.stderr, flush=True)
    return code


@contextmanager
def nothing_begun() -> Iterator[None]:
    """Ctrl-C while modules load leaves at once: an import that is broken off there ends in somebody's traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(tell("interrupted; nothing was begun", 130)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

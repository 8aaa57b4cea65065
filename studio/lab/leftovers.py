"""What processes that were killed leave behind: half captures, and the mark that says that a studio was running."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # a system without them: nothing is swept there
    fcntl = None  # type: ignore[assignment]

KILLED = (
    "The last studio ended without closing: it was killed, ran out of memory, or the machine stopped. What was saved "
    "is here; a run or search that was under way is not: start it again."
)


def hold(folder: Path) -> IO[bytes] | None:
    """Sweeps half captures out of a folder unless another process uses it, and holds the folder while the file that is
    returned is open. None where that is not possible; then nothing is swept."""
    if fcntl is None or not folder.is_dir():
        return None
    try:
        lock = (folder / ".lock").open("ab")
    except OSError:
        return None
    with suppress(OSError):  # another process holds the folder too
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _sweep(folder: Path) -> None:
    """Takes away what a save that was killed left; a capture that had stepped aside for it comes back."""
    for leftover in folder.glob(".headscope-*"):
        whole = folder / leftover.name.removeprefix(".headscope-").removesuffix(".replaced")
        if leftover.suffix == ".replaced" and not whole.exists():
            leftover.rename(whole)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


class Mark:
    """A file beside the database, there while a studio has it open."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".running")

    def set(self) -> str:
        """Marks the database as open; what must be said if another process left its mark."""
        own = str(os.getpid())
        with suppress(OSError):
            before = self._path.read_text("utf-8", "replace") if self._path.is_file() else own
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w") as out:
                out.write(own)
            return "" if before == own else KILLED
        return ""

    def clear(self) -> None:
        """The database is closed in order."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

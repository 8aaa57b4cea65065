"""What the server holds for all sessions: one `Lab` a process.

Everything that touches the device runs on the worker's thread: as a job, or as a short call.
"""

from __future__ import annotations

import atexit
import weakref
from pathlib import Path

from headscope.studio.lab.captures import Captures
from headscope.studio.lab.database import Database
from headscope.studio.lab.drafts import Drafts
from headscope.studio.lab.jobs import Worker
from headscope.studio.lab.leftovers import hold
from headscope.studio.lab.measurements import Measurements
from headscope.studio.lab.models import Models
from headscope.studio.lab.runs import Runs
from headscope.studio.lab.shelf import Shelf
from headscope.studio.store.store import Store


class Lab:
    """The worker, the database and what is built on them. `path` is the database's, `shelf` where captures go.

    If the database cannot be opened, `problem` says why and memory serves.
    """

    def __init__(self, path: Path | None, shelf: Shelf) -> None:
        self.worker = Worker()
        self.database = Database(path)
        self.models = Models(self.worker)
        self.captures = Captures(shelf)
        self._shelf_held = hold(shelf.folder)
        self.measurements = Measurements(self.worker, self.database, self.captures)
        self.runs = Runs(self.worker, self.database, self.models, self.captures, self.measurements)
        self.drafts = Drafts(self.database)
        atexit.register(_close_store, weakref.ref(self.database))

    @property
    def store(self) -> Store:
        """The store in use."""
        return self.database.store

    @property
    def problem(self) -> str:
        """Why the database's file is not in use; empty if it is."""
        return self.database.problem

    @property
    def notices(self) -> list[str]:
        """What opening the database brought to light, until it is put away, and what of the database is damaged."""
        damage = self.store.damage
        return [*self.database.notices, *([damage] if damage else [])]

    def put_notices_away(self) -> None:
        """Somebody has read what opening brought to light."""
        self.database.notices.clear()

    def reopen(self) -> bool:
        """Tries the database again after a problem; what memory holds goes into it. True if it is open now."""
        if not self.problem:
            return True
        before = self.database.reopen()
        if before is None:
            return False
        self.runs.move(before)
        self.drafts.store_all()
        return True

    def close(self) -> None:
        """Stops the worker and lets go of the database."""
        self.worker.close()
        self.database.close()
        if self._shelf_held is not None:
            self._shelf_held.close()


def _close_store(database: weakref.ref[Database]) -> None:
    """At the end of the process: what the log holds goes into the file."""
    still = database()
    if still is not None:
        still.close()

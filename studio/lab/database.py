"""The store that the lab writes to: the file's, or memory's while the file cannot be had."""

from __future__ import annotations

from pathlib import Path

from headscope.studio.base.errors import StoreError
from headscope.studio.lab.leftovers import Mark
from headscope.studio.store.store import Store


class Database:
    """`store` is the one in use; `problem` says why it is not the file's, if so.

    `notices` are what opening the file brought to light, until somebody has read them.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem = ""
        self.notices: list[str] = []
        self.store = self._open()

    def _open(self) -> Store:
        try:
            store = Store(self.path)
        except StoreError as error:
            self.problem = str(error)
            return Store(None)
        killed = "" if self.path is None else Mark(self.path).set()
        self.notices += [notice for notice in (killed, store.notice) if notice]
        return store

    def reopen(self) -> Store | None:
        """Tries the file again. The store that served until now, if the file is open now and it was not before."""
        before, self.problem = self.store, ""
        self.store = self._open()
        if self.problem:
            self.store.close()
            self.store = before
            return None
        return before

    def close(self) -> None:
        """Brings everything into the file and lets go of it."""
        self.store.close()
        if self.path is not None and not self.problem:
            Mark(self.path).clear()

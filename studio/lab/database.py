"""The store that the lab writes to: the file's, or memory's while the file cannot be had."""

from __future__ import annotations

from pathlib import Path

from headscope.studio.base.errors import StoreError
from headscope.studio.store.store import Store


class Database:
    """`store` is the one in use; `problem` says why it is not the file's, if so."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem = ""
        self.store = self._open()

    def _open(self) -> Store:
        try:
            return Store(self.path)
        except StoreError as error:
            self.problem = str(error)
            return Store(None)

    def reopen(self) -> Store | None:
        """Tries the file again. The store that served until now, if the file is open now and it was not before."""
        before, self.problem = self.store, ""
        self.store = self._open()
        if self.problem:
            self.store.close()
            self.store = before
            return None
        return before

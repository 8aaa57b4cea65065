"""Errors of the studio. Each message is one sentence that a page can show as it is."""

from __future__ import annotations

from headscope.engine.base.errors import Cancelled, HeadscopeError

__all__ = [
    "Busy",
    "Cancelled",
    "HeadscopeError",
    "StoreCorrupt",
    "StoreError",
    "StoreLocked",
    "StoreReadOnly",
    "StoreTooNew",
]


class StoreError(HeadscopeError):
    """The studio's database cannot do what was asked."""


class StoreLocked(StoreError):
    """Another process holds the database file."""


class StoreReadOnly(StoreError):
    """The database file, or its folder, cannot be written."""


class StoreCorrupt(StoreError):
    """The file is no DuckDB database, or a damaged one."""


class StoreTooNew(StoreError):
    """A newer version of the program wrote the file."""


class Busy(HeadscopeError):
    """The device is taken by another run."""

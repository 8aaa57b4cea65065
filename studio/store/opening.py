"""Opening the database file, bringing it to this program's format, and DuckDB's errors as sentences."""

from __future__ import annotations

import os
import re
from pathlib import Path

import duckdb

from headscope.studio.base.errors import StoreCorrupt, StoreError, StoreLocked, StoreReadOnly, StoreTooNew
from headscope.studio.store.migrations import MIGRATIONS, VERSION
from headscope.studio.store.rows import now


def open_database(path: Path | None) -> duckdb.DuckDBPyConnection:
    """A connection to the file, or to memory; a StoreError says in one sentence why there is none."""
    if path is None:
        connection = duckdb.connect(":memory:")
        _migrate(connection)
        return connection
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreReadOnly(
            f"The folder {path.parent} cannot be made, so set HEADSCOPE_DB to a file elsewhere."
        ) from error
    try:
        connection = duckdb.connect(str(path))
    except duckdb.Error as error:
        raise _open_error(error, path) from error
    try:
        _migrate(connection)
    except duckdb.Error as error:
        connection.close()
        raise save_error(error, path) from error
    except StoreError:
        connection.close()
        raise
    return connection


def _migrate(connection: duckdb.DuckDBPyConnection) -> None:
    """Brings the file to this program's version, one transaction a step."""
    tables = {row[0] for row in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if "migrations" in tables:
        done = connection.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchall()[0][0]
    elif tables:
        raise StoreCorrupt("That DuckDB file belongs to another program, so choose another with --db or HEADSCOPE_DB.")
    else:
        done = 0
    if done > VERSION:
        raise StoreTooNew(
            f"A newer headscope wrote this database (format {done}, this one reads up to {VERSION}): update headscope, "
            "or choose another file with --db."
        )
    for number, steps in enumerate(MIGRATIONS[done:], start=done + 1):
        connection.begin()
        if number == 1:
            connection.execute("CREATE TABLE migrations (number INTEGER PRIMARY KEY, applied_at TIMESTAMP NOT NULL)")
        for step in steps:
            connection.execute(step)
        connection.execute("INSERT INTO migrations VALUES (?, ?)", [number, now()])
        connection.commit()


def _open_error(error: duckdb.Error, path: Path) -> StoreError:
    words = str(error).lower()
    if re.search(r"\block\b", words):  # not a damaged "block"
        return StoreLocked(
            f"Another headscope has {path.name} open: close it, or start this one on another file with --db."
        )
    readable = path.exists() and not os.access(path, os.W_OK)
    if "permission" in words or "read-only" in words or "read only" in words or readable:
        return StoreReadOnly(f"{path} cannot be written: make it writable, or choose another file with --db.")
    if "no space" in words:
        return StoreError(f"The disk of {path.parent} is full: free some space, then try again.")
    return StoreCorrupt(
        f"{path.name} is damaged or is no headscope database: move it away and a new one is made, or choose another "
        "with --db."
    )


def read_error(error: duckdb.Error) -> StoreError:
    """The sentence for a read that failed."""
    return StoreError(f"The studio's database could not be read ({type(error).__name__}).")


def save_error(error: duckdb.Error, path: Path | None) -> StoreError:
    """The sentence for a write that failed."""
    words = str(error).lower()
    if "no space" in words or "too large" in words or "disk" in words or "could not write" in words:
        return StoreError("The disk is full, so nothing was saved: free some space and save again, the draft is kept.")
    if "read-only" in words or "read only" in words or "permission" in words:
        return StoreReadOnly(f"{path} cannot be written, so nothing was saved: make it writable and save again.")
    return StoreError(f"The database refused the save ({type(error).__name__}), so nothing was changed.")


def roll_back(cursor: duckdb.DuckDBPyConnection) -> None:
    """Gives a transaction up, if the failed statement has not ended it."""
    try:
        cursor.rollback()
    except duckdb.Error:
        return  # the failed statement already ended the transaction

"""Opening the database file, bringing it to this program's format, and DuckDB's errors as sentences."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import duckdb

from headscope.studio.base.errors import StoreCorrupt, StoreError, StoreLocked, StoreReadOnly, StoreTooNew
from headscope.studio.store.log import is_blamed, is_dropped, keep_copy, log_of, read_log, readable_part, set_aside
from headscope.studio.store.migrations import MIGRATIONS, VERSION
from headscope.studio.store.places import place_problem
from headscope.studio.store.rows import now


def open_database(path: Path | None) -> tuple[duckdb.DuckDBPyConnection, str]:
    """A connection to the file, or to memory, and what must be said about it (empty: nothing).

    A StoreError says in one sentence why there is no connection. The file is for its owner only.
    """
    if path is None:
        connection = duckdb.connect(":memory:")
        _migrate(connection)
        return connection, ""
    if problem := place_problem(path):
        raise StoreError(problem)
    path = path.absolute()  # DuckDB reads names such as "md:x" as places on the internet
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreReadOnly(
            f"The folder {path.parent} cannot be made, so set HEADSCOPE_DB to a file elsewhere."
        ) from error
    connection, log_kept = _connect(path)
    for each in (path, log_of(path)):
        with suppress(OSError):
            each.chmod(0o600)
    try:
        _migrate(connection)
        return connection, _log_notice(connection, path, log_kept) if log_kept else ""
    except duckdb.Error as error:
        connection.close()
        raise (_open_error(error, path) if is_damage(error) else save_error(error, path)) from error
    except StoreError:
        connection.close()
        raise


def _connect(path: Path) -> tuple[duckdb.DuckDBPyConnection, Path | None]:
    """A connection, and where a log lies that could not be read to its end."""
    raw = read_log(path)
    try:
        connection = duckdb.connect(str(path))
    except duckdb.Error as error:
        if raw and is_blamed(error):
            return _connect_past_log(path, raw, error)
        raise _open_error(error, path) from error
    return connection, keep_copy(log_of(path), raw) if is_dropped(connection, path, raw) else None


def _connect_past_log(path: Path, raw: bytes, problem: duckdb.Error) -> tuple[duckdb.DuckDBPyConnection, Path]:
    """A connection with what the log holds before its damage, or without the log; and where the log lies now.

    If the damage is the database's own, the log is back in its place when this raises.
    """
    log = log_of(path)
    aside = set_aside(log)
    for part in (readable_part(raw, problem), b""):
        if part:
            log.write_bytes(part)
        try:
            return duckdb.connect(str(path)), aside
        except duckdb.Error as error:
            log.unlink(missing_ok=True)
            problem = error
    aside.rename(log)
    raise _open_error(problem, path) from problem


def _log_notice(connection: duckdb.DuckDBPyConnection, path: Path, log_kept: Path) -> str:
    counted = {
        name: connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]
        for name, table in (("versions", "configs"), ("runs", "runs"), ("searches", "searches"))
    }
    return (
        f"The log of {path.name} could not be taken in whole. What could be read is here: "
        f"{counted['versions']} versions, {counted['runs']} runs and {counted['searches']} searches; what only the "
        f"rest of it held is not, and lies in {log_kept.name} beside the database."
    )


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


def is_damage(error: duckdb.Error) -> bool:
    """Whether a part of the file itself is damaged."""
    words = str(error).lower()
    return "corrupt" in words or "checksum" in words


def read_error(error: duckdb.Error) -> StoreError:
    """The sentence for a read that failed."""
    return StoreError(f"The studio's database could not be read ({type(error).__name__}).")


def save_error(error: duckdb.Error, path: Path | None) -> StoreError:
    """The sentence for a write that failed."""
    if is_damage(error):
        return StoreCorrupt(
            "The database is damaged, so nothing was saved: end the studio, copy what is readable into a new file with "
            "headscope studio --backup NEW_FILE, and start with --db NEW_FILE."
        )
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

"""DuckDB's write-ahead log beside the database: whether it was read to its end, and setting a damaged one aside.

DuckDB drops what follows an entry whose length is damaged without a word, and refuses the database as a whole for other
damage. Both would cost saved versions, so a log that cannot be read to its end is kept under another name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import duckdb

START = b"\x64\x00\x62\x65\x00"
"""The first fields of the log's head: the kind of entry, and the log's version."""

HEAD_END = b"\xff\xff"
TAKEN_IN = b"\x64\x00\x63"
"""How the entry begins that says that the file has taken in the log."""

ENTRY_HEAD = 16
"""Bytes before an entry: its length and its checksum, 8 each."""


def log_of(path: Path) -> Path:
    """The log of a database file."""
    return path.with_name(path.name + ".wal")


def read_log(path: Path) -> bytes:
    """The log of a database file; empty if there is none."""
    try:
        return log_of(path).read_bytes()
    except OSError:
        return b""


def is_dropped(connection: duckdb.DuckDBPyConnection, path: Path, raw: bytes) -> bool:
    """Whether DuckDB has just opened a database without all of `raw`, which its log held before.

    It drops without a word what follows a damaged length, and a log that it takes by its head for one that the file has
    taken in already. One that truly was taken in ends with the note of that.
    """
    if not raw:
        return False
    entries = _entries(raw)
    if entries is None:
        return True
    if not entries or any(raw[entry + ENTRY_HEAD :].startswith(TAKEN_IN) for entry in entries[-2:]):
        return False
    size = connection.execute("SELECT wal_size FROM pragma_database_size()").fetchall()[0][0]
    return size == "0 bytes" or len(read_log(path)) < len(raw)


def _entries(raw: bytes) -> list[int] | None:
    """Where the log's entries begin; None if there is no head, or their lengths do not lead to its very end."""
    head = raw.find(HEAD_END, len(START))
    if not raw.startswith(START) or head < 0:
        return None
    entries, position = [], head + len(HEAD_END)
    while position < len(raw):
        entries.append(position)
        length = int.from_bytes(raw[position : position + 8], "little")
        if not length:
            return None
        position += ENTRY_HEAD + length
    return entries if position == len(raw) else None


def is_blamed(error: duckdb.Error) -> bool:
    """Whether DuckDB refuses a database because of its log."""
    return "replaying WAL" in str(error)


def readable_part(raw: bytes, error: duckdb.Error) -> bytes:
    """What stands before the damaged entry that the error names; empty if it names none."""
    named = re.search(r"entry at byte position (\d+)", str(error))
    return raw[: int(named[1]) - ENTRY_HEAD] if named and int(named[1]) > ENTRY_HEAD else b""


def set_aside(log: Path) -> Path:
    """Renames a damaged log, beside the database and never over another; its new name."""
    aside = _free_name(log)
    os.rename(log, aside)
    return aside


def keep_copy(log: Path, raw: bytes) -> Path:
    """Writes out what a log held before DuckDB dropped the part that it could not read; the copy's name."""
    copy = _free_name(log)
    handle = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(raw)
        out.flush()
        os.fsync(out.fileno())
    return copy


def _free_name(log: Path) -> Path:
    number = 1
    while (aside := log.with_name(f"{log.name}.damaged-{number}")).exists():
        number += 1
    return aside

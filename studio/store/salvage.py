"""A copy of the database in a new file, of a damaged one as much as can be read."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from headscope.studio.base.errors import StoreError, StoreLocked
from headscope.studio.store.opening import is_damage, open_database, save_error

SMALLEST_PART = 2048
"""Rows that DuckDB reads at once: smaller parts of a damaged table read no better."""


@dataclass
class Backup:
    """What a copy holds: rows by table, rows that could not be read by table, and what opening the original said."""

    notice: str
    rows: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)


def back_up(source: Path, target: Path) -> Backup:
    """Copies the database to a new file, whole or not at all. StoreError if it cannot be read or written.

    Every row is read, so a copy of a damaged file holds what is readable, and `lost` counts the rest.
    """
    if not source.is_file():
        raise StoreError(f"There is no database {source} to back up.")
    if target.exists():
        raise StoreError(f"{target} is there already: give a new file.")
    if not target.parent.is_dir():
        raise StoreError(f"There is no folder {target.parent}: make it, or give a file elsewhere.")
    try:
        connection, notice = open_database(source)
    except StoreLocked as error:
        raise StoreLocked(f"A studio has {source} open: end it, then back it up.") from error
    scratch = target.with_name(f".headscope-{secrets.token_hex(8)}.duckdb")
    try:
        open_database(scratch)[0].close()
        backup = _copy(connection, scratch, Backup(notice))
        os.rename(scratch, target)
    except (duckdb.Error, OSError) as error:
        if isinstance(error, duckdb.Error):
            raise save_error(error, target) from error
        raise StoreError(f"{target} cannot be written ({error.strerror}): give a file elsewhere.") from error
    finally:
        connection.close()
        scratch.unlink(missing_ok=True)
    return backup


def tables(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """The tables of the database itself, by name."""
    query = "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database() ORDER BY table_name"
    return [row[0] for row in connection.execute(query).fetchall()]


def damaged_tables(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """The tables that cannot be read to their end."""
    damaged = set()
    for table in tables(connection):
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT bit_xor(hash({table})) FROM {table}").fetchall()
        except duckdb.Error as error:
            if is_damage(error):
                damaged.add(table)
    return damaged


def _copy(connection: duckdb.DuckDBPyConnection, file: Path, backup: Backup) -> Backup:
    """Every table into an empty database of the same format."""
    quoted = str(file.absolute()).replace("'", "''")
    connection.execute(f"ATTACH '{quoted}' AS backup")
    for table in tables(connection):
        if table == "migrations":  # the new file has its own
            continue
        rows = connection.execute(f"SELECT coalesce(max(rowid) + 1, 0), count(*) FROM {table}").fetchall()[0]
        backup.rows[table] = _copy_rows(connection, table, 0, rows[0])
        if backup.rows[table] < rows[1]:
            backup.lost[table] = rows[1] - backup.rows[table]
    connection.execute("CHECKPOINT backup")
    connection.execute("DETACH backup")
    return backup


def _copy_rows(connection: duckdb.DuckDBPyConnection, table: str, first: int, end: int) -> int:
    """Copies rows by their place, in halves where a part is damaged; how many were copied."""
    query = f"INSERT INTO backup.{table} SELECT * FROM {table} WHERE rowid >= ? AND rowid < ? ORDER BY rowid"
    try:
        return int(connection.execute(query, [first, end]).fetchall()[0][0])
    except duckdb.Error as error:
        if not is_damage(error):
            raise
    if end - first <= SMALLEST_PART:
        return 0
    parts = (end - first + SMALLEST_PART - 1) // SMALLEST_PART
    middle = first + parts // 2 * SMALLEST_PART
    return _copy_rows(connection, table, first, middle) + _copy_rows(connection, table, middle, end)

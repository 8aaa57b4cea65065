"""The studio's memory: one DuckDB file, append-only, in the user's data folder.

Every call takes its own cursor, so any thread may call. Writers take a lock and write one transaction: a
version is there whole or not at all, whatever kills the process. DuckDB lets one process at a time have the
file; the errors below say in one sentence what to do about it.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import platformdirs
import polars as pl

from headscope.studio.base.errors import StoreCorrupt, StoreError, StoreLocked, StoreReadOnly, StoreTooNew
from headscope.studio.store.migrations import MIGRATIONS, VERSION


def data_dir() -> Path:
    """The user's data folder of the program."""
    return Path(platformdirs.user_data_dir("headscope"))


def default_path() -> Path:
    """Where the database is: `HEADSCOPE_DB`, else `studio.duckdb` in the user's data folder."""
    return Path(os.environ.get("HEADSCOPE_DB") or data_dir() / "studio.duckdb").expanduser()


@dataclass(frozen=True)
class RunRow:
    """One prefill that was captured and measured."""

    id: str
    model: str
    fingerprint: str
    prompt_sha256: str
    tokens: int
    chat_template: bool
    device: str
    dtype: str
    impl: str
    tiles: str
    estimator: dict[str, Any]
    capture_ms: float
    measure_ms: float
    versions: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True)
class ConfigRow:
    """One immutable version of a head config; `heads[layer][head]` is (pattern, evidence)."""

    id: str
    number: int
    name: str
    parent_id: str | None
    run_id: str | None
    note: str
    tiles: str
    estimator: dict[str, Any]
    model: dict[str, Any]
    provenance: dict[str, Any]
    audit: dict[str, Any]
    created_at: datetime
    heads: tuple[tuple[tuple[dict[str, Any], dict[str, Any] | None], ...], ...]


def new_id() -> str:
    """A short random name for a row."""
    return uuid.uuid4().hex[:12]


def now() -> datetime:
    """The time to the second, UTC without a zone, as the tables hold it."""
    return datetime.now(UTC).replace(tzinfo=None, microsecond=0)


class Store:
    """The database. `path=None` keeps everything in memory: for tests, and for a studio whose file is not to be had."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._write = threading.RLock()
        self._connection = _open(path)

    def close(self) -> None:
        """Lets go of the file."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._write:
            try:
                with self._connection.cursor() as cursor:
                    cursor.begin()
                    try:
                        yield cursor
                        cursor.commit()
                    except BaseException:
                        _roll_back(cursor)
                        raise
            except duckdb.Error as error:
                self._recover(error)
                raise _save_error(error, self.path) from error

    def _recover(self, error: duckdb.Error) -> None:
        """DuckDB refuses all work after a failed write to disk until the file is opened anew."""
        if self.path is None or not isinstance(error, duckdb.FatalException | duckdb.IOException):
            return
        try:
            self._connection.close()
            self._connection = _open(self.path)
        except (duckdb.Error, StoreError):
            return

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        try:
            with self._connection.cursor() as cursor:
                result = cursor.execute(query, values)
                names = [column[0] for column in result.description or ()]
                return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
        except duckdb.Error as error:
            raise _read_error(error) from error

    def _frame(self, query: str, values: Sequence[Any] = ()) -> pl.DataFrame:
        try:
            with self._connection.cursor() as cursor:
                return cursor.sql(query, params=list(values)).pl()
        except duckdb.Error as error:
            raise _read_error(error) from error

    # models, prompts, runs, measurements

    def add_model(self, fingerprint: str, name: str, facts: dict[str, Any]) -> None:
        """Remembers a model once."""
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO models VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [fingerprint, name, json.dumps(facts), now()],
            )

    def add_prompt(self, sha256: str, name: str, kind: str, text: str) -> None:
        """Remembers a prompt once; `kind` is "sample", "pasted" or "uploaded"."""
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO prompts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", [sha256, name, kind, text, now()]
            )

    def prompt(self, sha256: str) -> dict[str, Any] | None:
        """The stored prompt: sha256, name, kind, text, created_at."""
        rows = self._rows("SELECT * FROM prompts WHERE sha256 = ?", [sha256])
        return rows[0] if rows else None

    def add_run(self, run: RunRow, measurements: Sequence[dict[str, Any]]) -> None:
        """A run and all its head measurements, in one transaction."""
        with self._transaction() as cursor:
            values = [*_fields(run)]
            cursor.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(values))})", values)
            _insert_measurements(cursor, run.id, "isolated", measurements)

    def add_measurements(self, run_id: str, context: str, measurements: Sequence[dict[str, Any]]) -> None:
        """More measurements of a run; `context` is "isolated" or "in situ"."""
        with self._transaction() as cursor:
            _insert_measurements(cursor, run_id, context, measurements)

    def run(self, run_id: str) -> RunRow | None:
        """One run by its id."""
        rows = self._rows("SELECT * FROM runs WHERE id = ?", [run_id])
        return _run_row(rows[0]) if rows else None

    def runs(self, limit: int = 50) -> list[RunRow]:
        """The latest runs, newest first."""
        return [_run_row(row) for row in self._rows("SELECT * FROM runs ORDER BY created_at DESC, id LIMIT ?", [limit])]

    def measurements(self, run_id: str, context: str = "isolated") -> list[dict[str, Any]]:
        """The bodies of a run's measurements in the order they were made; a later one of a head stands for it."""
        rows = self._rows(
            "SELECT body FROM head_measurements WHERE run_id = ? AND context = ? ORDER BY rowid", [run_id, context]
        )
        return [json.loads(row["body"]) for row in rows]

    def measurement_frame(self, run_id: str) -> pl.DataFrame:
        """A run's measurements as a frame, for downloads."""
        query = "SELECT * EXCLUDE (body) FROM head_measurements WHERE run_id = ? ORDER BY layer, head, measured_at"
        return self._frame(query, [run_id])

    def add_latency(self, run_id: str, config_id: str | None, kind: str, tokens: int, body: dict[str, Any]) -> None:
        """A timing of the whole model."""
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO latencies VALUES (?, ?, ?, ?, ?, ?)",
                [run_id, config_id, kind, tokens, json.dumps(body), now()],
            )

    def latencies(self, run_id: str) -> list[dict[str, Any]]:
        """Timings of a run's prompt, newest first."""
        rows = self._rows("SELECT * FROM latencies WHERE run_id = ? ORDER BY rowid DESC", [run_id])
        return [row | {"body": json.loads(row["body"])} for row in rows]

    def add_search(
        self,
        model: str,
        config_id: str | None,
        settings: dict[str, Any],
        summary: dict[str, Any],
        rows: pl.DataFrame | None = None,
    ) -> str:
        """A finished pattern search and its measurements, in one transaction; returns its id.

        `rows` has the columns of the table search_measurements without its first.
        """
        row_id = new_id()
        with self._transaction() as cursor:
            values = [row_id, model, config_id, json.dumps(settings), json.dumps(summary), now()]
            cursor.execute("INSERT INTO searches VALUES (?, ?, ?, ?, ?, ?)", values)
            if rows is not None:
                cursor.register("search_rows", rows.to_arrow())
                cursor.execute(
                    "INSERT INTO search_measurements BY NAME SELECT ? AS search_id, * FROM search_rows", [row_id]
                )
                cursor.unregister("search_rows")
        return row_id

    def search_rows(self, search_id: str) -> pl.DataFrame:
        """The measurements of a search, by prompt, layer, head and candidate."""
        query = """SELECT * EXCLUDE (search_id) FROM search_measurements WHERE search_id = ?
                   ORDER BY prompt_sha256, layer, head, candidate"""
        return self._frame(query, [search_id])

    def searches(self, limit: int = 50) -> list[dict[str, Any]]:
        """Finished searches, newest first."""
        rows = self._rows("SELECT * FROM searches ORDER BY created_at DESC, rowid DESC LIMIT ?", [limit])
        return [row | {"settings": json.loads(row["settings"]), "summary": json.loads(row["summary"])} for row in rows]

    # configs and drafts

    def save_config(
        self,
        name: str,
        heads: Sequence[Sequence[tuple[dict[str, Any], dict[str, Any] | None]]],
        *,
        parent_id: str | None = None,
        run_id: str | None = None,
        note: str = "",
        tiles: str,
        estimator: dict[str, Any],
        model: dict[str, Any],
        provenance: dict[str, Any],
        audit: dict[str, Any],
    ) -> ConfigRow:
        """Saves a version whole, under the next number, and returns it as stored."""
        name = name.strip()
        if not name or len(name) > 120:
            raise StoreError("A version needs a name of 1 to 120 characters.")
        row_id = new_id()
        with self._transaction() as cursor:
            largest = cursor.execute("SELECT coalesce(max(number), 0) FROM configs").fetchall()[0][0]
            documents = [json.dumps(document) for document in (estimator, model, provenance, audit)]
            values = [row_id, largest + 1, name, parent_id, run_id, note, tiles, *documents, now()]
            cursor.execute(f"INSERT INTO configs VALUES ({', '.join('?' * len(values))})", values)
            cursor.executemany(
                "INSERT INTO config_heads VALUES (?, ?, ?, ?, ?)",
                [
                    [row_id, layer, head, json.dumps(pattern), None if evidence is None else json.dumps(evidence)]
                    for layer, row in enumerate(heads)
                    for head, (pattern, evidence) in enumerate(row)
                ],
            )
        stored = self.config(row_id)
        if stored is None:
            raise StoreError("The version was written but could not be read back, so treat it as not saved.")
        return stored

    def config(self, config_id: str) -> ConfigRow | None:
        """One version with all its heads."""
        rows = self._rows("SELECT * FROM configs WHERE id = ?", [config_id])
        if not rows:
            return None
        heads: dict[int, list[tuple[dict[str, Any], dict[str, Any] | None]]] = {}
        query = "SELECT layer, pattern, evidence FROM config_heads WHERE config_id = ? ORDER BY layer, head"
        for row in self._rows(query, [config_id]):
            evidence = None if row["evidence"] is None else json.loads(row["evidence"])
            heads.setdefault(row["layer"], []).append((json.loads(row["pattern"]), evidence))
        documents = {name: json.loads(rows[0][name]) for name in ("estimator", "model", "provenance", "audit")}
        return ConfigRow(**(rows[0] | documents), heads=tuple(tuple(heads[layer]) for layer in sorted(heads)))

    def configs(self) -> pl.DataFrame:
        """All versions without their heads, newest first: id, number, name, parent, heads, note, created_at."""
        query = """SELECT c.id, c.number, c.name, p.number AS parent, c.run_id, c.note, c.created_at,
                          (SELECT count(*) FROM config_heads h WHERE h.config_id = c.id) AS heads,
                          c.model ->> '$.name' AS model
                   FROM configs c LEFT JOIN configs p ON p.id = c.parent_id ORDER BY c.number DESC"""
        return self._frame(query)

    def add_draft(self, draft_id: str, sequence: int, body: dict[str, Any]) -> None:
        """One more state of a draft; the same sequence is written once."""
        with self._transaction() as cursor:
            cursor.execute(
                "INSERT INTO drafts VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [draft_id, sequence, json.dumps(body), now()],
            )

    def draft(self, draft_id: str) -> tuple[int, dict[str, Any]] | None:
        """The latest state of a draft and its sequence."""
        query = "SELECT sequence, body FROM drafts WHERE draft_id = ? ORDER BY sequence DESC LIMIT 1"
        rows = self._rows(query, [draft_id])
        return (rows[0]["sequence"], json.loads(rows[0]["body"])) if rows else None


def _open(path: Path | None) -> duckdb.DuckDBPyConnection:
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
        raise _save_error(error, path) from error
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
    if "lock" in words:
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


def _read_error(error: duckdb.Error) -> StoreError:
    return StoreError(f"The studio's database could not be read ({type(error).__name__}).")


def _save_error(error: duckdb.Error, path: Path | None) -> StoreError:
    words = str(error).lower()
    if "no space" in words or "too large" in words or "disk" in words or "could not write" in words:
        return StoreError("The disk is full, so nothing was saved: free some space and save again, the draft is kept.")
    if "read-only" in words or "read only" in words or "permission" in words:
        return StoreReadOnly(f"{path} cannot be written, so nothing was saved: make it writable and save again.")
    return StoreError(f"The database refused the save ({type(error).__name__}), so nothing was changed.")


def _roll_back(cursor: duckdb.DuckDBPyConnection) -> None:
    try:
        cursor.rollback()
    except duckdb.Error:
        return  # the failed statement already ended the transaction


def _insert_measurements(
    cursor: duckdb.DuckDBPyConnection, run_id: str, context: str, measurements: Sequence[dict[str, Any]]
) -> None:
    numbers = (
        "missed_mass_mean",
        "missed_mass_worst",
        "missed_mass_p99",
        "output_error",
        "requested_density",
        "computed_density",
    )
    rows = [
        [run_id, context, body["layer"], body["head"], json.dumps(body["pattern"])]
        + [body[name] for name in numbers]
        + [json.dumps(body), now()]
        for body in measurements
    ]
    if rows:
        cursor.executemany(f"INSERT INTO head_measurements VALUES ({', '.join('?' * len(rows[0]))})", rows)


def _fields(run: RunRow) -> Iterator[Any]:
    for value in vars(run).values():
        yield json.dumps(value) if isinstance(value, dict) else value


def _run_row(row: dict[str, Any]) -> RunRow:
    return RunRow(**(row | {name: json.loads(row[name]) for name in ("estimator", "versions")}))

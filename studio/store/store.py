"""The studio's memory: one DuckDB file in the user's data folder.

Every call takes its own cursor, so any thread may call. Writers take a lock and write one transaction: a version is
there whole or not at all, whatever kills the process. Rows go in in bulk, since a statement a row takes seconds for a
large model. After every save the log is brought into the file, so that a copy of the file alone is whole.

Reads go on without a damaged part of the file. A row is looked for by `reverse(id)`, and so without its index, which
may be damaged where the row is not.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import ConfigError
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.patterns import families as patterns
from headscope.engine.patterns.families import Pattern
from headscope.studio.base.errors import StoreError
from headscope.studio.store.opening import is_damage, open_database, read_error, roll_back, save_error
from headscope.studio.store.rows import ConfigRow, DraftRow, RunRow, new_id, now
from headscope.studio.store.salvage import damaged_tables

CHECKED_BYTES = 512 * 2**20
"""A file up to this size is read through when it is opened, in less than a second; of a larger one, damage is noted
where a page meets it."""


class Store:
    """The database. `path=None` keeps everything in memory: for tests, and for a studio whose file is not to be had."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._write = threading.RLock()
        self._connection, self.notice = open_database(path)
        self._damaged: set[str] = set()
        if path is not None and path.stat().st_size <= CHECKED_BYTES:
            self._damaged |= damaged_tables(self._connection)

    @property
    def damage(self) -> str:
        """What of the file cannot be read, as a sentence; empty while all of it can. Reads go on without that part."""
        if not self._damaged or self.path is None:
            return ""
        parts = ", ".join(sorted(self._damaged)).replace("_", " ")
        return (
            f"{self.path.name} is damaged, and a part of it cannot be read ({parts}). The rest goes on. To save what "
            f"is readable, end the studio and run: headscope studio --db {self.path} --backup NEW_FILE"
        )

    def close(self) -> None:
        """Brings everything into the file and lets go of it."""
        with self._write:
            self._checkpoint()
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
                    except BaseException:  # an interrupt too must not leave a half-done transaction open
                        roll_back(cursor)
                        raise
            except duckdb.Error as error:
                self._recover(error)
                raise save_error(error, self.path) from error
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Brings the log into the file. What another thread's transaction holds up is done after the next save."""
        if self.path is None:
            return
        try:
            with self._connection.cursor() as cursor:
                cursor.execute("CHECKPOINT")
        except duckdb.Error as error:
            self._recover(error)

    def _recover(self, error: duckdb.Error) -> None:
        """DuckDB refuses all work after a failed write to disk until the file is opened anew."""
        if self.path is None or not isinstance(error, duckdb.FatalException | duckdb.IOException):
            return
        try:
            self._connection.close()
            self._connection, self.notice = open_database(self.path)
        except (duckdb.Error, StoreError):
            return

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        try:
            with self._connection.cursor() as cursor:
                result = cursor.execute(query, values)
                names = [column[0] for column in result.description or ()]
                return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
        except duckdb.Error as error:
            self._go_on_without(error)
            return []

    def _frame(self, query: str, values: Sequence[Any] = ()) -> pl.DataFrame:
        try:
            with self._connection.cursor() as cursor:
                return cursor.sql(query, params=list(values)).pl()
        except duckdb.Error as error:
            self._go_on_without(error)
        with self._connection.cursor() as cursor:
            return cursor.sql(f"SELECT * FROM ({query}) LIMIT 0", params=list(values)).pl()

    def _go_on_without(self, error: duckdb.Error) -> None:
        """Notes damage of the file, so that a page does without its part; any other problem is a StoreError."""
        if not is_damage(error):
            raise read_error(error) from error
        with self._write:
            self._damaged |= damaged_tables(self._connection) or {"some rows"}

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
        rows = self._rows("SELECT * FROM prompts WHERE reverse(sha256) = reverse(?)", [sha256])
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
        rows = self._rows("SELECT * FROM runs WHERE reverse(id) = reverse(?)", [run_id])
        return _run_row(rows[0]) if rows else None

    def runs(self, limit: int = 50) -> list[RunRow]:
        """The latest runs, newest first; of those of one second, the one stored last."""
        query = "SELECT * FROM runs ORDER BY created_at DESC, rowid DESC LIMIT ?"
        return [_run_row(row) for row in self._rows(query, [limit])]

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
                _insert(cursor, "search_measurements", rows.with_columns(pl.lit(row_id).alias("search_id")))
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
        self, name: str, config: HeadConfig, *, parent_id: str | None = None, run_id: str | None = None, note: str = ""
    ) -> ConfigRow:
        """Saves a version whole, under the next number, and returns it as stored."""
        name = name.strip()
        if not name or len(name) > 120:
            raise StoreError("A version needs a name of 1 to 120 characters.")
        row_id = new_id()
        heads = _head_rows(row_id, config)
        documents = (config.estimator.to_dict(), config.model, config.provenance, config.audit)
        with self._transaction() as cursor:
            largest = cursor.execute("SELECT coalesce(max(number), 0) FROM configs").fetchall()[0][0]
            values = [row_id, largest + 1, name, parent_id, run_id, note, config.tiles, *map(json.dumps, documents)]
            cursor.execute(f"INSERT INTO configs VALUES ({', '.join('?' * (len(values) + 1))})", [*values, now()])
            _insert(cursor, "config_heads", heads)
        stored = self.config(row_id)
        if stored is None:
            raise StoreError("The version was written but could not be read back, so treat it as not saved.")
        return stored

    def config(self, config_id: str) -> ConfigRow | None:
        """One version with all its heads. StoreError if it holds what this program cannot read."""
        rows = self._rows("SELECT * FROM configs WHERE reverse(id) = reverse(?)", [config_id])
        if not rows:
            return None
        row = rows[0]
        query = "SELECT layer, pattern, evidence FROM config_heads WHERE config_id = ? ORDER BY layer, head"
        try:
            config = HeadConfig(
                model=json.loads(row["model"]),
                provenance=json.loads(row["provenance"]),
                tiles=row["tiles"],
                estimator=Estimator.from_dict(json.loads(row["estimator"])),
                heads=_entries(self._rows(query, [config_id])),
                audit=json.loads(row["audit"]),
            )
        except (ConfigError, ValueError, TypeError) as error:
            raise StoreError(
                f"Version {row['number']} cannot be read by this headscope: another wrote it, or the row is damaged."
            ) from error
        beside = ("id", "number", "name", "parent_id", "run_id", "note", "created_at")
        return ConfigRow(**{field: row[field] for field in beside}, config=config)

    def configs(self) -> pl.DataFrame:
        """All versions without their heads, newest first: id, number, name, parent, heads, note, created_at."""
        query = """SELECT c.id, c.number, c.name, p.number AS parent, c.run_id, c.note, c.created_at,
                          (SELECT count(*) FROM config_heads h WHERE h.config_id = c.id) AS heads,
                          c.model ->> '$.name' AS model
                   FROM configs c LEFT JOIN configs p ON p.id = c.parent_id ORDER BY c.number DESC"""
        return self._frame(query)

    def put_draft(
        self, draft_id: str, sequence: int, body: dict[str, Any], edits: Sequence[dict[str, Any]] = ()
    ) -> None:
        """A draft whole: what it started from, and its edits. It takes the place of what was kept of it before."""
        with self._transaction() as cursor:
            cursor.execute("DELETE FROM drafts WHERE draft_id = ? AND sequence <> ?", [draft_id, sequence])
            cursor.execute(
                "INSERT INTO drafts VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [draft_id, sequence, json.dumps(body), now()],
            )
            _replace_edits(cursor, draft_id, sequence, 0, edits)

    def put_draft_edits(self, draft_id: str, sequence: int, position: int, edits: Sequence[dict[str, Any]]) -> None:
        """The edits of a stored draft from `position` on; those that were there go (undo, or another edit)."""
        with self._transaction() as cursor:
            _replace_edits(cursor, draft_id, sequence, position, edits)

    def draft(self, draft_id: str) -> DraftRow | None:
        """The newest state of a draft. Drafts of before format 4 hold their edits in the body."""
        query = "SELECT sequence, body FROM drafts WHERE draft_id = ? ORDER BY sequence DESC LIMIT 1"
        rows = self._rows(query, [draft_id])
        if not rows:
            return None
        query = "SELECT sequence, body FROM draft_edits WHERE draft_id = ? ORDER BY position"
        edits = self._rows(query, [draft_id])
        sequence = max(row["sequence"] for row in (*rows, *edits))
        return DraftRow(sequence, json.loads(rows[0]["body"]), tuple(json.loads(row["body"]) for row in edits))


def _insert(cursor: duckdb.DuckDBPyConnection, table: str, rows: pl.DataFrame) -> None:
    """Rows in bulk; the frame's columns are the table's, by name."""
    cursor.register("new_rows", rows.to_arrow())
    cursor.execute(f"INSERT INTO {table} BY NAME SELECT * FROM new_rows")
    cursor.unregister("new_rows")


def _replace_edits(
    cursor: duckdb.DuckDBPyConnection, draft_id: str, sequence: int, position: int, edits: Sequence[dict[str, Any]]
) -> None:
    cursor.execute("DELETE FROM draft_edits WHERE draft_id = ? AND position >= ?", [draft_id, position])
    for place, edit in enumerate(edits, start=position):
        values = [draft_id, place, sequence, json.dumps(edit), now()]
        cursor.execute("INSERT INTO draft_edits VALUES (?, ?, ?, ?, ?)", values)


def _head_rows(config_id: str, config: HeadConfig) -> pl.DataFrame:
    """A config's heads as rows of config_heads; a pattern that many heads have is written out once."""
    texts: dict[Pattern, str] = {}
    places = [(layer, head, entry) for layer, row in enumerate(config.heads) for head, entry in enumerate(row)]
    notes = [
        {name: note for name, note in (("evidence", entry.evidence), ("foreign", entry.foreign)) if note is not None}
        for _, _, entry in places
    ]
    return pl.DataFrame(
        {
            "config_id": [config_id] * len(places),
            "layer": [layer for layer, _, _ in places],
            "head": [head for _, head, _ in places],
            "pattern": [
                texts.get(entry.pattern) or texts.setdefault(entry.pattern, json.dumps(entry.pattern.to_dict()))
                for _, _, entry in places
            ],
            "evidence": [json.dumps(note) if note else None for note in notes],
        },
        schema_overrides={"evidence": pl.String},
    )


def _entries(rows: Sequence[dict[str, Any]]) -> tuple[tuple[HeadEntry, ...], ...]:
    """The heads of a config from rows in order of layer and head."""
    known: dict[str, Pattern] = {}
    layers: dict[int, list[HeadEntry]] = {}
    for row in rows:
        text = row["pattern"]
        if text not in known:
            known[text] = patterns.from_dict(json.loads(text))
        notes = {} if row["evidence"] is None else json.loads(row["evidence"])
        entry = HeadEntry(known[text], notes.get("evidence"), notes.get("foreign"))
        layers.setdefault(row["layer"], []).append(entry)
    return tuple(tuple(layers[layer]) for layer in sorted(layers))


NUMBERS = (
    "missed_mass_mean",
    "missed_mass_worst",
    "missed_mass_p99",
    "output_error",
    "requested_density",
    "computed_density",
)
"""Figures of a measurement that have columns of their own beside the body."""


def _insert_measurements(
    cursor: duckdb.DuckDBPyConnection, run_id: str, context: str, measurements: Sequence[dict[str, Any]]
) -> None:
    if not measurements:
        return
    many = len(measurements)
    columns: dict[str, Any] = {
        "run_id": [run_id] * many,
        "context": [context] * many,
        "layer": [body["layer"] for body in measurements],
        "head": [body["head"] for body in measurements],
        "pattern": [json.dumps(body["pattern"]) for body in measurements],
        "body": [json.dumps(body) for body in measurements],
        "measured_at": [now()] * many,
    }
    columns |= {name: [float(body[name]) for body in measurements] for name in NUMBERS}
    _insert(cursor, "head_measurements", pl.DataFrame(columns))


def _fields(run: RunRow) -> Iterator[Any]:
    for value in vars(run).values():
        yield json.dumps(value) if isinstance(value, dict) else value


def _run_row(row: dict[str, Any]) -> RunRow:
    return RunRow(**(row | {name: json.loads(row[name]) for name in ("estimator", "versions")}))

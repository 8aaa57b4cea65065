"""The studio's database: versions whole or absent, whatever happens to the process, the file or the disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from headscope.engine.attend.estimator import Estimator
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, VerticalSlash
from headscope.studio.base.errors import StoreCorrupt, StoreError, StoreLocked, StoreReadOnly, StoreTooNew
from headscope.studio.data.draft import uniform
from headscope.studio.lab.database import Database
from headscope.studio.lab.drafts import Drafts
from headscope.studio.store import opening
from headscope.studio.store.migrations import MIGRATIONS, VERSION
from headscope.studio.store.rows import ConfigRow, DraftRow, RunRow, new_id, now
from headscope.studio.store.store import Store

LAYERS, HEADS = 6, 4


def config(marker: int, layers: int = LAYERS, heads: int = HEADS) -> HeadConfig:
    entry = HeadEntry(AShape(marker, marker + 1), {"missed_mass_mean": marker / 1000})
    return HeadConfig({"name": "toy"}, {"made": "here"}, "tiles/1", Estimator(), ((entry,) * heads,) * layers)


def save(store: Store, marker: int, **more: Any) -> ConfigRow:
    return store.save_config(f"version {marker}", config(marker), **more)


def run_row(run_id: str = "") -> RunRow:
    return RunRow(
        id=run_id or new_id(),
        model="toy",
        fingerprint="f" * 64,
        prompt_sha256="a" * 64,
        tokens=128,
        chat_template=False,
        device="cpu",
        dtype="float32",
        impl="torch",
        tiles="tiles/1",
        estimator={"rows": 64},
        capture_ms=12.5,
        measure_ms=30.25,
        versions={"python": "3"},
        created_at=now(),
    )


def measurement(layer: int, head: int, missed: float) -> dict:
    return {
        "layer": layer,
        "head": head,
        "pattern": Dense().to_dict(),
        "missed_mass_mean": missed,
        "missed_mass_worst": 0.5,
        "missed_mass_p99": 0.4,
        "output_error": 0.1,
        "requested_density": 0.2,
        "computed_density": 0.3,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "studio.duckdb"


def test_a_version_comes_back_as_it_was_saved_after_reopening(path: Path) -> None:
    store = Store(path)
    first = save(store, 1)
    second = save(store, 2, parent_id=first.id, run_id="r", note="why")
    store.close()
    again = Store(path)
    assert again.config(second.id) == second
    assert second.config == config(2) and second.title == "v2 version 2"
    listed = again.configs()
    assert listed["number"].to_list() == [2, 1]
    assert listed["parent"].to_list() == [1, None]
    assert listed["heads"].to_list() == [LAYERS * HEADS] * 2
    again.close()


def test_a_name_is_needed_and_kept_as_plain_text(path: Path) -> None:
    store = Store(path)
    with pytest.raises(StoreError, match="needs a name"):
        store.save_config("   ", config(1))
    hostile = "<img src=x onerror=alert(1)>'); DROP TABLE configs; --"
    assert store.save_config(hostile, config(1)).name == hostile
    assert store.configs()["name"].to_list() == [hostile]


def test_runs_prompts_measurements_and_latencies_come_back(path: Path) -> None:
    store = Store(path)
    row = run_row()
    store.add_prompt("a" * 64, "code", "sample", "def f(): ...\n**bold** <b>")
    store.add_prompt("a" * 64, "another name", "pasted", "ignored: the hash is known")
    store.add_run(row, [measurement(0, 1, 0.25)])
    store.add_measurements(row.id, "isolated", [measurement(0, 1, 0.125)])
    store.add_latency(row.id, None, "ttft", 128, {"dense_ms": 1.5})
    assert store.run(row.id) == row
    assert store.runs() == [row]
    assert store.prompt("a" * 64)["text"] == "def f(): ...\n**bold** <b>"
    assert [body["missed_mass_mean"] for body in store.measurements(row.id)] == [0.25, 0.125]
    assert store.measurement_frame(row.id)["missed_mass_mean"].to_list() == [0.25, 0.125]
    assert store.latencies(row.id)[0]["body"] == {"dense_ms": 1.5}
    assert store.run("missing") is None and store.prompt("b" * 64) is None


def drafts(path: Path) -> Drafts:
    return Drafts(Database(path))


def test_a_draft_comes_back_with_its_edits_and_undo_survives_a_restart(path: Path) -> None:
    kept = drafts(path)
    draft = kept.keep(uniform("s-model", "start", VerticalSlash(64, 256), LAYERS, HEADS))
    for step, pattern in enumerate((Dense(), AShape(4, 32), BlockSparse(3))):
        draft = kept.keep(draft.edited(f"edit {step}", [(step, 1)], pattern))
    draft = kept.keep(draft.undone())
    draft = kept.keep(draft.onto("v1 calm", "id", draft.patterns, Estimator(rows=8)))
    kept._database.store.close()
    again = drafts(path)
    restored = again.get("s-model")
    assert restored == draft and restored.estimator == Estimator(rows=8)
    assert restored.title == "v1 calm" and restored.patterns[1][1] == AShape(4, 32)
    back = again.keep(again.keep(restored.undone()).undone())
    assert back.patterns[1][1] == VerticalSlash(64, 256) and back.estimator == Estimator()
    again._database.store.close()
    once_more = drafts(path)
    assert once_more.get("s-model").edits == back.edits
    cleared = once_more.keep(once_more.get("s-model").undone())
    once_more._database.store.close()
    assert drafts(path).get("s-model").edits == cleared.edits == ()


def test_what_an_edit_stores_does_not_grow_with_the_edits_before_it(path: Path) -> None:
    kept = drafts(path)
    draft = kept.keep(uniform("s-model", "start", VerticalSlash(64, 256), 30, 9))
    sizes = []
    for step in range(60):
        draft = kept.keep(draft.edited(f"edit {step}", [(step % 30, step % 9)], AShape(4, 10 + step)))
        sizes.append(stored_draft_bytes(kept._database.store))
    assert sizes[-1] - sizes[-2] < 1.2 * (sizes[2] - sizes[1])
    for _ in range(20):
        draft = kept.keep(draft.undone())
    assert stored_draft_bytes(kept._database.store) < sizes[45], "what was undone is kept for ever"


def stored_draft_bytes(store: Store) -> int:
    query = "SELECT coalesce(sum(strlen(body)), 0) AS size FROM {}"
    return sum(int(store._rows(query.format(table))[0]["size"]) for table in ("drafts", "draft_edits"))


def test_a_start_that_nobody_edited_takes_no_room(path: Path) -> None:
    kept = drafts(path)
    kept.keep(uniform("s-model", "start", Dense(), LAYERS, HEADS))
    assert kept._database.store.draft("s-model") is None


def test_drafts_of_before_edits_had_rows_are_read_pruned_and_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(opening, "MIGRATIONS", MIGRATIONS[:3])
        patch.setattr(opening, "VERSION", 3)
        store = Store(path)
        old = {
            "base_name": "start",
            "base_id": None,
            "patterns": [Dense().to_dict(), AShape(4, 32).to_dict()],
            "base": [[0, 0], [0, 0]],
        }
        edits = [
            {"label": f"edit {step}", "base": None, "changes": [[step, 1, 1]], "estimator": None} for step in (0, 1)
        ]
        for sequence in (1, 2):
            with store._transaction() as cursor:
                body = json.dumps(old | {"edits": edits[:sequence]})
                cursor.execute("INSERT INTO drafts VALUES (?, ?, ?, ?)", ["s-model", sequence, body, now()])
        store.close()
    kept = drafts(path)
    assert kept._database.store._rows("SELECT count(*) AS rows FROM drafts")[0]["rows"] == 1
    draft = kept.get("s-model")
    assert [edit.label for edit in draft.edits] == ["edit 0", "edit 1"] and draft.patterns[1][1] == AShape(4, 32)
    draft = kept.keep(draft.edited("edit 2", [(0, 0)], BlockSparse(2)))
    draft = kept.keep(draft.undone())
    draft = kept.keep(draft.undone())
    kept._database.store.close()
    assert drafts(path).get("s-model").edits == draft.edits == draft.edits[:1]


def test_each_older_format_is_brought_up_to_date_with_its_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for released in range(1, VERSION):
        old = path.with_name(f"old-{released}.duckdb")
        with monkeypatch.context() as patch:
            patch.setattr(opening, "MIGRATIONS", MIGRATIONS[:released])
            patch.setattr(opening, "VERSION", released)
            store = Store(old)
            kept = save(store, 7)
            store.close()
        store = Store(old)
        assert store.config(kept.id) == kept
        store.put_draft("d", 1, {"x": 1})
        assert store.draft("d") == DraftRow(1, {"x": 1}, ())
        store.close()


def test_runs_of_one_second_come_in_the_order_they_were_made(path: Path) -> None:
    store = Store(path)
    moment = now()
    rows = [replace(run_row(), created_at=moment) for _ in range(12)]
    for row in rows:
        store.add_run(row, [])
    assert store.runs() == rows[::-1]
    store.close()
    assert Store(path).runs(3) == rows[:-4:-1]


def test_a_copy_of_the_file_alone_holds_every_save(path: Path, tmp_path: Path) -> None:
    store = Store(path)
    row = run_row()
    store.add_run(row, [measurement(0, 1, 0.25)])
    saved = save(store, 1)
    store.put_draft("d", 1, {"x": 1})
    copy = tmp_path / "copy.duckdb"
    shutil.copy(path, copy)  # while the program runs, and without its log
    backup = Store(copy)
    assert backup.config(saved.id) == saved and backup.run(row.id) == row and backup.draft("d") is not None
    backup.close()
    store.close()
    assert not path.with_name(path.name + ".wal").exists()


def test_a_large_version_is_saved_in_bulk(path: Path) -> None:
    """126 layers of 128 heads, each with evidence of its own; row by row this takes 7 to 10 s."""
    store = Store(path)
    small = config(1)
    heads = tuple(
        tuple(HeadEntry(AShape(layer % 7, 64), {"missed_mass_mean": head / 1000}) for head in range(128))
        for layer in range(126)
    )
    began = time.perf_counter()
    row = store.save_config("large", replace(small, heads=heads))
    assert time.perf_counter() - began < 5
    assert row.config.heads == heads


def test_a_version_that_cannot_be_read_is_a_sentence_and_the_others_stay(path: Path) -> None:
    store = Store(path)
    first, second = save(store, 1), save(store, 2)
    with store._transaction() as cursor:
        cursor.execute('UPDATE config_heads SET pattern = \'{"pattern": "spiral"}\' WHERE config_id = ?', [first.id])
    with pytest.raises(StoreError, match="Version 1 cannot be read"):
        store.config(first.id)
    assert store.config(second.id) == second


def test_eight_threads_save_and_read_at_once(path: Path) -> None:
    store = Store(path)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for step in range(6):
                saved = save(store, thread * 10 + step)
                assert store.config(saved.id) == saved
                store.add_measurements("r", "isolated", [measurement(thread, step, 0.5)])
                store.configs()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(store.configs()["number"].to_list()) == list(range(1, 49))
    assert len(store.measurements("r")) == 48


def test_a_second_process_is_told_that_the_file_is_in_use(path: Path) -> None:
    store = Store(path)
    code = f"""
        from pathlib import Path
        from headscope.studio.store.store import Store
        from headscope.studio.base.errors import StoreLocked
        try:
            Store(Path({str(path)!r}))
        except StoreLocked as error:
            print(error)
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == (
        "Another headscope has studio.duckdb open: close it, or start this one on another file with --db."
    ), said.stderr
    save(store, 1)


def test_a_newer_format_is_refused_and_left_as_it_is(path: Path) -> None:
    Store(path).close()
    with duckdb.connect(str(path)) as connection:
        connection.execute("INSERT INTO migrations VALUES (?, now())", [VERSION + 1])
    before = path.read_bytes()
    with pytest.raises(StoreTooNew, match=f"format {VERSION + 1}, this one reads up to {VERSION}"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all" * 400, b"", b"\0" * 20_000])
def test_a_damaged_file_is_named_and_never_overwritten(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="damaged or is no headscope database"):
        Store(path)
    assert path.read_bytes() == content


def test_somebody_elses_database_is_left_alone(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE theirs (x INTEGER)")
    with pytest.raises(StoreCorrupt, match="belongs to another program"):
        Store(path)
    with duckdb.connect(str(path)) as connection:
        assert connection.execute("SELECT table_name FROM duckdb_tables()").fetchall() == [("theirs",)]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreReadOnly, match="cannot be made"):
        Store(tmp_path / "file" / "deeper" / "studio.duckdb")


def test_a_read_only_file_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise duckdb.IOException('IO Error: Cannot open file "x": Permission denied')

    monkeypatch.setattr(duckdb, "connect", refuse)
    with pytest.raises(StoreReadOnly, match="make it writable"):
        Store(path)


def test_a_damaged_block_is_damage_and_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise duckdb.IOException("IO Error: Corrupt database file: computed checksum of block 3 does not match")

    monkeypatch.setattr(duckdb, "connect", refuse)
    with pytest.raises(StoreCorrupt, match="is damaged"):
        Store(path)


def test_a_full_disk_while_saving_loses_no_version_and_the_next_save_works(tmp_path: Path) -> None:
    """The limit on file size stands in for a full disk: writes beyond it fail in the middle of the save."""
    code = f"""
        import random, resource, signal
        from dataclasses import replace
        from pathlib import Path
        from headscope.engine.attend.estimator import Estimator
        from headscope.engine.config.file import HeadConfig, HeadEntry
        from headscope.engine.patterns.families import Dense
        from headscope.studio.base.errors import StoreError
        from headscope.studio.store.store import Store
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = Path({str(tmp_path)!r}) / "studio.duckdb"
        store = Store(path)
        def config(entry, layers, heads):
            return HeadConfig({{}}, {{}}, "tiles/1", Estimator(), ((entry,) * heads,) * layers)
        small = config(HeadEntry(Dense()), 3, 4)
        first = store.save_config("first", small)
        used = max(p.stat().st_size for p in path.parent.iterdir())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (used + 20_000, hard))
        noise = random.Random(0)
        notes = lambda: {{"note": "".join(noise.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=3000))}}
        large = replace(small, heads=tuple(tuple(HeadEntry(Dense(), notes()) for _ in range(40)) for _ in range(40)))
        try:
            store.save_config("too large", large)
            print("saved")
        except StoreError as error:
            print("refused:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        second = store.save_config("second", small)
        print(store.configs()["name"].to_list(), store.config(first.id) == first)
        store.close()
        print(Store(path).configs()["name"].to_list())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=180)
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert lines[0].startswith("refused:") and "nothing was" in lines[0]
    assert lines[1:] == ["['second', 'first'] True", "['second', 'first']"]


@pytest.mark.slow
def test_fifty_kills_in_mid_save_leave_each_version_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "studio.duckdb"
    code = f"""
        import sys
        from pathlib import Path
        from headscope.engine.attend.estimator import Estimator
        from headscope.engine.config.file import HeadConfig, HeadEntry
        from headscope.engine.patterns.families import AShape
        from headscope.studio.store.store import Store
        store = Store(Path({str(path)!r}))
        print("open", flush=True)
        for marker in range(10_000):
            entry = HeadEntry(AShape(marker, 1), {{"m": marker}})
            config = HeadConfig({{}}, {{}}, "tiles/1", Estimator(), ((entry,) * 9,) * 30)
            print("begin", flush=True)
            saved = store.save_config(f"version {{marker}}", config)
            print("saved", saved.id, flush=True)
    """
    promised: set[str] = set()
    begun = 0
    for attempt in range(50):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert child.stdout is not None
        while child.stdout.readline().strip() != "begin":
            assert child.poll() is None
        time.sleep((attempt % 10) * 0.012)
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().splitlines()
        child.wait()
        begun += 1
        promised |= {line.split()[1] for line in rest if line.startswith("saved ") and len(line.split()[1]) == 12}
    store = Store(path)
    listed = store.configs()
    assert begun == 50
    assert promised <= set(listed["id"].to_list()), "a version that was reported as saved is gone"
    assert set(listed["heads"].to_list()) <= {270}, "a version is there in part"
    for row_id in listed["id"].to_list():
        row = store.config(row_id)
        markers = {entry.evidence["m"] for line in row.config.heads for entry in line}
        assert len(markers) == 1 and row.name == f"version {markers.pop()}"


def test_the_memory_store_behaves_alike() -> None:
    store = Store(None)
    row = store.config(save(store, 3).id)
    assert row is not None and row.config.patterns(0)[0] == AShape(3, 4)


def test_locked_errors_are_store_errors() -> None:
    assert issubclass(StoreLocked, StoreError)


def test_a_database_that_cannot_be_read_is_a_sentence() -> None:
    store = Store(None)
    store.close()
    for read in (store.configs, store.runs, lambda: store.search_rows("x"), lambda: store.measurement_frame("x")):
        with pytest.raises(StoreError, match="could not be read"):
            read()

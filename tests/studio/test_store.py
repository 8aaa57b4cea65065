"""The studio's database: versions whole or absent, whatever happens to the process, the file or the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import duckdb
import pytest

from headscope.engine.patterns.families import AShape, BlockSparse, Dense, VerticalSlash, from_dict
from headscope.studio.base.errors import StoreCorrupt, StoreError, StoreLocked, StoreReadOnly, StoreTooNew
from headscope.studio.store import store as store_module
from headscope.studio.store.migrations import MIGRATIONS, VERSION
from headscope.studio.store.store import ConfigRow, RunRow, Store, new_id, now
from headscope.studio.work.draft import Draft, uniform

LAYERS, HEADS = 6, 4
COMMON = {
    "tiles": "tiles/1",
    "estimator": {"rows": 64},
    "model": {"name": "toy"},
    "provenance": {"made": "here"},
    "audit": {},
}


def heads(marker: int) -> list[list[tuple[dict, dict | None]]]:
    pattern = AShape(marker, marker + 1).to_dict()
    return [[(pattern, {"missed_mass_mean": marker / 1000}) for _ in range(HEADS)] for _ in range(LAYERS)]


def save(store: Store, marker: int, **more: object) -> ConfigRow:
    return store.save_config(f"version {marker}", heads(marker), **COMMON, **more)


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
    assert second.heads[3][2] == (AShape(2, 3).to_dict(), {"missed_mass_mean": 0.002})
    listed = again.configs()
    assert listed["number"].to_list() == [2, 1]
    assert listed["parent"].to_list() == [1, None]
    assert listed["heads"].to_list() == [LAYERS * HEADS] * 2
    again.close()


def test_a_name_is_needed_and_kept_as_plain_text(path: Path) -> None:
    store = Store(path)
    with pytest.raises(StoreError, match="needs a name"):
        store.save_config("   ", heads(1), **COMMON)
    hostile = "<img src=x onerror=alert(1)>'); DROP TABLE configs; --"
    assert store.save_config(hostile, heads(1), **COMMON).name == hostile
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


def test_drafts_keep_every_state_and_give_back_the_latest(path: Path) -> None:
    store = Store(path)
    draft = uniform("s-model", "start", VerticalSlash(64, 256), LAYERS, HEADS)
    for step, pattern in enumerate((Dense(), AShape(4, 32), BlockSparse(3))):
        draft = draft.edited(f"edit {step}", [(step, 1)], pattern)
        store.add_draft(draft.id, draft.sequence, draft.to_dict())
    store.close()
    sequence, body = Store(path).draft("s-model")
    found = Draft.from_dict("s-model", sequence, body)
    assert found == draft
    assert found.patterns[1][1] == AShape(4, 32)
    assert found.undone().patterns[2][1] == VerticalSlash(64, 256)
    assert [from_dict(pattern.to_dict()) for row in found.patterns for pattern in row] == [
        pattern for row in draft.patterns for pattern in row
    ]


def test_each_older_format_is_brought_up_to_date_with_its_data(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for released in range(1, VERSION):
        old = path.with_name(f"old-{released}.duckdb")
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "MIGRATIONS", MIGRATIONS[:released])
            patch.setattr(store_module, "VERSION", released)
            store = Store(old)
            kept = save(store, 7)
            store.close()
        store = Store(old)
        assert store.config(kept.id) == kept
        store.add_draft("d", 1, {"x": 1})
        assert store.draft("d") == (1, {"x": 1})
        store.close()


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


def test_a_full_disk_while_saving_loses_no_version_and_the_next_save_works(tmp_path: Path) -> None:
    """The limit on file size stands in for a full disk: writes beyond it fail in the middle of the save."""
    code = f"""
        import resource, signal
        from pathlib import Path
        from headscope.studio.base.errors import StoreError
        from headscope.studio.store.store import Store
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = Path({str(tmp_path)!r}) / "studio.duckdb"
        store = Store(path)
        common = dict(tiles="tiles/1", estimator={{}}, model={{}}, provenance={{}}, audit={{}})
        small = [[({{"pattern": "dense"}}, None)] * 4] * 3
        first = store.save_config("first", small, **common)
        used = max(p.stat().st_size for p in path.parent.iterdir())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (used + 20_000, hard))
        large = [[({{"pattern": "dense"}}, {{"note": "x" * 3000}})] * 40] * 40
        try:
            store.save_config("too large", large, **common)
            print("saved")
        except StoreError as error:
            print("refused:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        second = store.save_config("second", small, **common)
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
        from headscope.studio.store.store import Store
        store = Store(Path({str(path)!r}))
        common = dict(tiles="tiles/1", estimator={{}}, model={{}}, provenance={{}}, audit={{}})
        print("open", flush=True)
        for marker in range(10_000):
            heads = [[({{"pattern": "a-shape", "sink": marker, "window": 1}}, {{"m": marker}})] * 9] * 30
            print("begin", flush=True)
            saved = store.save_config(f"version {{marker}}", heads, **common)
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
        markers = {evidence["m"] for line in row.heads for _, evidence in line}
        assert len(markers) == 1 and row.name == f"version {markers.pop()}"


def test_the_memory_store_behaves_alike() -> None:
    store = Store(None)
    assert store.config(save(store, 3).id).heads[0][0][0] == AShape(3, 4).to_dict()


def test_locked_errors_are_store_errors() -> None:
    assert issubclass(StoreLocked, StoreError)


def test_a_database_that_cannot_be_read_is_a_sentence() -> None:
    store = Store(None)
    store.close()
    for read in (store.configs, store.runs, lambda: store.search_rows("x"), lambda: store.measurement_frame("x")):
        with pytest.raises(StoreError, match="could not be read"):
            read()

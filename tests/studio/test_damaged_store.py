"""A damaged database: one sentence, the rest goes on, nothing that was readable is lost."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest

from headscope.engine.cli import main as cli
from headscope.engine.model.load import LoadedModel
from headscope.studio.base.errors import StoreCorrupt, StoreError
from headscope.studio.lab.database import Database
from headscope.studio.store.log import log_of
from headscope.studio.store.places import place_problem
from headscope.studio.store.salvage import back_up
from headscope.studio.store.store import Store
from tests.helpers.studio_pages import page, shown
from tests.helpers.studio_toy import make_lab, toy
from tests.studio.test_store import measurement, run_row, save

FILED, LOGGED = 6, 3
"""Versions in the file, and in the log alone."""

BLOCK = 256 * 2**10
BLOCKS_FROM = 3 * 4096


@dataclass(frozen=True)
class Killed:
    """What a studio leaves that was killed: a file, and a log with more."""

    file: bytes
    log: bytes

    def put(self, path: Path, file: bytes | None = None, log: bytes | None = None) -> Path:
        for old in path.parent.glob(path.name + "*"):
            old.unlink()
        path.write_bytes(self.file if file is None else file)
        log_of(path).write_bytes(self.log if log is None else log)
        return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    path = tmp_path_factory.mktemp("killed") / "studio.duckdb"
    store = Store(path)
    for marker in range(FILED):
        save(store, marker)
    store.add_prompt("a" * 64, "code", "sample", "some text")
    store.add_run(run_row(), [measurement(layer, head, 0.25) for layer in range(6) for head in range(4)])
    store._checkpoint = lambda: None  # type: ignore[method-assign]
    for marker in range(FILED, FILED + LOGGED):
        save(store, marker)
    found = Killed(path.read_bytes(), log_of(path).read_bytes())
    store._connection.close()
    return found


def flipped(content: bytes, position: int, bits: int = 0x41) -> bytes:
    return content[:position] + bytes([content[position] ^ bits]) + content[position + 1 :]


def asides(path: Path) -> list[Path]:
    return sorted(path.parent.glob(path.name + ".wal.damaged-*"))


def damaged_block(killed: Killed, table: str, path: Path) -> bytes:
    """The file with a damaged block of a table, which no other table lies in."""
    with duckdb.connect(str(killed.put(path, log=b""))) as connection:
        query = f"SELECT DISTINCT block_id FROM pragma_storage_info('{table}') WHERE block_id >= 0"
        block = connection.execute(query).fetchall()[0][0]
    return flipped(killed.file, BLOCKS_FROM + block * BLOCK + 100)


def test_a_whole_log_is_read_in_silence(killed: Killed, tmp_path: Path) -> None:
    store = Store(killed.put(tmp_path / "studio.duckdb"))
    assert len(store.configs()) == FILED + LOGGED and not store.notice and not asides(store.path or tmp_path)
    store.close()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.99])
def test_a_damaged_log_is_set_aside_and_what_stands_before_the_damage_is_kept(
    killed: Killed, tmp_path: Path, place: float
) -> None:
    log = flipped(killed.log, int(len(killed.log) * place))
    path = killed.put(tmp_path / "studio.duckdb", log=log)
    store = Store(path)
    versions = len(store.configs())
    assert versions == FILED + int(place * LOGGED)
    assert f"{versions} versions, 1 runs" in store.notice and "studio.duckdb.wal.damaged-1" in store.notice
    assert [aside.read_bytes() for aside in asides(path)] == [log]
    assert save(store, 50).number == versions + 1
    store.close()
    again = Store(path)
    assert len(again.configs()) == versions + 1 and not again.notice
    again.close()


@pytest.mark.parametrize("change", ["head", "length", "noise", "short"])
def test_a_log_that_duckdb_drops_without_a_word_is_kept(killed: Killed, tmp_path: Path, change: str) -> None:
    log = {
        "head": flipped(killed.log, 6),
        "length": flipped(killed.log, 47),
        "noise": bytes(range(256)) * 8,
        "short": killed.log[:-10],
    }[change]
    path = killed.put(tmp_path / "studio.duckdb", log=log)
    store = Store(path)
    assert len(store.configs()) >= FILED and "could not be taken in whole" in store.notice
    assert asides(path)[0].read_bytes() == log
    store.close()


def test_a_second_damaged_log_never_takes_the_place_of_the_first(killed: Killed, tmp_path: Path) -> None:
    path = killed.put(tmp_path / "studio.duckdb", log=flipped(killed.log, 2000))
    path.with_name("studio.duckdb.wal.damaged-1").write_text("an earlier one")
    Store(path).close()
    assert asides(path)[0].read_text() == "an earlier one" and len(asides(path)) == 2


def test_a_damaged_file_keeps_its_log_where_it_is(killed: Killed, tmp_path: Path) -> None:
    log = flipped(killed.log, 2000)
    path = killed.put(tmp_path / "studio.duckdb", file=flipped(killed.file, BLOCKS_FROM + 50), log=log)
    with pytest.raises(StoreCorrupt, match="is damaged"):
        Store(path)
    assert log_of(path).read_bytes() == log and not asides(path)


def test_a_damaged_block_costs_its_table_only_and_a_backup_holds_the_rest(killed: Killed, tmp_path: Path) -> None:
    path = tmp_path / "studio.duckdb"
    killed.put(path, file=damaged_block(killed, "head_measurements", path), log=b"")
    store = Store(path)
    assert "studio.duckdb is damaged" in store.damage and "head measurements" in store.damage
    run = store.runs()[0]
    assert store.measurements(run.id) == [] and store.measurement_frame(run.id).is_empty()
    assert len(store.configs()) == FILED
    store.close()
    backup = back_up(path, tmp_path / "backup.duckdb")
    assert backup.lost == {"head_measurements": 24} and backup.rows["configs"] == FILED
    copy = Store(tmp_path / "backup.duckdb")
    assert not copy.damage and copy.runs() == [run] and copy.config(copy.configs()["id"][0]) is not None
    copy.close()


def test_a_large_table_loses_only_its_damaged_part(tmp_path: Path) -> None:
    path = tmp_path / "studio.duckdb"
    store = Store(path)
    with store._transaction() as cursor:
        made = "md5(x::VARCHAR), 'n', 'k', md5(random()::VARCHAR), now()"
        cursor.execute(f"INSERT INTO prompts SELECT {made} FROM range(300000) numbers(x)")
    store.close()
    with duckdb.connect(str(path)) as connection:
        query = "SELECT max(block_id) FROM pragma_storage_info('prompts') WHERE column_name = 'text' AND block_id >= 0"
        block = connection.execute(query).fetchall()[0][0]
    path.write_bytes(flipped(path.read_bytes(), BLOCKS_FROM + block * BLOCK + 100))
    backup = back_up(path, tmp_path / "backup.duckdb")
    assert 0 < backup.lost["prompts"] < 30_000
    assert backup.rows["prompts"] + backup.lost["prompts"] == 300_000


def test_a_damaged_index_hides_no_row_and_a_save_says_what_to_do(killed: Killed, tmp_path: Path) -> None:
    path = killed.put(tmp_path / "studio.duckdb", log=b"")
    with duckdb.connect(str(path)) as connection:
        used = set()
        for (table,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall():
            query = f"SELECT DISTINCT block_id FROM pragma_storage_info('{table}')"
            used |= {row[0] for row in connection.execute(query).fetchall()}
    others = [block for block in range((len(killed.file) - BLOCKS_FROM) // BLOCK) if block not in used]
    hidden = 0
    for block in others:
        killed.put(path, file=flipped(killed.file, BLOCKS_FROM + block * BLOCK + 100), log=b"")
        try:
            store = Store(path)
        except StoreCorrupt:
            continue
        assert len(store.configs()) == FILED and all(store.config(row) for row in store.configs()["id"])
        try:
            save(store, 50)
        except StoreError as error:
            hidden += 1
            assert "The database is damaged, so nothing was saved" in str(error)
        store._connection.close()
    assert hidden, "no block of an index was found"


@pytest.mark.parametrize("table", ["runs", "configs", "head_measurements", "prompts"])
@pytest.mark.parametrize("name", ["heads", "configs"])
def test_a_page_on_a_damaged_database_says_so_once_and_goes_on(
    killed: Killed, tmp_path: Path, tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, table: str, name: str
) -> None:
    path = tmp_path / "studio.duckdb"
    killed.put(path, file=damaged_block(killed, table, path), log=b"")
    lab = make_lab(toy(tiny_llama), tmp_path, monkeypatch, path)
    drawn = page(name)
    assert not drawn.exception
    assert shown(drawn).count("is damaged, and a part of it") == 1
    lab.close()


def test_a_notice_stays_until_it_is_put_away(
    killed: Killed, tmp_path: Path, tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed.put(tmp_path / "studio.duckdb", log=flipped(killed.log, 2000))
    path.with_name("studio.duckdb.running").write_text("1")
    lab = make_lab(toy(tiny_llama), tmp_path, monkeypatch, path)
    assert "ended without closing" in shown(page("configs")) and "could not be taken in whole" in shown(page("configs"))
    drawn = page("configs")
    drawn.button(key="notices-read").click().run()
    assert "could not be taken in whole" not in shown(drawn) and not lab.notices
    lab.close()


def test_a_studio_that_was_killed_is_said_at_the_next_start_only(tmp_path: Path) -> None:
    path = tmp_path / "studio.duckdb"
    code = f"""
        import os
        from pathlib import Path
        from headscope.studio.lab.database import Database
        Database(Path({str(path)!r}))
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=120)
    database = Database(path)
    assert len(database.notices) == 1 and "it was killed" in database.notices[0]
    database.close()
    database = Database(path)
    assert not database.notices
    database.close()
    assert [each.name for each in tmp_path.iterdir()] == ["studio.duckdb"]


def test_a_folder_and_memory_are_no_places_for_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StoreError, match="is a folder: give a file, such as"):
        Store(tmp_path)
    for name in (":memory:", ":memory:mine"):
        with pytest.raises(StoreError, match="would keep nothing"):
            Store(Path(name))
        monkeypatch.setenv("HEADSCOPE_DB", name)
        assert "would keep nothing" in command(capsys, 2)
        assert "would keep nothing" in command(capsys, 2, "--db", name)
    assert "is a folder" in command(capsys, 2, "--db", str(tmp_path))
    assert "cannot name a file" in place_problem(Path("a" * 300))


def test_a_name_never_leads_to_a_place_on_the_internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store(Path("md:mine")).close()
    assert (tmp_path / "md:mine").is_file()


def test_the_database_and_its_log_are_for_their_owner_only(killed: Killed, tmp_path: Path) -> None:
    path = killed.put(tmp_path / "studio.duckdb")
    store = Store(path)
    assert path.stat().st_mode & 0o777 == 0o600 and log_of(path).stat().st_mode & 0o777 == 0o600
    store.close()
    Store(tmp_path / "fresh" / "studio.duckdb").close()
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o700


def command(capsys: pytest.CaptureFixture[str], code: int, *options: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main(["studio", *options])
    shown = capsys.readouterr()
    assert left.value.code in (code, code or None), shown
    return shown.out + shown.err


def test_the_backup_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "studio.duckdb", tmp_path / "copy.duckdb"
    options = ("--db", str(path), "--backup", str(copy))
    assert "There is no database" in command(capsys, 1, *options)
    store = Store(path)
    saved = save(store, 1)
    store.close()
    assert command(capsys, 0, *options) == f"Wrote {copy}: 1 versions, 0 runs, 0 searches.\n"
    assert copy.stat().st_mode & 0o777 == 0o600
    again = Store(copy)
    assert again.config(saved.id) == saved
    again.close()
    assert "is there already" in command(capsys, 1, *options)


def test_a_backup_while_a_studio_runs_says_so(tmp_path: Path) -> None:
    path = tmp_path / "studio.duckdb"
    store = Store(path)
    arguments = ["-m", "headscope.engine.cli.main", "studio", "--db", str(path), "--backup", str(tmp_path / "copy")]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == f"A studio has {path} open: end it, then back it up.\n"
    store.close()
    assert [each.name for each in tmp_path.iterdir()] == ["studio.duckdb"]


@pytest.mark.slow
def test_three_hundred_damaged_databases_lose_nothing_that_was_readable(
    killed: Killed, tmp_path: Path, tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third each: damage of the first 12 KiB, of a block, of the log. Every tenth is opened by a page too."""
    noise = random.Random(0)
    endings: Counter[str] = Counter()
    for case in range(300):
        file, log = killed.file, killed.log
        kind = ("head", "block", "log")[case % 3]
        if kind == "log":
            log = flipped(log, noise.randrange(len(log)), noise.randrange(1, 256))
            log = log if noise.random() < 0.7 else log[: noise.randrange(len(log))]
        else:
            places = range(BLOCKS_FROM) if kind == "head" else range(BLOCKS_FROM, len(file))
            for _ in range(1 if kind == "head" else noise.randrange(1, 5)):
                file = flipped(file, noise.choice(places), noise.randrange(1, 256))
        path = killed.put(tmp_path / "studio.duckdb", file, log)
        try:
            store = Store(path)
        except StoreCorrupt:
            assert path.read_bytes() == file and log_of(path).read_bytes() == log, "a file that was refused was changed"
            ending = "refused"
        else:
            versions = len(store.configs())
            ending = "damage said" if store.damage else "log set aside" if store.notice else "whole"
            if not store.damage:
                assert versions >= FILED, f"case {case}: versions of the file are gone"
                assert versions == FILED + LOGGED or asides(path)[0].read_bytes() == log, f"case {case}: a log is gone"
                assert all(store.config(row) is not None for row in store.configs()["id"]), (
                    f"case {case}: {store.damage}"
                )
            store.close()
        endings[f"{kind}: {ending}"] += 1
        if case % 10 == 0:
            shutil.rmtree(tmp_path / "page", ignore_errors=True)
            (tmp_path / "page").mkdir()
            path = killed.put(tmp_path / "page" / "studio.duckdb", file, log)
            lab = make_lab(toy(tiny_llama), tmp_path / "page", monkeypatch, path)
            drawn = page("configs" if case % 20 else "heads")
            assert not drawn.exception, f"case {case}"
            assert lab.problem or lab.notices or ending == "whole", f"case {case}: nothing is said"
            lab.close()
    print(dict(endings))
    assert endings["log: log set aside"] and endings["block: damage said"] and endings["head: refused"]

"""Files are written whole or not at all, and hostile JSON ends in one sentence."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError, PromptError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "config.json"
    files.write_atomic(target, "first")
    files.write_atomic(target, "zweite Fassung: äöü")
    assert target.read_text("utf-8") == "zweite Fassung: äöü"
    assert names(target.parent) == ["config.json"]


def test_write_keeps_the_mode_of_an_old_file_and_follows_a_link(tmp_path: Path) -> None:
    target = tmp_path / "config.json"
    target.write_text("old")
    target.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    files.write_atomic(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    target = tmp_path / "config.json"
    target.write_text("old")

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(ConfigError) as caught:
        files.write_atomic(target, "new")
    if code != errno.EIO:
        assert "disk is full" in str(caught.value)
    assert target.read_text() == "old" and names(tmp_path) == ["config.json"]


def test_an_interrupt_in_the_middle_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "config.json"
    target.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(target, "new")
    assert target.read_text() == "old" and names(tmp_path) == ["config.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_is_written_and_never_replaced() -> None:
    with pytest.raises(ConfigError, match="disk is full"):
        files.write_atomic("/dev/full", "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_places_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a folder"):
        files.write_atomic(tmp_path, "x")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        files.write_atomic(tmp_path / "file" / "config.json", "x")
    with pytest.raises(ConfigError, match="too long"):
        files.write_atomic(tmp_path / ("x" * 300), "x")
    with pytest.raises(ConfigError):
        files.write_atomic("a\0b", "x")


HOSTILE = {
    "empty": b"",
    "nan": b'{"a": NaN}',
    "infinity": b"[-Infinity]",
    "overflow": b"[1e999]",
    "endless integer": b"[" + b"9" * 10_000 + b"]",
    "21 digits": b"[123456789012345678901]",
    "duplicate": b'{"a": 1, "a": 2}',
    "duplicate inside": b'[{"b": {"a": 1, "a": 1}}]',
    "deep list": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and closed": b"[" * 900 + b"]" * 900,
    "seventeen deep": b"[" * 18 + b"]" * 18,
    "latin-1": '{"a": "ü"}'.encode("latin-1"),
    "zero bytes": b"\x00\x00\x00",
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "surrogate": b'["\\ud800"]',
    "surrogate key": b'{"\\udfff": 1}',
    "trailing": b"{} {}",
    "cut off": b'{"a": [1, 2',
    "comment": b'{"a": 1} // note',
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_json_is_one_sentence(raw: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        files.parse_json(raw, "c.json")
    message = str(caught.value)
    assert message.startswith("c.json: ") and message.endswith(".")
    assert "\n" not in message and len(message) < 300


def test_good_json_passes_and_errors_take_the_callers_class() -> None:
    assert files.parse_json(b'\xef\xbb\xbf{"a": [1, -2.5e3, true, null, "\xc3\xbc"]}', "x") == {
        "a": [1, -2500.0, True, None, "ü"]
    }
    with pytest.raises(PromptError):
        files.parse_json(b"[", "x", PromptError)


def test_a_hundred_megabytes_are_refused_without_reading_them(tmp_path: Path) -> None:
    big = tmp_path / "big.json"
    with big.open("wb") as out:
        out.truncate(100 * 2**20)
    with pytest.raises(ConfigError, match="larger than 32 MiB"):
        files.read_json(big)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json", Path("/dev/null"), Path("a\0b")):
        with pytest.raises(ConfigError):
            files.read_json(path)


def test_plain_makes_json_types_and_refuses_what_json_cannot_hold() -> None:
    numpy = pytest.importorskip("numpy")
    made = files.plain({"a": (1, numpy.int64(2)), "b": numpy.float32(0.5)})
    assert made == {"a": [1, 2], "b": 0.5} and type(made["a"][1]) is int and type(made["b"]) is float
    circle: list[object] = []
    circle.append(circle)
    for value in (float("nan"), {1: 2}, {"a": {3}}, b"bytes", 10**30, circle):
        with pytest.raises(ValueError):
            files.plain(value)


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not an ordinary file"):
        files.read_json(tmp_path / "pipe")


def test_a_place_is_checked_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "file", tmp_path / "new" / "folder" / "x.json", Path("/dev/null")):
        files.check_writable(path)
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"
    for path in (tmp_path, tmp_path / "file" / "x.json", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(ConfigError) as checked:
            files.check_writable(path)
        with pytest.raises(ConfigError) as written:
            files.write_atomic(path, "x")
        assert str(checked.value) == str(written.value) and checked.value.exit_code == 1


def test_text_that_no_file_can_hold_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Could not save"):
        files.write_atomic(tmp_path / "x", "\udce9")
    assert files.printable("caf\udce9.txt") == "caf\\udce9.txt" and files.printable("café") == "café"

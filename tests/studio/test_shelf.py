"""Captures on disk: room is found before anything goes, what is open stays, and the latest used stays longest."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import CaptureError
from headscope.engine.runs.capture import Capture
from headscope.studio.lab import leftovers
from headscope.studio.lab import shelf as shelf_module
from headscope.studio.lab.shelf import Shelf, default_budget

TOKENS = 64


def capture(seed: int = 0) -> Capture:
    torch.manual_seed(seed)
    made = Capture(torch.arange(TOKENS)[None], None, "toy", "f" * 64)
    q, k, v = (torch.randn(1, heads, TOKENS, 16) for heads in (4, 2, 2))
    made._put(0, LayerInputs(q, k, v, 0.25), {"host": 2**30})
    return made


SIZE = 8 * TOKENS * 16 * 4


def filled(folder: Path, budget: int, names: str = "abc") -> Shelf:
    shelf = Shelf(folder, 2**30)
    for age, name in enumerate(names):
        assert shelf.put(name, capture(age), SIZE)
        os.utime(shelf.path(name), (1000 + age, 1000 + age))
    return Shelf(folder, budget)


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shelf_module.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))


def test_a_full_disk_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = filled(tmp_path, budget=int(3.5 * SIZE) + 3000)
    disk(monkeypatch, 0)
    assert not shelf.put("d", capture(9), 20 * SIZE), "larger than the budget"
    assert not Shelf(tmp_path, 2**30).put("d", capture(9), 20 * SIZE), "larger than the disk with everything gone"
    assert all(shelf.has(name) for name in "abc")


def test_a_save_that_fails_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = filled(tmp_path, budget=int(3.5 * SIZE) + 3000)

    def fail(*_: object) -> None:
        raise CaptureError("could not write")

    new = capture(9)
    monkeypatch.setattr(new, "save", fail)
    assert not shelf.put("d", new, SIZE)
    assert all(shelf.has(name) for name in "abc") and not shelf.has("d")
    assert not shelf.put("a", new, SIZE) and shelf.has("a"), "a run's own capture stays until another is whole"


def test_a_run_that_is_stored_again_does_not_give_way_to_itself(tmp_path: Path) -> None:
    shelf = filled(tmp_path, budget=int(3.5 * SIZE) + 3000)
    assert shelf.put("a", capture(9), SIZE)
    assert shelf.load("a").layer(0).q.shape == (1, 4, TOKENS, 16) and not shelf.has("b")


def test_the_one_not_used_for_longest_goes_and_never_one_in_use(tmp_path: Path) -> None:
    shelf = filled(tmp_path, budget=int(3.5 * SIZE) + 3000)
    shelf.touch("a")
    assert shelf.put("d", capture(9), SIZE, in_use=("b",))
    assert [shelf.has(name) for name in "abcd"] == [True, True, False, True]
    assert shelf.load("b").layer(0).q.shape == (1, 4, TOKENS, 16)
    assert not shelf.put("e", capture(9), 3 * SIZE, in_use=("a", "b", "d"))
    assert [shelf.has(name) for name in "abde"] == [True, True, True, False]


def test_a_disk_that_is_short_gets_room_from_what_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = filled(tmp_path, budget=2**30)
    disk(monkeypatch, SIZE // 2)
    assert shelf.put("d", capture(9), SIZE)
    assert [shelf.has(name) for name in "abcd"] == [False, True, True, True]


@pytest.mark.parametrize(("said", "gib"), [("2", 2.0), ("inf", 4.0), ("nan", 4.0), ("-1", 0.0), ("much", 4.0)])
def test_the_budget_of_the_environment(said: str, gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_CAPTURE_GIB", said)
    assert default_budget() == int(gib * 2**30)


def test_half_captures_are_swept_unless_another_process_uses_the_folder(tmp_path: Path) -> None:
    shelf = filled(tmp_path, budget=2**30)
    (tmp_path / ".headscope-half").mkdir()
    (tmp_path / ".headscope-half" / "layer-0000.safetensors").write_bytes(b"x" * 100)
    shelf.path("a").rename(tmp_path / ".headscope-a.replaced")
    other = (tmp_path / ".lock").open("ab")
    fcntl.flock(other, fcntl.LOCK_SH)
    held = leftovers.hold(tmp_path)
    assert held is not None and (tmp_path / ".headscope-half").exists()
    held.close()
    other.close()
    held = leftovers.hold(tmp_path)
    assert held is not None and not list(tmp_path.glob(".headscope-*"))
    assert all(shelf.has(name) for name in "abc"), "a capture that had stepped aside is gone"
    assert leftovers.hold(tmp_path / "none") is None
    held.close()


def test_what_is_half_written_is_no_capture_to_count_or_to_drop(tmp_path: Path) -> None:
    shelf = filled(tmp_path, budget=2**30)
    used = shelf.used()
    (tmp_path / ".headscope-half").mkdir()
    (tmp_path / ".headscope-half" / "layer").write_bytes(b"x" * 100)
    assert shelf.used() == used


def test_captures_are_for_their_owner_only(tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir(mode=0o755)
    filled(tmp_path / "captures", budget=2**30)
    assert (tmp_path / "captures").stat().st_mode & 0o777 == 0o700

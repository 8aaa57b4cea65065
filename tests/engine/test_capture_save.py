"""Saving a capture over an earlier one: at every moment, one of the two is whole on disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import CaptureError
from headscope.engine.runs import capture as capture_module
from headscope.engine.runs.capture import Capture


def made(marker: float) -> Capture:
    one = Capture(torch.arange(8)[None], None, "toy", "f" * 64)
    q, k, v = (torch.full((1, heads, 8, 4), marker) for heads in (2, 1, 1))
    one._put(0, LayerInputs(q, k, v, 0.5), {"host": 2**20})
    return one


def marker(folder: Path) -> float:
    return float(Capture.load(folder).layer(0).q[0, 0, 0, 0])


class Killed(BaseException):
    """Stands for the end of the process: nothing after it may be relied on."""


@pytest.mark.parametrize("stop", range(6))
def test_the_old_or_the_new_one_is_whole_wherever_a_save_is_killed(
    tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "capture"
    made(1.0).save(target)
    steps = [0]
    replace, rmtree = os.replace, shutil.rmtree

    def counted(real):  # type: ignore[no-untyped-def]
        def call(*given, **named):  # type: ignore[no-untyped-def]
            if steps[0] >= stop:
                raise Killed
            steps[0] += 1
            return real(*given, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(capture_module.os, "replace", counted(replace))
        patch.setattr(capture_module.shutil, "rmtree", counted(rmtree))
        with suppress(Killed):
            made(2.0).save(target)
    assert marker(target) in (1.0, 2.0)
    made(3.0).save(target)
    assert marker(target) == 3.0


def test_a_save_that_fails_leaves_the_old_one_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "capture"
    made(1.0).save(target)
    replace = os.replace

    def full(source: object, place: object) -> None:
        if (
            Path(str(place)) == target
            and Path(str(source)).name.startswith(".headscope-")
            and "replaced" not in str(source)
        ):
            raise OSError(28, "No space left on device")
        replace(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(capture_module.os, "replace", full)
        with pytest.raises(CaptureError, match="No space left"):
            made(2.0).save(target)
    assert (target / "capture.json").is_file() and marker(target) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["capture"], "nothing is left over"

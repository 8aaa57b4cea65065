"""Captures on disk, so that a restart needs no new prefill; those not used for longest go when the budget is full."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headscope.engine.base.errors import CaptureError
from headscope.engine.runs.capture import Capture
from headscope.studio.store.places import data_dir

DEFAULT_GIB = 4.0


def default_budget() -> int:
    """Bytes that captures may take: `HEADSCOPE_CAPTURE_GIB`, else 4 GiB."""
    try:
        gib = float(os.environ.get("HEADSCOPE_CAPTURE_GIB", DEFAULT_GIB))
    except ValueError:
        gib = DEFAULT_GIB
    return int(max(0.0, gib if math.isfinite(gib) else DEFAULT_GIB) * 2**30)


@dataclass(frozen=True)
class Shelf:
    """A folder of captures, one folder a run."""

    folder: Path
    budget: int

    @classmethod
    def default(cls) -> Shelf:
        """Beside the database, in the user's data folder."""
        named = os.environ.get("HEADSCOPE_CAPTURES")
        return cls(Path(named).expanduser() if named else data_dir() / "captures", default_budget())

    def path(self, run_id: str) -> Path:
        """Where a run's capture is, or would be."""
        if not run_id.isalnum():
            raise CaptureError("A run's name has letters and digits only.")
        return self.folder / run_id

    def has(self, run_id: str) -> bool:
        """Whether the capture is whole on disk."""
        return (self.path(run_id) / "capture.json").is_file()

    def put(self, run_id: str, capture: Capture, expected: int, in_use: Collection[str] = ()) -> bool:
        """Saves a capture of about `expected` bytes; False, and everything as it was, if there is no room for it.

        Room is made by taking away what was not used for longest, never a run of `in_use`. Where the disk allows it,
        that is done after the save. `Capture.save` writes whole or not at all.
        """
        needed = int(expected * 1.1)
        free = self._free()
        victims = self._victims(expected, needed - free, {*in_use, run_id})
        if victims is None:
            return False
        if free < needed:
            _remove(victims)
            victims = []
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)  # captures hold what was read
            capture.save(self.path(run_id))
        except (OSError, CaptureError):
            return False
        _remove(victims)
        return True

    def load(self, run_id: str) -> Capture:
        """A stored capture. CaptureError where it is missing or damaged."""
        capture = Capture.load(self.path(run_id))
        self.touch(run_id)
        return capture

    def touch(self, run_id: str) -> None:
        """Notes that a capture is used now, so that others go first."""
        with suppress(OSError):
            os.utime(self.path(run_id))

    def drop(self, run_id: str) -> None:
        """Takes a capture away."""
        shutil.rmtree(self.path(run_id), ignore_errors=True)

    def used(self) -> int:
        """Bytes that captures take now."""
        return sum(_bytes(entry) for entry in self._entries())

    def _free(self) -> int:
        """Bytes free on the disk of the folder, or of the nearest folder above it that exists."""
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def _entries(self) -> list[Path]:
        """The captures, the one not used for longest first."""
        if not self.folder.is_dir():
            return []
        entries = [entry for entry in self.folder.iterdir() if entry.is_dir() and entry.name[0] != "."]
        return sorted(entries, key=lambda entry: entry.stat().st_mtime)

    def _victims(self, expected: int, short: int, in_use: Collection[str]) -> list[Path] | None:
        """What must go so that `expected` bytes fit the budget, and `short` bytes more the disk; None: never enough."""
        entries = self._entries()
        sizes = {entry: _bytes(entry) for entry in entries}
        excess = max(sum(sizes.values()) + expected - self.budget, short)
        victims: list[Path] = []
        for entry in entries:
            if excess <= 0:
                break
            if entry.name not in in_use:
                victims.append(entry)
                excess -= sizes[entry]
        return victims if excess <= 0 else None


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _bytes(folder: Path) -> int:
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())

"""Captures on disk: the oldest go when the budget is full, so that a restart needs no new prefill."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from headscope.engine.base.errors import CaptureError
from headscope.engine.runs.capture import Capture
from headscope.studio.store.store import data_dir

DEFAULT_GIB = 4.0


def default_budget() -> int:
    """Bytes that captures may take: `HEADSCOPE_CAPTURE_GIB`, else 4 GiB."""
    try:
        gib = float(os.environ.get("HEADSCOPE_CAPTURE_GIB", DEFAULT_GIB))
    except ValueError:
        gib = DEFAULT_GIB
    return int(max(0.0, gib) * 2**30)


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

    def put(self, run_id: str, capture: Capture, expected: int) -> bool:
        """Saves a capture of about `expected` bytes; False, and nothing written, if it does not fit.

        `Capture.save` writes whole or not at all, so a killed save leaves nothing that is read.
        """
        if expected > self.budget:
            return False
        self._make_room(expected)
        target = self.path(run_id)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < expected * 1.1:
                return False
            capture.save(target)
        except (OSError, CaptureError):
            shutil.rmtree(target, ignore_errors=True)
            return False
        return True

    def drop(self, run_id: str) -> None:
        """Takes a capture away."""
        shutil.rmtree(self.path(run_id), ignore_errors=True)

    def used(self) -> int:
        """Bytes that captures take now."""
        return sum(_bytes(entry) for entry in self._entries())

    def _entries(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        entries = [entry for entry in self.folder.iterdir() if entry.is_dir()]
        return sorted(entries, key=lambda entry: entry.stat().st_mtime)

    def _make_room(self, expected: int) -> None:
        entries = self._entries()
        used = sum(_bytes(entry) for entry in entries)
        for entry in entries:
            if used + expected <= self.budget:
                return
            used -= _bytes(entry)
            shutil.rmtree(entry, ignore_errors=True)


def _bytes(folder: Path) -> int:
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())

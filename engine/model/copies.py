"""The float32 copy of a packaged model: written whole, hashed, and never trusted when it does not fit its hashes.

Reading GGUF takes 10 to 25 seconds each time; the copy holds the same values and loads in about one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from headscope.engine.base import files
from headscope.engine.base.errors import ModelError
from headscope.engine.base.progress import Progress
from headscope.engine.model.packaged import cache_dir, disk_errors, fetch, packaged

MANIFEST = "headscope.json"
_FORMAT = "headscope.copy/1"


def float32_copy(name: str, progress: Progress | None, convert: Callable[[Path, Path], None]) -> Path:
    """Folder with a packaged model's weights as safetensors; `convert(gguf, folder)` fills a new one where needed.

    ModelError when there is no room, or the cache cannot be written.
    """
    model = packaged(name)
    root = cache_dir() / name
    target = root / f"float32-{model.sha256[:8]}"
    if is_whole(target):
        return target
    gguf = fetch(name, progress)
    with disk_errors(f"keep a float32 copy of {name} in {root}", model.download_bytes * 8), FileLock(root / ".lock"):
        sweep(root)
        if not is_whole(target):
            _replace(target, gguf, convert)
    return target


def is_whole(folder: Path) -> bool:
    """Whether every file of a copy has the hash that was noted when it was written."""
    try:
        manifest = files.read_json(folder / MANIFEST, ModelError)
        if manifest.get("format") != _FORMAT:
            return False
        return all(_sha256(folder / name) == digest for name, digest in manifest["sha256"].items())
    except (ModelError, OSError, AttributeError, KeyError, TypeError):
        return False


def sweep(root: Path) -> None:
    """Removes what a killed conversion left behind. The caller holds the lock of `root`."""
    for leftover in root.glob(".convert-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _replace(target: Path, gguf: Path, convert: Callable[[Path, Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".convert-"))
    try:
        folder = scratch / "new"
        folder.mkdir()
        convert(gguf, folder)
        names = sorted(item.name for item in folder.iterdir())
        manifest = {"format": _FORMAT, "sha256": {name: _sha256(folder / name) for name in names}}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for name in (*names, MANIFEST):
            _sync(folder / name)
        _sync(folder)
        if target.exists():
            os.replace(target, scratch / "old")
        os.replace(folder, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

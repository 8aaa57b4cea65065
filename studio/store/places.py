"""Where the studio keeps what it remembers."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def data_dir() -> Path:
    """The user's data folder of the program."""
    return Path(platformdirs.user_data_dir("headscope"))


def default_path() -> Path:
    """Where the database is: `HEADSCOPE_DB`, else `studio.duckdb` in the user's data folder."""
    return Path(os.environ.get("HEADSCOPE_DB") or data_dir() / "studio.duckdb").expanduser()


def place_problem(path: Path) -> str:
    """Why no database can be kept under this name, as a sentence; empty if one can."""
    if str(path).startswith(":memory:"):
        return f"{path} would keep nothing: give a file with --db or HEADSCOPE_DB."
    try:
        if path.is_dir():
            return f"{path} is a folder: give a file, such as {path / 'studio.duckdb'}, with --db or HEADSCOPE_DB."
        if path.exists() and not path.is_file():
            return f"{path} is not an ordinary file: choose another with --db or HEADSCOPE_DB."
    except (OSError, ValueError):
        return f"{str(path)[:60]!r} cannot name a file: choose another with --db or HEADSCOPE_DB."
    return ""

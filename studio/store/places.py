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

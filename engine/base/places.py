"""Where the project's own files lie: the folder of `app.py`, `pages` and `sample_prompts`, installed or not."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Found by a module's own file: importlib.resources fails on the namespace root of an editable install."""

"""Runs streamlit on the app: `python -m headscope.studio.server`. `headscope studio` calls it.

Streamlit takes a `pages` folder beside the app for a page list of its own until the app has run once, so a link to
a page, opened first, would run that page's file alone. Saying beforehand that the app lists its pages avoids it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from streamlit.runtime.pages_manager import PagesManager
from streamlit.web import cli

import headscope.engine

APP = Path(str(headscope.engine.__file__)).resolve().parents[1] / "app.py"

SETTINGS = {
    "server.address": "127.0.0.1",
    "server.headless": "true",
    "server.fileWatcherType": "none",
    "server.maxUploadSize": "8",
    "browser.gatherUsageStats": "false",
    "client.showErrorDetails": "none",
    "client.toolbarMode": "viewer",
}
"""Streamlit reads the app's own settings file only when started in its folder, so what matters is given here too."""


def main(port: int) -> None:
    """Serves until interrupted."""
    PagesManager.uses_pages_directory = False
    flags = [f"--{name}={value}" for name, value in (SETTINGS | {"server.port": str(port)}).items()]
    sys.argv = ["streamlit", "run", str(APP), *flags]
    cli.main(prog_name="streamlit")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8501)

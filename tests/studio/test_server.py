"""The studio's own server: what it insists on, whatever a person's settings of Streamlit say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

_PROGRAM = """
import json, streamlit as st, uvicorn
from headscope.studio.serve import server

uvicorn.run = lambda app, **how: print(json.dumps(
    {name: st.get_option(name) for name in (*server.SETTINGS, "server.port")} | {"host": how["host"]}
))
server.main(8765)
"""


def test_settings_hold_against_the_settings_of_a_person(tmp_path: Path) -> None:
    folder = tmp_path / ".streamlit"
    folder.mkdir()
    (folder / "config.toml").write_text("[browser]\ngatherUsageStats = true\n[server]\nmaxUploadSize = 200\n")
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    from headscope.studio.serve import server

    told = json.loads(done.stdout.splitlines()[-1])
    assert told == server.SETTINGS | {"server.port": 8765, "host": "127.0.0.1"}

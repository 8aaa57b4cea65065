"""Runs mypy over the packages under their import names.

The folders `engine`, `kernels` and `studio` stand at the root and are imported as `headscope.…`, which mypy cannot
know; so it is given a folder of links that has that shape.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "kernels", "studio")


def main() -> int:
    links = ROOT / ".mypy_cache" / "root"
    (links / "headscope").mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link = links / "headscope" / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name, target_is_directory=True)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    for name in PACKAGES:
        command += ["-p", f"headscope.{name}"]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": str(links)}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())

"""Every Triton kernel compiled ahead of time, without a GPU: registers, spills and shared memory, per architecture.

Both ends of the supported range of triton: the installed one, and 3.9 from `.venv/triton-3.9` where `make` put it.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

from headscope import kernels
from tests.helpers.triton_ahead import SHARED

ROOT = Path(__file__).resolve().parents[2]
NEWEST = ROOT / ".venv" / "triton-3.9"


def _stack_allowed(row: dict) -> int:
    """Bytes of spills a thread. Masked tiles spill, not the main loops where an MMA keeps its operands in shared memory
    (sm_90, sm_100); that of float32 takes a whole head through registers."""
    name, wide = row["name"], row["name"].endswith("d256")
    if name.startswith("rows"):
        return 0
    if "fp32" in name:
        return 30_000 if name.endswith("d128") else 13_000
    if row["sm"] in (90, 100):
        if name.startswith("attend"):
            return 512 if wide else 64
        return 900 if name.startswith(("map of cells", "weights of many")) else 16
    if name.startswith("attend"):
        return 4096 if wide else 1100
    return 7000 if wide else 1700 if name.startswith("map of cells") else 640


def _compile(capability: int, site: Path | None = None) -> list[dict]:
    path = os.pathsep.join(str(p) for p in (site, ROOT) if p is not None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_ahead", str(capability)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _kernels() -> set[str]:
    """Every kernel of the package that is launched, by file and function."""
    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, "headscope.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            own = type(value) is JITFunction and value.fn.__module__ == module.name
            if own and name.endswith("_kernel"):
                found.add(f"{module.name.removeprefix('headscope.kernels.')}.{name}")
    return found


def _check(rows: list[dict]) -> None:
    # One row at least for every Triton kernel; those in Gluon have a test of their own.
    assert {row["kernel"] for row in rows} == _kernels()
    for row in rows:
        assert row["registers"] <= 255, row
        assert row["shared"] <= SHARED[row["sm"]], row
        assert row["stack"] <= _stack_allowed(row), row


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_compiles(capability: int) -> None:
    _check(_compile(capability))


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST.is_dir(), reason="triton 3.9 is not in .venv/triton-3.9")
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_with_newest_triton(capability: int) -> None:
    rows = _compile(capability, NEWEST)
    assert all(row["triton"].startswith("3.9") for row in rows)
    _check(rows)


def test_main_loops_leave_room_for_two_blocks() -> None:
    """The layout kernel of head size 128 fits twice on an SM of sm_90, as when it was timed."""
    from headscope.kernels.triton.attention import sparse_settings

    use = sparse_settings(128, 2, 90)
    tile = 64 * 128 * 2
    stages_of_k_and_v = 2 * use.stages * tile
    assert 2 * (tile + stages_of_k_and_v + 4096) <= 228 * 1024

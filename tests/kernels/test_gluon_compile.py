"""The Hopper kernels compiled ahead of time for sm_90a, on both ends of the Triton range: no GPU needed.

The second end is used where `make` has put it in `.venv/triton-3.9`; each end runs in a process of its own, because
a process can hold one Triton only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHER = ROOT / ".venv" / "triton-3.9"
SHARED_LIMIT = 232_448

pytest.importorskip("triton.experimental.gluon")

# Bytes that a kernel may spill. Dense kernels spill a few registers an item, none in the loop over tiles. The sparse
# kernels spill around theirs, at head size 256 and with exact masks in them: see the README of the kernels. The maps
# spill nothing where a tile lies in one pool and below the diagonal.
SPILLS = {
    "dense 64": 100,
    "dense 256": 20,
    "mass 128": 20,
    "sparse 64": 400,
    "sparse 64 plain": 128,
    "sparse 128": 1700,
    "sparse 128 plain": 300,
    "sparse 256": 3500,
    "sparse 256 plain": 950,
}
# Under Triton 3.9 the maps spill in tiles on the diagonal or of two pools, and a sparse step has two products.
SPILLS_39 = {
    "dense 64": 260,
    "dense 256": 200,
    "mass 64": 1100,
    "mass 128": 1100,
    "sparse 64": 1300,
    "sparse 64 plain": 200,
    "sparse 128": 3500,
    "sparse 128 plain": 600,
    "sparse 256": 5300,
    "sparse 256 plain": 950,
}


def costs_under(folder: Path | None, cache: Path) -> tuple[str, list[dict]]:
    """Triton's version and the cost of every kernel, from a process that finds `folder` first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.helpers.gluon_ahead"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return lines[0]["triton"], lines[1:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", ["installed", "3.9"])
def test_registers_spills_and_shared_memory(end: str, tmp_path: Path) -> None:
    if end == "3.9" and not (OTHER / "triton").is_dir():
        pytest.skip("no second Triton in .venv/triton-3.9")
    version, costs = costs_under(OTHER if end == "3.9" else None, tmp_path)
    assert version.startswith("3.9.") or end == "installed", version
    assert len(costs) == 13
    spills = SPILLS_39 if version.startswith("3.9.") else SPILLS
    for cost in costs:
        name = cost["kernel"]
        assert cost["registers"] <= 168, f"{name} on triton {version}: {cost}"
        assert cost["shared"] <= SHARED_LIMIT, f"{name} on triton {version}: {cost}"
        assert cost["spills"] <= spills.get(name, 0), f"{name} on triton {version}: {cost}"
        assert not cost["warnings"], f"{name} on triton {version}: ptxas serialises MMAs: {cost['warnings']}"


def test_unknown_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    import triton

    from headscope.kernels.gluon import compat as gluon_compat

    monkeypatch.setattr(triton, "__version__", "3.11.0")
    with pytest.raises(ImportError, match=r"3\.6 to 3\.9; this is 3\.11"):
        importlib.reload(gluon_compat)
    monkeypatch.undo()
    importlib.reload(gluon_compat)

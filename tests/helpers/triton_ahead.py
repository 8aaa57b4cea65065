"""Compiles the Triton kernels ahead of time, without a GPU, and prints what each takes: one JSON object a line.

Run as a program, so that another triton can be put first on the path: `python -m tests.helpers.triton_ahead 80 90`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headscope.kernels.gluon import mass as gluon_mass
from headscope.kernels.gluon import tables as gluon_tables
from headscope.kernels.triton import attention as triton_attention
from headscope.kernels.triton import cover as triton_cover
from headscope.kernels.triton import cut as triton_cut
from headscope.kernels.triton import dense as triton_dense
from headscope.kernels.triton import mass as triton_mass
from headscope.kernels.triton import plan as triton_plan
from headscope.kernels.triton import pools as triton_pools
from headscope.kernels.triton import profiles as triton_profiles
from headscope.kernels.triton import rows as triton_rows
from headscope.kernels.triton import runs as triton_runs
from headscope.kernels.triton import scores as triton_scores
from headscope.kernels.triton import select as triton_select
from headscope.kernels.triton import sparse as triton_sparse

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that one block may have, by compute capability."""

ROW_SIZES = ("row_size", "flag_size")
"""Known to be multiples of 16 at the lengths that matter, where a kernel cares."""


def measure(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    warps: int = 4,
    stages: int = 3,
    most_registers: int | None = None,
) -> dict[str, Any]:
    """Registers a thread, bytes of stack (spills), and shared memory of one compiled kernel."""
    parameters = [parameter.name for parameter in kernel.params]
    signature = {p: "constexpr" if p in constants else types.get(p, _default(p)) for p in parameters}
    wide = {p.name for p in kernel.params if p.name in ROW_SIZES and not p.do_not_specialize}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, p in enumerate(parameters) if signature[p].startswith("*") or p in wide
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": most_registers}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found, usage.stdout
    return {
        "name": name,
        "kernel": full_name(kernel),
        "sm": capability,
        "triton": triton.__version__,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": made.metadata.shared,
    }


def full_name(kernel: Any) -> str:
    """The room, file and function of a kernel, such as `triton.dense.dense_kernel`."""
    return f"{kernel.fn.__module__.removeprefix('headscope.kernels.')}.{kernel.fn.__name__}"


def _default(name: str) -> str:
    if name == "scale":
        return "fp32"
    return "*i32" if name.endswith("_ptr") else "i32"


def _tile(element: str, rows: int, width: int) -> str:
    return f"tensordesc<{element}[1, {rows}, {width}]>"


def attention(capability: int, element: str, head_dim: int) -> list[dict[str, Any]]:
    """Dense, and the layout kernel with every kind of list at once."""
    width = max(16, triton.next_power_of_2(head_dim))
    use = triton_attention.dense_settings(width, 2, capability)
    halves = {"o_ptr": f"*{element}", "lse_ptr": "*fp32", "k_ptr": f"*{element}", "v_ptr": f"*{element}"}
    types = halves | {
        "q_d": _tile(element, use.rows, width),
        "k_d": _tile(element, use.columns, width),
        "v_d": _tile(element, use.columns, width),
    }
    shared = {"GROUP": 4, "D": head_dim, "WIDTH": width, "BY_BLOCK": False, "PRECISION": "tf32"}
    constants = shared | {"ROWS": use.rows, "COLUMNS": use.columns, "STAGES": use.stages}
    dense = measure(
        f"dense d{head_dim}", triton_dense.dense_kernel, types, constants, capability, use.warps, use.stages
    )
    use = triton_attention.sparse_settings(width, 2, capability)
    types = halves | {name: _tile(element, 64, width) for name in ("q_d", "k_d", "v_d", "kc_d", "vc_d")}
    types["cover_ptr"] = "*u8"
    constants = shared | {
        "TILE": 128,
        "COLUMNS": use.columns,
        "BOXES": True,
        "LINES": True,
        "BITS": True,
        "BLOCKS": True,
        "ODD_BLOCKS": False,
        "OVERLAPS": True,
        "STAGES": use.stages,
    }
    sparse = measure(
        f"attend d{head_dim}", triton_sparse.attend_kernel, types, constants, capability, use.warps, use.stages
    )
    return [dense, sparse]


_FLOATS = dict.fromkeys(
    ("lse_ptr", "out_ptr", "top_ptr", "total_ptr", "weight_ptr", "column_ptr", "distance_ptr", "in_ptr"), "*fp32"
)
_BYTES = dict.fromkeys(("cover_ptr", "flag_ptr"), "*u8")


def passes(capability: int, element: str, width: int) -> list[dict[str, Any]]:
    """The index and measurement kernels that multiply queries and keys, with the stages that fit."""
    size, room = (4 if element == "fp32" else 2), SHARED[capability]
    stages, on_maps = triton_scores.stages_for(width, size, room), triton_mass.launch_for(width, size, room)
    types = (
        _FLOATS
        | _BYTES
        | {
            "q_d": _tile(element, 64, width),
            "k_d": _tile(element, 128, width),
            "q_ptr": f"*{element}",
        }
    )
    shared = {"WIDTH": width, "PRECISION": "ieee" if element == "fp32" else "tf32"}
    scores = shared | {"D": width, "LOGIT": False, "BY_MAX": False, "SPLITS": 32, "STAGES": stages.scores}
    cells = shared | {"TILE": 128, "COUNT": False}
    warps = on_maps.warps
    norms = shared | {"D": width, "LOGIT": False, "STAGES": stages.norms}
    on_passes = triton_scores.warps_for(capability)
    jobs: list[tuple[str, Any, dict[str, Any], int, int]] = [
        ("norms", triton_scores._norm_kernel, norms, on_passes, 3),
        ("weights", triton_scores._weights_kernel, scores | {"SINGLE": True}, 4, 3),
        ("weights of many rows", triton_scores._weights_kernel, scores | {"SINGLE": False}, 4, 3),
        ("tail", triton_scores._tail_kernel, scores, on_passes, 3),
        ("map", triton_mass._rows_kernel, cells | {"LAYOUT": False, "BLOCKS": False}, warps, on_maps.rows),
        ("map of cells", triton_mass._rows_kernel, cells | {"LAYOUT": True, "BLOCKS": True}, warps, on_maps.rows),
        ("diagonals", triton_profiles._diagonals_kernel, shared, warps, on_maps.diagonals),
    ]
    return [
        measure(f"{name} {element} d{width}", kernel, types, constants, capability, warps, stages)
        for name, kernel, constants, warps, stages in jobs
    ]


def others(capability: int) -> list[dict[str, Any]]:
    """The kernels without an MMA."""
    types = _FLOATS | _BYTES
    lines = types | {"bands_ptr": "*i32", "windows_ptr": "*i32"}
    score = types | {"in_ptr": "*fp32", "cut_ptr": "*fp32", "score_ptr": "*fp32", "out_ptr": "*i32"}
    jobs: list[tuple[str, Any, dict[str, str], dict[str, Any]]] = [
        (
            "distances",
            triton_scores._distances_kernel,
            types,
            {"MEAN": True, "SHRUNK": True, "REMOVED": True, "BLOCK": 256},
        ),
        *(("digit", triton_cut._digit_kernel, score, {"DIGIT": n, "CHUNK": triton_cut.CHUNK}) for n in (0, 1, 2)),
        ("value", triton_cut._value_kernel, score, {}),
        ("runs", triton_runs._write_kernel, lines, {"CHUNK": triton_runs.CHUNK, "CHUNKS": 32}),
        (
            "write",
            triton_select._write_kernel,
            score,
            {"MODE": 0, "LIST": True, "COUNT": True, "FLAGS": True, "CHUNK": triton_select.CHUNK},
        ),
        ("boxes", triton_plan._boxes_kernel, {}, {"TILE": 128}),
        ("cover", triton_cover._cover_kernel, _BYTES, {"TILE": 128, "BLOCK": 1024}),
        ("columns of pools", triton_mass._columns_kernel, _FLOATS, {}),
        ("along diagonals", triton_profiles._along_kernel, _FLOATS, {}),
        ("runs, summary", triton_runs._summary_kernel, lines, {"CHUNK": triton_runs.CHUNK}),
        ("runs, count", triton_runs._count_kernel, lines, {"CHUNK": triton_runs.CHUNK, "CHUNKS": 32}),
        ("count", triton_select._count_kernel, score, {"MODE": 0, "CHUNK": triton_select.CHUNK}),
        ("windows", triton_pools._window_mass_kernel, _FLOATS | {"score_ptr": "*fp32"}, {}),
        ("means", triton_pools._means_kernel, _FLOATS | {"x_ptr": "*bf16"}, {"D": 128, "WIDTH": 128}),
        ("counts", triton_plan._counts_kernel, {}, {"TILE": 128}),
        (
            "compact",
            triton_plan._compact_kernel,
            dict.fromkeys(("k_ptr", "v_ptr", "kc_ptr", "vc_ptr"), "*bf16"),
            {"D": 128, "WIDTH": 128, "ROWS": 32},
        ),
        ("keep", triton_cover._keep_kernel, _BYTES, {"TILE": 128, "WORDS": 32, "WHOLE": True}),
        ("counts for gluon", gluon_tables._counts_kernel, {}, {}),
        ("uneven for gluon", gluon_tables._uneven_kernel, {}, {}),
        ("reduce for gluon", gluon_mass._reduce_kernel, _FLOATS | {"part_ptr": "*fp32"}, {"GROUPS": 4, "WIDTH": 64}),
    ]
    warps = {"runs": 8, "runs, summary": 8, "runs, count": 8, "counts": 2, "uneven for gluon": 1}
    return [
        measure(name, kernel, kinds, constants, capability, warps.get(name, 4))
        for name, kernel, kinds, constants in jobs
    ]


def block_rows(capability: int) -> list[dict[str, Any]]:
    """The choice of blocks, for block rows as long as at 32K, 128K and 1M tokens in blocks of 64, and longer."""
    types = {"score_ptr": "*fp32", "scale": "fp32"}
    made = []
    for most in (511, 2047, 16383, 32767):
        constants, warps = triton_rows.settings(most)
        made.append(
            measure(
                f"rows {most}",
                triton_rows._choose_kernel,
                types,
                constants,
                capability,
                warps,
                most_registers=triton_rows.REGISTERS,
            )
        )
    return made


def main(capabilities: list[int]) -> None:
    for capability in capabilities:
        rows = others(capability) + block_rows(capability)
        for element, head_dim in (("bf16", 64), ("bf16", 128), ("fp16", 96), ("bf16", 256)):
            rows += attention(capability, element, head_dim)
        for element, width in (("bf16", 64), ("fp16", 128), ("bf16", 256), ("fp32", 64), ("fp32", 128)):
            if element != "fp32" or triton_scores.room_for_float32(width) <= SHARED[capability]:
                rows += passes(capability, element, width)
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

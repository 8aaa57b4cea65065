"""Ahead-of-time compilation of the Gluon kernels for sm_90a, without a GPU, with what the result costs.

Triton checks neither registers nor shared memory when it compiles ahead of time, and Gluon has no interpreter,
so this is what a machine without a Hopper GPU can hold the kernels to. `python -m tests.helpers.gluon_ahead` prints
one JSON line per kernel, so that another Triton (first on PYTHONPATH) can be tried in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from headscope.kernels.gluon import attention as gluon_attention
from headscope.kernels.gluon import dense as gluon_dense
from headscope.kernels.gluon import mass as gluon_mass
from headscope.kernels.gluon import sparse as gluon_sparse
from headscope.kernels.gluon.compat import tile_layout

SHARED_LIMIT = 232_448
"""Bytes of shared memory that one block of an H100 or H200 may have."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Cost:
    """Registers per thread at launch, spilled bytes (stores plus loads), shared bytes, what ptxas said of wgmma."""

    registers: int
    spills: int
    shared: int
    warnings: tuple[str, ...]


def box(rows: int, columns: int, dtype: torch.dtype) -> str:
    """Signature of a TMA descriptor argument with boxes [1, rows, columns]."""
    return f"tensordesc<{_NAMES[dtype]}[1, {rows}, {columns}],{tile_layout(rows, columns, dtype)!r}>"


def compile_ahead(
    kernel: Any, boxes: dict[str, str], constants: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Cost:
    """For sm_90a: `boxes` are its TMA descriptors, pointers end in `_ptr`, constants are upper case."""
    floats = dict.fromkeys(("lse_ptr", "part_ptr"), "*fp32") | {"o_ptr": f"*{_NAMES[dtype]}", "scale": "fp32"}
    signature = {}
    for name in kernel.arg_names:
        other = "constexpr" if name.isupper() else "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = boxes.get(name) or floats.get(name) or other
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return _cost(compiled)


def dense(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Cost:
    config = gluon_attention.dense_config(head_dim)
    rows, keys = box(64, head_dim, dtype), box(config.keys, head_dim, dtype)
    constants = {
        "BN": config.keys,
        "D": head_dim,
        "STAGES": config.stages,
        "GROUPS": config.groups,
        "EXP_BOUND": config.exp_bound,
        "CONSUMER_REGISTERS": config.registers,
    }
    return compile_ahead(gluon_dense.dense_kernel, {"q_d": rows, "k_d": keys, "v_d": keys}, constants, dtype)


def sparse(head_dim: int, half_blocks: bool, overlaps: bool, dtype: torch.dtype = torch.bfloat16) -> Cost:
    config = gluon_attention.SPARSE[head_dim]
    piece, rows = box(64, 64, dtype), box(64, head_dim, dtype)
    boxes = {"q_d": piece, "k_d": piece, "kc_d": piece, "o_d": piece, "v_d": rows, "vc_d": rows}
    constants = {
        "D": head_dim,
        "STAGES": config.stages,
        "SLOTS": config.slots,
        "RING": config.ring,
        "HALF_BLOCKS": half_blocks,
        "OVERLAPS": overlaps,
    }
    return compile_ahead(gluon_sparse.sparse_kernel, boxes, constants, dtype)


def mass(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Cost:
    groups = gluon_mass.GROUPS[head_dim]
    boxes = {"q_d": box(64, head_dim, dtype), "k_d": box(gluon_mass.KEYS, head_dim, dtype)}
    constants = {
        "D": head_dim,
        "STAGES": gluon_mass.STAGES[head_dim],
        "GROUPS": groups,
        "CONSUMER_REGISTERS": gluon_mass.REGISTERS[groups],
    }
    return compile_ahead(gluon_mass.mass_kernel, boxes, constants)


def all_costs() -> dict[str, Cost]:
    """Every kernel at every head size, and the variants of the sparse one at the size that matters most."""
    costs = {f"dense {d}": dense(d) for d in gluon_attention.HEAD_SIZES}
    costs |= {f"mass {d}": mass(d) for d in gluon_attention.HEAD_SIZES}
    costs["dense 128 fp16"] = dense(128, torch.float16)
    costs |= {f"sparse {d}": sparse(d, True, True) for d in gluon_attention.HEAD_SIZES}
    costs |= {f"sparse {d} plain": sparse(d, False, False) for d in gluon_attention.HEAD_SIZES}
    return costs


def _cost(compiled: Any) -> Cost:
    ptxas = get_ptxas(90).path
    release = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    # Triton gives this to ptxas 13, which else takes more registers.
    extra = ["--regAllocOptLevel=2"] if "release 13" in release else []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(compiled.asm["ptx"])
        command = [ptxas, "-v", *extra, "--gpu-name=sm_90a", str(source), "-o", str(target)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", said))
    warnings = tuple(line for line in said.splitlines() if "wgmma" in line or "setmaxnreg" in line)
    return Cost(registers, spills, compiled.metadata.shared, warnings)


if __name__ == "__main__":
    print(json.dumps({"triton": triton.__version__}))
    for name, cost in all_costs().items():
        print(json.dumps({"kernel": name} | asdict(cost)), flush=True)

"""Ahead-of-time compilation of the Gluon kernels for sm_90a, without a GPU, with what the result costs.

Triton checks neither registers nor shared memory when it compiles ahead of time, and Gluon has no interpreter,
so this is what a machine without a Hopper GPU can hold the kernels to.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from headscope.kernels.gluon_compat import tile_layout

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


def compile_ahead(kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4) -> Cost:
    """Compiles `kernel` for sm_90a; `types` are the signature of its run-time arguments."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return _cost(compiled)


def _cost(compiled: Any) -> Cost:
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(compiled.asm["ptx"])
        said = subprocess.run(
            [str(ptxas), "-v", "--gpu-name=sm_90a", str(text), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", said))
    warnings = tuple(line for line in said.splitlines() if "wgmma" in line or "setmaxnreg" in line)
    return Cost(registers, spills, compiled.metadata.shared, warnings)

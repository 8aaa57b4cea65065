"""One Gluon source for triton 3.6 to 3.9: names that moved between those versions, checked at import.

Gluon is experimental: `thread_barrier` became `barrier` in 3.7, and in 3.9 `tma.async_copy_*` became
`tma.async_load` and `tma.async_store`. 3.8 and 3.9 refuse views that the sparse kernel is faster with:
`OVERLAPPING_VIEWS`.
A version outside the tested range raises ImportError here, so that `auto` picks the portable kernels and a named
`impl="gluon"` says why it cannot run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

OLDEST, NEWEST = (3, 6), (3, 9)

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
if not OLDEST <= VERSION <= NEWEST:
    raise ImportError(f"gluon kernels are tested with triton 3.6 to 3.9; this is {triton.__version__}")


def _first(module: Any, *names: str) -> Any:
    """The first of `names` that this triton has; ImportError when it has none."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"triton {triton.__version__} has none of {', '.join(names)} in {module.__name__}")


barrier = _first(gl, "barrier", "thread_barrier")
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
tma_store_wait = tma.store_wait

OVERLAPPING_VIEWS = VERSION < (3, 8)
"""Whether a view may be larger than the piece of shared memory that it starts at; Triton 3.8 forbids it."""


@gluon.jit
def overlapping_view(piece, ROWS: gl.constexpr):
    """`ROWS` rows of 64 from where `piece` [1, 64, 64] starts on: 64, or 128 where OVERLAPPING_VIEWS."""
    if ROWS == 64:
        return piece.reshape([64, 64])
    else:
        FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        return piece._reinterpret(piece.dtype, [ROWS, 64], FLAT)


GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
"""Element types that the Hopper kernels serve."""


@lru_cache(maxsize=64)
def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Swizzled shared-memory layout of one TMA box [1, rows, columns]."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, columns], GL_DTYPE[dtype])


def descriptor(rows3d: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor over [heads, length, D] in boxes [1, rows, columns]; out-of-range rows read as zero."""
    layout = tile_layout(rows, columns, rows3d.dtype)
    return TensorDescriptor(rows3d, list(rows3d.shape), list(rows3d.stride()), [1, rows, columns], layout)

"""Primitives shared by the Triton kernels: look-ups in sorted lists, one softmax step, ordered keys, small host
helpers.

Scores are kept in base 2 with the scale folded in (`scale * log2 e`), so that `exp2` is the only
transcendental of the loops. Running maxima start at a finite floor: a row that has met no key yet stays free
of `inf - inf`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headscope.kernels.cells import inputs
from headscope.kernels.cells.layout import PAD, Layout

BOX_ROWS = 64
BOX_COLUMNS = 128
TILES = (1, BOX_COLUMNS)
"""Tiles of layouts that the kernels serve."""
BARRIERS = 1024
"""Bytes of shared memory left for barriers and the like."""

# Kernels read these as compile-time constants, those in Gluon too.
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
SOFTMAX_FLOOR = tl.constexpr(-1.0e30)
"""Running maximum of a row that has met no cell: finite, so that no difference of infinities arises."""
PADDING = tl.constexpr(PAD)
"""Fills the unused end of a list."""


@triton.jit
def count_below(list_ptr, count, bound, steps, stride: tl.constexpr):
    """How many of the first `count` entries of an ascending list are `< bound` (a tensor of bounds).

    `steps` >= log2(count + 1) halvings; entries lie `stride` apart.
    """
    low = bound * 0
    high = low + count
    for _step in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        below = tl.load(list_ptr + middle * stride, mask=open_, other=0) < bound
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low


@triton.jit
def softmax_step(scores, v, acc, top, total, scale, PRECISION: tl.constexpr):
    """One tile of online softmax. scores [M, N] (masked cells -inf), v [N, D], acc [M, D], top and total [M]."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weight = tl.math.exp2(scores * scale - new_top[:, None])
    decay = tl.math.exp2(top - new_top)
    total = total * decay + tl.sum(weight, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def close_softmax(acc, top, total):
    """Output and natural-log LSE of finished rows; rows without a key give 0 and -inf."""
    some = total > 0
    safe = tl.where(some, total, 1.0)
    lse = tl.where(some, (top + tl.math.log2(safe)) * LN2, float("-inf"))
    return acc / safe[:, None], lse


def base2(scale: float) -> float:
    """The factor of dot products that makes them logits in base 2, as the kernels keep them."""
    return scale * float(LOG2E.value)


def row_blocks(layout: Layout) -> int:
    """Row blocks of 64 rows from own position 0 to the longest sequence's end."""
    return max(1, -(-layout.kv_len // BOX_ROWS))


def pad_dim(head_dim: int) -> int:
    """The power of two that holds a head: tiles are as wide, descriptors clip the rest."""
    return max(16, triton.next_power_of_2(head_dim))


def steps_for(count: int) -> int:
    """Halvings that a binary search over `count` entries needs."""
    return max(1, int(count).bit_length())


@triton.jit
def ordered_key(value):
    """An int32 that is ordered as the float32 is, -0 just below +0."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The float32 of an ordered key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def capability(device: torch.device) -> int:
    """Compute capability as one number (90 for sm_90); 90 too where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def shared_room(device: torch.device) -> int:
    """Bytes of shared memory that one block may have; the interpreter knows no bound and gets Hopper's."""
    if device.type != "cuda":
        return 232_448
    return _shared_room(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _shared_room(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def stages_within(room: int, wanted: int, staged: int, kept: int = 0) -> int:
    """How many stages of `staged` bytes go into `room` bytes of shared memory beside `kept`: `wanted` at most, 1 at
    least."""
    return max(1, min(wanted, (room - kept - BARRIERS) // staged))


@lru_cache(maxsize=512)
def device_ints(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 of host integers on a device, copied once per distinct tuple so that repeated calls do not wait.

    The last 512 tuples are kept: a CUDA graph that holds one must not outlive it.
    """
    return torch.tensor(values, dtype=torch.int32, device=device)


def descriptor(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Tiles [1, rows, width] of a contiguous [heads, n, D] tensor; reads outside are 0, writes outside are dropped."""
    flat = x.view(-1, x.shape[-2], x.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, rows, width])


def precision(dtype: torch.dtype) -> str:
    """Tensor-core mode: an MMA of float32 is exact (`ieee`), the half types have one mode."""
    return "ieee" if dtype == torch.float32 else "tf32"


def refusal(q: torch.Tensor) -> str | None:
    """Why these kernels cannot serve queries of this dtype and head size, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"impl='triton' serves bfloat16, float16 and float32, got q.dtype = {q.dtype}"
    # An MMA of wider float32 heads fills the shared memory of every GPU, and takes minutes to compile.
    most = 128 if q.dtype == torch.float32 else 256
    if not 1 <= q.shape[-1] <= most:
        return f"impl='triton' serves {q.dtype} heads of sizes up to {most}, got {q.shape[-1]}"
    if q.shape[-1] * q.element_size() % 16:
        return f"impl='triton' needs head rows of a multiple of 16 bytes, got {q.shape[-1]} x {q.dtype}"
    return None


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, scale: float, starts: tuple[int, ...]
) -> None:
    """`ValueError` naming what does not fit, or what this path cannot serve."""
    if reason := refusal(q):
        raise ValueError(reason)
    inputs.check_inputs(q, k, v, scale, starts)


def check_contiguous(**tensors: torch.Tensor | None) -> None:
    """`ValueError` naming a tensor that does not lie in one piece, as the kernels' pointers take for granted."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")


def check_lse(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The LSE of q's rows as the kernels read it, float32 in one piece; `ValueError` where it is not q's."""
    inputs.check_lse(lse, q)
    return lse.float().contiguous()

"""What a launcher makes sure of before a kernel reads memory by pointers: tensors that fit each other, in one piece.

The meaning of inputs is the engine's to check; these checks are cheap and keep a kernel from reading beside its
tensors, whoever calls it.
"""

from __future__ import annotations

import math

import torch

from headscope.kernels.cells.layout import Layout

_TABLES = ("windows", "window_count", "bands", "band_count", "columns", "column_count", "blocks", "block_count")


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, scale: float, starts: tuple[int, ...]
) -> None:
    """q [B, Hq, S, D], k and v [B, Hkv, T, D] with Hq a multiple of Hkv and S <= T, one start in 0 .. T a sequence.

    `ValueError` names what does not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} must be [batch, heads, tokens, head size], none of them 0, got {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must have q's dtype and device, {q.dtype} on {q.device}, got {x.dtype} on {x.device}"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or k.shape[2] < q.shape[2]:
        raise ValueError(
            f"k must have q's batch and head size and no fewer keys than q has rows: "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of KV heads, got {q.shape[1]} and {k.shape[1]}")
    if v is not None and v.shape != k.shape:
        raise ValueError(f"v must be shaped as k {tuple(k.shape)}, got {tuple(v.shape)}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if len(starts) != q.shape[0] or not all(0 <= start <= k.shape[2] for start in starts):
        raise ValueError(f"starts must be {q.shape[0]} positions in 0 .. {k.shape[2]}, got {starts}")


def check_layout(layout: Layout, q: torch.Tensor, k: torch.Tensor) -> None:
    """`ValueError` where `layout` was made for other inputs, or a table of it does not lie in one piece."""
    expected, got = (layout.batch, layout.heads, layout.q_len, layout.kv_len), (*q.shape[:3], k.shape[2])
    if expected != got or layout.device != q.device:
        raise ValueError(
            f"the layout is for batch, heads, rows, keys = {expected} on {layout.device}, "
            f"q and k have {got} on {q.device}"
        )
    for name in _TABLES:
        if not getattr(layout, name).is_contiguous():
            raise ValueError(f"layout.{name} must be contiguous")


def check_lse(lse: torch.Tensor, q: torch.Tensor) -> None:
    """`ValueError` where `lse` is not one floating-point number for each row of q [B, Hq, S, D]."""
    if lse.shape != q.shape[:3] or lse.device != q.device or not lse.is_floating_point():
        raise ValueError(
            f"lse must be floating point {tuple(q.shape[:3])} on {q.device}, "
            f"got {lse.dtype} {tuple(lse.shape)} on {lse.device}"
        )


def check_pools(rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int], kv_len: int) -> None:
    """`ValueError` where `shape` pools do not cut the spans `rows` and `cols` of 0 .. kv_len into one position each
    at least."""
    for name, (first, stop), pools in (("rows", rows, shape[0]), ("cols", cols, shape[1])):
        if not 0 <= first < stop <= kv_len:
            raise ValueError(f"{name} must be a span within 0 and {kv_len}, got {(first, stop)}")
        if not 1 <= pools <= stop - first:
            raise ValueError(f"shape must cut the {stop - first} {name} into 1 to {stop - first} pools, got {pools}")


def rows_in_one_piece(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where neighbours of the last dimension lie side by side, else a copy in which they do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def packed(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it is contiguous and 16-byte aligned, as pointers and the copy engine need it, else a
    copy that is."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)

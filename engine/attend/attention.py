"""Attention over an index, over everything, or over any mask; each returns the output and the LSE.

The LSE is the natural logarithm of the row's sum of exponentials, float32 (float64 from the reference). Two of
them give the exact mass that a sparse row misses: see `headscope.engine.loss.mass`.
"""

from __future__ import annotations

import torch

from headscope.engine.attend import checks as shapes
from headscope.engine.attend.index import Index
from headscope.kernels import backends
from headscope.kernels.cells import reference


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the computed cells of `index`: out [B, Hq, S, D] in q's dtype, LSE [B, Hq, S].

    A row with no cell gives output 0 and LSE -inf. `ValueError` where shapes, devices or the named `impl` do
    not fit the index.
    """
    shapes.check_qkv(q, k, v)
    layout = index.computed
    expected = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    got = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if got != expected:
        raise ValueError(f"index was built for batch, heads, rows, keys = {expected}, got q and k with {got}")
    if q.device != layout.device:
        raise ValueError(f"index lies on {layout.device}, q on {q.device}")
    out, lse = backends.choose(impl, q, layout).attend(q, k, v, layout, index.scale)
    return out.to(q.dtype), lse


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    starts: shapes.Starts = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention over every real key: out [B, Hq, S, D] in q's dtype, LSE [B, Hq, S]."""
    shapes.check_qkv(q, k, v)
    first = shapes.check_starts(starts, q, k)
    out, lse = backends.choose(impl, q).dense(q, k, v, shapes.check_scale(scale, q), first)
    return out.to(q.dtype), lse


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 reference: softmax over any boolean mask [B, Hq, S, T] (or one that broadcasts to it)."""
    shapes.check_qkv(q, k, v)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"mask must be a boolean tensor that broadcasts to {full}")
    try:
        mask = mask.expand(full)
    except RuntimeError:
        raise ValueError(f"mask must broadcast to {full}, got {tuple(mask.shape)}") from None
    return reference.masked(q, k, v, mask, shapes.check_scale(scale, q))

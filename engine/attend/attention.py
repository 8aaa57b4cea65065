"""Attention over an index, over everything, or over any mask; each returns the output and the LSE.

The LSE is the natural logarithm of the row's sum of exponentials, float32 (float64 from the reference). Two of
them give the exact mass that a sparse row misses: see `headscope.engine.loss.mass`.

No input is read for NaN and infinities beforehand, which would cost a pass over it in every layer of a prefill.
Instead nothing finite is wrong: a row that reads such a query or key has an output and LSE that are not finite, one
that reads such a value an output that is not, and the rest is exact (or, beside such a value, not finite either).
Measuring refuses all of it. Scores beyond 1e30, which float32 hardly holds, make a row NaN, infinite or empty.
"""

from __future__ import annotations

import torch

from headscope.engine.attend.index import Index
from headscope.engine.attend.inputs import LayerInputs, Starts
from headscope.kernels import backends
from headscope.kernels.cells import reference


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the computed cells of `index`: out [B, Hq, S, D] in q's dtype, LSE [B, Hq, S].

    A row with no cell gives output 0 and LSE -inf. `ValueError` where shapes, devices or the named `impl` do
    not fit the index. NaN and infinities as the module says.
    """
    return attend_sparse(LayerInputs(q, k, v, index.scale), index, impl)


def attend_sparse(inputs: LayerInputs, index: Index, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_attention` over checked inputs. Scale and starts are those of the index."""
    layout = index.computed
    expected = (layout.batch, layout.heads, layout.q_len, layout.kv_len)
    sizes = (inputs.batch, inputs.query_heads, inputs.rows, inputs.length)
    if sizes != expected:
        raise ValueError(f"index was built for batch, heads, rows, keys = {expected}, got q and k with {sizes}")
    if inputs.device != layout.device:
        raise ValueError(f"index lies on {layout.device}, q on {inputs.device}")
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = backends.choose(impl, q, layout).attend(q, k, v, layout, index.scale)
    return out.to(q.dtype), lse


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    starts: Starts = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention over every real key: out [B, Hq, S, D] in q's dtype, LSE [B, Hq, S].

    NaN and infinities as the module says.
    """
    return attend_dense(LayerInputs(q, k, v, scale, starts), impl)


def attend_dense(inputs: LayerInputs, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_attention` over checked inputs."""
    q = inputs.q
    out, lse = backends.choose(impl, q).dense(q, inputs.k, inputs.v, inputs.scale, inputs.starts)
    return out.to(q.dtype), lse


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 reference: softmax over any boolean mask [B, Hq, S, T] (or one that broadcasts to it)."""
    inputs = LayerInputs(q, k, v, scale)
    full = (inputs.batch, inputs.query_heads, inputs.rows, inputs.length)
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise ValueError(f"mask must be a boolean tensor that broadcasts to {full}")
    try:
        mask = mask.expand(full)
    except RuntimeError:
        raise ValueError(f"mask must broadcast to {full}, got {tuple(mask.shape)}") from None
    return reference.masked(q, k, v, mask, inputs.scale)

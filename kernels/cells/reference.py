"""Attention over any boolean mask in float64: the specification that every kernel is held to.

`softmax` runs over the masked-in keys alone (eq. 2 with the sum restricted to them). A row with no key gives
output 0 and LSE -inf. Forms the full matrix of scores, so it is for small inputs and sampled rows.
"""

from __future__ import annotations

import torch

from headscope.kernels.cells import membership
from headscope.kernels.cells.layout import Layout


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, S, D], k/v [B, Hkv, T, D], mask bool [B, Hq, S, T] (or broadcastable); float64 out and LSE."""
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = (q.double() @ keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    return weights @ values, lse


def probabilities(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 [B, Hq, S, T]: softmax over the masked-in keys; rows without any are 0."""
    identity = torch.eye(k.shape[2], dtype=torch.float64, device=k.device).expand(k.shape[0], k.shape[1], -1, -1)
    return masked(q, k, identity, mask, scale)[0]


def causal(q_len: int, kv_len: int, starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """bool [B, 1, S, T]: every cell that a row may read, in physical positions."""
    rows = torch.arange(q_len, device=device) + (kv_len - q_len)
    cols = torch.arange(kv_len, device=device)
    first = torch.tensor(starts, device=device)[:, None, None]
    return ((cols[None, :] <= rows[:, None])[None] & (cols[None, None, :] >= first)).unsqueeze(1)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every causal cell, in float64; LSE [B, Hq, S]."""
    return masked(q, k, v, causal(q.shape[2], k.shape[2], starts, q.device), scale)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cells of a layout, in float64."""
    return masked(q, k, v, membership.mask(layout), scale)

"""`exp(q k scale - lse)`: the attention probabilities of a few rows, from logits and a log-sum-exp.

Everything that sums probabilities (maps, profiles, oracles, studies of sampling) forms them here, a chunk of rows at
a time, so that nothing grows with the square of the length.
"""

from __future__ import annotations

import torch


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or in float64 where it is float64: what the torch path computes in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def probabilities(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: float, first_key: int = 0
) -> torch.Tensor:
    """[Hq, r, n]: the probability of each key in each row, 0 right of the diagonal. float32; float64 for a float64 q.

    q [Hq, r, D] are the queries of the own positions `rows` [r], k [Hkv, n, D] the keys of the own positions
    `first_key .. first_key + n - 1`, and lse [Hq, r] the natural logarithm of each row's sum of exponentials. Which
    keys that sum runs over is the caller's choice: with the LSE of the dense pass these are the dense probabilities.
    """
    heads, count, dim = q.shape
    kv_heads, keys = k.shape[:2]
    grouped = at_least_float32(q).reshape(kv_heads, -1, dim)
    logits = ((grouped @ at_least_float32(k).transpose(-1, -2)) * scale).view(heads, count, keys)
    weight = logits.sub_(lse[..., None]).exp_()
    future = torch.arange(first_key, first_key + keys, device=q.device)[None, :] > rows[:, None]
    return weight.masked_fill_(future, 0.0)

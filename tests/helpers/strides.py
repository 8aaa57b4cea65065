"""The same kind of tensors laid out in every way that callers bring them."""

from __future__ import annotations

import torch

WAYS = ("plain", "transposed heads", "transposed dimensions", "expanded", "flipped", "odd offset", "every second")


def restrided(how: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of the same shapes and dtypes, whose strides are unusual; all but the expanded hold the same numbers."""
    return [_restride(how, x) for x in tensors]


def _restride(how: str, x: torch.Tensor) -> torch.Tensor:
    if how == "transposed heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "transposed dimensions":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "expanded":
        # Every head of every sequence the same: strides of 0.
        return x[:1, :1].expand(x.shape)
    if how == "flipped":
        # Rows come from the back, as a copy; a batch and heads of stride 0 before it.
        return x.flip(2).transpose(0, 1).contiguous().transpose(0, 1).flip(2)
    if how == "odd offset":
        room = x.new_zeros(x.numel() + 1)
        room[1:] = x.flatten()
        return room[1:].view(x.shape)
    if how == "every second":
        room = x.new_zeros(*x.shape[:3], 2 * x.shape[3])
        room[..., 1::2] = x
        return room[..., 1::2]
    return x

"""What a layer must know about the rows of a call: where each sequence starts, and which head is which.

Pure functions over tensors and integers; the hook in `headscope.engine.model.apply` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.engine.base.errors import ModelError

PADDING, VALID, UNWRITTEN = 0, 1, 2


@dataclass(frozen=True)
class Rows:
    """`starts[b]` is the first real key of sequence b; keys from `kv_len` on are slots that nothing was written to."""

    starts: tuple[int, ...]
    kv_len: int


def encode_mask(
    batch: int, q_len: int, kv_len: int, q_offset: int, padding: torch.Tensor | None, device: torch.device | str
) -> torch.Tensor | None:
    """int8 [B, 1, 1, kv_len] with PADDING, VALID or UNWRITTEN per key slot; None when every slot is valid.

    `padding` [B, seen tokens] is true (or 1) where a token is real. Slots from `q_offset + q_len` on belong to a
    static cache that is not yet full.
    """
    written = min(int(q_offset) + q_len, kv_len)
    if written == kv_len and (padding is None or bool(padding[:, :kv_len].all())):
        return None
    codes = torch.full((batch, kv_len), UNWRITTEN, dtype=torch.int8, device=device)
    codes[:, :written] = VALID
    if padding is not None:
        known = min(written, padding.shape[-1])
        codes[:, :known] = padding[:, :known].to(torch.int8).clamp(0, 1)
    return codes[:, None, None, :]


def decode_mask(codes: torch.Tensor | None, batch: int, kv_len: int) -> Rows:
    """The rows behind a mask of `encode_mask`. ModelError when padding stands anywhere but on the left."""
    if codes is None:
        return Rows((0,) * batch, kv_len)
    flat = codes[:, 0, 0, :].cpu()
    if flat.shape[0] != batch:
        flat = flat.expand(batch, -1)
    written = int((flat[0] != UNWRITTEN).sum())
    valid = flat[:, :written] == VALID
    starts = tuple(int(row) for row in written - valid.sum(dim=1))
    for sequence, start in enumerate(starts):
        if not bool(valid[sequence, start:].all()):
            raise ModelError(
                f"sequence {sequence} of the batch has padding that is not on its left: set the tokenizer's "
                "padding_side to 'left' for sparse prefill"
            )
    return Rows(starts, written)


def head_offset(local_heads: int, all_heads: int, rank: int) -> int:
    """Global number of a rank's first query head under tensor parallel.

    Some families keep all heads on every rank; then the offset is 0. ModelError when heads do not divide.
    """
    if local_heads == all_heads:
        return 0
    if local_heads <= 0 or all_heads % local_heads:
        raise ModelError(
            f"{all_heads} query heads do not divide into {local_heads} on each rank: use a tensor-parallel size "
            "that divides the heads"
        )
    offset = rank * local_heads
    if not 0 <= offset < all_heads:
        raise ModelError(f"rank {rank} with {local_heads} heads lies outside the model's {all_heads} query heads")
    return offset

"""What a layer must know about the rows of a call: where each sequence starts, and which head is which.

Pure functions over tensors and integers; the hook in `headscope.engine.model.hook` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.engine.base.errors import ModelError


@dataclass(frozen=True)
class Rows:
    """`starts[b]` is the first real key of sequence b; keys from `kv_len` on are slots that nothing was written to."""

    starts: tuple[int, ...]
    kv_len: int


def rows_behind(padding: torch.Tensor | None, batch: int, written: int) -> Rows:
    """The rows of a causal call with `written` keys; `padding` [B, tokens] is true (or 1) where a token is real.

    ModelError when padding stands anywhere but on the left.
    """
    if padding is None:
        return Rows((0,) * batch, written)
    valid = padding[:, :written].cpu().bool().expand(batch, -1)
    if valid.shape[1] < written:  # as the stock mask functions do: what the padding mask does not reach is padding
        valid = torch.nn.functional.pad(valid, (0, written - valid.shape[1]))
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

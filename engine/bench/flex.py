"""FlexAttention over the tiles of a layout, as a second baseline: its own granularity, 128 x 128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headscope.engine.attend.inputs import LayerInputs, ScoreInputs
from headscope.kernels.cells.layout import PAD, Layout

SIDE = 128

LONGEST = 2**18
"""Beyond this its tables of tiles, which grow with the square of the length, take gigabytes."""


def reason_to_skip(inputs: ScoreInputs) -> str | None:
    """Why FlexAttention is not timed on these inputs, or None."""
    if inputs.device.type != "cuda":
        return "it is timed on CUDA only"
    if inputs.rows != inputs.length or inputs.length % SIDE:
        return f"it is timed on whole prompts of a multiple of {SIDE} tokens"
    return None if inputs.length <= LONGEST else f"its block mask at {inputs.length} tokens takes gigabytes"


def calls(inputs: LayerInputs, layouts: dict[str, Layout]) -> dict[str, Callable[[], Any]]:
    """One call per layout, compiled on first use. Tiles below the diagonal are full, those on it causal."""
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    # One compilation serves all layouts of a shape; a few shapes exhaust the cache, so it is emptied.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    timed_calls: dict[str, Callable[[], Any]] = {}
    for name, layout in layouts.items():
        computed = tiles(layout)
        diagonal = torch.eye(computed.shape[-1], dtype=torch.bool, device=computed.device)
        mask = BlockMask.from_kv_blocks(
            *_listed(computed & diagonal), *_listed(computed & ~diagonal), BLOCK_SIZE=SIDE, mask_mod=_causal
        )
        timed_calls[name] = lambda mask=mask: compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)  # type: ignore[misc]
    return timed_calls


def _causal(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return row >= column


def _listed(computed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts int32 [B, H, n] and key tiles int32 [B, H, n, n], those that are found first."""
    order = computed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return computed.sum(-1, dtype=torch.int32), order.to(torch.int32)


def tiles(layout: Layout) -> torch.Tensor:
    """bool [B, H, n / 128, n / 128]: tiles that hold a cell. For whole unpadded sequences of a multiple of 128."""
    if layout.kv_len % SIDE or layout.q_len != layout.kv_len or any(layout.starts) or SIDE % layout.rows:
        raise ValueError(f"tiles need whole unpadded sequences of a multiple of {SIDE} tokens")
    side = layout.kv_len // SIDE
    place = torch.arange(side, device=layout.device)
    back = place[:, None] - place[None, :]
    # Windows and bands look the same from every row block: what counts is how many tiles back a tile lies.
    near = _spans(layout, side)
    column = torch.zeros(len(near), side + 1, dtype=torch.bool, device=layout.device)
    column.scatter_(1, (layout.columns.long() // SIDE).clamp(max=side), True)
    computed = near[:, back.clamp(min=0)] | column[:, None, :side]
    _add_blocks(layout, computed)
    return (computed & (back >= 0)).view(layout.batch, layout.heads, side, side)


def _spans(layout: Layout, side: int) -> torch.Tensor:
    """bool [N, side]: whether a window or band reaches the tile so many tiles before a row block's own."""
    # A window's columns run from r0 - offset to r0 - offset + W - 1, for r0 from the block's first row to its last
    # group of rows. Tile `b - x` holds the columns -128 x to -128 x + 127 from the block's first row.
    offset = layout.windows.long()
    low = [-((SIDE - layout.rows + layout.tile - 1 - offset).div(SIDE, rounding_mode="floor"))]
    high = [-((-offset).div(SIDE, rounding_mode="floor"))]
    real = [layout.windows < PAD]
    if layout.bands.shape[1]:
        # Cells of that tile lie 128 x - 127 to 128 x + 127 back.
        first, last = layout.bands.long().unbind(-1)
        low.append(-((SIDE - 1 - first).div(SIDE, rounding_mode="floor")))
        high.append((last + SIDE - 1).div(SIDE, rounding_mode="floor"))
        real.append(first < PAD)
    edges = torch.zeros(len(offset), side + 1, dtype=torch.int32, device=layout.device)
    for start, stop, kept in zip(low, high, real, strict=True):
        edges.scatter_add_(1, start.clamp(0, side), kept.int())
        edges.scatter_add_(1, (stop + 1).clamp(0, side), -kept.int())
    return edges[:, :side].cumsum(1) > 0


def _add_blocks(layout: Layout, computed: torch.Tensor) -> None:
    """Marks the tiles that listed blocks of any size touch in `found` [N, side, side]."""
    last = computed.shape[-1] - 1
    for head, slot in enumerate(layout.block_slot):
        if slot < 0:
            continue
        size = layout.block_size[head]
        row, entry = (layout.blocks[slot] < PAD).nonzero(as_tuple=True)
        key = layout.blocks[slot, row, entry].long()
        for down in range(0, size + SIDE - 1, SIDE):
            for right in range(0, size + SIDE - 1, SIDE):
                # The last step is the block's last row or column.
                rows = (row * size + min(down, size - 1)) // SIDE
                keys = (key * size + min(right, size - 1)) // SIDE
                computed[head, rows.clamp(max=last), keys.clamp(max=last)] = True

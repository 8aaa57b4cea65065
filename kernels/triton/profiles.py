"""Exact sums of attention probability in Triton per column and per distance, over all rows of a prompt.

Columns are the first step of a pooled map (`mass`) with one pool that holds every row. Distances use that a box of 64
rows by 128 columns at a fixed offset holds the same distances for every row block: its cells are summed over all row
blocks in registers, then along the diagonals once. Additions run in a fixed order, so results repeat bit for bit;
scratch is bounded, and heads go in chunks that fit it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.cells.inputs import packed
from headscope.kernels.triton.common import (
    base2,
    check_inputs,
    check_lse,
    descriptor,
    device_ints,
    pad_dim,
    precision,
    shared_room,
)
from headscope.kernels.triton.mass import SCRATCH, column_sums, launch_for, probability


@triton.jit(do_not_specialize=("q_len", "kv_len", "heads", "group", "first_head", "boxes"))
def _diagonals_kernel(
    q_d,
    k_d,
    lse_ptr,
    out_ptr,
    starts_ptr,
    q_len,
    kv_len,
    heads,
    group,
    scale,
    first_head,
    boxes,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Box b (offset 64 + 128 b): its cells summed over all row blocks. out [heads of this chunk, boxes, 64, 128]."""
    box = tl.program_id(0)
    head = first_head + tl.program_id(1)
    sequence = head // heads
    start = tl.load(starts_ptr + sequence)
    first_row = kv_len - q_len - start
    length = kv_len - start
    delta = 64 + 128 * box
    kv_head = sequence * (heads // group) + head % heads // group
    lane = tl.arange(0, 64)
    wide = tl.arange(0, 128)
    acc = tl.zeros([64, 128], tl.float32)
    low = tl.maximum(tl.maximum(first_row, 0) // 64, (delta - 64) // 64) * 64
    for row in range(low, length, 64):
        rows = row + lane
        columns = row - delta + wide
        k = k_d.load([kv_head, start + row - delta, 0]).reshape([128, WIDTH])
        weight = probability(q_d, k, lse_ptr, head, rows, row - first_row, q_len, scale, WIDTH, PRECISION)
        keep = (rows[:, None] >= columns[None, :]) & ((columns >= 0)[None, :] & (rows < length)[:, None])
        acc += tl.where(keep, weight, 0.0)
    line = (tl.program_id(1).to(tl.int64) * boxes + box) * 8192
    tl.store(out_ptr + line + lane[:, None] * 128 + wide[None, :], acc)


@triton.jit(do_not_specialize=("boxes", "length"))
def _along_kernel(in_ptr, out_ptr, boxes, length):
    """Adds up the cells of equal distance: out [heads of this chunk, length], 256 distances a program."""
    distance = tl.program_id(0) * 256 + tl.arange(0, 256)
    head = tl.program_id(1).to(tl.int64)
    acc = tl.zeros([256], tl.float32)
    for row in range(64):
        # Row t sees distance d in the box whose column t + 64 + 128 b - d lies in 0 .. 127.
        box = (distance - row - 64 + 127 + 128) // 128 - 1
        column = row + 64 + 128 * box - distance
        real = (box >= 0) & (box < boxes) & (column < 128)
        acc += tl.load(in_ptr + ((head * boxes + box) * 64 + row) * 128 + column, mask=real, other=0.0)
    tl.store(out_ptr + head * length + distance, acc, mask=distance < length)


def sums(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, starts: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probability per own column and per distance over all rows: two float32 [B, Hq, T].

    q and k are copied where they do not lie in one piece. `ValueError` for inputs that do not fit each other or that
    this path does not serve.
    """
    check_inputs(q, k, None, scale, starts)
    lse, q, k = check_lse(lse, q), packed(q), packed(k)
    batch, heads, q_len, head_dim = q.shape
    kv_len, width = k.shape[2], pad_dim(head_dim)
    columns = column_sums(q, k, lse, scale, starts)
    distances = torch.empty(batch * heads, kv_len, dtype=torch.float32, device=q.device)
    boxes = -(-(kv_len + 63) // 128)
    chunk = max(1, min(batch * heads, SCRATCH // (boxes * 8192)))
    scratch = torch.empty(chunk, boxes, 64, 128, dtype=torch.float32, device=q.device)
    use = launch_for(width, q.element_size(), shared_room(q.device))
    for head in range(0, batch * heads, chunk):
        count = min(chunk, batch * heads - head)
        _diagonals_kernel[(boxes, count)](
            descriptor(q, 64, width),
            descriptor(k, 128, width),
            lse,
            scratch,
            device_ints(starts, q.device),
            q_len,
            kv_len,
            heads,
            heads // k.shape[1],
            base2(scale),
            head,
            boxes,
            WIDTH=width,
            PRECISION=precision(q.dtype),
            num_warps=use.warps,
            num_stages=use.diagonals,
        )
        _along_kernel[(-(-kv_len // 256), count)](scratch, distances[head:], boxes, kv_len, num_warps=4)
    return columns, distances.view(batch, heads, kv_len)

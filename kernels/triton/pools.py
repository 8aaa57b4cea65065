"""Pools that the online index scores in Triton: mean queries and keys of blocks, masses of windows of distances.

Sums run in float32 in a fixed order. See `torch.index` for the meaning.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headscope.kernels.triton.common import check_contiguous, pad_dim


@triton.jit(do_not_specialize=("span", "count"))
def _window_mass_kernel(score_ptr, lines_ptr, length_ptr, out_ptr, span, count):
    """Mass of the grid windows (tile 128): each distance's score times the share of 64 rows that see it inside."""
    line = tl.program_id(1)
    source = tl.load(lines_ptr + line).to(tl.int64) * span
    length = tl.load(length_ptr + line)
    window = tl.program_id(0) * 16 + tl.arange(0, 16)
    # Distances -63 .. 127 beyond 128 m are seen, of 256 tried.
    distance = window[:, None] * 128 - 64 + tl.arange(0, 256)[None, :]
    real = (distance >= 0) & (distance < length) & (window < count)[:, None]
    score = tl.load(score_ptr + source + distance, mask=real, other=0.0)
    far = (distance + 63) // 128
    near = distance // 128
    share = tl.minimum(distance + 64 - far * 128, 64).to(tl.float32) / 64
    share = tl.where(far == near, 1.0, share)
    here = window[:, None]
    weight = tl.where(far == here, share, 0.0) + tl.where((near == here) & (far != near), 1.0 - share, 0.0)
    mass = tl.sum(tl.where(real, score * weight, 0.0), 1)
    tl.store(out_ptr + line.to(tl.int64) * count + window, mass, mask=window < count)


@triton.jit(do_not_specialize=("n", "own_last", "heads", "blocks", "size"))
def _means_kernel(
    x_ptr,
    map_ptr,
    starts_ptr,
    out_ptr,
    n,
    own_last,
    heads,
    blocks,
    size,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """float32 mean of the real rows of each block. x [heads of all sequences, n, D]; its last row is the newest."""
    block, line = tl.program_id(0), tl.program_id(1)
    head = tl.load(map_ptr + line * 2)
    start = tl.load(starts_ptr + tl.load(map_ptr + line * 2 + 1))
    length = own_last - start
    shift = length - n
    dim = tl.arange(0, WIDTH)
    acc = tl.zeros([16, WIDTH], tl.float32)
    low = tl.maximum(block * size, tl.maximum(shift, 0))
    high = tl.minimum(block * size + size, length)
    for at in range(low, high, 16):
        row = at + tl.arange(0, 16)
        source = (head.to(tl.int64) * n + row - shift)[:, None] * D + dim[None, :]
        acc += tl.load(x_ptr + source, mask=(row < high)[:, None] & (dim < D)[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(acc, 0) / tl.maximum(high - low, 1).to(tl.float32)
    tl.store(out_ptr + (line.to(tl.int64) * blocks + block) * D + dim, mean, mask=dim < D)


def window_mass(score: torch.Tensor, lines: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """float32 [len(lines), count]: mass of grid window m (offset 64 + 128 m) of the given lines of `score`.

    `ValueError` for a tensor that does not lie in one piece.
    """
    check_contiguous(score=score, lines=lines, lengths=lengths)
    out = torch.empty(lines.shape[0], count, dtype=torch.float32, device=score.device)
    _window_mass_kernel[(-(-count // 16), lines.shape[0])](
        score, lines, lengths, out, score.shape[1], count, num_warps=4
    )
    return out


def block_means(
    x: torch.Tensor, pairs: torch.Tensor, starts: torch.Tensor, kv_len: int, blocks: int, size: int
) -> torch.Tensor:
    """float32 [lines, blocks, D]: means of blocks of `size` own positions. x [B, H, n, D].

    `pairs` int32 [lines, 2]: the head among B * H, and its sequence. `ValueError` for a tensor that does not lie in one
    piece.
    """
    check_contiguous(x=x, pairs=pairs, starts=starts)
    head_dim = x.shape[-1]
    out = torch.empty(pairs.shape[0], blocks, head_dim, dtype=torch.float32, device=x.device)
    _means_kernel[(blocks, pairs.shape[0])](
        x,
        pairs,
        starts,
        out,
        x.shape[2],
        kv_len,
        x.shape[1],
        blocks,
        size,
        D=head_dim,
        WIDTH=pad_dim(head_dim),
        num_warps=4,
    )
    return out

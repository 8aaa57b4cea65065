"""The dense kernel of the portable path in Triton: causal attention with LSE over every cell.

One program takes one block of one query head; see `attention` for shapes and meaning.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headscope.kernels.triton.common import SOFTMAX_FLOOR, close_softmax, softmax_step


@triton.jit
def place(blocks, kv_heads, GROUP: tl.constexpr, BY_BLOCK: tl.constexpr):
    """(sequence, KV head in the sequence, query head in the group, block from the end) of this program."""
    pid = tl.program_id(0)
    if BY_BLOCK:
        # Longest blocks of all heads first: balanced where there are few blocks.
        lanes = tl.num_programs(0) // blocks
        back = pid // lanes
        rest = pid % lanes
        flat = rest // GROUP
        member = rest % GROUP
    else:
        # One KV head after another: its keys stay in L2 over the whole sweep.
        flat = pid // (GROUP * blocks)
        rest = pid % (GROUP * blocks)
        back = rest // GROUP
        member = rest % GROUP
    return flat // kv_heads, flat % kv_heads, member, back


@triton.jit
def store_rows(o_ptr, lse_ptr, out, lse, first, local, q_len, D: tl.constexpr):
    """Finished rows `local` of one head whose row 0 is row `first` of the output. Pointers, since a tensor-map store
    at a negative row is an illegal instruction on sm_90, unlike a load."""
    dim = tl.arange(0, out.shape[1])
    real = (local >= 0) & (local < q_len)
    tl.store(lse_ptr + first + local, lse, mask=real)
    place = (first + local)[:, None] * D + dim[None, :]
    tl.store(o_ptr + place, out, mask=real[:, None] & (dim < D)[None, :])


@triton.jit(do_not_specialize=("q_len", "kv_len", "kv_heads", "blocks"))
def dense_kernel(
    q_d,
    k_d,
    v_d,
    o_ptr,
    lse_ptr,
    starts_ptr,
    q_len,
    kv_len,
    kv_heads,
    blocks,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, kv_local, member, back = place(blocks, kv_heads, GROUP, BY_BLOCK)
    start = tl.load(starts_ptr + sequence)
    first_row = kv_len - q_len - start
    block = (kv_len - start + ROWS - 1) // ROWS - 1 - back
    top_row = block * ROWS
    if (block >= 0) & (top_row + ROWS > first_row):
        kv_head = sequence * kv_heads + kv_local
        head = kv_head * GROUP + member
        rows = top_row + tl.arange(0, ROWS)
        # q [ROWS, WIDTH]
        q = q_d.load([head, top_row - first_row, 0]).reshape([ROWS, WIDTH])
        top = tl.full([ROWS], SOFTMAX_FLOOR, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for at in tl.range(0, top_row, COLUMNS, num_stages=STAGES):
            k = k_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            v = v_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        for at in tl.range(top_row, top_row + ROWS, COLUMNS, num_stages=1):
            columns = at + tl.arange(0, COLUMNS)
            k = k_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            v = v_d.load([kv_head, start + at, 0]).reshape([COLUMNS, WIDTH])
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
            acc, top, total = softmax_step(scores, v, acc, top, total, scale, PRECISION)
        acc, lse = close_softmax(acc, top, total)
        store_rows(o_ptr, lse_ptr, acc.to(q.dtype), lse, head.to(tl.int64) * q_len, rows - first_row, q_len, D)

"""The products and the softmax of one step of sparse attention: parts of `gluon_sparse`."""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from headscope.kernels.gluon.compat import OVERLAPPING_VIEWS, overlapping_view

# fmt: off
# Kernels take dozens of arguments: one a line would hide the few lines that compute.

ONE_VIEW = gl.constexpr(1 if OVERLAPPING_VIEWS else 0)
"""Whether two neighbouring slots of keys, wherever they start, can be one operand; else a step takes two products."""


@gluon.jit
def product(q_s, k_s, chunk, G: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STRIDE: gl.constexpr,
            SL: gl.constexpr):
    """Starts the scores [64, N] of the row block's queries and the N keys from K piece `chunk` on."""
    HALVES: gl.constexpr = D // 64
    s_t = gl.zeros([64, N], gl.float32, SL)
    for half in gl.static_range(HALVES):
        keys = overlapping_view(k_s.index(chunk + half * STRIDE), N)
        s_t = warpgroup_mma(q_s.index(G * HALVES + half).reshape([64, 64]), keys.permute((1, 0)), s_t, use_acc=half > 0,
                            is_async=True)
    return s_t


@gluon.jit
def start_scores(q_s, k_s, chunk, G: gl.constexpr, D: gl.constexpr, PAIR: gl.constexpr, STRIDE: gl.constexpr,
                 SL: gl.constexpr):
    """Starts this step's scores [64, 64 * PAIR], which `finish_scores` waits for."""
    if ONE_VIEW + (2 - PAIR) > 0:
        s_t = product(q_s, k_s, chunk, G, D, 64 * PAIR, STRIDE, SL)
        return s_t, s_t
    else:
        HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
        s0 = product(q_s, k_s, chunk, G, D, 64, STRIDE, HALF)
        s1 = product(q_s, k_s, chunk + 1, G, D, 64, STRIDE, HALF)
        return s0, s1


@gluon.jit
def finish_scores(s0, s1, LATER: gl.constexpr, PAIR: gl.constexpr, SL: gl.constexpr):
    """The scores, once all but the LATER last products are done."""
    if ONE_VIEW + (2 - PAIR) > 0:
        return warpgroup_mma_wait(LATER, deps=[s0])
    else:
        s0, s1 = warpgroup_mma_wait(LATER, deps=[s0, s1])
        return gl.convert_layout(gl.join(s0, s1).permute((0, 2, 1)).reshape([64, 128]), SL)


@gluon.jit
def issue(q_s, k_s, v_s, k_full, ph, v_full, pph, chunk, slot, acc, p0, p1, G: gl.constexpr, D: gl.constexpr,
          PAIR: gl.constexpr, STRIDE: gl.constexpr, SL: gl.constexpr):
    """Starts this step's scores [64, 64 * PAIR] and beside them the value product of the step before."""
    mbarrier.wait(k_full, ph)
    s0, s1 = start_scores(q_s, k_s, chunk, G, D, PAIR, STRIDE, SL)
    mbarrier.wait(v_full, pph)
    o_t = warpgroup_mma(p0, v_s.index(slot).reshape([64, D]), acc, is_async=True)
    if PAIR == 2:
        o_t = warpgroup_mma(p1, v_s.index(slot + 1).reshape([64, D]), o_t, is_async=True)
    return s0, s1, o_t


@gluon.jit
def operands(weights, DTYPE: gl.constexpr, PL: gl.constexpr, PAIR: gl.constexpr):
    """Softmax weights as one or two 64-key operands in registers."""
    if PAIR == 2:
        w0, w1 = weights.to(DTYPE).reshape([64, 2, 64]).permute((0, 2, 1)).split()
        return gl.convert_layout(w0, PL), gl.convert_layout(w1, PL)
    else:
        w = gl.convert_layout(weights.to(DTYPE), PL)
        return w, w


@gluon.jit
def lone_scores(q_s, k_s, k_full, ph, k_empty, chunk, G: gl.constexpr, D: gl.constexpr, PAIR: gl.constexpr,
                STRIDE: gl.constexpr, SL: gl.constexpr):
    """This step's scores with nothing beside them."""
    mbarrier.wait(k_full, ph)
    s0, s1 = start_scores(q_s, k_s, chunk, G, D, PAIR, STRIDE, SL)
    s = finish_scores(s0, s1, 0, PAIR, SL)
    mbarrier.arrive(k_empty)
    return s


@gluon.jit
def last_values(v_s, v_full, pph, slot, acc, p0, p1, D: gl.constexpr, PAIR: gl.constexpr):
    """The last step's value product with nothing beside it."""
    mbarrier.wait(v_full, pph)
    o_t = warpgroup_mma(p0, v_s.index(slot).reshape([64, D]), acc, is_async=True)
    if PAIR == 2:
        o_t = warpgroup_mma(p1, v_s.index(slot + 1).reshape([64, D]), o_t, is_async=True)
    return warpgroup_mma_wait(0, deps=[o_t])


@gluon.jit
def weigh(s, m, total, scale, DTYPE: gl.constexpr, PAIR: gl.constexpr, PL: gl.constexpr):
    """Online softmax of finished scores: (factor on what came before, running maximum, running sum, weights)."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    shrink = gl.exp2(m - top)
    weights = gl.exp2(s * scale - top[:, None])
    p0, p1 = operands(weights, DTYPE, PL, PAIR)
    return shrink, top, total * shrink + gl.sum(weights, 1), p0, p1

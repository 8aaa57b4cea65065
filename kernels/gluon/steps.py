"""The MMAs and the softmax of one step of sparse attention: parts of `sparse.py`."""

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
"""Whether two neighbouring slots of keys, wherever they start, can be one operand; else a step takes two MMAs."""


@gluon.jit
def start_mma(shared, piece, G: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STRIDE: gl.constexpr,
              SCORES: gl.constexpr):
    """Starts the scores [64, N] of row block G's queries and the N keys from K piece `piece` on; pieces of the same
    keys, 64 dimensions each, lie STRIDE apart."""
    HALVES: gl.constexpr = D // 64
    scores_t = gl.zeros([64, N], gl.float32, SCORES)
    for half in gl.static_range(HALVES):
        keys = overlapping_view(shared.k.index(piece + half * STRIDE), N)
        scores_t = warpgroup_mma(shared.q.index(G * HALVES + half).reshape([64, 64]), keys.permute((1, 0)), scores_t,
                                 use_acc=half > 0, is_async=True)
    return scores_t


@gluon.jit
def start_scores(shared, piece, G: gl.constexpr, D: gl.constexpr, PAIR: gl.constexpr, STRIDE: gl.constexpr,
                 SCORES: gl.constexpr):
    """Starts this step's scores [64, 64 * PAIR], which `finish_scores` waits for."""
    if ONE_VIEW + (2 - PAIR) > 0:
        scores_t = start_mma(shared, piece, G, D, 64 * PAIR, STRIDE, SCORES)
        return scores_t, scores_t
    else:
        HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
        scores0 = start_mma(shared, piece, G, D, 64, STRIDE, HALF)
        scores1 = start_mma(shared, piece + 1, G, D, 64, STRIDE, HALF)
        return scores0, scores1


@gluon.jit
def finish_scores(scores0, scores1, LATER: gl.constexpr, PAIR: gl.constexpr, SCORES: gl.constexpr):
    """The scores, once all but the LATER last MMAs are done. Two halves are laid side by side:

        scores0  a0 a1 .. a63     join    [a0 b0] [a1 b1] ..     permute, reshape    a0 .. a63 b0 .. b63
        scores1  b0 b1 .. b63

    """
    if ONE_VIEW + (2 - PAIR) > 0:
        return warpgroup_mma_wait(LATER, deps=[scores0])
    else:
        scores0, scores1 = warpgroup_mma_wait(LATER, deps=[scores0, scores1])
        return gl.convert_layout(gl.join(scores0, scores1).permute((0, 2, 1)).reshape([64, 128]), SCORES)


@gluon.jit
def issue(shared, k_full, phase, v_full, v_phase, piece, v_slot, acc, operand0, operand1, G: gl.constexpr,
          D: gl.constexpr, PAIR: gl.constexpr, STRIDE: gl.constexpr, SCORES: gl.constexpr):
    """Starts this step's scores [64, 64 * PAIR] and beside them the value MMA of the step before."""
    mbarrier.wait(k_full, phase)
    scores0, scores1 = start_scores(shared, piece, G, D, PAIR, STRIDE, SCORES)
    mbarrier.wait(v_full, v_phase)
    out_t = warpgroup_mma(operand0, shared.v.index(v_slot).reshape([64, D]), acc, is_async=True)
    if PAIR == 2:
        out_t = warpgroup_mma(operand1, shared.v.index(v_slot + 1).reshape([64, D]), out_t, is_async=True)
    return scores0, scores1, out_t


@gluon.jit
def operands(weights, DTYPE: gl.constexpr, OPERAND: gl.constexpr, PAIR: gl.constexpr):
    """Softmax weights as one or two 64-key operands in registers. A row of 128 is cut in the middle:

        w0 .. w63 w64 .. w127    reshape, permute    [w0 w64] [w1 w65] ..    split    w0 .. w63 | w64 .. w127

    """
    if PAIR == 2:
        left, right = weights.to(DTYPE).reshape([64, 2, 64]).permute((0, 2, 1)).split()
        return gl.convert_layout(left, OPERAND), gl.convert_layout(right, OPERAND)
    else:
        whole = gl.convert_layout(weights.to(DTYPE), OPERAND)
        return whole, whole


@gluon.jit
def lone_scores(shared, k_full, phase, k_empty, piece, G: gl.constexpr, D: gl.constexpr, PAIR: gl.constexpr,
                STRIDE: gl.constexpr, SCORES: gl.constexpr):
    """This step's scores with nothing beside them."""
    mbarrier.wait(k_full, phase)
    scores0, scores1 = start_scores(shared, piece, G, D, PAIR, STRIDE, SCORES)
    scores = finish_scores(scores0, scores1, 0, PAIR, SCORES)
    mbarrier.arrive(k_empty)
    return scores


@gluon.jit
def last_values(shared, v_full, v_phase, v_slot, acc, operand0, operand1, D: gl.constexpr, PAIR: gl.constexpr):
    """The last step's value MMA with nothing beside it."""
    mbarrier.wait(v_full, v_phase)
    out_t = warpgroup_mma(operand0, shared.v.index(v_slot).reshape([64, D]), acc, is_async=True)
    if PAIR == 2:
        out_t = warpgroup_mma(operand1, shared.v.index(v_slot + 1).reshape([64, D]), out_t, is_async=True)
    return warpgroup_mma_wait(0, deps=[out_t])


@gluon.jit
def weigh(scores, top, total, scale, DTYPE: gl.constexpr, PAIR: gl.constexpr, OPERAND: gl.constexpr):
    """Online softmax of finished scores: (factor on what came before, running maximum, running sum, weights)."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    shrink = gl.exp2(top - new_top)
    weights = gl.exp2(scores * scale - new_top[:, None])
    operand0, operand1 = operands(weights, DTYPE, OPERAND, PAIR)
    return shrink, new_top, total * shrink + gl.sum(weights, 1), operand0, operand1

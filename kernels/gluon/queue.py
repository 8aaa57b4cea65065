"""What the persistent Hopper kernels share: rings of stages, and a queue of items.

A grid has one program a multiprocessor, and its producer takes one item (a head and its rows) after another from a
counter in global memory, whoever is first. It looks up what the item is and passes that on to the consumers of its
program through shared memory, two items deep, and loads for the next item while they finish one. Launching, looking
up, the first loads and the last store of an item then pass beside the products of another.
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def next_stage(st, ph, STAGES: gl.constexpr):
    """The stage after `st`, and the phase its barriers are waited for in."""
    st += 1
    if st == STAGES:
        st = 0
        ph = ph ^ 1
    return st, ph


@gluon.jit
def take(counter_ptr):
    """An item that no program has; the first ones are those of the programs' own numbers. Nothing else is passed on by
    the counter, so it orders no other memory: a fence would also empty the multiprocessor's cache."""
    return gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def announce(facts, turn, queue, told, heard, FACTS: gl.constexpr):
    """The producer's word on the turn-th item of its program: FACTS integers, of which the first is negative only
    after the last item. queue int32 [2 * FACTS, 1]."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn & 1
    mbarrier.wait(heard.index(place), ((turn >> 1) & 1) ^ 1)
    for i in gl.static_range(FACTS):
        queue.index(place * FACTS + i).store(gl.full([1], 0, gl.int32, ONE) + facts[i])
    mbarrier.arrive(told.index(place))


@gluon.jit
def fact(number: gl.constexpr, turn, queue, FACTS: gl.constexpr):
    """One integer about the turn-th item, for a consumer warpgroup, which gives the place back once it has read all."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(queue.index((turn & 1) * FACTS + number).load(ONE), 0)


@gluon.jit
def next_head(turn, queue, told, FACTS: gl.constexpr):
    """The first fact of the turn-th item, its head or -1, once it is announced; `fact` then reads the others."""
    mbarrier.wait(told.index(turn & 1), (turn >> 1) & 1)
    return fact(0, turn, queue, FACTS)

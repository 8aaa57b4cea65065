"""What the persistent Hopper kernels share: rings of stages, and a queue of items.

A grid has one program an SM, and its producer takes one item (a head and its rows) after another from a counter in
global memory, whoever is first. It looks up what the item is and passes that on to the consumers of its program through
shared memory, two items deep, and loads for the next item while they finish one. Launching, looking up, the first loads
and the last store of an item then pass beside the MMAs of another:

    counter --take--> producer --announce--> facts of items n, n + 1 --fact--> consumers
                         |                                                        ^
                         +--TMA--> stages of a ring (full / empty barriers) ------+
"""

# mypy: ignore-errors
# Gluon kernels are compiled by Triton: their annotations are compile-time markers, not Python types.

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Items(NamedTuple):
    """Which items a launch has. `counter_ptr` holds a 0; `only_start` is every sequence's start, or -1 where they
    differ; heads = B * Hq; with `by_kv` one KV head's query heads run together."""

    counter_ptr: Any
    starts_ptr: Any
    only_start: Any
    q_len: Any
    kv_len: Any
    heads: Any
    heads_per_sequence: Any
    group: Any
    row_blocks: Any
    by_kv: Any


class Queue(NamedTuple):
    """Shared memory through which a producer tells its consumers of items, two places deep: `facts` int32
    [2 * FACTS, 1]; barriers [2] `told`, that a place is written, and `heard`, that every consumer has read it."""

    facts: Any
    told: Any
    heard: Any


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase its barriers are waited for in."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def take(counter_ptr):
    """An item that no program has; the first ones are those of the programs' own numbers. Nothing else is passed on by
    the counter, so it orders no other memory: a fence would also empty the SM's cache."""
    return gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def announce(facts, nth, queue, FACTS: gl.constexpr):
    """The producer's word on the nth item of its program: FACTS integers, of which the first is negative only after the
    last item."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = nth & 1
    mbarrier.wait(queue.heard.index(place), ((nth >> 1) & 1) ^ 1)
    for i in gl.static_range(FACTS):
        queue.facts.index(place * FACTS + i).store(gl.full([1], 0, gl.int32, ONE) + facts[i])
    mbarrier.arrive(queue.told.index(place))


@gluon.jit
def fact(number: gl.constexpr, nth, queue, FACTS: gl.constexpr):
    """One integer about the nth item, for a consumer warpgroup, which gives the place back once it has read all."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(queue.facts.index((nth & 1) * FACTS + number).load(ONE), 0)


@gluon.jit
def next_head(nth, queue, FACTS: gl.constexpr):
    """The first fact of the nth item, its head or -1, once it is announced; `fact` then reads the others."""
    mbarrier.wait(queue.told.index(nth & 1), (nth >> 1) & 1)
    return fact(0, nth, queue, FACTS)

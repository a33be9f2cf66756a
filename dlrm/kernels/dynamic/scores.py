"""Scores of slots: which of them is the first to lose its id.

A score has 31 bits, and is 0 for an empty slot; where a table has fewer slots than its buckets, the
score of what is missing is -1, and no id gets it. The low 8 bits are 1 more than the number of the
step that last used the slot, modulo 255: slots of this very step are not evicted, and one is
counted once a step. (In one step of 255 a slot that was not used counts as used, by chance.) The
other 23 bits are a *value*:

- ``lfu``: 13 bits for the period of the last use and 10 for the number of steps that used the slot,
  which halves from period to period. The number stays when another id gets the slot, so it rises
  where many ids come, and those that fade do not stay because they were used often once.
- ``lru`` and ``age``: the clock at the last use.
- ``score``: the clock at the last use, and the slot with the lowest one is evicted, where ``lru``
  evicts that of the longest time. So whoever sets the clock gives a score to the ids of a step.

All arithmetic is in integers: a CPU and a GPU evict the same ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.kernels import tl, triton

RULES = ("lfu", "lru", "age", "score")
TAG = tl.constexpr(0xFF)
VALUE = tl.constexpr((1 << 23) - 1)
PERIOD = tl.constexpr((1 << 13) - 1)
COUNT = tl.constexpr((1 << 10) - 1)
KEPT = tl.constexpr(1 << 23)
"""The priority of a slot that must keep its id, above all others."""


class Eviction(NamedTuple):
    """How ids are chosen that lose their rows."""

    rule: str = "lfu"
    """One of :data:`RULES`."""
    half_life: int = 1000
    """lfu: steps after which a count halves."""
    age: int = 0
    """age: only ids unused for so many ticks of the clock, which is the step by default."""


class Now(NamedTuple):
    """The time of a step, 0-d int64 tensors."""

    step: Tensor
    clock: Tensor


def used(score: Tensor, now: Now, eviction: Eviction) -> Tensor:
    """The scores of slots after a use in this step, int64."""
    value, tag = now.clock & VALUE.value, now.step % 255 + 1
    if eviction.rule == "lfu":
        period = now.step // eviction.half_life
        count = _count(score >> 8, period)
        value = ((period & PERIOD.value) << 10) | (count + 1).clamp(max=COUNT.value)
    return torch.where((score & TAG.value) == tag, score, (value << 8) | tag)


def priority(score: Tensor, now: Now, eviction: Eviction) -> Tensor:
    """The order in which slots are taken, lowest first, int64: empty ones are -1."""
    value = score >> 8
    if eviction.rule == "lfu":  # of equal counts the one that was not used for longest
        period = now.step // eviction.half_life
        elapsed = (period - (value >> 10)) & PERIOD.value
        order = (_count(value, period) << 13) | (PERIOD.value - elapsed)
    elif eviction.rule == "score":
        order = value
    else:
        elapsed = (now.clock - value) & VALUE.value
        order = VALUE.value - elapsed
        if eviction.rule == "age":
            order = torch.where(elapsed >= eviction.age, order, KEPT.value)
    kept = ((score & TAG.value) == now.step % 255 + 1) | (score < 0)
    return torch.where(score == 0, -1, torch.where(kept, KEPT.value, order))


def _count(value: Tensor, period: Tensor) -> Tensor:
    """The number of uses, halved for every period since the last one."""
    elapsed = (period - (value >> 10)) & PERIOD.value
    return (value & COUNT.value) >> elapsed.clamp(max=15)


# In kernels -----------------------------------------------------------------------------------


@triton.jit
def _count_triton(value, period):
    elapsed = (period - (value >> 10)) & PERIOD
    return (value & COUNT) >> tl.minimum(elapsed, 15)


@triton.jit
def used_triton(score, step, clock, EVICTION: tl.constexpr):
    """:func:`used`, of int32 scores."""
    value = (clock & VALUE).to(tl.int32)
    if EVICTION.rule == "lfu":
        period = (step // EVICTION.half_life & PERIOD).to(tl.int32)
        count = tl.minimum(_count_triton(score >> 8, period) + 1, COUNT)
        value = (period << 10) | count
    tag = (step % 255 + 1).to(tl.int32)
    return tl.where((score & TAG) == tag, score, (value << 8) | tag)


@triton.jit
def priority_triton(score, step, clock, EVICTION: tl.constexpr):
    """:func:`priority`, of int32 scores."""
    value = score >> 8
    if EVICTION.rule == "lfu":
        period = (step // EVICTION.half_life & PERIOD).to(tl.int32)
        elapsed = (period - (value >> 10)) & PERIOD
        order = (_count_triton(value, period) << 13) | (PERIOD - elapsed)
    elif EVICTION.rule == "score":
        order = value
    else:
        elapsed = ((clock & VALUE).to(tl.int32) - value) & VALUE
        order = VALUE - elapsed
        if EVICTION.rule == "age":
            order = tl.where(elapsed >= EVICTION.age, order, KEPT)
    kept = ((score & TAG) == (step % 255 + 1).to(tl.int32)) | (score < 0)
    return tl.where(score == 0, -1, tl.where(kept, KEPT, order))

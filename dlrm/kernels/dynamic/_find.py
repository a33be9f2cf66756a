"""The kernels that find the slots of ids: see :mod:`dlrm.kernels.dynamic.index`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton
from dlrm.kernels.dynamic.hashing import GOLDEN, LOW, mix_triton, scale_triton
from dlrm.kernels.dynamic.scores import used_triton
from dlrm.kernels.lists import append

LANES = tl.constexpr(32)  # slots of a bucket
SEED = tl.constexpr(0x5851F42D4C957F2D)  # of the draw of an admission by chance
EMPTY = GOLDEN  # stands for no id; the id of this number never gets a slot
SPARE = tl.constexpr(1 << 14)  # cells to swap in without a claim
COUNTERS = tl.constexpr(8)  # 1 + rounds, rounded up to a power of two


class Lookups(NamedTuple):
    """The look-ups of a step."""

    ids: Tensor
    """``[n]``."""
    tables: Tensor
    """Look-up ``k`` is of ``tables[k // repeat]``."""
    repeat: int
    n: int
    end: Tensor | None
    """How many of them there are, ``[1]``; None: ``n``."""
    salts: Tensor | None
    """See :class:`~dlrm.kernels.dynamic.slot_index.SlotIndex`."""


class Work(NamedTuple):
    """Memory of one step: int32, and ``new_ids`` int64."""

    missing: Tensor
    """List of the look-ups whose ids have no slot, ``[n]``."""
    claimants: Tensor
    """For each in this list the look-up that stands for its id, ``[n]``."""
    status: Tensor
    """Of claimants the slot, or why there is none, ``[n]``, by look-up."""
    new: Tensor
    """List of the claimants, ``[n]``."""
    new_ids: Tensor
    """Their ids, ``[n]`` int64."""
    chosen: Tensor
    """For each of them the bucket that it has chosen in this round, -1 for none, ``[n]``."""
    next: Tensor
    """And the next one that has chosen it, -1 at the end, ``[n]``."""
    counters: Tensor
    """Lengths of ``missing`` and ``new``; for each further round whether ids are left,
    ``[COUNTERS]``."""
    claims: Tensor
    """Hash table of claimants, and cells that count for nothing."""
    cells: int
    """Its size, a power of two, at most ``2 n``."""
    heads: Tensor
    """The first claimant that has chosen each bucket, -1 for none; of others it is undefined."""


@triton.jit
def begin(index, work, BEGINS: tl.constexpr):
    """Begin a step, or a further part of one."""
    tl.store(work.counters + tl.arange(0, COUNTERS), 0)
    if BEGINS:
        tl.store(index.time, tl.load(index.time) + 1)
        tl.store(index.time + 1, tl.load(index.time + 1) + tl.load(index.time + 2))


@triton.jit
def load_lookups(lookups, k, inside):
    """The ids and tables of look-ups."""
    id = tl.load(lookups.ids + k, mask=inside, other=0).to(tl.int64)
    table = tl.load(lookups.tables + k // lookups.repeat, mask=inside, other=0)
    if lookups.salts is not None:
        id ^= tl.load(lookups.salts + table, mask=inside, other=0)
    return id, table


@triton.jit
def _live(lookups, k):
    live = k < lookups.n
    if lookups.end is not None:
        live &= k < tl.load(lookups.end)
    return live


@triton.jit
def buckets_of(index, id, table, live):
    """The two buckets of ids."""
    first = tl.load(index.first + table, mask=live, other=0)
    size = tl.load(index.buckets + table, mask=live, other=1)
    key = mix_triton(id)
    one = scale_triton(key, size)
    other = one + 1 + scale_triton(key >> 32, size - 1)
    return first + one, first + tl.where(other < size, other, other - size)


@triton.jit
def slots_of(bucket):
    return bucket[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _slot_in(index, bucket, id, live):
    """The slots of ids in their buckets, int32; -1 for none."""
    held = tl.load(index.ids + slots_of(bucket), mask=live[:, None], other=EMPTY)
    lane = tl.max(tl.where(held == id[:, None], tl.arange(0, LANES)[None, :], -1), 1)
    return tl.where(live & (lane >= 0), (bucket * LANES).to(tl.int32) + lane, -1)


@triton.jit
def _probe(index, id, table, live):
    """The slots of ids, int32; -1 for none."""
    live &= id != EMPTY
    one, other = buckets_of(index, id, table, live)
    slot = _slot_in(index, one, id, live)
    more = live & (slot < 0)
    if tl.max(more.to(tl.int32), 0) > 0:  # most ids are in their first bucket
        slot = tl.maximum(slot, _slot_in(index, other, id, more))
    return slot


@triton.jit
def local_row(index, num_shared, slot, id, table, inside):
    """The row of look-ups within their tables."""
    few = tl.load(num_shared + table, mask=inside, other=1)
    first = tl.load(index.first + table, mask=inside, other=0)
    shared = scale_triton(mix_triton(id + 1) >> 16, few)
    return tl.where(slot >= 0, slot.to(tl.int64) - first * LANES + few, shared)


@triton.jit
def drawn(index, id, table, limit):
    """Which ids may have a slot by chance."""
    draw = mix_triton(mix_triton(id ^ SEED) + table + tl.load(index.time) * GOLDEN)
    return (draw & LOW) < limit


@triton.jit
def find(
    index, num_shared, lookups, work, rows, limit, BLOCK: tl.constexpr, EVICTION: tl.constexpr,
    CHANCE: tl.constexpr,
):  # fmt: skip
    """The row of each look-up within its table. In a step, score slots, and list missing ids."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, live = k < lookups.n, _live(lookups, k)
    id, table = load_lookups(lookups, k, inside)
    slot = _probe(index, id, table, live)
    tl.store(rows + k, local_row(index, num_shared, slot, id, table, inside), mask=inside)

    if work is not None:
        tl.store(work.claims + k, -1, mask=inside)
        tl.store(work.claims + lookups.n + k, -1, mask=inside & (lookups.n + k < work.cells))

        # All look-ups of a slot store the same score.
        found = slot >= 0
        step, clock = tl.load(index.time), tl.load(index.time + 1)
        score = tl.load(index.scores + slot, mask=found, other=0)
        new = used_triton(score, step, clock, EVICTION)
        tl.store(index.scores + slot, new, mask=found & (new != score))
        missing = live & ~found
        if CHANCE:  # those that wait need no more
            waiting = missing & (id != EMPTY) & ~drawn(index, id, table, limit)
            missing &= ~waiting
            number = tl.sum(waiting.to(tl.int64), 0)
            tl.atomic_add(index.counts, -number, mask=number > 0, sem="relaxed")  # not found
            tl.atomic_add(index.counts + 3, number, mask=number > 0, sem="relaxed")
        if tl.max(missing.to(tl.int32), 0) > 0:
            tl.store(work.missing + append(work.counters, missing), k, mask=missing)

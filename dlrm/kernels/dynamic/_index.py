"""The kernels of :mod:`dlrm.kernels.dynamic.index`.

A step finds the slots of all look-ups. Of each missing id one look-up is its *claimant*: they agree
by compare-and-swap in a hash table of look-ups, which is as large as the batch. Each round, the
claimants choose buckets and are linked to a list for each; then one program a bucket keeps the
smallest ids of its list, and takes them and its slots in ascending order, so that the order of the
list does not matter. Memory of a step depends on the number of look-ups and buckets only, and the
later kernels do no more work than there are missing ids.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton
from dlrm.kernels.dynamic.hashing import GOLDEN, LOW, mix_triton, scale_triton
from dlrm.kernels.dynamic.scores import KEPT, priority_triton, used_triton
from dlrm.kernels.lists import append

LANES = tl.constexpr(32)  # slots of a bucket
EMPTY = GOLDEN  # stands for no id; the id of this number never gets a slot
SEED = tl.constexpr(0x5851F42D4C957F2D)  # of the draw of an admission by chance
SPARE = tl.constexpr(64)  # programs that swap in cells of their own where they have no claim
NOT_PLACED, WAITING, FULL = tl.constexpr(-1), tl.constexpr(-2), tl.constexpr(-3)
SMALLEST, LARGEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)


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


class Arrays(NamedTuple):
    """The tensors of an index."""

    ids: Tensor
    scores: Tensor
    first: Tensor
    buckets: Tensor
    time: Tensor
    sketch: Tensor
    counts: Tensor


class Work(NamedTuple):
    """Memory of one step, int32."""

    slots: Tensor
    """Slot of each look-up before the step, ``[n]``; -1 for none."""
    claimants: Tensor
    """The look-up that stands for the id of each missing one, ``[n]``."""
    status: Tensor
    """Of claimants the slot, or why there is none, ``[n]``."""
    missing: Tensor
    """List of the claimants."""
    next: Tensor
    """For each in the list the next one of the same bucket, -1 at the end, ``[n]``."""
    heads: Tensor
    """The first one of each bucket."""
    chosen: Tensor
    """List of the buckets that ids have chosen in a round."""
    counters: Tensor
    """Lengths of ``missing``, and of ``chosen`` in each round."""
    claims: Tensor
    """Hash table of claimants, and cells that count for nothing."""
    cells: int
    """Its size, a power of two."""


@triton.jit
def _load(lookups, k, inside):
    """The ids and tables of look-ups."""
    id = tl.load(lookups.ids + k, mask=inside, other=0).to(tl.int64)
    return id, tl.load(lookups.tables + k // lookups.repeat, mask=inside, other=0)


@triton.jit
def _live(lookups, k):
    live = k < lookups.n
    if lookups.end is not None:
        live &= k < tl.load(lookups.end)
    return live


@triton.jit
def _buckets(index, id, table, live):
    """The two buckets of ids."""
    first = tl.load(index.first + table, mask=live, other=0)
    size = tl.load(index.buckets + table, mask=live, other=1)
    key = mix_triton(id)
    one = scale_triton(key, size)
    other = one + 1 + scale_triton(key >> 32, size - 1)
    return first + one, first + tl.where(other < size, other, other - size)


@triton.jit
def _slots_of(bucket):
    return bucket[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _probe(index, id, table, live):
    """The slots of ids, int32; -1 for none."""
    one, other = _buckets(index, id, table, live)
    at = _slots_of(one)
    held = tl.load(index.ids + at, mask=live[:, None], other=EMPTY)
    slot = tl.max(tl.where(held == id[:, None], at, -1), 1)
    more = live & (slot < 0)
    at = _slots_of(other)
    held = tl.load(index.ids + at, mask=more[:, None], other=EMPTY)
    slot = tl.maximum(slot, tl.max(tl.where(held == id[:, None], at, -1), 1))
    return tl.where(live & (id != EMPTY), slot, -1).to(tl.int32)


@triton.jit
def _local_row(index, num_shared, slot, id, table, inside):
    """The row of look-ups within their tables."""
    few = tl.load(num_shared + table, mask=inside, other=1)
    first = tl.load(index.first + table, mask=inside, other=0)
    shared = scale_triton(mix_triton(id + 1) >> 16, few)
    return tl.where(slot >= 0, slot.to(tl.int64) - first * LANES + few, shared)


@triton.jit
def find_rows(index, num_shared, lookups, rows, BLOCK: tl.constexpr):
    """The row of each look-up within its table."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < lookups.n
    id, table = _load(lookups, k, inside)
    slot = _probe(index, id, table, inside)
    tl.store(rows + k, _local_row(index, num_shared, slot, id, table, inside), mask=inside)


@triton.jit
def _sketch_cells(index, id, table, half):
    """The two cells that count an id."""
    key = mix_triton(id) ^ mix_triton(table + 1)
    return index.sketch + (key & (half - 1)), index.sketch + half + ((key >> 32) & (half - 1))


@triton.jit
def find_and_claim(
    index, lookups, work, half, BLOCK: tl.constexpr, EVICTION: tl.constexpr, COUNT: tl.constexpr
):
    """Find the slots of look-ups and score them; of each missing id, list one look-up."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, live = k < lookups.n, _live(lookups, k)
    id, table = _load(lookups, k, inside)
    slot = _probe(index, id, table, live)
    found = slot >= 0
    tl.store(work.slots + k, slot, mask=inside)
    tl.atomic_add(index.counts, tl.sum(found.to(tl.int64), 0), sem="relaxed")

    # All look-ups of a slot store the same score.
    step, clock = tl.load(index.time), tl.load(index.time + 1)
    score = tl.load(index.scores + slot, mask=found, other=0)
    new = used_triton(score, step, clock, EVICTION)
    tl.store(index.scores + slot, new, mask=found & (new != score))

    # Claim the ids that are missing.
    missing = live & (slot < 0) & (id != EMPTY)
    if COUNT:
        one, other = _sketch_cells(index, id, table, half)
        tl.atomic_add(one, 1, mask=missing, sem="relaxed")
        tl.atomic_add(other, 1, mask=missing, sem="relaxed")
    claimant, pending = k, missing
    at = ((mix_triton(id + table * GOLDEN) >> 16) & (work.cells - 1)).to(tl.int32)
    spare = work.cells + (tl.program_id(0) % SPARE) * BLOCK + tl.arange(0, BLOCK)
    none = tl.full([BLOCK], -1, tl.int32)
    while tl.max(pending.to(tl.int32), 0) > 0:
        holder = tl.load(work.claims + at, mask=pending, other=0)
        free = pending & (holder < 0)
        old = tl.atomic_cas(work.claims + tl.where(free, at, spare), none, k, sem="relaxed")
        won = free & (old < 0)
        holder = tl.where(free, old, holder)
        pending &= ~won
        its_id, its_table = _load(lookups, holder, pending)
        same = pending & (its_id == id) & (its_table == table)
        claimant = tl.where(same, holder, claimant)
        pending &= ~same
        at = (at + 1) & (work.cells - 1)
    tl.store(work.claimants + k, claimant, mask=inside)
    claims = missing & (claimant == k)
    tl.store(work.missing + append(work.counters, claims), k, mask=claims)


@triton.jit
def _order(index, at, mask, EVICTION: tl.constexpr):
    """The order in which slots are taken."""
    held = tl.load(index.ids + at, mask=mask, other=EMPTY)
    score = tl.load(index.scores + at, mask=mask, other=0)
    step, clock = tl.load(index.time), tl.load(index.time + 1)
    return priority_triton(score, held == EMPTY, step, clock, EVICTION)


@triton.jit
def _admitted(
    index, id, table, wanting, half, limit, AFTER: tl.constexpr, CHANCE: tl.constexpr
):  # fmt: skip
    """Which new ids get a slot."""
    admitted = wanting
    if AFTER > 1:
        one, other = _sketch_cells(index, id, table, half)
        first = tl.load(one, mask=wanting, other=0)
        admitted &= tl.minimum(first, tl.load(other, mask=wanting, other=0)) >= AFTER
    if CHANCE:
        draw = mix_triton(mix_triton(id ^ SEED) + table + tl.load(index.time) * GOLDEN)
        admitted &= (draw & LOW) < limit
    return admitted


@triton.jit
def choose_buckets(
    index, lookups, work, half, limit, ROUND: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr, EVICTION: tl.constexpr, AFTER: tl.constexpr, CHANCE: tl.constexpr,
):  # fmt: skip
    """Have each claimant without a slot choose a bucket, and link it to the list of that."""
    count = tl.load(work.counters)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        j = start + tl.arange(0, BLOCK)
        k = tl.load(work.missing + j, mask=j < count, other=0)
        id, table = _load(lookups, k, j < count)
        status = tl.load(work.status + k, mask=j < count, other=WAITING)
        wanting = status == NOT_PLACED
        if LAST:
            wanting |= status == FULL
        if ROUND == 0:
            admitted = _admitted(index, id, table, wanting, half, limit, AFTER, CHANCE)
            tl.store(work.status + k, WAITING, mask=wanting & ~admitted)
            wanting = admitted

        # The bucket with more empty slots or, if both are full, with the slot to take first.
        one, other = _buckets(index, id, table, wanting)
        order = _order(index, _slots_of(one), wanting[:, None], EVICTION)
        room_one, best_one = tl.sum((order < 0).to(tl.int32), 1), tl.min(order, 1)
        order = _order(index, _slots_of(other), wanting[:, None], EVICTION)
        room_other, best_other = tl.sum((order < 0).to(tl.int32), 1), tl.min(order, 1)
        room = tl.maximum(room_one, room_other) > 0
        second = tl.where(room, room_other > room_one, best_other < best_one)
        if not LAST:
            tl.store(work.status + k, FULL, mask=wanting & ~room)
            wanting &= room

        bucket = tl.where(second, other, one)
        old = tl.atomic_xchg(work.heads + bucket, j, mask=wanting)
        tl.store(work.next + j, old, mask=wanting)
        leads = wanting & (old < 0)
        to = append(work.counters + 1 + ROUND, leads)
        tl.store(work.chosen + to, bucket.to(tl.int32), mask=leads)


@triton.jit
def fill_buckets(
    index, lookups, work, ROUND: tl.constexpr, LAST: tl.constexpr, EVICTION: tl.constexpr
):
    """Give slots of each chosen bucket to the ids of its list, in ascending order."""
    lane = tl.arange(0, LANES)
    step, clock = tl.load(index.time), tl.load(index.time + 1)
    score = used_triton(tl.full((), 0, tl.int32), step, clock, EVICTION)
    inserted, evicted = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for number in range(tl.program_id(0), tl.load(work.counters + 1 + ROUND), tl.num_programs(0)):
        # The smallest ids of the list, and their look-ups.
        bucket = tl.load(work.chosen + number).to(tl.int64)
        id, k = tl.full([LANES], SMALLEST, tl.int64), tl.zeros([LANES], tl.int32)
        length = tl.full((), 0, tl.int32)
        j = tl.load(work.heads + bucket)
        tl.store(work.heads + bucket, -1)
        while j >= 0:
            its_k = tl.load(work.missing + j)
            its_id = tl.load(lookups.ids + its_k).to(tl.int64)
            largest = tl.max(id, 0)
            replaced = (id == largest) & (its_id < largest) & (length == LANES)
            to = replaced | (lane == length)
            id, k = tl.where(to, its_id, id), tl.where(to, its_k, k)
            length = tl.minimum(length + 1, LANES)
            j = tl.load(work.next + j)
        live = lane < length

        # Its slots: the key of a slot is its place in the order in which they are taken, and its
        # lane.
        order = _order(index, bucket * LANES + lane, lane < LANES, EVICTION)
        key = (order.to(tl.int64) + 1) * LANES + lane
        most = tl.sum((order < KEPT).to(tl.int32), 0)
        if not LAST:
            most = (tl.sum((order < 0).to(tl.int32), 0) + 1) // 2
        placed = tl.minimum(length, most)

        # Match them, each in ascending order.
        for _ in range(placed):
            first = tl.min(key, 0)
            slot = bucket * LANES + first % LANES
            smallest = tl.min(tl.where(live, id, LARGEST), 0)
            chosen = live & (id == smallest)
            tl.store(index.ids + slot, smallest)
            tl.store(index.scores + slot, score)
            tl.store(work.status + tl.sum(tl.where(chosen, k, 0), 0), slot.to(tl.int32))
            evicted += (first >= LANES).to(tl.int32)  # not an empty one
            key = tl.where(key == first, LARGEST, key)
            live = live & ~chosen
        inserted += placed
    tl.atomic_add(index.counts + 1, inserted.to(tl.int64), mask=inserted > 0, sem="relaxed")
    tl.atomic_add(index.counts + 2, evicted.to(tl.int64), mask=evicted > 0, sem="relaxed")


@triton.jit
def placed_rows(index, num_shared, lookups, work, rows, BLOCK: tl.constexpr):
    """The row of each look-up within its table after the ids were placed."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, live = k < lookups.n, _live(lookups, k)
    id, table = _load(lookups, k, inside)
    slot = tl.load(work.slots + k, mask=inside, other=0)
    missing = inside & (slot < 0)
    claimant = tl.load(work.claimants + k, mask=missing, other=0)
    status = tl.load(work.status + claimant, mask=missing, other=0)
    slot = tl.where(missing, status, slot)

    waiting = missing & live & (status == WAITING)
    not_placed = missing & live & (status < 0) & (status != WAITING)
    number = tl.sum(waiting.to(tl.int64), 0)
    tl.atomic_add(index.counts + 3, number, mask=number > 0, sem="relaxed")
    number = tl.sum(not_placed.to(tl.int64), 0)
    tl.atomic_add(index.counts + 4, number, mask=number > 0, sem="relaxed")
    tl.store(rows + k, _local_row(index, num_shared, slot, id, table, inside), mask=inside)

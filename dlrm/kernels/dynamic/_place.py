"""The kernels that give slots to new ids: see :mod:`dlrm.kernels.dynamic.index`.

A step finds the slots of all look-ups, and lists those whose ids have none. Of each such id one
look-up is its *claimant*: they agree by compare-and-swap in a hash table of look-ups, which is as
large as the batch. Each round, the claimants choose buckets by the scores of their slots alone, and
are linked to a list for each. Then a thread goes through each list for its smallest ids, which take
slots in ascending order: so the order of the list does not matter. Memory of a step depends on the
number of look-ups and buckets only. No kernel does more work than there are missing ids.
"""

from __future__ import annotations

from dlrm.kernels import tl, triton
from dlrm.kernels.dynamic._find import (
    EMPTY,
    LANES,
    SPARE,
    buckets_of,
    drawn,
    load_lookups,
    local_row,
    slots_of,
)
from dlrm.kernels.dynamic.hashing import GOLDEN, mix_triton
from dlrm.kernels.dynamic.scores import KEPT, priority_triton, used_triton
from dlrm.kernels.lists import append

ENOUGH = tl.constexpr(12)  # empty slots with which an id takes its first bucket
NOT_PLACED, WAITING = tl.constexpr(-1), tl.constexpr(-2)
SMALLEST, LARGEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
NO_LOOKUP = tl.constexpr(2**31 - 1)


@triton.jit
def _sketch_cells(index, id, table, half):
    """The two cells that count an id."""
    key = mix_triton(id) ^ mix_triton(table + 1)
    return index.sketch + (key & (half - 1)), index.sketch + half + ((key >> 32) & (half - 1))


@triton.jit
def claim(index, lookups, work, half, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Of each missing id, list one look-up."""
    count, salt = tl.load(work.counters), tl.load(index.time) * GOLDEN
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        m = start + tl.arange(0, BLOCK)
        live = m < count
        k = tl.load(work.missing + m, mask=live, other=0)
        id, table = load_lookups(lookups, k, live)
        wanted = live & (id != EMPTY)
        if COUNT:
            one, other = _sketch_cells(index, id, table, half)
            tl.atomic_add(one, 1, mask=wanted, sem="relaxed")
            tl.atomic_add(other, 1, mask=wanted, sem="relaxed")

        # The first look-up that gets the cell of its id, or the next free one, stands for it. No
        # ids share a cell in all steps, and those of one bucket share none.
        claimant, pending = k, wanted
        at = (mix_triton(mix_triton(id) + table + salt) & (work.cells - 1)).to(tl.int32)
        none = tl.full([BLOCK], -1, tl.int32)
        while tl.max(pending.to(tl.int32), 0) > 0:
            holder = tl.load(work.claims + at, mask=pending, other=0)
            free = pending & (holder < 0)
            cell = tl.where(free, at, work.cells + m % SPARE)
            old = tl.atomic_cas(work.claims + cell, none, k, sem="relaxed")
            won = free & (old < 0)
            holder = tl.where(free, old, holder)
            pending &= ~won

            its_id, its_table = load_lookups(lookups, holder, pending)
            same = pending & (its_id == id) & (its_table == table)
            claimant = tl.where(same, holder, claimant)
            pending &= ~same
            at = (at + 1) & (work.cells - 1)

        tl.store(work.claimants + m, claimant, mask=live)
        first = live & (claimant == k)
        tl.store(work.status + k, NOT_PLACED, mask=first)
        first &= wanted
        to = append(work.counters + 1, first)
        tl.store(work.new + to, k, mask=first)
        tl.store(work.new_ids + to, id, mask=first)
        near, far = buckets_of(index, id, table, first)
        tl.store(work.heads + near, -1, mask=first)
        tl.store(work.heads + far, -1, mask=first)


@triton.jit
def _order(index, at, mask, EVICTION: tl.constexpr):
    """The order in which slots are taken."""
    score = tl.load(index.scores + at, mask=mask, other=0)
    step, clock = tl.load(index.time), tl.load(index.time + 1)
    return priority_triton(score, step, clock, EVICTION)


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
        admitted &= drawn(index, id, table, limit)
    return admitted


@triton.jit
def _count_new(work, number):
    """The number of claimants; 0 if a round has none without a slot."""
    some = tl.load(work.counters + 1 + number) > 0
    return tl.where(some, tl.load(work.counters + 1), 0)


@triton.jit
def choose(
    index, lookups, work, half, limit, number, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    EVICTION: tl.constexpr, AFTER: tl.constexpr, CHANCE: tl.constexpr,
):  # fmt: skip
    """Have each claimant without a slot choose a bucket, and link it to the list of that.

    ``number`` is that of the round, from 0.
    """
    count = _count_new(work, number)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        j = start + tl.arange(0, BLOCK)
        live = j < count
        k = tl.load(work.new + j, mask=live, other=0)
        id = tl.load(work.new_ids + j, mask=live, other=0)
        table = tl.load(lookups.tables + k // lookups.repeat, mask=live, other=0)
        if FIRST:
            wanting = _admitted(index, id, table, live, half, limit, AFTER, CHANCE)
            tl.store(work.status + k, WAITING, mask=live & ~wanting)
        else:
            wanting = tl.load(work.status + k, mask=live, other=WAITING) == NOT_PLACED

        # The first bucket or, if it has few empty slots, the one with more of them. If both are
        # full, the one with the slot to take first.
        one, other = buckets_of(index, id, table, wanting)
        order = _order(index, slots_of(one), wanting[:, None], EVICTION)
        room_one, best_one = tl.sum((order < 0).to(tl.int32), 1), tl.min(order, 1)
        full = wanting & (room_one < ENOUGH)
        order = _order(index, slots_of(other), full[:, None], EVICTION)
        room_other, best_other = tl.sum((order < 0).to(tl.int32), 1), tl.min(order, 1)
        room = tl.maximum(room_one, room_other) > 0
        emptier = (room_other > room_one) & (room_one < ENOUGH)
        second = tl.where(room, emptier, best_other < best_one)

        bucket = tl.where(second, other, one).to(tl.int32)
        following = tl.atomic_xchg(work.heads + bucket, j, mask=wanting)
        tl.store(work.next + j, following, mask=wanting)
        tl.store(work.chosen + j, tl.where(wanting, bucket, -1), mask=live)


@triton.jit
def _sorted(id, k, other, other_k):
    """Two ids of each lane, the smaller one first, with their look-ups."""
    swap = (other < id) | ((other == id) & (other_k < k))  # equal ones are none, or the largest id
    first, second = tl.where(swap, other, id), tl.where(swap, id, other)
    return first, tl.where(swap, other_k, k), second, tl.where(swap, k, other_k)


@triton.jit
def _smallest(work, head, least):
    """The four smallest ids of lists ``[BLOCK]`` from ``least`` on, ascending, each followed by its
    look-up, and the lengths of the lists.
    """
    # In registers: an exchange between threads would take longer than all else.
    one = tl.full(head.shape, LARGEST, tl.int64)
    two, three, four = one, one, one
    k_one = tl.full(head.shape, NO_LOOKUP, tl.int32)
    k_two, k_three, k_four = k_one, k_one, k_one
    j, length = head, tl.zeros(head.shape, tl.int32)
    while tl.max(j, 0) >= 0:
        live = j >= 0
        id = tl.load(work.new_ids + j, mask=live, other=SMALLEST)
        k = tl.load(work.new + j, mask=live, other=0)
        wanted = live & (id >= least)
        id, k = tl.where(wanted, id, LARGEST), tl.where(wanted, k, NO_LOOKUP)
        one, k_one, id, k = _sorted(one, k_one, id, k)
        two, k_two, id, k = _sorted(two, k_two, id, k)
        three, k_three, id, k = _sorted(three, k_three, id, k)
        four, k_four, id, k = _sorted(four, k_four, id, k)
        length += live.to(tl.int32)
        j = tl.load(work.next + j, mask=live, other=-1)
    return one, k_one, two, k_two, three, k_three, four, k_four, length


@triton.jit
def _give(index, lookups, work, bucket, key, id, k, on, EVICTION: tl.constexpr):
    """Give the first slot of each bucket to an id; returns the keys of the others, and whether an
    id left.
    """
    first = tl.min(key, 1)
    slot = bucket * LANES + first % LANES
    tl.store(index.ids + slot, id, mask=on)
    step, clock = tl.load(index.time), tl.load(index.time + 1)
    score = tl.load(index.scores + slot, mask=on, other=0)
    tl.store(index.scores + slot, used_triton(score, step, clock, EVICTION), mask=on)
    if index.columns is not None:
        table = tl.load(lookups.tables + k // lookups.repeat, mask=on, other=0)
        tl.store(index.columns + slot, table.to(index.columns.dtype.element_ty), mask=on)
    tl.store(work.status + k, slot.to(tl.int32), mask=on)
    key = tl.where(key == first[:, None], 2**31 - 1, key)
    return key, (on & (first >= LANES)).to(tl.int32)  # not an empty one


@triton.jit
def fill(
    index, lookups, work, number, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """Give slots of each chosen bucket to the ids of its list, in ascending order."""
    lane = tl.arange(0, LANES)[None, :]
    inserted, evicted = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    count = _count_new(work, number)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        # The lists, each at the claimant that is its head.
        j = start + tl.arange(0, BLOCK)
        chosen = tl.load(work.chosen + j, mask=j < count, other=-1)
        own = chosen >= 0
        own &= tl.load(work.heads + chosen, mask=own, other=-1) == j
        tl.debug_barrier()  # several warps read the same heads
        tl.store(work.heads + chosen, -1, mask=own)
        bucket = chosen.to(tl.int64)

        # Its slots: the key of a slot is its place in the order in which they are taken, and its
        # lane. Only the last round takes more than half of the empty ones.
        order = _order(index, slots_of(bucket), own[:, None], EVICTION)
        key = (order + 1) * LANES + lane
        room, empty = tl.sum((order < KEPT).to(tl.int32), 1), tl.sum((order < 0).to(tl.int32), 1)
        room = tl.where((empty > 0) & (number < ROUNDS - 1), (empty + 1) // 2, room)

        # Match ids and slots, each in ascending order, four at a time.
        head, least = tl.where(own & (room > 0), j, -1), tl.full([BLOCK], SMALLEST, tl.int64)
        length, given, most = own.to(tl.int32), 0, 1
        while given < most:
            one, k_one, two, k_two, three, k_three, four, k_four, found = _smallest(
                work, head, least
            )
            length = tl.maximum(length, found)
            placed = tl.minimum(tl.minimum(length, LANES), room)
            on = given < placed
            key, left = _give(index, lookups, work, bucket, key, one, k_one, on, EVICTION)
            evicted += left
            on = given + 1 < placed
            key, left = _give(index, lookups, work, bucket, key, two, k_two, on, EVICTION)
            evicted += left
            on = given + 2 < placed
            key, left = _give(index, lookups, work, bucket, key, three, k_three, on, EVICTION)
            evicted += left
            on = given + 3 < placed
            key, left = _give(index, lookups, work, bucket, key, four, k_four, on, EVICTION)
            evicted += left
            inserted += tl.minimum(tl.maximum(placed - given, 0), 4)
            given, most, least = given + 4, tl.max(placed, 0), four + 1
            head = tl.where(given < placed, head, -1)
        # Without room both buckets of an id are full of ids of this step, and stay so.
        some = tl.max(((length > room) & (room > 0)).to(tl.int32), 0) > 0
        tl.store(work.counters + 2 + number, 1, mask=some)  # of the next round
    number = tl.sum(inserted, 0).to(tl.int64)
    tl.atomic_add(index.counts + 1, number, mask=number > 0, sem="relaxed")
    number = tl.sum(evicted, 0).to(tl.int64)
    tl.atomic_add(index.counts + 2, number, mask=number > 0, sem="relaxed")


@triton.jit
def further_rounds(
    index, lookups, work, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, LISTS: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """All rounds but the first one, by one program, for few ids: most steps need none of them."""
    if tl.load(work.counters + 2) > 0:
        for number in range(1, ROUNDS):
            choose(index, lookups, work, 0, 0, number, False, BLOCK, EVICTION, 1, False)
            tl.debug_barrier()
            fill(index, lookups, work, number, ROUNDS, LISTS, EVICTION)
            tl.debug_barrier()


@triton.jit
def finish(index, num_shared, lookups, work, rows, BLOCK: tl.constexpr):
    """The rows of the look-ups whose ids had no slot."""
    waiting, not_placed = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    count = tl.load(work.counters)
    if tl.program_id(0) == 0:
        live = lookups.n if lookups.end is None else tl.minimum(tl.load(lookups.end), lookups.n)
        tl.atomic_add(index.counts, live - count, sem="relaxed")
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        m = start + tl.arange(0, BLOCK)
        live = m < count
        k = tl.load(work.missing + m, mask=live, other=0)
        claimant = tl.load(work.claimants + m, mask=live, other=0)
        status = tl.load(work.status + claimant, mask=live, other=0)
        id, table = load_lookups(lookups, k, live)
        tl.store(rows + k, local_row(index, num_shared, status, id, table, live), mask=live)
        waiting += (status == WAITING).to(tl.int64)
        not_placed += ((status < 0) & (status != WAITING)).to(tl.int64)
    number = tl.sum(waiting, 0)
    tl.atomic_add(index.counts + 3, number, mask=number > 0, sem="relaxed")
    number = tl.sum(not_placed, 0)
    tl.atomic_add(index.counts + 4, number, mask=number > 0, sem="relaxed")

"""An index from ids of 64 bits to slots, which admits, places and evicts ids in a training step.

Each table has buckets of its own, of 32 slots. An id may be in two of them, which its hash chooses:
so at 0.9 of the capacity one id in 200,000 does not fit. A look-up reads the ids of one bucket, or
of both. A slot is 8 bytes for the id and 4 for its score (:mod:`dlrm.kernels.dynamic.scores`).

The new ids of a step are placed in a few rounds. In each, an id chooses between its buckets as they
were before the round: the first one while that has 12 empty slots, so that most look-ups find their
id there; then the emptier one. The ids of a bucket get its slots in ascending order: half of the
empty ones, so that many new ids fill buckets evenly; and in the last round any of them. No slot
that this step has used is taken.

An id without a slot, because it waits for admission, was evicted, or found both buckets full of ids
of the same step, is never given the slot of another one. Its look-ups are counted.

Bytes that a look-up must read: 8 for each slot of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dlrm.kernels import triton, use_triton
from dlrm.kernels.dynamic import _index as kernels
from dlrm.kernels.dynamic.hashing import GOLDEN, LOW, mix, scale, shift
from dlrm.kernels.dynamic.scores import KEPT, Eviction, Now, priority, used

LANES, EMPTY = kernels.LANES.value, kernels.EMPTY.value
ENOUGH = kernels.ENOUGH.value
ROUNDS = 5  # of a step: if many new ids come to a table at once, 1 in 10,000 finds no room at 0.85
BLOCK = 64  # look-ups of a program that reads their buckets
LISTS = 16  # that a program goes through at a time
WIDE = 256  # look-ups of a program that reads no buckets
PROGRAMS = 1056  # that go through what is missing
NAMES = ("found", "inserted", "evicted", "waiting", "not_placed")
"""Counters of an index: look-ups of ids with a slot; ids that came, and that left; look-ups of ids
that wait for admission, and of ids for which there was no slot."""


class Admission(NamedTuple):
    """Which new ids get a slot."""

    after: int = 1
    """From which occurrence on, counting look-ups."""
    chance: float = 1.0
    """And with which probability in each step."""

    @property
    def limit(self) -> int:
        """The chance as a limit on 32 random bits."""
        return round(self.chance * 2**32)


class SlotIndex(NamedTuple):
    """The ids of the slots of several tables; all tensors are changed in place."""

    ids: Tensor
    """Id of each slot, ``[slots]`` int64; :data:`EMPTY` for none."""
    scores: Tensor
    """``[slots]`` int32; 0 for empty ones."""
    first: Tensor
    """First bucket of each table, ``[F]`` int64."""
    buckets: Tensor
    """Number of its buckets, ``[F]`` int64."""
    time: Tensor
    """Number of the step, from 1; the clock; and its ticks for each step, ``[3]`` int64."""
    sketch: Tensor
    """Counts of ids without a slot, ``[cells]`` int32, a power of two."""
    counts: Tensor
    """Of :data:`NAMES`, ``[5]`` int64."""
    eviction: Eviction
    admission: Admission

    @classmethod
    def empty(
        cls,
        slots: Sequence[int],
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """An index of tables with at least so many ``slots`` each.

        Args:
            slots: of each table, 1 or more; they are rounded up to whole buckets.
            eviction, admission: by default that of each class.
            device: of the tensors; by default that of PyTorch.
        """
        admission = admission or Admission()
        buckets = [buckets_for(own) for own in slots]
        total = LANES * sum(buckets)
        cells = 1 << (total.bit_length() - 1) if admission.after > 1 else 2
        sizes = torch.tensor(buckets, device=device)
        return cls(
            ids=torch.full((total,), EMPTY, device=device),
            scores=torch.zeros(total, dtype=torch.int32, device=device),
            first=sizes.cumsum(0) - sizes,
            buckets=sizes,
            time=torch.tensor([0, 0, 1], device=device),
            sketch=torch.zeros(cells, dtype=torch.int32, device=device),
            counts=torch.zeros(len(NAMES), dtype=torch.int64, device=device),
            eviction=eviction or Eviction(),
            admission=admission,
        )

    @property
    def now(self) -> Now:
        """The time of the current step."""
        return Now(self.time[0], self.time[1])


class Placed(NamedTuple):
    """The rows of look-ups, and which of them stand for ids that had no slot before."""

    rows: Tensor
    """Row of each look-up within its table, of the shape of the ids, int64. The first rows of a
    table are the shared ones."""
    missing: Tensor
    """One look-up of each of these ids, int32; what lies beyond ``number`` is undefined. Ids
    that got a slot have rows beyond the shared ones."""
    number: Tensor
    """How many these are, ``[1]`` int32."""


def buckets_for(slots: int) -> int:
    """Number of buckets with at least so many slots."""
    return -(-slots // LANES)


def buckets_of(index: SlotIndex, tables: Tensor, ids: Tensor) -> Tensor:
    """The two buckets that ids ``[n]`` of ``tables [n]`` may be in, ``[n, 2]``."""
    key, first, size = mix(ids), index.first[tables], index.buckets[tables]
    one = scale(key, size)
    other = one + 1 + scale(shift(key, 32), size - 1)  # another one, if there are several
    return torch.stack([first + one, first + torch.where(other < size, other, other - size)], 1)


def find_torch(index: SlotIndex, tables: Tensor, ids: Tensor) -> Tensor:
    """The slots of ids ``[n]`` of ``tables [n]``, ``[n]`` int64; -1 for ids without one."""
    choices = buckets_of(index, tables, ids)
    match = index.ids.view(-1, LANES)[choices] == ids[:, None, None]  # [n, 2, LANES]
    lane, found = match.int().max(2).indices, match.any(2)
    slots = torch.where(found, choices * LANES + lane, -1).amax(1)
    return slots.where(ids != EMPTY, -1)


def local_rows_torch(
    index: SlotIndex, num_shared: Tensor, tables: Tensor, ids: Tensor, slots: Tensor
) -> Tensor:
    """The rows within their tables of ids ``[n]`` with ``slots [n]``, or -1 for a shared row."""
    few = num_shared[tables]
    shared = scale(shift(mix(ids + 1), 16), few)
    return torch.where(slots >= 0, slots - LANES * index.first[tables] + few, shared)


def find_rows_torch(index: SlotIndex, num_shared: Tensor, tables: Tensor, ids: Tensor) -> Tensor:
    """:func:`find_rows` in PyTorch."""
    flat_tables, flat = tables.expand_as(ids).reshape(-1), ids.reshape(-1).long()
    slots = find_torch(index, flat_tables, flat)
    return local_rows_torch(index, num_shared, flat_tables, flat, slots).view(ids.shape)


def find_rows(
    index: SlotIndex,
    num_shared: Tensor,
    tables: Tensor,
    ids: Tensor,
    *,
    impl: str | None = None,
) -> Tensor:
    """Find the rows of ids; nothing changes.

    Args:
        index: the index.
        num_shared: shared rows of each table, ``[F]`` int64, which come before its slots.
        tables: table of each id, int64; it broadcasts against ``ids``.
        ids: any shape, int32 or int64.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        The row of each id within its table, int64, of the shape of ``ids``.
    """
    if not use_triton(ids, impl):
        return find_rows_torch(index, num_shared, tables, ids)
    lookups, rows = lookups_of(tables, ids, None), torch.empty_like(ids, dtype=torch.int64)
    if lookups.n:
        kernels.find[triton.cdiv(lookups.n, BLOCK),](
            _arrays(index), num_shared, lookups, None, rows, BLOCK=BLOCK, EVICTION=index.eviction
        )
    return rows


def place(
    index: SlotIndex,
    num_shared: Tensor,
    tables: Tensor,
    ids: Tensor,
    *,
    end: Tensor | None = None,
    impl: str | None = None,
) -> Placed:
    """Find the rows of ids in a training step that has begun, and give rows to new ids.

    No shape depends on the ids and the host reads nothing back, so a CUDA graph can capture it.

    Args:
        index: the index; changed in place.
        num_shared, tables, ids, impl: see :func:`find_rows`.
        end: how many of the ids are look-ups, ``[1]``; None: all.
    """
    if not use_triton(ids, impl):
        return place_torch(index, num_shared, tables, ids, end)

    lookups, rows = lookups_of(tables, ids, end), torch.empty_like(ids, dtype=torch.int64)
    work = _new_work(lookups.n, len(index.ids) // LANES, ids.device)
    placed = Placed(rows, work.new, work.counters[0, 1:2])
    if not lookups.n:
        return placed

    arrays, eviction, admission = _arrays(index), index.eviction, index.admission
    half, grid = len(index.sketch) // 2, (triton.cdiv(lookups.n, BLOCK),)
    kernels.find[grid](arrays, num_shared, lookups, work, rows, BLOCK=BLOCK, EVICTION=eviction)

    # The other programs go through lists, of which only the device knows the length.
    grid = (min(triton.cdiv(lookups.n, BLOCK), PROGRAMS),)
    kernels.claim[grid](arrays, lookups, work, half, BLOCK=WIDE, COUNT=admission.after > 1)
    for number, flags in enumerate(work.counters[1:]):
        last = number == ROUNDS - 1
        kernels.choose[grid](
            arrays, lookups, work, flags, half, admission.limit, FIRST=number == 0, LAST=last,
            BLOCK=BLOCK, EVICTION=eviction, AFTER=admission.after, CHANCE=admission.chance < 1,
        )  # fmt: skip
        kernels.fill[grid](
            arrays, work, flags, LAST=last, BLOCK=LISTS, EVICTION=eviction, num_warps=2
        )
    kernels.finish[grid](arrays, num_shared, lookups, work, rows, BLOCK=WIDE)
    return placed


def _arrays(index: SlotIndex) -> SlotIndex:
    """The tensors of an index, as the argument of a kernel, which has the rules as constants."""
    return index._replace(eviction=None, admission=None)  # type: ignore[arg-type]


def lookups_of(tables: Tensor, ids: Tensor, end: Tensor | None) -> kernels.Lookups:
    """The arguments of a kernel, of tables that are one for each row of the ids, or for each id."""
    if tables.numel() != ids.numel() and tables.shape != (*ids.shape[:-1], 1)[: tables.dim()]:
        tables = tables.expand_as(ids)
    repeat = max(1, ids.numel() // max(1, tables.numel()))
    return kernels.Lookups(ids.contiguous(), tables.contiguous(), repeat, ids.numel(), end)


def _new_work(n: int, buckets: int, device: torch.device) -> kernels.Work:
    """Memory of one step with ``n`` look-ups."""
    cells = 1 << n.bit_length()
    sizes = (cells + kernels.SPARE.value, 2 * buckets)
    claims, heads = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device).split(sizes)
    empty = torch.empty((6, n), dtype=torch.int32, device=device)
    missing, claimants, status, new, chosen, following = empty
    return kernels.Work(
        missing=missing,
        claimants=claimants,
        status=status,
        new=new,
        new_ids=torch.empty(n, dtype=torch.int64, device=device),
        chosen=chosen,
        next=following,
        heads=heads,
        counters=torch.zeros((1 + ROUNDS, 4), dtype=torch.int32, device=device),
        claims=claims,
        cells=cells,
        buckets=buckets,
    )


def begin_step(index: SlotIndex) -> None:
    """Advance the step and the clock, and halve a part of the counts of ids without a slot."""
    index.time[0] += 1
    index.time[1] += index.time[2]
    if index.admission.after > 1:  # each once in a half-life
        cells = len(index.sketch)
        part = -(-cells // index.eviction.half_life)
        at = torch.arange(part, device=index.sketch.device) + index.time[0] * part
        at &= cells - 1
        index.sketch[at] = index.sketch[at] >> 1


def place_torch(
    index: SlotIndex,
    num_shared: Tensor,
    tables: Tensor,
    ids: Tensor,
    end: Tensor | None = None,
) -> Placed:
    """:func:`place` in PyTorch; the step has begun."""
    shape, tables, ids = ids.shape, tables.expand_as(ids).reshape(-1), ids.reshape(-1).long()
    live = torch.ones_like(ids, dtype=torch.bool)
    if end is not None:
        live = torch.arange(len(ids), device=ids.device) < end
    slots = find_torch(index, tables, ids).where(live, -1)
    known = slots[slots >= 0]
    score = index.scores[known].long()
    index.scores[known] = used(score, index.now, index.eviction).int()

    # The missing ids, each once, and how often each is looked up.
    at = ((slots < 0) & live & (ids != EMPTY)).nonzero()[:, 0]
    at = at[ids[at].argsort(stable=True)]
    at = at[tables[at].argsort(stable=True)]
    first = torch.ones_like(at, dtype=torch.bool)
    first[1:] = (ids[at].diff() != 0) | (tables[at].diff() != 0)
    number = first.cumsum(0) - 1
    claimants = at[first]
    uses = torch.zeros_like(claimants).index_add_(0, number, torch.ones_like(number))

    admitted = _admit(index, tables[claimants], ids[claimants], uses)
    placed = torch.full_like(claimants, -1)
    own = claimants[admitted]
    placed[admitted] = _take(index, tables[own], ids[own])
    slots[at] = placed[number]

    waiting = uses[~admitted].sum()
    index.counts[0] += len(known)
    index.counts[3] += waiting
    index.counts[4] += ((slots < 0) & live).sum() - waiting
    rows = local_rows_torch(index, num_shared, tables, ids, slots).view(shape)
    number = torch.tensor([len(claimants)], dtype=torch.int32, device=ids.device)
    return Placed(rows, claimants.int(), number)


def _admit(index: SlotIndex, tables: Tensor, ids: Tensor, uses: Tensor) -> Tensor:
    """Which new ids get a slot, after counting their look-ups."""
    admission, key = index.admission, mix(ids)
    admitted = torch.ones_like(ids, dtype=torch.bool)
    if admission.after > 1:
        key, half = key ^ mix(tables + 1), len(index.sketch) // 2
        cells = torch.stack([key & (half - 1), half + (shift(key, 32) & (half - 1))])
        for own in cells:
            index.sketch.index_add_(0, own, uses.int())
        admitted &= index.sketch[cells].amin(0) >= admission.after
    if admission.chance < 1:
        draw = mix(mix(ids ^ kernels.SEED.value) + tables + index.time[0] * GOLDEN.value)
        admitted &= (draw & LOW.value) < admission.limit
    return admitted


def _take(index: SlotIndex, tables: Tensor, ids: Tensor) -> Tensor:
    """Give slots to admitted ids; returns the slot of each, -1 for none."""
    slots = torch.full_like(ids, -1)
    choices = buckets_of(index, tables, ids)
    number, last = 0, False
    while not last and len(wanting := (slots < 0).nonzero()[:, 0]):
        last = number == ROUNDS - 1
        found = _take_round(index, choices[wanting], ids[wanting], last=last)
        slots[wanting] = found
        number = number + 1 if (found >= 0).any() else ROUNDS - 1  # others would change nothing
    return slots


def _take_round(index: SlotIndex, choices: Tensor, ids: Tensor, *, last: bool) -> Tensor:
    """One round: half of the empty slots of a bucket or, in the ``last`` one, any slots."""
    scores = index.scores.view(-1, LANES)

    def order(buckets: Tensor) -> Tensor:
        return priority(scores[buckets].long(), index.now, index.eviction)

    # The first bucket or, if it has few empty slots, the one with more of them. If both are full,
    # the one with the slot to take first.
    both = order(choices)  # [n, 2, LANES]
    room, best = (both < 0).sum(2), both.amin(2)
    emptier = (room[:, 1] > room[:, 0]) & (room[:, 0] < ENOUGH)
    second = torch.where(room.any(1), emptier, best[:, 1] < best[:, 0])
    bucket = choices.gather(1, second.long()[:, None])[:, 0]

    # The new ids of each bucket in ascending order, next to its slots in the order they are taken.
    by_id = ids.argsort(stable=True)
    sorted_bucket, by_bucket = bucket[by_id].sort(stable=True)
    own = by_id[by_bucket]
    touched, number = sorted_bucket.unique_consecutive(return_inverse=True)
    begin = torch.searchsorted(sorted_bucket, touched)
    rank = torch.arange(len(own), device=ids.device) - begin[number]
    values, lanes = order(touched).sort(dim=1, stable=True)
    lane = rank.clamp(max=LANES - 1)
    most = LANES if last else ((values < 0).sum(1)[number] + 1) // 2
    fits = (rank < most) & (values[number, lane] < KEPT.value)

    own, slot = own[fits], (sorted_bucket * LANES + lanes[number, lane])[fits]
    index.counts[1] += len(slot)
    index.counts[2] += (index.ids[slot] != EMPTY).sum()
    index.ids[slot] = ids[own]
    index.scores[slot] = used(torch.zeros_like(slot), index.now, index.eviction).int()
    slots = torch.full_like(ids, -1)
    slots[own] = slot
    return slots

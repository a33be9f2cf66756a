"""The index in PyTorch: the same slots, to the last one, as by the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm.kernels.dynamic import _place as kernels
from dlrm.kernels.dynamic._find import SEED
from dlrm.kernels.dynamic.hashing import GOLDEN, LOW, mix, scale, shift
from dlrm.kernels.dynamic.scores import KEPT, priority, used
from dlrm.kernels.dynamic.slot_index import EMPTY, LANES, ROUNDS, Placed, SlotIndex

ENOUGH = kernels.ENOUGH.value


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
    """:func:`dlrm.kernels.dynamic.index.find_rows` in PyTorch."""
    flat_tables, flat = (
        tables.expand_as(ids).reshape(-1),
        index.keys(tables, ids).reshape(-1).long(),
    )
    slots = find_torch(index, flat_tables, flat)
    return local_rows_torch(index, num_shared, flat_tables, flat, slots).view(ids.shape)


def place_torch(
    index: SlotIndex,
    num_shared: Tensor,
    tables: Tensor,
    ids: Tensor,
    end: Tensor | None = None,
) -> Placed:
    """:func:`dlrm.kernels.dynamic.index.place` in PyTorch; the step has begun."""
    shape, ids = ids.shape, index.keys(tables, ids).reshape(-1).long()
    tables = tables.expand(shape).reshape(-1)
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
        draw = mix(mix(ids ^ SEED.value) + tables + index.time[0] * GOLDEN.value)
        admitted &= (draw & LOW.value) < admission.limit
    return admitted


def _take(index: SlotIndex, tables: Tensor, ids: Tensor) -> Tensor:
    """Give slots to admitted ids; returns the slot of each, -1 for none."""
    slots = torch.full_like(ids, -1)
    choices = buckets_of(index, tables, ids)
    number, last = 0, False
    while not last and len(wanting := (slots < 0).nonzero()[:, 0]):
        last = number == ROUNDS - 1
        of_wanting = tables[wanting], ids[wanting]
        found = _take_round(index, choices[wanting], *of_wanting, last=last)
        slots[wanting] = found
        number = number + 1 if (found >= 0).any() else ROUNDS - 1  # others would change nothing
    return slots


def _take_round(
    index: SlotIndex, choices: Tensor, tables: Tensor, ids: Tensor, *, last: bool
) -> Tensor:
    """One round: half of the empty slots of a bucket; if there are none, or in the ``last`` round,
    any slots.
    """
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
    empty = (values < 0).sum(1)[number]
    most = torch.where((empty > 0) & (not last), (empty + 1) // 2, LANES)
    fits = (rank < most) & (values[number, lane] < KEPT.value)

    own, slot = own[fits], (sorted_bucket * LANES + lanes[number, lane])[fits]
    index.counts[1] += len(slot)
    index.counts[2] += (index.ids[slot] != EMPTY).sum()
    index.ids[slot] = ids[own]
    if index.columns is not None:
        index.columns[slot] = tables[own].to(index.columns.dtype)
    index.scores[slot] = used(index.scores[slot].long(), index.now, index.eviction).int()
    slots = torch.full_like(ids, -1)
    slots[own] = slot
    return slots

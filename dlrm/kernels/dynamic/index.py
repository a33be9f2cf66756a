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

import torch
from torch import Tensor

from dlrm.kernels import triton, use_triton
from dlrm.kernels.dynamic import _index as kernels
from dlrm.kernels.dynamic.reference import find_rows_torch, place_torch
from dlrm.kernels.dynamic.scores import VALUE
from dlrm.kernels.dynamic.slot_index import LANES, ROUNDS, Placed, SlotIndex

BLOCK = 64  # look-ups of a program that reads their buckets
LISTS = 32  # that a program goes through at a time
WIDE = 256  # look-ups of a program that reads no buckets
PROGRAMS = 1056  # that go through what is missing


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
    lists = (min(triton.cdiv(lookups.n, LISTS), 2 * PROGRAMS),)
    kernels.claim[grid](arrays, lookups, work, half, BLOCK=WIDE, COUNT=admission.after > 1)
    for number, flags in enumerate(work.counters[1:]):
        last = number == ROUNDS - 1
        kernels.choose[grid](
            arrays, lookups, work, flags, half, admission.limit, FIRST=number == 0, LAST=last,
            BLOCK=BLOCK, EVICTION=eviction, AFTER=admission.after, CHANCE=admission.chance < 1,
        )  # fmt: skip
        kernels.fill[lists](
            arrays, work, flags, LAST=last, BLOCK=LISTS, EVICTION=eviction, num_warps=1
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


def raise_scores(
    index: SlotIndex, num_shared: Tensor, tables: Tensor, rows: Tensor, values: Tensor
) -> None:
    """Raise the scores of slots that the step has used to the highest value of their look-ups.

    Args:
        index: of rule ``score``; its clock is the value of look-ups without one.
        num_shared, tables: see :func:`find_rows`.
        rows: of the look-ups, from :func:`place`.
        values: of the shape of the rows, from 0 to 2^23 - 1; others are cut off.
    """
    few, first = num_shared[tables], LANES * index.first[tables]
    value = values.clamp(0, VALUE.value).long()
    score = torch.where(rows >= few, (value << 8) | (index.now.step % 255 + 1), 0)
    slots = (rows - few + first).clamp(min=0)  # one without an own row raises that of any slot to 0
    index.scores.scatter_reduce_(0, slots.view(-1), score.int().view(-1), "amax")

"""An index from ids of 64 bits to slots, which admits, places and evicts ids in a training step.

Each table has buckets of its own, of 32 slots, or several tables share them: then their ids must
differ. An id may be in two of them, which its hash chooses: so at 0.9 of the capacity one id in
200,000 does not fit. A look-up reads the ids of one bucket, or of both. A slot is 8 bytes for the
id and 4 for its score (:mod:`dlrm.kernels.dynamic.scores`).

The new ids of a step are placed in a few rounds. In each, an id chooses between its buckets as they
were before the round: the first one while that has 12 empty slots, so that most look-ups find their
id there; then the emptier one. The ids of a bucket get its slots in ascending order: half of the
empty ones, so that many new ids fill buckets evenly; if there are none, and in the last round, any
of them. No slot that this step has used is taken.

An id without a slot, because it waits for admission, was evicted, or found both buckets full of ids
of the same step, is never given the slot of another one. Its look-ups are counted.

Bytes that a look-up must read: 8 for each slot of a bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm.kernels import triton, use_triton
from dlrm.kernels.dynamic import _place as kernels
from dlrm.kernels.dynamic._find import COUNTERS, SPARE, Lookups, Work, begin, find
from dlrm.kernels.dynamic.reference import find_rows_torch, place_torch
from dlrm.kernels.dynamic.scores import VALUE
from dlrm.kernels.dynamic.slot_index import (
    LANES,
    ROUNDS,
    Placed,
    SlotIndex,
    age_sketch,
    begin_step,
)

FOUND = 32  # look-ups of a program that finds their slots: one of each thread
BLOCK = 64  # new ids that a program reads the buckets of at a time
LISTS = 32  # lists that a program goes through at a time
WIDE = 256  # missing look-ups of a program that reads no buckets
SHARE, PROGRAMS = 1024, 1056  # a program for so many look-ups goes through what is missing, up to
FEW = 1 << 19  # look-ups, of which one program places the ids that the first round did not


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
    lookups = lookups_of(tables, ids, None, index.salts)
    rows = torch.empty_like(ids, dtype=torch.int64, memory_format=torch.contiguous_format)
    if lookups.n:
        _find(index, num_shared, lookups, None, rows)
    return rows


def place(
    index: SlotIndex,
    num_shared: Tensor,
    tables: Tensor,
    ids: Tensor,
    *,
    end: Tensor | None = None,
    begins: bool = True,
    impl: str | None = None,
) -> Placed:
    """Find the rows of ids in a training step, and give rows to new ids.

    No shape depends on the ids and the host reads nothing back, so a CUDA graph can capture it.

    Args:
        index: the index; changed in place.
        num_shared, tables, ids, impl: see :func:`find_rows`.
        end: how many of the ids are look-ups, ``[1]``; None: all.
        begins: whether these are the first ids of the step.
    """
    if not use_triton(ids, impl):
        if begins:
            begin_step(index)
        return place_torch(index, num_shared, tables, ids, end)

    lookups = lookups_of(tables, ids, end, index.salts)
    rows = torch.empty_like(ids, dtype=torch.int64, memory_format=torch.contiguous_format)
    work = _new_work(lookups.n, len(index.ids) // LANES, ids.device)
    placed = Placed(rows, work.new, work.counters[1:2])
    if not lookups.n:
        if begins:
            begin_step(index)
        return placed

    arrays, eviction, admission = _arrays(index), index.eviction, index.admission
    begin[1,](arrays, work, BEGINS=begins, num_warps=1)
    if begins:
        age_sketch(index)
    _find(index, num_shared, lookups, work, rows)

    # The other programs go through lists, of which only the device knows the length: where that is
    # 0, more of them would only take longer to begin.
    half, grid = len(index.sketch) // 2, (min(triton.cdiv(lookups.n, SHARE), PROGRAMS),)
    lists = (2 * grid[0],)
    kernels.claim[grid](arrays, lookups, work, half, BLOCK=WIDE, COUNT=admission.after > 1)
    few = lookups.n <= FEW
    for number in range(1 if few else ROUNDS):
        kernels.choose[grid](
            arrays, lookups, work, half, admission.limit, number, FIRST=number == 0,
            BLOCK=BLOCK, EVICTION=eviction, AFTER=admission.after, CHANCE=admission.chance < 1,
        )  # fmt: skip
        kernels.fill[lists](
            arrays, lookups, work, number,
            ROUNDS=ROUNDS, BLOCK=LISTS, EVICTION=eviction, num_warps=1,
        )  # fmt: skip
    if few:
        kernels.further_rounds[1,](
            arrays, lookups, work, ROUNDS=ROUNDS, BLOCK=4 * BLOCK, LISTS=8 * LISTS,
            EVICTION=eviction, num_warps=8,
        )  # fmt: skip
    kernels.finish[grid](arrays, num_shared, lookups, work, rows, BLOCK=WIDE)
    return placed


def _find(
    index: SlotIndex, num_shared: Tensor, lookups: Lookups, work: Work | None, rows: Tensor
) -> None:
    admission = index.admission
    find[triton.cdiv(lookups.n, FOUND),](
        _arrays(index), num_shared, lookups, work, rows, admission.limit, BLOCK=FOUND,
        EVICTION=index.eviction, CHANCE=admission.chance < 1 and admission.after == 1, num_warps=1,
    )  # fmt: skip


def _arrays(index: SlotIndex) -> SlotIndex:
    """The tensors of an index, as the argument of a kernel, which has the rules as constants."""
    return index._replace(eviction=None, admission=None)  # type: ignore[arg-type]


def lookups_of(
    tables: Tensor, ids: Tensor, end: Tensor | None, salts: Tensor | None = None
) -> Lookups:
    """The arguments of a kernel, of tables that are one for each row of the ids, or for each id."""
    if tables.numel() != ids.numel() and tables.shape != (*ids.shape[:-1], 1)[: tables.dim()]:
        tables = tables.expand_as(ids)
    repeat = max(1, ids.numel() // max(1, tables.numel()))
    return Lookups(ids.contiguous(), tables.contiguous(), repeat, ids.numel(), end, salts)


def _new_work(n: int, buckets: int, device: torch.device) -> Work:
    """Memory of one step with ``n`` look-ups."""
    cells = 1 << n.bit_length()
    sizes = COUNTERS.value, cells + SPARE.value, *[n] * 6, buckets  # most are aligned
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    counters, claims, missing, claimants, status, new, chosen, following, heads = memory
    return Work(
        missing=missing,
        claimants=claimants,
        status=status,
        new=new,
        new_ids=torch.empty(n, dtype=torch.int64, device=device),
        chosen=chosen,
        next=following,
        counters=counters,
        claims=claims,
        cells=cells,
        heads=heads,
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

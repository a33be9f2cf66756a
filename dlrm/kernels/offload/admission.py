"""Move rows between host memory and a cache of them on the GPU, ahead of their use.

A move lists the rows of a round of batches that have no slot in the cache, gives them the slots of
the coldest rows, and exchanges the two: the old ones to the host, the new ones from it. Its shapes
depend on the size of the batches alone and the host is told nothing, so that the lists can
be made on a second stream while the round before computes. That round is not disturbed, since
neither its rows nor the next ones lose their slots, and rows that it uses in host memory are not
fetched.

What costs is not bytes but the GPU's translation of host addresses. Seen on an H100, with 30,000
rows of 64 bytes each way beside a step of 0.48 ms: within 256 MB of host memory they cost the step
0.03 ms; in 1 GB 0.15 ms; in 2.2 GB 0.36 ms if moved as fast as the link can, by one program, which
takes 0.8 ms for them, 0.06. While look-ups of addresses queue up, all else in their part of the GPU
waits for its own. The copy engine moves as many bytes that lie behind one another for 0.001 ms.
Hence kernels exchange rows only while a step waits for them, in ascending order, so that a page is
met once; ahead of their use :mod:`dlrm.kernels.offload.prefetch` does.

How warm a row is: each round that uses it adds 1, which decays by half in ``half_life`` rounds.

Bytes that a move must transfer: each fetched row and its state once, each row that leaves once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm.kernels import use_triton
from dlrm.kernels.offload.transfer import RowMoves, exchange_rows

BLOCK = 1024  # look-ups or slots of a program
FEW = 4096  # look-ups up to which all may miss; of more, a quarter
BINS = 256  # of warmth; the last is of slots that can't be taken
COLDEST, WARMEST = -8, 10  # log2 of the warmth between which slots are told apart
CLAIMED = tl.constexpr(-(2**31))  # in place of a slot, while a missing row is given one
NONE = 2**31 - 1  # behind the last of the missing rows


@triton.jit
def row_of(ids, starts, k, inside, batch):
    """The row of each look-up of ``ids [F, batch]``."""
    row = tl.load(ids + k, mask=inside, other=0).to(tl.int64)
    if starts is not None:
        row += tl.load(starts + k // batch, mask=inside, other=0)
    return row


@triton.jit
def _mark(
    ids, starts, slots, stamps, clock, missing, counters, traffic, n, batch, most,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stamp the slots of a round's rows; list the rows without one, each once, ``most`` of them."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    row = row_of(ids, starts, k, inside, batch)
    slot = tl.load(slots + row, mask=inside, other=CLAIMED)
    held = slot >= 0
    tl.atomic_add(traffic, tl.sum(inside.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(traffic + 1, tl.sum(held.to(tl.int64), 0), sem="relaxed")
    now = tl.load(clock)
    mark = now + AHEAD
    tl.store(stamps + slot, mark, mask=held)
    busy = (slot <= -2 - now) & (slot != CLAIMED)  # the round under way uses it in host memory
    tl.store(slots + row, -2 - mark, mask=busy)
    absent = (slot < 0) & (slot > -2 - now)
    absent &= tl.atomic_min(slots + row, CLAIMED, mask=absent, sem="relaxed") != CLAIMED
    first = absent.to(tl.int32)
    at = tl.atomic_add(counters, tl.sum(first, 0), sem="relaxed") + tl.cumsum(first, 0) - 1
    tl.store(missing + at, row.to(tl.int32), mask=absent & (at < most))
    tl.store(slots + row, -2 - mark, mask=absent & (at >= most))


@triton.jit
def _bin_of(stamp, warm, now, half_life, LOW: tl.constexpr, HIGH: tl.constexpr,
            BINS: tl.constexpr):  # fmt: skip
    """The bin of each slot by its row's warmth, coldest first."""
    free = stamp < now
    scaled = (warm - now.to(tl.float32) / half_life - LOW) * ((BINS - 2) / (HIGH - LOW))
    bin = tl.minimum(tl.maximum(scaled, 0.0), BINS - 2).to(tl.int32)
    return tl.where(free, bin, BINS - 1)


@triton.jit
def _count(
    stamps, warmth, clock, histogram, half_life, C,
    AHEAD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Warm the slots of the round's rows; count the slots by warmth."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    now = tl.load(clock)
    mark = now + AHEAD
    stamp = tl.load(stamps + slot, mask=slot < C, other=2**31 - 1)
    warm = tl.load(warmth + slot, mask=slot < C, other=0.0)
    time = mark.to(tl.float32) / half_life
    tl.store(warmth + slot, time + tl.log2(1 + tl.exp2(warm - time)), mask=stamp == mark)
    bin = _bin_of(stamp, warm, now, half_life, LOW, HIGH, BINS)
    counts = tl.histogram(bin, BINS)
    tl.atomic_add(histogram + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _choose(
    slots, owners, stamps, warmth, clock, leaving, targets, counters, histogram, traffic,
    most, half_life, C,
    AHEAD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List the coldest slots, as many as rows are missing or can be had, and the rows in them."""
    pid = tl.program_id(0)
    now = tl.load(clock)
    mark = now + AHEAD
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + bins, mask=bins < BINS - 1, other=0)
    missed = tl.minimum(tl.load(counters), most)
    wanted = tl.minimum(missed, tl.sum(counts, 0))
    limit = tl.sum((tl.cumsum(counts, 0) < wanted).to(tl.int32), 0)  # of this bin some are taken
    below = tl.sum(tl.where(bins < limit, counts, 0), 0)
    share = (wanted - below) / tl.maximum(tl.sum(tl.where(bins == limit, counts, 0), 0), 1)

    slot = pid * BLOCK + tl.arange(0, BLOCK)
    stamp = tl.load(stamps + slot, mask=slot < C, other=2**31 - 1)
    warm = tl.load(warmth + slot, mask=slot < C, other=0.0)
    bin = _bin_of(stamp, warm, now, half_life, LOW, HIGH, BINS)
    chance = tl.rand(now, slot)  # all over the cache, rather than its first slots
    some = (bin == limit) & (chance <= share * 1.05) & (wanted > below)
    taken = (bin < limit) | some
    ones = taken.to(tl.int32)
    at = tl.atomic_add(counters + 1, tl.sum(ones, 0), sem="relaxed") + tl.cumsum(ones, 0) - 1
    taken &= at < wanted
    old = tl.load(owners + slot, mask=taken, other=-1)
    tl.store(leaving + at, old, mask=taken)
    tl.store(targets + at, slot, mask=taken)
    tl.store(stamps + slot, mark, mask=taken)
    tl.store(warmth + slot, mark.to(tl.float32) / half_life, mask=taken)
    tl.store(slots + old, -1, mask=taken & (old >= 0))
    if pid == 0:
        tl.store(counters + 2, wanted)
    left = tl.sum((taken & (old >= 0)).to(tl.int32), 0)
    tl.atomic_add(counters + 3, left, sem="relaxed")
    tl.atomic_add(traffic + 2, tl.sum(taken.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(traffic + 3, left.to(tl.int64), sem="relaxed")


@triton.jit
def _settle(
    slots, owners, clock, missing, targets, counters, most,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the slots to the missing rows; those that find none are used where they lie."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    moves = tl.minimum(tl.load(counters + 1), tl.load(counters + 2))
    inside = k < tl.minimum(tl.load(counters), most)
    row = tl.load(missing + k, mask=inside, other=0)
    slot = tl.load(targets + k, mask=k < moves, other=0)
    tl.store(owners + slot, row, mask=k < moves)
    place = tl.where(k < moves, slot, -2 - (tl.load(clock) + AHEAD))
    tl.store(slots + row, place, mask=inside)


@dataclass(frozen=True, kw_only=True)
class CacheIndex:
    """Which rows have a slot of a cache, and which of them are warm."""

    slots: Tensor
    """Slot of each row, ``[V]`` int32; -1 without one, -2 - t if round t uses it in host memory."""
    owners: Tensor
    """Row of each slot, ``[C]`` int32, -1 of a free one."""
    stamps: Tensor
    """Latest round that uses it, ``[C]`` int32."""
    warmth: Tensor
    """Log2 of the warmth, ``[C]`` fp32, not decaying: it grows with time instead."""
    clock: Tensor
    """The round under way, counted from 1, 0-d int32."""
    traffic: Tensor
    """Look-ups so far, those that found a slot, rows fetched, rows written, and batches, ``[5]``
    int64."""
    half_life: float
    """Rounds in which warmth halves."""

    @classmethod
    def empty(cls, rows: int, capacity: int, half_life: float, device: torch.device) -> Self:
        """For a table of so many rows and a cache of so many, none of them used."""
        return cls(
            slots=torch.full((rows,), -1, dtype=torch.int32, device=device),
            owners=torch.full((capacity,), -1, dtype=torch.int32, device=device),
            stamps=torch.full((capacity,), -1, dtype=torch.int32, device=device),
            warmth=torch.full((capacity,), -torch.inf, device=device),
            clock=torch.zeros((), dtype=torch.int32, device=device),
            traffic=torch.zeros(5, dtype=torch.int64, device=device),
            half_life=half_life,
        )

    def clear(self) -> None:
        """Free all slots."""
        for tensor in (self.slots, self.owners, self.stamps):
            tensor.fill_(-1)
        self.warmth.fill_(-torch.inf)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def rows_of(ids: Tensor, starts: Tensor | None) -> Tensor:
    """The rows of ``ids [F, B]``, ``[B, F]`` int64."""
    rows = ids.long() if starts is None else ids + starts[:, None]
    return rows.t().contiguous()


@torch.no_grad()
def move_rows(
    index: CacheIndex,
    tensors: Sequence[tuple[Tensor, Tensor]],
    ids: Tensor,
    starts: Tensor | None,
    *,
    impl: str | None = None,
) -> None:
    """Bring the rows of the round under way into the cache.

    Args:
        index: which rows have slots; will have changed.
        tensors: what moves, each ``[V, columns]`` in host memory and ``[C, columns]`` in the cache.
        ids: ``[F, B]`` contiguous, int32 or int64; B counts the samples of all its batches.
        starts: first row of each table, ``[F]`` int64; None for zeros.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(ids, impl):
        move_rows_torch(index, tensors, ids, starts, ahead=False)
    elif ids.numel():
        exchange_rows(tensors, list_moves(index, ids, starts, ahead=False))


@torch.no_grad()
def list_moves(index: CacheIndex, ids: Tensor, starts: Tensor | None, *, ahead: bool) -> RowMoves:
    """Give slots to the rows of a round, and say which rows have to move for that.

    Args:
        index, ids, starts: as of :func:`move_rows`; at least one look-up.
        ahead: the round is the one after that of the clock, which may be under way.
    """
    n, capacity = ids.numel(), len(index.owners)
    most = max(min(n, FEW), n // 4)
    missing, leaving, targets = ids.new_full((3, most), NONE, dtype=torch.int32)
    counters = torch.zeros(4 + BINS, dtype=torch.int32, device=ids.device)
    batch, histogram, half_life = ids.shape[1], counters[4:], index.half_life
    _mark[triton.cdiv(n, BLOCK),](
        ids, starts, index.slots, index.stamps, index.clock, missing, counters, index.traffic,
        n, batch, most, AHEAD=ahead, BLOCK=BLOCK,
    )  # fmt: skip
    warm = (index.stamps, index.warmth, index.clock)
    options = {"AHEAD": ahead, "LOW": COLDEST, "HIGH": WARMEST, "BINS": BINS, "BLOCK": BLOCK}
    grid = (triton.cdiv(capacity, BLOCK),)
    _count[grid](*warm, histogram, half_life, capacity, **options)
    _choose[grid](
        index.slots, index.owners, *warm, leaving, targets, counters, histogram, index.traffic,
        most, half_life, capacity, **options,
    )  # fmt: skip
    if not ahead:  # kernels walk through host memory in this order
        missing = missing.sort().values
        leaving, order = leaving.sort()
        targets = targets[order]
    _settle[triton.cdiv(most, BLOCK),](
        index.slots, index.owners, index.clock, missing, targets, counters, most,
        AHEAD=ahead, BLOCK=BLOCK,
    )  # fmt: skip
    return RowMoves(missing=missing, leaving=leaving, targets=targets, counters=counters[:4])


@torch.no_grad()
def move_rows_torch(
    index: CacheIndex,
    tensors: Sequence[tuple[Tensor, Tensor]],
    ids: Tensor,
    starts: Tensor | None,
    *,
    ahead: bool,
) -> None:
    """:func:`move_rows` in PyTorch; ``ahead`` as of :func:`list_moves`."""
    now = int(index.clock)
    mark, busy, time = now + ahead, -2 - now, (now + ahead) / index.half_life
    rows, uses = rows_of(ids, starts).unique(return_counts=True)
    slot = index.slots[rows].long()
    held = slot[slot >= 0]
    index.stamps[held] = mark
    index.warmth[held] = time + torch.log2(1 + torch.exp2(index.warmth[held] - time))

    index.slots[rows[slot <= busy]] = -2 - mark
    missing = rows[(slot < 0) & (slot > busy)]
    free = (index.stamps < now).nonzero()[:, 0]
    taken = free[index.warmth[free].argsort(stable=True)[: len(missing)]]
    index.slots[missing[len(taken) :]] = -2 - mark
    missing = missing[: len(taken)]
    leaves = index.owners[taken] >= 0
    leaving = index.owners[taken][leaves].long()
    for host, cache in tensors:
        host[leaving] = cache[taken[leaves]]
        cache[taken] = host[missing]
    index.slots[leaving] = -1
    index.slots[missing] = taken.int()
    index.owners[taken] = missing.int()
    index.stamps[taken] = mark
    index.warmth[taken] = time
    counts = [ids.numel(), int(uses[slot >= 0].sum()), len(missing), len(leaving)]
    index.traffic[:4] += torch.tensor(counts, device=ids.device)

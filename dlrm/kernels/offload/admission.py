"""Admit rows of host memory to a cache on the GPU, and evict the least frequently used.

The batches whose rows are fetched together form a *window*. Before each window, its rows without a
slot are listed and get the slots with the lowest scores: the old rows are written to the host, and
the new ones are read from it. All shapes depend only on the batch size, and the host reads nothing
back, so a second stream can do both while the previous window is computed. It leaves that window
alone: its rows and those of the next window keep their slots, and rows that it uses in host memory
are not fetched.

The cost is the GPU's translation of host addresses, not the bytes. Measured on an H100 with 134,000
rows each way: of 64 bytes in 2.2 GB, they take 0.5 ms in ascending order and 4.5 ms at random; of
256 bytes in 8.6 GB, 2.6 ms in ascending order. So time depends on the pages that are visited, of
about 64 KB. While translations queue up, everything else in that part of the GPU waits: moving as
many rows during four steps of 0.48 ms costs each step 0.09 ms with two programs, and 0.17 ms with
16. So rows move in order of their pages, in long windows, and beside a step by few programs.

The LFU score of a row is the number of windows that used it; it halves every ``half_life`` windows.

The least number of bytes to transfer: each fetched row and its state once, each evicted row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.lists import append
from dlrm.kernels.offload.pinned_memory import zeros_in_same_memory
from dlrm.kernels.offload.transfer import (
    ABSENT,
    EVICTED,
    TAKEN,
    WANTED,
    RowMoves,
    exchange_rows,
    number_of_moves,
)

BLOCK = 1024  # look-ups or slots of a program
BINS = tl.constexpr(256)  # of scores; the last one is for slots that can't be taken
LOWEST, HIGHEST = tl.constexpr(-8), tl.constexpr(10)  # log2 of the scores that bins distinguish
CLAIMED = tl.constexpr(-(2**31))  # instead of the slot of a missing row that is in the list
FOREVER = 2**31 - 1  # when a slot was last used whose row stays in the cache
PAGE = 1 << 16  # bytes of host memory whose addresses are translated together


class CacheIndex(NamedTuple):
    """The rows in the cache, their slots, and how often they are used."""

    row_to_slot: Tensor
    """Slot of each row, ``[V]`` int32. -1: none; ``-2 - t``: none, window t uses the row in host
    memory."""
    slot_to_row: Tensor
    """Row of each slot, ``[C]`` int32; -1 for a free slot."""
    last_used: Tensor
    """Last window that uses each slot, ``[C]`` int32; FOREVER for a row that always stays."""
    lfu_score: Tensor
    """Log2 of the LFU score plus ``t / half_life``, ``[C]`` fp32. As later windows add more, old
    scores decay without an update."""
    step: Tensor
    """Number of the current window, from 1, 0-d int32."""
    demand: Tensor
    """Slots that the current and the next window together need for each of their look-ups, 0 if
    unknown; and the look-ups of the last window, ``[2]`` fp32. In host memory, where the host reads
    it without waiting for the GPU."""
    traffic: Tensor
    """Look-ups so far, look-ups of cached rows, rows fetched, rows evicted, and batches, ``[5]``
    int64."""
    half_life: float
    """Number of windows after which a score is halved."""

    @classmethod
    def empty(cls, weight: Tensor, capacity: int, half_life: float) -> Self:
        """An index of a table ``[V, D]`` and a cache with ``capacity`` slots, all free."""
        device = weight.device
        return cls(
            row_to_slot=torch.full((len(weight),), -1, dtype=torch.int32, device=device),
            slot_to_row=torch.full((capacity,), -1, dtype=torch.int32, device=device),
            last_used=torch.full((capacity,), -1, dtype=torch.int32, device=device),
            lfu_score=torch.full((capacity,), -torch.inf, device=device),
            step=torch.zeros((), dtype=torch.int32, device=device),
            demand=zeros_in_same_memory(weight, (2,), torch.float32),
            traffic=torch.zeros(5, dtype=torch.int64, device=device),
            half_life=half_life,
        )

    def clear(self) -> None:
        """Free all slots."""
        for tensor in (self.row_to_slot, self.slot_to_row, self.last_used):
            tensor.fill_(-1)
        self.lfu_score.fill_(-torch.inf)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return tuple(value for value in self if isinstance(value, Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


# Kernels. AHEAD: the window is the next one, while the current one may be in progress. -----------


@triton.jit
def _list_missing(
    index, ids, starts, missing, counters, pages, n, batch, most, shift,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the slots of the window's rows as used, and list the rows without a slot once each.

    ``pages`` counts the listed rows by page: of a row, it is ``row >> shift``.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    listed, start = inside, 0
    if starts is not None:
        start = tl.load(starts + k // batch, mask=inside, other=0)
        listed = inside & (start >= 0)  # rows of other tables always stay
    row = tl.load(ids + k, mask=listed, other=0).to(tl.int64) + start
    slot = tl.load(index.row_to_slot + row, mask=listed, other=CLAIMED)
    cached = slot >= 0

    # Cached rows. Most look-ups are of rows that others have marked: to store again costs more.
    now = tl.load(index.step)
    window = now + AHEAD
    used = tl.load(index.last_used + slot, mask=cached, other=0)
    tl.store(index.last_used + slot, window, mask=cached & (used < window))
    if tl.program_id(0) == 0:
        tl.atomic_add(index.traffic, tl.full((), n, tl.int64), sem="relaxed")
    hits = tl.sum((cached | (inside & ~listed)).to(tl.int32), 0)
    tl.atomic_add(index.traffic + 1, hits.to(tl.int64), sem="relaxed")

    # Rows that the current window uses in host memory stay there.
    busy = (slot <= -2 - now) & (slot != CLAIMED)
    absent = (slot < 0) & (slot > -2 - now)
    if tl.max((busy | absent).to(tl.int32), 0) > 0:
        tl.store(index.row_to_slot + row, -2 - window, mask=busy)

        # Missing rows: the first look-up of each lists it. Those that do not fit stay, too.
        old = tl.atomic_min(index.row_to_slot + row, CLAIMED, mask=absent, sem="relaxed")
        absent &= old != CLAIMED
        at = append(counters + ABSENT, absent)
        listed = absent & (at < most)
        tl.store(missing + at, row.to(tl.int32), mask=listed)
        tl.atomic_add(pages + (row >> shift), 1, mask=listed, sem="relaxed")
        tl.store(index.row_to_slot + row, -2 - window, mask=absent & (at >= most))


@triton.jit
def _bin_of(index, last_used, score, now):
    """The bin of each slot by its score, lowest first."""
    score -= now.to(tl.float32) / index.half_life
    scaled = (score - LOWEST) * ((BINS - 2) / (HIGHEST - LOWEST))
    bin = tl.minimum(tl.maximum(scaled, 0.0), BINS - 2).to(tl.int32)
    return tl.where(last_used < now, bin, BINS - 1)


@triton.jit
def _count_scores(index, histogram, capacity, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Raise the scores of the slots that the window uses, and count the slots by score."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    now = tl.load(index.step)
    window = now + AHEAD
    last_used = tl.load(index.last_used + slot, mask=slot < capacity, other=2**31 - 1)
    score = tl.load(index.lfu_score + slot, mask=slot < capacity, other=0.0)
    time = window.to(tl.float32) / index.half_life
    raised = time + tl.log2(1 + tl.exp2(score - time))
    tl.store(index.lfu_score + slot, raised, mask=last_used == window)

    counts = tl.histogram(_bin_of(index, last_used, score, now), BINS)
    tl.atomic_add(histogram + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _evict(
    index, lists, histogram, pages, n, most, capacity, shift,
    AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the slots with the lowest scores, one for each missing row if possible, and their rows.

    All slots in the bins below a limit are taken, and a random part of those in the bin at the
    limit. ``pages`` counts their rows by page.
    """
    counters = lists.counters
    now = tl.load(index.step)
    window = now + AHEAD

    # The bin at the limit, and the share of its slots that is needed.
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + bins, mask=bins < BINS - 1, other=0)
    missing, free = tl.load(counters + ABSENT), tl.sum(counts, 0)
    wanted = tl.minimum(tl.minimum(missing, most), free)
    limit = tl.sum((tl.cumsum(counts, 0) < wanted).to(tl.int32), 0)
    below = tl.sum(tl.where(bins < limit, counts, 0), 0)
    share = (wanted - below) / tl.maximum(tl.sum(tl.where(bins == limit, counts, 0), 0), 1)

    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    last_used = tl.load(index.last_used + slot, mask=slot < capacity, other=2**31 - 1)
    score = tl.load(index.lfu_score + slot, mask=slot < capacity, other=0.0)
    bin = _bin_of(index, last_used, score, now)
    random = tl.rand(now, slot)  # from the whole cache, not only its first slots
    some = (bin == limit) & (random <= share * 1.05) & (wanted > below)
    taken = (bin < limit) | some
    at = append(counters + TAKEN, taken)
    taken &= at < wanted

    old = tl.load(index.slot_to_row + slot, mask=taken, other=-1)
    tl.store(lists.leaving + at, old, mask=taken)
    tl.store(lists.targets + at, slot, mask=taken)
    tl.atomic_add(pages + (tl.maximum(old, 0) >> shift), 1, mask=taken, sem="relaxed")
    tl.store(index.last_used + slot, window, mask=taken)
    tl.store(index.lfu_score + slot, window.to(tl.float32) / index.half_life, mask=taken)
    tl.store(index.row_to_slot + old, -1, mask=taken & (old >= 0))

    if tl.program_id(0) == 0:
        tl.store(counters + WANTED, wanted)
        if AHEAD:
            lookups = tl.load(index.demand + 1) + n
            tl.store(index.demand, (capacity - free + missing) / lookups)
        tl.store(index.demand + 1, n * 1.0)
    evicted = tl.sum((taken & (old >= 0)).to(tl.int32), 0)
    tl.atomic_add(counters + EVICTED, evicted, sem="relaxed")
    tl.atomic_add(index.traffic + 2, tl.sum(taken.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(index.traffic + 3, evicted.to(tl.int64), sem="relaxed")


@triton.jit
def _order(lists, ordered, missing_ends, leaving_ends, most, shift, BLOCK: tl.constexpr):
    """Order both lists by page, within one in any order.

    The rows of a page go before its end, which counts those of both lists.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    listed = tl.minimum(tl.load(lists.counters + ABSENT), most)
    row = tl.load(lists.missing + k, mask=k < listed, other=0)
    at = tl.atomic_add(missing_ends + (row >> shift), -1, mask=k < listed, sem="relaxed") - 1
    tl.store(ordered.missing + at, row, mask=k < listed)

    moves = number_of_moves(lists.counters)
    old = tl.load(lists.leaving + k, mask=k < moves, other=0)
    slot = tl.load(lists.targets + k, mask=k < moves, other=0)
    page = tl.maximum(old, 0) >> shift
    at = tl.atomic_add(leaving_ends + page, -1, mask=k < moves, sem="relaxed") - 1 - listed
    tl.store(ordered.leaving + at, old, mask=k < moves)
    tl.store(ordered.targets + at, slot, mask=k < moves)


@triton.jit
def _assign(index, lists, most, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Assign the slots to the missing rows; rows that get none are used in host memory."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    moves = number_of_moves(lists.counters)
    inside = k < tl.minimum(tl.load(lists.counters + ABSENT), most)
    row = tl.load(lists.missing + k, mask=inside, other=0)
    slot = tl.load(lists.targets + k, mask=k < moves, other=0)
    tl.store(index.slot_to_row + slot, row, mask=k < moves)
    new_slot = tl.where(k < moves, slot, -2 - (tl.load(index.step) + AHEAD))
    tl.store(index.row_to_slot + row, new_slot, mask=inside)


# Launchers ------------------------------------------------------------------------------------


@torch.no_grad()
def move_rows(
    index: CacheIndex,
    tensors: Sequence[tuple[Tensor, Tensor]],
    ids: Tensor,
    starts: Tensor | None,
    *,
    ahead: bool,
    impl: str | None = None,
) -> None:
    """Move the rows of a window into the cache.

    Args:
        index: the index of the cache; updated in place.
        tensors: what is moved: ``[V, columns]`` in host memory and ``[C, columns]`` in the cache.
        ids: ``[F, B]`` contiguous, int32 or int64; B is the number of samples of all its batches.
        starts: first row of each table, ``[F]`` int64, -1 for a table all of whose rows stay in the
            cache; None for zeros.
        ahead: move those of the next window, while the current one may be in progress.
        impl: see :mod:`dlrm.kernels`.
    """
    if not ids.numel():
        return
    if not use_triton(ids, impl):
        move_rows_torch(index, tensors, ids, starts, ahead=ahead)
    else:
        row_bytes = max(host.shape[1] * host.element_size() for host, _ in tensors)
        shift = max(1, PAGE // row_bytes).bit_length() - 1
        moves = _list_moves(index, ids, starts, ahead=ahead, shift=shift)
        exchange_rows(tensors, moves, background=ahead)


def _list_moves(
    index: CacheIndex, ids: Tensor, starts: Tensor | None, *, ahead: bool, shift: int
) -> RowMoves:
    """Assign slots to the rows of a window, and list the rows that must move.

    Args:
        shift: log2 of the rows of a page of host memory, rounded down.
    """
    n, capacity = ids.numel(), len(index.slot_to_row)
    most, pages = min(n, capacity), (len(index.row_to_slot) >> shift) + 1
    counts = torch.zeros(4 + BINS.value + 2 * pages, dtype=torch.int32, device=ids.device)
    counters, histogram, pages_of = counts.split([4, BINS.value, 2 * pages])
    missing_pages, leaving_pages = pages_of.split(pages)
    memory = ids.new_empty((2, 3, most), dtype=torch.int32)
    lists, ordered = (
        RowMoves(missing, leaving, targets, counters) for missing, leaving, targets in memory
    )

    options = {"AHEAD": ahead, "BLOCK": BLOCK}
    _list_missing[triton.cdiv(n, BLOCK),](
        index, ids, starts, lists.missing, counters, missing_pages, n, ids.shape[1], most, shift,
        **options,
    )  # fmt: skip
    grid = (triton.cdiv(capacity, BLOCK),)
    _count_scores[grid](index, histogram, capacity, **options)
    _evict[grid](index, lists, histogram, leaving_pages, n, most, capacity, shift, **options)

    # Host memory is accessed in this order, which visits each of its pages once.
    ends = pages_of.cumsum(0, dtype=torch.int32)
    grid = (triton.cdiv(most, BLOCK),)
    _order[grid](lists, ordered, *ends.split(pages), most, shift, BLOCK=BLOCK)
    _assign[grid](index, ordered, most, **options)
    return ordered


@torch.no_grad()
def move_rows_torch(
    index: CacheIndex,
    tensors: Sequence[tuple[Tensor, Tensor]],
    ids: Tensor,
    starts: Tensor | None,
    *,
    ahead: bool,
) -> None:
    """:func:`move_rows` in PyTorch."""
    now = int(index.step)
    window = now + ahead
    time = window / index.half_life

    # Cached rows.
    listed = ids.long() if starts is None else (ids + starts[:, None])[starts >= 0]
    rows, uses = listed.unique(return_counts=True)
    slot = index.row_to_slot[rows].long()
    cached = slot[slot >= 0]
    cached = cached[index.last_used[cached] < window]
    index.last_used[cached] = window
    index.lfu_score[cached] = time + torch.log2(1 + torch.exp2(index.lfu_score[cached] - time))

    # Missing rows, and the slots for them. Rows that get none are used in host memory.
    busy = slot <= -2 - now  # the current window uses them in host memory
    index.row_to_slot[rows[busy]] = -2 - window
    missing = rows[(slot < 0) & ~busy]
    free = (index.last_used < now).nonzero()[:, 0]
    if ahead:
        needed = len(index.slot_to_row) - len(free) + len(missing)
        index.demand[0] = needed / (index.demand[1] + ids.numel())
    index.demand[1] = ids.numel()
    taken = free[index.lfu_score[free].argsort(stable=True)[: len(missing)]]
    index.row_to_slot[missing[len(taken) :]] = -2 - window
    missing = missing[: len(taken)]

    # Move the rows, and update the index.
    evicts = index.slot_to_row[taken] >= 0
    leaving = index.slot_to_row[taken][evicts].long()
    for host, cache in tensors:
        host[leaving] = cache[taken[evicts]]
        cache[taken] = host[missing]
    index.row_to_slot[leaving] = -1
    index.row_to_slot[missing] = taken.int()
    index.slot_to_row[taken] = missing.int()
    index.last_used[taken] = window
    index.lfu_score[taken] = time
    hits = ids.numel() - int(uses[slot < 0].sum())
    counts = [ids.numel(), hits, len(missing), len(leaving)]
    index.traffic[:4] += torch.tensor(counts, device=ids.device)

"""Rows in host memory, of which a GPU holds the most used: moved in batches, ahead of their use.

Every row has a place in host memory, which the GPU reads and writes at its own address
(:mod:`dlrm.kernels.host`). Some have a slot of a cache on the GPU as well, which then stands for
them; with a row moves what an optimizer keeps for it. A row that found no slot is used where it
lies, so a cache of any size gives the same result, down to none.

A move lists the rows of a batch that have no slot, gives them the slots of the coldest rows, and
exchanges the two: the old ones to the host, the new ones from it. Its shapes depend on the size of
the batch alone and the host is told nothing, so that it runs on a second stream while the step
before computes, and a CUDA graph can hold both. That step is not disturbed, since neither its rows
nor the next ones lose their slots and rows that it uses in host memory are not fetched.

What costs is not bytes but the GPU's translation of host addresses, which reaches no further than
some hundred pages at a time and holds up all else while it misses. So the missing rows are sorted,
and their slots taken in order: then the rows of slots behind one another ascend as well, being of
few generations, and both ways a few programs at a time keep within some 70 pages of 2 MB, where
without any order it were 550.

How warm a row is: each batch that uses it adds 1, which decays by half in ``half_life`` batches.

Bytes that a move must transfer: each fetched row and its state once, each row that leaves once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.kernels import use_triton
from dlrm.kernels.branch import Branch
from dlrm.kernels.host import zeros_beside
from dlrm.kernels.lookup import row_gradient
from dlrm.kernels.plan import announce

BLOCK = 1024  # look-ups or slots of a program
GATHER, GATHER_WARPS = 128, 4  # rows of 16 of a look-up's program, and its warps
FEW = 4096  # look-ups up to which all may miss; of more, a quarter
BINS = 256  # of warmth; the last is of slots that can't be taken
COLDEST, WARMEST = -8, 10  # log2 of the warmth between which slots are told apart
MOVERS = 16  # programs that move rows: enough for the link, and few pages at a time
CLAIMED = tl.constexpr(-(2**31))  # in place of a slot, while a missing row is given one
NONE = 2**31 - 1  # behind the last of the missing rows


@triton.jit
def _row_of(ids, starts, k, inside, batch):
    """The row of each look-up of ``ids [F, batch]``."""
    row = tl.load(ids + k, mask=inside, other=0).to(tl.int64)
    if starts is not None:
        row += tl.load(starts + k // batch, mask=inside, other=0)
    return row


@triton.jit
def _mark(
    ids, starts, slots, stamps, warmth, clock, missing, counters, traffic, n, batch, most,
    half_life, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stamp the slots of a batch's rows; list the rows without one, each once, ``most`` of them."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    row = _row_of(ids, starts, k, inside, batch)
    slot = tl.load(slots + row, mask=inside, other=CLAIMED)
    held = slot >= 0
    tl.atomic_add(traffic + 1, tl.sum(held.to(tl.int64), 0))
    now = tl.load(clock)
    mark = now + AHEAD

    held &= tl.load(stamps + slot, mask=held, other=mark) < mark
    held &= tl.atomic_max(stamps + slot, mark, mask=held) < mark  # of equal rows the first
    time = mark.to(tl.float32) / half_life
    warm = tl.load(warmth + slot, mask=held, other=0.0)
    tl.store(warmth + slot, time + tl.log2(1 + tl.exp2(warm - time)), mask=held)

    busy = (slot <= -2 - now) & (slot != CLAIMED)  # the step under way uses it in host memory
    tl.store(slots + row, -2 - mark, mask=busy)
    absent = (slot < 0) & (slot > -2 - now)
    absent &= tl.atomic_min(slots + row, CLAIMED, mask=absent) != CLAIMED
    first = absent.to(tl.int32)
    at = tl.atomic_add(counters, tl.sum(first, 0)) + tl.cumsum(first, 0) - 1
    tl.store(missing + at, row.to(tl.int32), mask=absent & (at < most))
    tl.store(slots + row, -2 - mark, mask=absent & (at >= most))


@triton.jit
def _bin_of(slot, stamps, warmth, now, half_life, C, LOW: tl.constexpr, HIGH: tl.constexpr,
            BINS: tl.constexpr):  # fmt: skip
    """The bin of each slot by its row's warmth, coldest first."""
    inside = slot < C
    free = inside & (tl.load(stamps + slot, mask=inside, other=0) < now)
    warm = tl.load(warmth + slot, mask=inside, other=0.0) - now.to(tl.float32) / half_life
    scaled = (warm - LOW) * ((BINS - 2) / (HIGH - LOW))
    bin = tl.minimum(tl.maximum(scaled, 0.0), BINS - 2).to(tl.int32)
    return tl.where(free, bin, BINS - 1)


@triton.jit
def _count(
    stamps, warmth, clock, histogram, half_life, C,
    LOW: tl.constexpr, HIGH: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the slots by warmth."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bin = _bin_of(slot, stamps, warmth, tl.load(clock), half_life, C, LOW, HIGH, BINS)
    tl.atomic_add(histogram + tl.arange(0, BINS), tl.histogram(bin, BINS))


@triton.jit
def _choose(
    slots, owners, stamps, warmth, clock, missing, leaving, targets, counters, histogram, traffic,
    most, half_life, C,
    AHEAD: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Give the missing rows the coldest slots, as far as there are any, both in ascending order."""
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
    bin = _bin_of(slot, stamps, warmth, now, half_life, C, LOW, HIGH, BINS)
    chance = tl.rand(now, slot)  # all over the cache, rather than its first slots
    some = (bin == limit) & (chance <= share * 1.05) & (wanted > below)
    taken = (bin < limit) | some
    ones = taken.to(tl.int32)
    at = tl.atomic_add(counters + 1, tl.sum(ones, 0)) + tl.cumsum(ones, 0) - 1
    taken &= at < wanted
    row = tl.load(missing + at, mask=taken, other=0)
    old = tl.load(owners + slot, mask=taken, other=-1)
    tl.store(leaving + at, old, mask=taken)
    tl.store(targets + at, slot, mask=taken)
    tl.store(owners + slot, row, mask=taken)
    tl.store(stamps + slot, mark, mask=taken)
    tl.store(warmth + slot, mark.to(tl.float32) / half_life, mask=taken)
    tl.store(slots + old, -1, mask=taken & (old >= 0))
    tl.store(slots + row, slot, mask=taken)
    if pid == 0:
        tl.store(counters + 2, wanted)
    tl.atomic_add(traffic + 2, tl.sum(taken.to(tl.int64), 0))
    tl.atomic_add(traffic + 3, tl.sum((taken & (old >= 0)).to(tl.int64), 0))


@triton.jit
def _settle(
    slots, clock, missing, counters, most, AHEAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The missing rows that found no slot are used where they lie."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < tl.minimum(tl.load(counters), most)
    row = tl.load(missing + k, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    tl.store(slots + row, -2 - (tl.load(clock) + AHEAD), mask=inside & (slot == CLAIMED))


@triton.jit
def _exchange(
    host, cache, missing, leaving, targets, counters,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Move the rows of one tensor: those that leave to the host, the missing ones to the slots."""
    moves = tl.minimum(tl.load(counters + 1), tl.load(counters + 2))
    column = tl.arange(0, BLOCK_D)[None, :]
    for start in range(tl.program_id(0) * BLOCK, moves, tl.num_programs(0) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < moves
        row = tl.load(missing + k, mask=inside, other=0).to(tl.int64)
        old = tl.load(leaving + k, mask=inside, other=-1).to(tl.int64)
        slot = tl.load(targets + k, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (column < D)
        at = slot[:, None] * D + column
        new = tl.load(host + row[:, None] * D + column, mask=mask, other=0.0)
        leaves = tl.load(cache + at, mask=mask, other=0.0)
        tl.store(host + old[:, None] * D + column, leaves, mask=mask & (old >= 0)[:, None])
        tl.debug_barrier()
        tl.store(cache + at, new, mask=mask)


@triton.jit
def _gather(
    ids, starts, slots, stamps, clock, weight, gap, out, flat, n, batch, F,
    KEEP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch rows from their slots or the host, sample after sample; ``flat`` gets the rows. With
    KEEP neither shall move for now.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    row = _row_of(ids, starts, (k % F) * batch + k // F, inside, batch)
    slot = tl.load(slots + row, mask=inside, other=-1)
    tl.store(flat + k, row, mask=inside)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    at = tl.where(slot >= 0, slot.to(tl.int64) * D + gap, row * D)
    value = tl.load(weight + at[:, None] + column, mask=mask, other=0.0)
    tl.store(out + k.to(tl.int64)[:, None] * D + column, value, mask=mask)
    if KEEP:
        now = tl.load(clock)
        stamp = tl.load(stamps + slot, mask=inside & (slot >= 0), other=now)
        tl.store(stamps + slot, now, mask=inside & (stamp < now))
        tl.store(slots + row, -2 - now, mask=inside & (slot < 0))


Announced = tuple[Tensor, Tensor | None]  # ids [F, B], and where their tables begin


def cached_rows(parameter: Tensor) -> CachedRows | None:
    """The cache in front of a parameter whose rows lie in host memory; None of any other."""
    return getattr(parameter, "cached_rows", None)


class CachedRows:
    """The rows of a table in host memory, and a cache of some of them on the GPU.

    It rests until an optimizer that knows of it, as ``RowOptimizer`` does, calls :meth:`start`;
    until then, and for other optimizers, the table is one like any other. On a CPU both lie in
    the same memory and all is as on a GPU, in PyTorch.

    Args:
        weight: the table, ``[V, D]``, in host memory; a GPU's tensor is one of
            :func:`dlrm.kernels.host.mapped`.
        capacity: slots of the cache, 0 for none.
        half_life: batches in which the warmth of a row that is not used falls by half.
        impl: see :mod:`dlrm.kernels`.
    """

    def __init__(
        self, weight: Tensor, capacity: int, *, half_life: float = 1000.0, impl: str | None = None
    ) -> None:
        self.capacity = capacity
        self.half_life = half_life
        self.impl = impl
        self.tensors = [(weight, weight)]  # in host memory, in the cache
        self.active = False

    @torch.no_grad()
    def start(self) -> None:
        """Begin to cache, with an empty cache; what :meth:`new_rows` made before is forgotten."""
        self.release()
        weight, _ = self.tensors[0]
        capacity, device = self.capacity, weight.device
        self.tensors = [(weight, weight.new_zeros(capacity, weight.shape[1]))]
        # A row's slot; -1 without one, -2 - t if the step of time t uses it in host memory.
        self.slots = torch.full((len(weight),), -1, dtype=torch.int32, device=device)
        self.owners = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self.stamps = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self.warmth = torch.full((capacity,), -torch.inf, device=device)
        self.clock = torch.zeros((), dtype=torch.int32, device=device)  # training look-ups so far
        self.traffic = torch.zeros(4, dtype=torch.int64, device=device)
        self._branch = Branch(device)
        self._coming: Announced | None = None  # the batch after the one in hand
        self._moving: Announced | None = None  # whose rows the branch is fetching
        self._fetched = False  # the next look-up's rows were fetched ahead
        self._waiting = 0  # training look-ups that no update has followed
        self.active = True

    def new_rows(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Zeros ``[V, columns]`` in host memory that move with the rows of the table."""
        weight, _ = self.tensors[0]
        host = zeros_beside(weight, (len(weight), columns), dtype)
        cache = torch.zeros(self.capacity, columns, dtype=dtype, device=weight.device)
        self.tensors.append((host, cache))
        return host

    @property
    def gaps(self) -> tuple[int, ...]:
        """For the table and each :meth:`new_rows` how far behind it its cache lies, in elements."""
        return tuple(
            (cache.data_ptr() - host.data_ptr()) // host.element_size()
            for host, cache in self.tensors
        )

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the cached rows with their states, and of what keeps track of them."""
        if not self.active:
            return 0, 0
        index = (self.slots, self.owners, self.stamps, self.warmth)
        return sum(cache.nbytes for _, cache in self.tensors), sum(t.nbytes for t in index)

    # Looking up and moving --------------------------------------------------------------------

    def prefetch(self, ids: Tensor, starts: Tensor | None = None) -> None:
        """Announce the ids of the batch behind the next training look-up.

        Their rows are fetched beside the step which that look-up begins.

        Args:
            ids, starts: as of :meth:`lookup`; ids must stay as they are until then.
        """
        if self.active and self.capacity:
            self._coming = ids.contiguous(), starts

    def lookup(
        self, ids: Tensor, starts: Tensor | None = None, *, sparse: bool, training: bool
    ) -> Tensor:
        """Fetch rows, with a gradient for the table.

        In training, rows that were not announced are moved into the cache first; otherwise nothing
        moves, and rows without a slot are read from the host.

        Args:
            ids: ``[F, B]`` int32 or int64, one per table and sample.
            starts: first row of each table, ``[F]`` int64; None for zeros.
            sparse: see :func:`dlrm.kernels.lookup.lookup_tables`.
            training: an update of these rows will follow.

        Returns:
            ``[B, F, D]``.
        """
        assert self.active
        self._join()
        ids = ids.contiguous()
        training = training and self.capacity > 0
        if training:
            self.clock += 1
            self._waiting += 1
            if not self._fetched:
                self._move(ids, starts, ahead=False)
            self._fetched = False
        out = _Lookup.apply(self.tensors[0][0], ids, starts, self, sparse, training)
        if training and self._coming is not None:
            # With two steps under way, a row of the first might move at the time of its update.
            if self._waiting == 1:
                self._moving, self._fetched = self._coming, True
                with self._branch.fork():
                    self._move(*self._moving, ahead=True)
            self._coming = None
        return out

    def updated(self) -> None:
        """The rows of the training look-ups so far have been updated."""
        self._waiting = 0
        self._join()

    def _join(self) -> None:
        if self._moving is not None:
            self._branch.join()
            self._moving = None

    @torch.no_grad()
    def _move(self, ids: Tensor, starts: Tensor | None, *, ahead: bool) -> None:
        """Bring rows into the cache; ``ahead`` of the look-up after the one of this time."""
        n, capacity = ids.numel(), self.capacity
        if not n:
            return
        if not use_triton(ids, self.impl):
            self._move_torch(_rows_of(ids, starts).view(-1), ahead=ahead)
            return
        self.traffic[0] += n
        most = max(min(n, FEW), n // 4)
        missing = torch.full((most,), NONE, dtype=torch.int32, device=ids.device)
        counters = torch.zeros(3 + BINS, dtype=torch.int32, device=ids.device)
        batch, histogram = ids.shape[1], counters[3:]
        by_warmth = {"LOW": COLDEST, "HIGH": WARMEST, "BINS": BINS}
        slots = (self.stamps, self.warmth, self.clock)
        _mark[triton.cdiv(n, BLOCK),](
            ids, starts, self.slots, *slots, missing, counters, self.traffic, n, batch, most,
            self.half_life, AHEAD=ahead, BLOCK=BLOCK,
        )  # fmt: skip
        missing = missing.sort().values
        leaving, targets = torch.empty(2, most, dtype=torch.int32, device=ids.device)
        grid = (triton.cdiv(capacity, BLOCK),)
        _count[grid](*slots, histogram, self.half_life, capacity, **by_warmth, BLOCK=BLOCK)
        _choose[grid](
            self.slots, self.owners, *slots, missing, leaving, targets, counters, histogram,
            self.traffic, most, self.half_life, capacity, AHEAD=ahead, **by_warmth, BLOCK=BLOCK,
        )  # fmt: skip
        _settle[triton.cdiv(most, BLOCK),](
            self.slots, self.clock, missing, counters, most, AHEAD=ahead, BLOCK=BLOCK
        )
        for host, cache in self.tensors:
            dim = host.shape[1]
            block_d = triton.next_power_of_2(dim)
            block = max(4, min(128, 2048 // block_d))
            _exchange[min(MOVERS, triton.cdiv(most, block)),](
                host, cache, missing, leaving, targets, counters,
                D=dim, BLOCK=block, BLOCK_D=block_d,
            )  # fmt: skip

    def _move_torch(self, rows: Tensor, *, ahead: bool) -> None:
        """:meth:`_move` in PyTorch."""
        now, count = int(self.clock), rows.numel()
        mark, busy = now + ahead, -2 - now
        rows, uses = rows.long().unique(return_counts=True)
        slot = self.slots[rows].long()
        held = slot >= 0
        hits = int(uses[held].sum())
        time = mark / self.half_life
        self.stamps[slot[held]] = mark
        self.warmth[slot[held]] = time + torch.log2(1 + torch.exp2(self.warmth[slot[held]] - time))

        self.slots[rows[slot <= busy]] = -2 - mark
        missing = rows[(slot < 0) & (slot > busy)]
        free = (self.stamps < now).nonzero()[:, 0]
        taken = free[self.warmth[free].argsort(stable=True)[: len(missing)]]
        self.slots[missing[len(taken) :]] = -2 - mark
        missing = missing[: len(taken)]
        leaves = self.owners[taken] >= 0
        leaving = self.owners[taken][leaves].long()
        for host, cache in self.tensors:
            host[leaving] = cache[taken[leaves]]
            cache[taken] = host[missing]
        self.slots[leaving] = -1
        self.slots[missing] = taken.int()
        self.owners[taken] = missing.int()
        self.stamps[taken] = mark
        self.warmth[taken] = time
        moved = [count, hits, len(missing), len(leaving)]
        self.traffic += torch.tensor(moved, device=self.traffic.device)

    # The table as a whole ---------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Write the cached rows to the host; they stay in the cache."""
        if not self.active:
            return
        self._join()
        held = (self.owners >= 0).nonzero()[:, 0]
        rows = self.owners[held].long()
        for host, cache in self.tensors:
            host.index_copy_(0, rows, cache[held])

    @torch.no_grad()
    def release(self) -> None:
        """Write the cached rows to the host and empty the cache."""
        if not self.active:
            return
        self.flush()
        self.slots.fill_(-1)
        self.owners.fill_(-1)
        self.stamps.fill_(-1)
        self.warmth.fill_(-torch.inf)
        self._coming, self._fetched = None, False

    def stop(self) -> None:
        """Write all back and cache no longer, until the next :meth:`start`."""
        self.release()
        self.tensors = [(self.tensors[0][0],) * 2]
        self.active = False

    def read(self, tensor: int, rows: Tensor) -> Tensor:
        """Rows ``[n]`` of the table (0) or of what :meth:`new_rows` made (1, ...)."""
        host, cache = self.tensors[tensor]
        slot = self.slots[rows].long()
        value = host.index_select(0, rows)
        value[slot >= 0] = cache[slot[slot >= 0]]
        return value

    def write(self, tensor: int, rows: Tensor, values: Tensor) -> None:
        """Put ``values [n, columns]`` where :meth:`read` would find them; no row twice."""
        host, cache = self.tensors[tensor]
        slot = self.slots[rows].long()
        held = slot >= 0
        cache[slot[held]] = values[held]
        host[rows[~held]] = values[~held]


def _rows_of(ids: Tensor, starts: Tensor | None) -> Tensor:
    """The rows of ``ids [F, B]``, ``[B, F]`` int64."""
    rows = ids.long() if starts is None else ids + starts[:, None]
    return rows.t().contiguous()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        starts: Tensor | None,
        cached: CachedRows,
        sparse: bool,
        training: bool,
    ) -> Tensor:
        tables, batch = ids.shape
        ctx.weight, ctx.sparse = weight, sparse  # saved, it would count as changed by every move
        if use_triton(ids, cached.impl):
            out, flat = _launch_gather(ids, starts, cached, training)
        else:
            flat = _rows_of(ids, starts).view(-1)
            out = cached.read(0, flat)
            if training:
                slot, now = cached.slots[flat].long(), int(cached.clock)
                cached.stamps[slot[slot >= 0]] = now
                cached.slots[flat[slot < 0]] = -2 - now
        if ctx.needs_input_grad[0]:
            announce(flat, len(weight))
        ctx.save_for_backward(flat)
        return out.view(batch, tables, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        values = grad.reshape(len(flat), -1)
        return row_gradient(ctx.weight, flat, values, ctx.sparse), None, None, None, None, None


def _launch_gather(
    ids: Tensor, starts: Tensor | None, cached: CachedRows, keep: bool
) -> tuple[Tensor, Tensor]:
    """The rows ``[B * F, D]`` that ids mean, and their numbers ``[B * F]``."""
    weight, _ = cached.tensors[0]
    (tables, batch), dim, n = ids.shape, weight.shape[1], ids.numel()
    out, flat = weight.new_empty(n, dim), torch.empty(n, dtype=torch.int64, device=ids.device)
    block_d = triton.next_power_of_2(dim)
    block = max(4, min(GATHER, 16 * GATHER // block_d))
    if n:
        _gather[triton.cdiv(n, block),](
            ids, starts, cached.slots, cached.stamps, cached.clock, weight, cached.gaps[0], out,
            flat, n, batch, tables, KEEP=keep, D=dim, BLOCK=block, BLOCK_D=block_d,
            num_warps=GATHER_WARPS,
        )  # fmt: skip
    return out, flat

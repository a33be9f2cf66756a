"""Rows in host memory, of which a GPU holds the most used: moved by rounds, ahead of their use.

Every row has a place in host memory, which the GPU reads and writes at its own address
(:mod:`dlrm.kernels.offload.pinned_memory`). Some have a slot of a cache on the GPU as well, which
then stands for them; with a row moves what an optimizer keeps for it. A row that found no slot is
used where it lies, so a cache of any size gives the same result, down to none. How rows move:
:mod:`dlrm.kernels.offload.admission` and, ahead of their use, :mod:`dlrm.kernels.offload.prefetch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dlrm.kernels import use_triton
from dlrm.kernels.lookup.tables import row_gradient, tiling
from dlrm.kernels.offload.admission import CacheIndex, flat_rows, load_rows, move_rows
from dlrm.kernels.offload.pinned_memory import empty_on_host, in_host_memory, zeros_in_same_memory
from dlrm.kernels.offload.prefetch import AsyncRowTransfer
from dlrm.kernels.update.cached_slots import CachedSlots
from dlrm.kernels.update.row_sort import RowSorter

TILE = 2048  # elements of a tile: rows in host memory are waited for by few others


@triton.jit
def _gather(
    ids, starts, slots, weight, gap, out, flat, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch rows from their slots or the host, sample after sample; ``flat`` gets the rows."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    row = load_rows(ids, starts, (k % F) * batch + k // F, inside, batch)
    slot = tl.load(slots + row, mask=inside, other=-1)
    tl.store(flat + k, row, mask=inside)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    at = tl.where(slot >= 0, slot.to(tl.int64) * D + gap, row * D)
    value = tl.load(weight + at[:, None] + column, mask=mask, other=0.0)
    tl.store(out + k.to(tl.int64)[:, None] * D + column, value, mask=mask)


Round = tuple[Tensor, Tensor | None]  # ids [F, B] of a round, and where their tables begin


class CachedParameter(nn.Parameter):
    """A table in host memory, with a cache of its rows.

    A copy, or one that is loaded, lies in host memory as well and has a cache of its own, which
    rests until there is an optimizer.

    Args:
        data: the rows, ``[V, D]``; those in the memory of a GPU are moved to that of the host.
        requires_grad: see ``nn.Parameter``.
        capacity, half_life, impl: see :class:`CachedRows`.
    """

    cached: CachedRows

    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = True,
        capacity: int = 0,
        half_life: float = 1000.0,
        impl: str | None = None,
    ) -> Self:
        if data.is_cuda and not in_host_memory(data):
            data = empty_on_host(data).copy_(data)
        parameter = super().__new__(cls, data, requires_grad)
        parameter.cached = CachedRows(parameter, capacity, half_life=half_life, impl=impl)
        return parameter

    def _settings(self) -> tuple[Any, ...]:
        cached = self.cached
        return self.requires_grad, cached.capacity, cached.half_life, cached.impl

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            self.cached.flush()
            rows = empty_on_host(self.data).copy_(self.data)
            memo[id(self)] = type(self)(rows, *self._settings())
        copied: Self = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """What pickle and ``torch.save`` keep: rows that are all written back."""
        self.cached.flush()
        return type(self), (self.data, *self._settings())


def cached_rows(parameter: Tensor) -> CachedRows | None:
    """The cache in front of a parameter; None if it has none."""
    return parameter.cached if isinstance(parameter, CachedParameter) else None


class CachedRows:
    """The rows of a table in host memory, and a cache of some of them on the GPU.

    It rests until an optimizer that knows of it, as ``RowOptimizer`` does, calls :meth:`start`;
    until then, and for other optimizers, the table is one like any other. On a CPU both lie in
    the same memory and all is as on a GPU, in PyTorch.

    Args:
        weight: the table, ``[V, D]``, in host memory; a GPU's tensor is one of
            :func:`dlrm.kernels.offload.pinned_memory.mapped`.
        capacity: slots of the cache, 0 for none.
        half_life: windows in which the LFU score of a row that is not used halves.
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
        self.ready = False  # the rows of the round are where it expects them

    @torch.no_grad()
    def start(self) -> None:
        """Begin to cache, with an empty cache; what :meth:`new_rows` made before is forgotten."""
        self.release()
        weight, _ = self.tensors[0]
        capacity, device = self.capacity, weight.device
        self.tensors = [(weight, weight.new_zeros(capacity, weight.shape[1]))]
        self.index = CacheIndex.empty(len(weight), capacity, self.half_life, device)
        self._transfer = AsyncRowTransfer(device)
        self.active = True

    def new_rows(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Zeros ``[V, columns]`` in host memory that move with the rows of the table."""
        weight, _ = self.tensors[0]
        host = zeros_in_same_memory(weight, (len(weight), columns), dtype)
        cache = torch.zeros(self.capacity, columns, dtype=dtype, device=weight.device)
        self.tensors.append((host, cache))
        return host

    @property
    def moves(self) -> bool:
        """Whether there is a cache for rows to move to."""
        return self.active and self.capacity > 0

    @property
    def slots(self) -> Tensor:
        """Slot of each row, ``[V]`` int32; below 0 without one."""
        return self.index.row_to_slot

    @property
    def cached_slots(self) -> CachedSlots:
        """What :func:`dlrm.kernels.update.sparse.update_rows` needs to know of the cache."""
        return CachedSlots(slots=self.slots, caches=[cache for _, cache in self.tensors])

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the cached rows with their states, and of what keeps track of them."""
        if not self.active:
            return 0, 0
        return sum(cache.nbytes for _, cache in self.tensors), self.index.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what is loaded, is the cache of the copied parameter."""
        weight = self.tensors[0][0]
        assert isinstance(weight, CachedParameter), "a cache is copied with its parameter"
        return getattr, (weight, "cached")

    # Looking up and moving --------------------------------------------------------------------

    def begin_window(self, now: Round | None, coming: Round | None, *, batches: int = 1) -> None:
        """Begin a round of training look-ups, of the rows that were last said to be coming.

        Until the next call all training look-ups must be of this round, and are told so.

        Args:
            now: ids of this round and starts, as of :meth:`lookup`, if they were not announced:
                their rows are fetched first.
            coming: those of the next round: their rows are fetched beside the look-ups of this
                one and all that comes with them. The ids must stay as they are until then.
            batches: in how many steps these ids are used.
        """
        if not self.moves:
            return
        self._transfer.wait()
        self.index.step.add_(1)
        self.index.traffic[4] += batches
        self.ready = True
        if now is not None:
            self._transfer.wait_all()
            move_rows(self.index, self.tensors, *now, impl=self.impl)
        if coming is not None:
            self._transfer.start(self.index, self.tensors, *coming, impl=self.impl)

    def lookup(
        self,
        ids: Tensor,
        starts: Tensor | None = None,
        *,
        sparse: bool,
        training: bool,
        fetched: bool = False,
        sorter: RowSorter | None = None,
    ) -> Tensor:
        """Fetch rows, with a gradient for the table.

        In training the rows are moved into the cache first, if no round did that. Otherwise
        nothing moves, and rows without a slot are read from the host.

        Args:
            ids: ``[F, B]`` int32 or int64, one per table and sample.
            starts: first row of each table, ``[F]`` int64; None for zeros.
            sparse: see :func:`dlrm.kernels.lookup.tables.lookup_tables`.
            training: an update of these rows will follow.
            fetched: the rows are those of the round under way, which :meth:`begin_window` fetched.
            sorter: sorts the rows that will have a gradient ahead of their update.

        Returns:
            ``[B, F, D]``.
        """
        assert self.active
        ids = ids.contiguous()
        if training and not fetched:
            self.begin_window((ids, starts), None)
            self.ready = False  # what was announced may have lost its slots
        elif not training:
            self._transfer.wait_all()
        return _Lookup.apply(self.tensors[0][0], ids, starts, self, sparse, sorter)

    # The table as a whole ---------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Write the cached rows to the host; they stay in the cache."""
        if not self.active:
            return
        self._transfer.wait_all()
        held = (self.index.slot_to_row >= 0).nonzero()[:, 0]
        rows = self.index.slot_to_row[held].long()
        for host, cache in self.tensors:
            host.index_copy_(0, rows, cache[held])

    @torch.no_grad()
    def release(self) -> None:
        """Write the cached rows to the host and empty the cache."""
        if not self.active:
            return
        self.flush()
        self.index.clear()
        self.ready = False

    def keeps(self, states: Sequence[Tensor]) -> bool:
        """Whether rows move, and with them just these tensors of :meth:`new_rows`."""
        own = [id(host) for host, _ in self.tensors[1:]]
        return self.active and own == [id(state) for state in states]

    def stop(self) -> None:
        """Write all back and cache no longer, until the next :meth:`start`."""
        if not self.active:
            return
        self.release()
        self.tensors = [(self.tensors[0][0],) * 2]
        self.active = False


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        starts: Tensor | None,
        cached: CachedRows,
        sparse: bool,
        sorter: RowSorter | None,
    ) -> Tensor:
        tables, batch = ids.shape
        ctx.weight, ctx.sparse = weight, sparse  # saved, it would count as changed by every move
        if use_triton(ids, cached.impl):
            out, flat = _launch_gather(ids, starts, cached)
        else:
            flat = flat_rows(ids, starts).view(-1)
            out = cached.cached_slots.read(weight, 0, flat)
        if ctx.needs_input_grad[0] and sorter is not None:
            sorter.submit(flat, len(weight))
        ctx.save_for_backward(flat)
        return out.view(batch, tables, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        values = grad.reshape(len(flat), ctx.weight.shape[1])
        return row_gradient(ctx.weight, flat, values, ctx.sparse), *[None] * 5


def _launch_gather(ids: Tensor, starts: Tensor | None, cached: CachedRows) -> tuple[Tensor, Tensor]:
    """The rows ``[B * F, D]`` that ids mean, and their numbers ``[B * F]``."""
    weight, _ = cached.tensors[0]
    gap, *_ = cached.cached_slots.offsets([host for host, _ in cached.tensors])
    (tables, batch), dim, n = ids.shape, weight.shape[1], ids.numel()
    out, flat = weight.new_empty(n, dim), torch.empty(n, dtype=torch.int64, device=ids.device)
    grid, sizes = tiling(n, dim, TILE)
    if n:
        _gather[grid](
            ids, starts, cached.slots, weight, gap, out, flat, n, batch,
            F=tables, **sizes,
        )  # fmt: skip
    return out, flat

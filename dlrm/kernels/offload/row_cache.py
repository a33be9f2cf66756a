"""Tables in host memory, with a cache of their most used rows on the GPU.

All rows are in pinned host memory, which the GPU reads and writes directly
(:mod:`dlrm.kernels.offload.pinned_memory`). Some have a slot in the cache, which then holds their
values; optimizer state moves with the rows. Rows without a slot are read and updated in host
memory, so results do not depend on the size of the cache. :mod:`dlrm.kernels.offload.admission`
moves rows between the two.

Rows are moved ahead of their use: those of window t + 1 during window t, by few programs of a side
stream. No row is used while it moves:

- The side stream begins after the last step of window t - 1, so updates by windows before t are
  complete.
- No row that window t uses, in a slot or in host memory, is fetched or evicted, and no row of
  window t + 1 is evicted. At most, rows that move share a sector of memory with such rows.
- Rows of small tables may be kept: they come into the empty cache, between steps, and never leave.
  So windows do not list them.
- Window t + 1, and everything else that accesses the table, begins after the side stream. A row
  that is evicted and used again is read by the next move, on the same stream, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dlrm.kernels import use_triton
from dlrm.kernels.lookup.source import KernelSource, SourceKind, Weight
from dlrm.kernels.offload.admission import FOREVER, CacheIndex, move_rows
from dlrm.kernels.offload.pinned_memory import (
    empty_on_host,
    in_host_memory,
    on_host,
    zeros_in_same_memory,
)
from dlrm.kernels.update.cached_slots import CachedSlots, cache_of
from dlrm.kernels.update.packed import PackedParameter, PackedRows, packed_rows, stored_rows
from dlrm.utils.streams import side_stream_of

SHARE = 0.97  # of the slots that two windows should need: rows without one are slow
DEMAND = 0.25  # slots that they need for each of their look-ups, as long as it is unknown

Window = tuple[Tensor, Tensor | None]
"""The ids ``[F, B]`` of a prefetch window, and where their tables begin: see :func:`move_rows`."""


class CachedParameter(nn.Parameter):
    """A table in host memory, with a cache of its rows.

    A copy is in host memory as well, with a cache of its own, which is inactive until there is an
    optimizer.

    Args:
        data: the rows, ``[V, D]``; rows on a GPU are moved to host memory.
        requires_grad: see ``nn.Parameter``.
        capacity, half_life: see :class:`CachedRows`.
    """

    cached: CachedRows

    def __new__(
        cls, data: Tensor, requires_grad: bool = True, capacity: int = 0, half_life: float = 1000.0
    ) -> Self:
        if data.is_cuda and not in_host_memory(data):
            data = empty_on_host(data).copy_(data)
        parameter = super().__new__(cls, data, requires_grad)
        parameter.cached = CachedRows(parameter, capacity, half_life)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            self.cached.flush()
            rows = empty_on_host(self.data).copy_(self.data)
            memo[id(self)] = type(self)(rows, self.requires_grad, *self.cached.settings)
        copied: Self = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle and ``torch.save``: the rows after all are written back."""
        self.cached.flush()
        return type(self), (self.data, self.requires_grad, *self.cached.settings)


class CachedPackedParameter(PackedParameter):
    """A table of packed rows of one width in host memory; otherwise a :class:`CachedParameter`.

    Args:
        packed: the rows, in host memory.
        requires_grad: see ``nn.Parameter``.
        capacity, half_life: see :class:`CachedRows`.
    """

    cached: CachedRows

    def __new__(
        cls,
        packed: PackedRows,
        requires_grad: bool = True,
        capacity: int = 0,
        half_life: float = 1000.0,
    ) -> Self:
        parameter = super().__new__(cls, packed, requires_grad)
        parameter.cached = CachedRows(parameter, capacity, half_life)
        return parameter

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """This parameter, mapped for the device to which ``fn`` moves tensors."""
        data = self.packed.data
        like = fn(data[:0])
        if like.device == data.device:
            return self
        self.cached.stop()
        return super().moved(lambda data: empty_on_host(like, data.shape).copy_(data))

    @property
    def settings(self) -> tuple[Any, ...]:
        return self.requires_grad, *self.cached.settings

    def _copied_data(self) -> Tensor:
        self.cached.flush()
        return empty_on_host(self.packed.data).copy_(self.packed.data)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.cached.flush()
        return super().__reduce_ex__(protocol)


def cached_rows(parameter: Tensor) -> CachedRows | None:
    """The cache of a parameter; None if it has none."""
    if isinstance(parameter, CachedParameter | CachedPackedParameter):
        return parameter.cached
    return None


def slots_for_update(parameter: Tensor, states: Sequence[Tensor]) -> CachedSlots | None:
    """The cached rows of a parameter and of its optimizer's states; None if it has no cache.

    A cache that moves the states of another optimizer, or none, is stopped.
    """
    cached = cached_rows(parameter)
    if cached is None:
        return None
    moving = [id(host) for host, _ in cached.tensors[1:]]
    if cached.active and moving == [id(state) for state in states]:
        return cached.cached_slots
    cached.stop()
    return None


def slots_that_fit(dim: int, device: torch.device) -> int:
    """Number of slots whose rows and two states in fp32 take half of the GPU's free memory."""
    if device.type != "cuda":
        return 2**31 - 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(free // 2 // (3 * 4 * dim), 1)


class CachedRows(Weight):
    """The rows of a table in host memory, and a cache of some of them on the GPU.

    It is inactive until an optimizer that supports it, such as ``RowOptimizer``, calls
    :meth:`start`. Until then, and for other optimizers, the table is like any other. On a CPU, both
    are in the same memory and PyTorch does all that the kernels do.

    Args:
        weight: the table, ``[V, D]``, in host memory; for a GPU a
            :func:`dlrm.kernels.offload.pinned_memory.mapped_tensor`; or packed rows in such memory.
        capacity: slots of the cache, 0 for none; fewer if the GPU's free memory is too small.
        half_life: windows in which the LFU score of an unused row halves.
    """

    tile: ClassVar[int] = 2048  # few other rows wait for one in host memory
    impl: str | None = None  # see :mod:`dlrm.kernels`

    def __init__(self, weight: Tensor, capacity: int, half_life: float = 1000.0) -> None:
        super().__init__(weight)
        self.capacity = capacity
        self.half_life = half_life
        self.tensors: list[tuple[Tensor, Tensor]] = []  # in host memory, in the cache
        self.active = False
        self.ready = False  # the rows of the window are where begin_window put them
        self.starts: Tensor | None = None  # those of tables, once some have been kept

    @torch.no_grad()
    def start(self) -> None:
        """Begin to cache, with an empty cache and without the states of :meth:`new_rows`."""
        self.release()
        host, device = stored_rows(self.weight), self.weight.device
        capacity = min(self.capacity, slots_that_fit(self.weight.shape[1], device))
        self.tensors = [(host, cache_of(host, capacity))]
        self.index = CacheIndex.empty(host, capacity, self.half_life)
        self.side = side_stream_of(device, "rows")
        self._moving = False  # rows are on their way
        self.empty, self.starts = True, None
        self.active = True

    def new_rows(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Zeros ``[V, columns]`` in host memory that move with the rows of the table."""
        rows, slots = self.tensors[0]
        host = zeros_in_same_memory(rows, (len(rows), columns), dtype)
        self.tensors.append((host, cache_of(host, len(slots))))
        return host

    @property
    def settings(self) -> tuple[int, float]:
        """Arguments for a copy."""
        return self.capacity, self.half_life

    @property
    def _memory(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors as moves write to them: no value changes, so autograd must not see it."""
        return [(host.data, cache) for host, cache in self.tensors]

    @property
    def moves(self) -> bool:
        """Whether there is a cache for rows to move to."""
        return self.active and self.capacity > 0

    @property
    def window_lookups(self) -> int:
        """Look-ups of a window, so that the rows of two windows take most of the slots."""
        slots, demand = self.capacity, 0.0
        if self.active:  # there may be fewer slots
            slots, demand = len(self.index.slot_to_row), on_host(self.index.demand)[0].item()
        if slots == len(self.weight):
            return 2**31  # there is a slot for each row
        return int(SHARE * slots / (demand or DEMAND)) // 2

    @property
    def slots(self) -> Tensor:
        """Slot of each row, ``[V]`` int32; negative without one."""
        return self.index.row_to_slot

    @property
    def cached_slots(self) -> CachedSlots:
        """The cache as :func:`dlrm.kernels.update.sparse.update_rows` reads it."""
        return CachedSlots(slots=self.slots, tensors=self.tensors)

    def for_kernel(self) -> tuple[KernelSource, SourceKind]:
        source, kind = super().for_kernel()
        return source._replace(slots=self.slots, to_cache=self.cached_slots.to_cache[0]), kind

    def runs_triton(self, ids: Tensor, impl: str | None) -> bool:
        return use_triton(ids, impl or self.impl)

    def read(self, rows: Tensor) -> Tensor:
        found, packed = self.cached_slots.read(0, rows), packed_rows(self.weight)
        if packed is None:
            return found
        return packed.of_records(found).read(torch.arange(len(rows), device=rows.device))

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the cached rows with their states, and of the index."""
        if not self.active:
            return 0, 0
        return sum(cache.nbytes for _, cache in self.tensors), self.index.nbytes

    @torch.no_grad()
    def keep(self, tables: Sequence[int], starts: Tensor, sizes: Sequence[int]) -> None:
        """Bring all rows of some tables into the empty cache, where they stay until it is emptied.

        Windows that have :attr:`starts` as theirs do not list them.

        Args:
            tables: numbers of these tables, whose rows have slots.
            starts: first row of each table, ``[F]`` int64.
            sizes: rows of each table.
        """
        assert self.empty
        self.starts, slot = starts.clone(), 0
        for table in tables:
            first, size = sum(sizes[:table]), sizes[table]
            rows, slots = slice(first, first + size), slice(slot, slot + size)
            for host, cache in self.tensors:
                cache[slots] = host[rows]
            numbers = torch.arange(slot, slot + size, dtype=torch.int32, device=starts.device)
            self.index.row_to_slot[rows] = numbers
            self.index.slot_to_row[slots] = numbers + (first - slot)
            self.starts[table] = -1
            slot += size
        self.index.last_used[:slot] = FOREVER

    # Looking up and moving --------------------------------------------------------------------

    def begin_window(self, now: Window | None, coming: Window | None, *, batches: int = 1) -> None:
        """Begin a prefetch window, by default that of the ``coming`` ids of the last call.

        Until the next call, all training look-ups must be of this window, with ``fetched``.

        Args:
            now: those of this window, if they were not ``coming`` in the last call; their rows are
                fetched at once.
            coming: those of the next window, whose rows are fetched during this one. The ids must
                not change until then.
            batches: number of batches in ``now`` and ``coming``.
        """
        if not self.moves:
            return
        self.wait()
        self.empty = False
        self.index.step.add_(1)
        self.index.traffic[4] += batches
        self.ready = True

        if now is not None:
            move_rows(self.index, self._memory, *now, ahead=False, impl=self.impl)
        if coming is not None:
            with self.side.fork():
                move_rows(self.index, self._memory, *coming, ahead=True, impl=self.impl)
            # All of these may be dropped meanwhile.
            caches = [cache for _, cache in self.tensors]
            self.side.keep([coming[0], *caches, *self.index.tensors])
            self._moving = True

    def wait(self) -> None:
        """Make the current stream wait for the rows that are on their way."""
        if self._moving:
            self.side.join()
            self._moving = False

    def prepare(self, rows: Tensor, *, training: bool) -> None:
        """Prepare a look-up of rows that were not fetched with a window.

        In training, they are moved into the cache first. Otherwise nothing moves, and rows without
        a slot are read from the host.

        Args:
            rows: ``[1, n]`` int32 or int64, contiguous.
            training: an update of these rows will follow.
        """
        assert self.active
        if training:
            self.begin_window((rows, None), None)
            self.ready = False  # rows of the next window may have lost their slots
        else:
            self.wait()

    # The table as a whole ---------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Write the cached rows to the host; they stay in the cache."""
        if not self.active:
            return
        self.wait()
        held = (self.index.slot_to_row >= 0).nonzero()[:, 0]
        rows = self.index.slot_to_row[held].long()
        for host, cache in self._memory:
            host.index_copy_(0, rows, cache[held])

    @torch.no_grad()
    def release(self) -> None:
        """Write the cached rows to the host and empty the cache."""
        if not self.active:
            return
        self.flush()
        self.index.clear()
        self.ready = False
        self.empty, self.starts = True, None

    def stop(self) -> None:
        """Write all rows back and stop caching until the next :meth:`start`."""
        if not self.active:
            return
        self.release()
        self.tensors = []
        del self.index  # with four bytes on the GPU for each row of the table
        self.active = False

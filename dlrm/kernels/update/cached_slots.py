"""The cache of a table in host memory, as an update sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.kernels import tl, triton


@triton.jit
def place_of(row, slot, to_cache):
    """The places of rows: a row with a slot is so many rows further, in the cache."""
    return tl.where(slot >= 0, slot.to(tl.int64) + to_cache, row)


@dataclass(frozen=True, kw_only=True)
class CachedSlots:
    """Rows whose current values are in a cache on the GPU, not in the table.

    A cache begins a whole number of rows away from its tensor (:func:`cache_of`). So a kernel reads
    cached rows as further rows of the tensor.
    """

    slots: Tensor
    """Slot of each row of the table, ``[V]`` int32; negative for a row that is not cached."""
    tensors: Sequence[tuple[Tensor, Tensor]]
    """The rows of the weight and then of each of its states: ``[V, columns]`` in host memory and
    ``[C, columns]`` in the cache."""

    @property
    def to_cache(self) -> tuple[int, ...]:
        """The row of each tensor at which its cache would begin."""
        return tuple(
            (cache.data_ptr() - host.data_ptr()) // row_bytes(host) for host, cache in self.tensors
        )

    def read(self, index: int, rows: Tensor) -> Tensor:
        """The current values of ``rows [n]`` of a tensor."""
        host, cache = self.tensors[index]
        slot = self.slots[rows].long()
        value = host.index_select(0, rows)
        value[slot >= 0] = cache[slot[slot >= 0]]
        return value

    def write(self, index: int, rows: Tensor, values: Tensor) -> None:
        """Store ``values [n, columns]`` where :meth:`read` would find them; no row twice."""
        host, cache = self.tensors[index]
        slot = self.slots[rows].long()
        cached = slot >= 0
        cache[slot[cached]] = values[cached]
        host[rows[~cached]] = values[~cached]


def row_bytes(tensor: Tensor) -> int:
    """Bytes of a row of ``tensor [V, columns]``."""
    return tensor.shape[1] * tensor.element_size()


def cache_of(host: Tensor, slots: int) -> Tensor:
    """Zeros ``[slots, columns]`` for rows of ``host [V, columns]``, a whole number of rows away."""
    columns, size = host.shape[1], host.element_size()
    memory = torch.zeros((slots + 1) * columns, dtype=host.dtype, device=host.device)
    start = (host.data_ptr() - memory.data_ptr()) % row_bytes(host) // size
    return memory[start : start + slots * columns].view(slots, columns)

"""The cache of a table in host memory, as an update sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CachedSlots:
    """Rows whose current values are in a cache on the GPU, not in the table."""

    slots: Tensor
    """Slot of each row of the table, ``[V]`` int32; negative for a row that is not cached."""
    caches: Sequence[Tensor]
    """Cached rows of the weight and then of each of its states, ``[C, columns]`` each."""

    def offsets(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Elements from the start of each tensor (weight, states) to that of its cache."""
        return tuple(
            (cache.data_ptr() - tensor.data_ptr()) // tensor.element_size()
            for cache, tensor in zip(self.caches, tensors, strict=True)
        )

    def read(self, tensor: Tensor, index: int, rows: Tensor) -> Tensor:
        """The current values of ``rows [n]`` of ``tensor``, whose cache is ``caches[index]``."""
        slot, cache = self.slots[rows].long(), self.caches[index]
        value = tensor.index_select(0, rows)
        value[slot >= 0] = cache[slot[slot >= 0]]
        return value

    def write(self, tensor: Tensor, index: int, rows: Tensor, values: Tensor) -> None:
        """Store ``values [n, columns]`` where :meth:`read` would find them; no row twice."""
        slot, cache = self.slots[rows].long(), self.caches[index]
        cached = slot >= 0
        cache[slot[cached]] = values[cached]
        tensor[rows[~cached]] = values[~cached]

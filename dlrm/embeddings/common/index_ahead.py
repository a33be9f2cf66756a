"""A copy of the index of dynamic tables that places coming batches, before their steps do."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.embeddings.common.dynamic_tables import STATE
from dlrm.kernels.dynamic.index import find_rows, place
from dlrm.kernels.dynamic.slot_index import SlotIndex
from dlrm.utils.graph_recorder import RecordedByShape

ROOM = 8  # ids of bags are padded by up to one in so many: batches of like sizes share a graph


class IndexAhead:
    """Gives the ids of coming batches the rows that they will have in their steps.

    It gets the same ids in the same order as the index that it is a copy of, and so gives them the
    same rows. On a GPU, a CUDA graph places the ids of a batch: twenty launches one by one would
    take longer than a small step.

    Args:
        index: the index of the steps.
        num_shared: shared rows of each table, ``[F]``.
    """

    def __init__(self, index: SlotIndex, num_shared: Tensor) -> None:
        copies = {name: getattr(index, name).clone() for name in STATE}
        self._index = index._replace(**copies, columns=None)
        self._place = RecordedByShape(
            partial(_place, self._index, num_shared), self.device, "lookups"
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of the copy."""
        return [getattr(self._index, name) for name in STATE]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._index.ids.device

    def follow(self, index: SlotIndex) -> None:
        """Start again from what the index of the steps has now."""
        for name, own in zip(STATE, self.tensors, strict=True):
            own.copy_(getattr(index, name))

    def place(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The rows that the look-ups of ``ids [F, B]`` use, within their tables, ``[1, F, B]``; of
        tables that share rows also those that they will use from the next step on, ``[2, F, B]``.
        """
        return self._place(tables, ids).clone()

    def place_bags(self, tables: Tensor, ids: Tensor, end: Tensor) -> Tensor:
        """The rows of the ids of bags, as of :meth:`place`, ``[..., nnz]``; ``end [1]`` of them are
        used.
        """
        count = len(ids)
        if not ids.is_cuda:
            return self._place(tables, ids)
        unit = max(1, (1 << count.bit_length()) // (2 * ROOM))
        padding = (0, -count % unit)
        tables, ids = functional.pad(tables, padding), functional.pad(ids, padding)
        return self._place(tables, ids, end)[:, :count].clone()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """For copies of the tables, which have none until they train."""
        return type(None), ()


@torch.no_grad()
def _place(
    index: SlotIndex, num_shared: Tensor, tables: Tensor, ids: Tensor, end: Tensor | None = None
) -> Tensor:
    """Give the ids of a step their rows."""
    before = [] if index.salts is None else [find_rows(index, num_shared, tables, ids)]
    return torch.stack([*before, place(index, num_shared, tables, ids, end=end).rows])

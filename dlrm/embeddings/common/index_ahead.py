"""A copy of the index of dynamic tables that places coming batches, before their steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.embeddings.common.dynamic_tables import STATE
from dlrm.kernels.dynamic.index import place
from dlrm.kernels.dynamic.slot_index import SlotIndex, begin_step
from dlrm.utils.bags import Bags
from dlrm.utils.graph_recorder import GraphRecorder

ROOM = 8  # ids of bags are padded by up to one in so many: batches of like sizes share a graph


class _Inputs(NamedTuple):
    """The tensors that a graph reads: see :func:`dlrm.kernels.dynamic.index.place`."""

    tables: Tensor
    ids: Tensor
    end: Tensor | None


class _Captured(NamedTuple):
    """A recorded batch: its inputs, and the rows that it writes."""

    replay: Callable[[], object]
    inputs: _Inputs
    rows: Tensor


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
        self._index = index._replace(**{name: getattr(index, name).clone() for name in STATE})
        self._num_shared = num_shared
        self._captured: dict[tuple[torch.Size, torch.dtype], _Captured | None] = {}
        self._recorder = GraphRecorder(self.device, "lookups") if index.ids.is_cuda else None

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
        """The row of each of ``ids [F, B]`` within its table, when its step has begun."""
        return self._place(_Inputs(tables, ids, None))

    def place_bags(self, bags: Bags, num_tables: int) -> Tensor:
        """The row of each id of bags within its table, ``[nnz]``."""
        tables, ids, count = bags.tables(num_tables), bags.ids, len(bags.ids)
        if not ids.is_cuda:
            return self._place(_Inputs(tables, ids, None))
        unit = max(1, (1 << count.bit_length()) // (2 * ROOM))
        padding = (0, -count % unit)
        tables, ids = functional.pad(tables, padding), functional.pad(ids, padding)
        return self._place(_Inputs(tables, ids, bags.offsets[-1:]))[:count]

    @torch.no_grad()
    def _place(self, given: _Inputs) -> Tensor:
        """The first batch of a shape compiles the kernels, and the second one is captured."""
        key = given.ids.shape, given.ids.dtype
        if self._recorder is None:
            return self._step(given)
        if key not in self._captured:
            self._captured[key] = None
            return self._step(given)

        if (captured := self._captured[key]) is None:
            end = None if given.end is None else given.end.clone()
            inputs = _Inputs(given.tables.clone(), given.ids.clone(), end)
            rows = self._step(inputs)
            replay, to = self._recorder.record(lambda: self._step(inputs))
            self._captured[key] = _Captured(replay, inputs, to)
            return rows

        own = captured.inputs
        own.ids.copy_(given.ids)
        if own.end is not None and given.end is not None:
            own.end.copy_(given.end)
            own.tables.copy_(given.tables)  # of one id for each table they are always the same
        captured.replay()
        return captured.rows.clone()

    def _step(self, given: _Inputs) -> Tensor:
        begin_step(self._index)
        return place(self._index, self._num_shared, given.tables, given.ids, end=given.end).rows

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """For copies of the tables, which have none until they train."""
        return type(None), ()

"""Shuffle buffers on the GPU, which gathers the rows of a batch itself.

Writing rows in random order takes a CPU half as long again as reading them, and a GPU next to no
time. So the readers keep the order of the file, and a batch is a gather by row number.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dlrm.data.batch import Batch, RowBuffer, concatenate
from dlrm.data.parquet import RowGroup, RowGroupReader
from dlrm.data.shuffle import Interleave, ShuffleGroup, interleave, row_buffer


class DeviceShuffleBuffer:
    """The rows of a shuffle group on a device, filled by the reader threads.

    Holds the same rows in the same order as :class:`~dlrm.data.shuffle.ShuffleBuffer`, for one-hot
    features. One thread must make all calls, on one stream.

    Args:
        group: the rows and their order.
        reader: decodes row groups.
        pool: reader threads.
        device: device of the rows.
    """

    def __init__(
        self,
        group: ShuffleGroup,
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
        device: torch.device,
    ) -> None:
        self.group, self._reader, self._device = group, reader, device
        pinned = device.type == "cuda"
        self._order: Tensor | None = None
        if group.seed is not None:
            self._order = torch.empty(group.rows, dtype=torch.int64, pin_memory=pinned)
        self._reads: deque[Future[RowBuffer]] = deque()
        self._arrived: list[Batch] = []
        first = 0
        for row_group, mix in zip(group.row_groups, interleave(group), strict=True):
            # Pinned by this thread: calls to CUDA from others disturb the capture of a CUDA graph.
            rows = row_buffer(reader, row_group.rows, pinned=pinned)
            self._reads.append(pool.submit(self._read, row_group, rows, mix, first))
            first += row_group.rows

    def _read(
        self, row_group: RowGroup, out: RowBuffer, mix: Interleave | None, first: int
    ) -> RowBuffer:
        """Read a row group, the rows from ``first`` on in file order."""
        rows = self._reader.read(row_group)
        outs = [out.labels, *out.dense, *out.ids]
        for values, column in zip([rows.labels, *rows.dense, *rows.ids], outs, strict=True):
            column[:] = values
        if rows.weights is not None and out.weights is not None:
            out.weights[:] = rows.weights
        if mix is not None and self._order is not None:
            self._order.numpy()[mix.positions()] = first + mix.permutation()
        return out

    def copy_arrived(self) -> None:
        """Start to copy the row groups that have been read; errors are left to :meth:`wait`."""
        while self._reads and self._reads[0].done() and not self._reads[0].exception():
            self._arrived.append(self._reads.popleft().result().to(self._device))

    def wait(self) -> None:
        """Wait until all rows have been read.

        Raises:
            ValueError: a row group is damaged or holds an invalid value.
        """
        while self._reads:
            self._reads[0].result()
            self.copy_arrived()
        if len(self._arrived) > 1:
            self._arrived = [concatenate(self._arrived)]
        if self._order is not None and self._order.device != self._device:
            self._order = self._order.to(self._device, non_blocking=True)

    def batch(self, first: int, last: int) -> Batch:
        """Rows ``first`` to ``last - 1`` of the epoch as far as they are in this group."""
        self.wait()
        (rows,) = self._arrived
        part = self.group.between(first, last)
        if self._order is None:
            return Batch(
                rows.dense[:, part].contiguous(),
                rows.ids[:, part].contiguous(),
                rows.labels[part],
                weights=None if rows.weights is None else rows.weights[part],
            )
        index = self._order[part]
        return Batch(
            rows.dense.index_select(1, index),
            rows.ids.index_select(1, index),
            rows.labels.index_select(0, index),
            weights=None if rows.weights is None else rows.weights.index_select(0, index),
        )

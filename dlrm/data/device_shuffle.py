"""Shuffle buffers on the GPU, which gathers the rows of a batch itself.

Writing rows in random order takes a CPU half as long again as reading them, and a GPU next to no
time. So the readers keep the order of the file, and a batch is a gather by row number.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dlrm.data.batch import Batch, RowBuffer
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
        staged: row groups in host memory at a time.
    """

    def __init__(
        self,
        group: ShuffleGroup,
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
        device: torch.device,
        staged: int,
    ) -> None:
        self.group, self._reader, self._device, self._staged = group, reader, device, staged
        self._pool = pool
        self._unread = deque(group.row_groups)
        self._reads: deque[Future[RowBuffer]] = deque()
        self._rows: Batch | None = None
        self._arrived = 0
        self._read_more()
        self.reorder(group, pool)

    def reorder(self, group: ShuffleGroup, pool: ThreadPoolExecutor) -> None:
        """Change the order of the rows to that of ``group``, which has the same row groups."""
        self.group = group
        self._ordered: list[Future[None]] = []
        self._order: Tensor | None = None
        if group.seed is None:
            return
        kind = torch.int32 if group.rows < 2**31 else torch.int64
        self._order = torch.empty(group.rows, dtype=kind, pin_memory=self._device.type == "cuda")
        first = 0
        for mix in interleave(group):
            assert mix is not None
            self._ordered.append(pool.submit(_write_order, mix, first, self._order.numpy()))
            first += mix.rows

    def _read_more(self) -> None:
        """Start to read as many row groups as may be in host memory."""
        while self._unread and len(self._reads) < self._staged:
            row_group = self._unread.popleft()
            # Pinned by this thread: calls to CUDA from others disturb the capture of a CUDA graph.
            pinned = self._device.type == "cuda"
            out = row_buffer(self._reader, row_group.rows, pinned=pinned)
            self._reads.append(self._pool.submit(_read, self._reader, row_group, out))

    def copy_arrived(self) -> None:
        """Start to copy the row groups that have been read, and to read the next ones; errors are
        left to :meth:`wait`."""
        while self._reads and self._reads[0].done() and not self._reads[0].exception():
            self._store(self._reads.popleft().result().to(self._device))
            self._read_more()

    def _store(self, rows: Batch) -> None:
        """Append the rows of a row group."""
        if self._rows is None:
            if len(self.group.row_groups) == 1:
                self._rows = rows
                return
            all_rows = self.group.rows
            self._rows = Batch(
                dense=rows.dense.new_empty((len(rows.dense), all_rows)),
                ids=rows.ids.new_empty((len(rows.ids), all_rows)),
                labels=rows.labels.new_empty(all_rows),
                weights=None if rows.weights is None else rows.weights.new_empty(all_rows),
            )
        here = slice(self._arrived, self._arrived + rows.size)
        self._rows.dense[:, here] = rows.dense
        self._rows.ids[:, here] = rows.ids
        self._rows.labels[here] = rows.labels
        if self._rows.weights is not None and rows.weights is not None:
            self._rows.weights[here] = rows.weights
        self._arrived = here.stop

    def wait(self) -> None:
        """Wait until all rows have been read.

        Raises:
            ValueError: a row group is damaged or holds an invalid value.
        """
        while self._reads:
            self._reads[0].result()
            self.copy_arrived()
        for ordered in self._ordered:
            ordered.result()
        if self._order is not None and self._order.device != self._device:
            self._order = self._order.to(self._device, non_blocking=True)

    def batch(self, first: int, last: int) -> Batch:
        """Rows ``first`` to ``last - 1`` of the epoch as far as they are in this group."""
        self.wait()
        rows, part = self._rows, self.group.between(first, last)
        assert rows is not None
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


def _read(reader: RowGroupReader, row_group: RowGroup, out: RowBuffer) -> RowBuffer:
    """Read a row group in file order."""
    rows = reader.read(row_group)
    outs = [out.labels, *out.dense, *out.ids]
    for values, column in zip([rows.labels, *rows.dense, *rows.ids], outs, strict=True):
        column[:] = values
    if rows.weights is not None and out.weights is not None:
        out.weights[:] = rows.weights
    return out


def _write_order(mix: Interleave, first: int, order: np.ndarray) -> None:
    """Write the rows of a row group, from ``first`` on in file order, to their positions."""
    order[mix.positions()] = first + mix.permutation()

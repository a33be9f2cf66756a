"""Windows of row groups on the GPU, which gathers the rows of a batch itself.

To put the rows of a window into a random order takes a CPU half as long again as reading them does,
and a GPU next to nothing: its readers copy each row group in the order of the file, and a batch is
one gather by the numbers of its rows.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dlrm.data.batch import Batch, joined
from dlrm.data.parquet import RowGroup, RowGroupReader
from dlrm.data.shuffle import Interleave, RowBuffer, ShuffleGroup, interleave


class DeviceShuffleBuffer:
    """The rows of one span on a device, on their way from the reader threads.

    Row for row the same as :class:`~dlrm.data.shuffle.Window`, for one-hot features. Every call but
    the reader threads' own is to be made by one thread, on one stream.

    Args:
        span: what to read, and the order.
        reader: decodes row groups.
        pool: its threads do the reading.
        device: where the rows go.
    """

    def __init__(
        self,
        span: ShuffleGroup,
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
        device: torch.device,
    ) -> None:
        self.start, self.stop = span.start, span.start + span.rows
        self._reader, self._device = reader, device
        pinned, meta = device.type == "cuda", reader.meta
        self._order: Tensor | None = None
        moves: list[Interleave] | list[None] = [None] * len(span.groups)
        if span.seed is not None:
            self._order = torch.empty(span.rows, dtype=torch.int64, pin_memory=pinned)
            moves = interleave(span)
        self._reads: deque[Future[RowBuffer]] = deque()
        self._arrived: list[Batch] = []
        first = 0
        for group, deal in zip(span.groups, moves, strict=True):
            # Pinned by this thread: calls to CUDA from others disturb the capture of a CUDA graph.
            block = RowBuffer(
                group.rows,
                dense=len(meta.dense),
                one_hot=len(meta.categorical),
                ids=reader.ids_dtype,
                pinned=pinned,
            )
            self._reads.append(pool.submit(self._read, group, block, deal, first))
            first += group.rows

    def _read(
        self, group: RowGroup, block: RowBuffer, deal: Interleave | None, first: int
    ) -> RowBuffer:
        """Read one row group, whose first row is number ``first`` of the window."""
        rows = self._reader.read(group)
        outs = [block.labels, *block.dense, *block.ids]
        for values, out in zip([rows.labels, *rows.dense, *rows.ids], outs, strict=True):
            out[:] = values
        if deal is not None and self._order is not None:
            self._order.numpy()[deal.places()] = first + deal.permutation()
        return block

    def copy_arrived(self) -> None:
        """Start to copy the row groups that have been read."""
        while self._reads and self._reads[0].done():
            self._arrived.append(self._reads.popleft().result().to(self._device))

    def wait(self) -> None:
        """Return when all rows are there; raises what a reader raised."""
        while self._reads:
            self._reads[0].result()
            self.copy_arrived()
        if len(self._arrived) > 1:
            self._arrived = [joined(self._arrived)]
        if self._order is not None and self._order.device != self._device:
            self._order = self._order.to(self._device, non_blocking=True)

    def batch(self, first: int, last: int) -> Batch:
        """Of the rows ``first`` to ``last - 1`` of the epoch, those that lie in this window."""
        self.wait()
        (rows,) = self._arrived
        part = slice(max(first, self.start) - self.start, min(last, self.stop) - self.start)
        if self._order is None:
            return Batch(
                rows.dense[:, part].contiguous(), rows.ids[:, part].contiguous(), rows.labels[part]
            )
        index = self._order[part]
        return Batch(
            rows.dense.index_select(1, index),
            rows.ids.index_select(1, index),
            rows.labels.index_select(0, index),
        )

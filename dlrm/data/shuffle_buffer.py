"""Shuffle buffers on a device: readers keep the order of the file, and a batch gathers its rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dlrm.data.batch import Batch, concatenate
from dlrm.data.multi_hot import FixedBags, RaggedBags, StagedBags, by_feature, take
from dlrm.data.parquet import RowGroup, RowGroupReader
from dlrm.data.rows import as_batch, empty_batch, fill, new_columns
from dlrm.data.shuffle import Interleave, ShuffleGroup, interleave


class ShuffleBuffer:
    """The rows of a shuffle group on a device, filled by the reader threads of a pool, which have
    so many row groups ``staged`` in host memory at a time.

    One thread must make all calls, on one stream.
    """

    def __init__(
        self,
        group: ShuffleGroup,
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
        device: torch.device,
        staged: int,
    ) -> None:
        self._reader = reader
        self._pool = pool
        self._device = device
        self._staged = staged

        self._unread = deque(zip(group.row_groups, self._arrange(group), strict=True))
        self._reads: deque[Future[tuple[list[Tensor], StagedBags | None]]] = deque()
        self._rows: list[Tensor] = []  # see new_columns
        self._bags: FixedBags | RaggedBags | None = None
        self._arrived = self._submitted = 0  # rows

        # Ids of each row in each ragged feature, in the order of the file.
        ragged = reader.meta.lengths.count(None)
        self._lengths = np.empty((ragged, group.rows), np.int32)
        self._ordered_lengths = self._lengths if group.seed is None else self._lengths.copy()
        self._ordered: list[Future[None]] = []

        self._read_more()

    def reorder(self, group: ShuffleGroup, pool: ThreadPoolExecutor) -> None:
        """Change the order of the rows to that of ``group``, which has the same row groups."""
        self._ordered, first = [], 0
        for mix in self._arrange(group):
            if mix is not None:
                self._ordered.append(pool.submit(self._write_order, mix, first))
                first += mix.rows

    def _arrange(self, group: ShuffleGroup) -> list[Interleave] | list[None]:
        """Make room for the order of ``group``, and return how its row groups are mixed."""
        self.group = group
        self._order: Tensor | None = None
        if group.seed is not None:
            kind = torch.int32 if group.rows < 2**31 else torch.int64
            pinned = self._device.type == "cuda"
            self._order = torch.empty(group.rows, dtype=kind, pin_memory=pinned)
        return interleave(group)

    def _write_order(self, mix: Interleave, first: int) -> None:
        """Write the rows of a row group, from ``first`` on in file order, to their positions."""
        assert self._order is not None
        rows, positions = first + mix.permutation(), mix.positions()
        self._order.numpy()[positions] = rows
        for lengths, ordered in zip(self._lengths, self._ordered_lengths, strict=True):
            ordered[positions] = lengths[rows]

    def _read_more(self) -> None:
        """Start reading until the allowed number of row groups is in host memory."""
        # Pinned by this thread, which makes all calls to CUDA.
        pinned, reader = self._device.type == "cuda", self._reader
        while self._unread and len(self._reads) < self._staged:
            row_group, mix = self._unread.popleft()
            rows = new_columns(reader, row_group.rows, pinned=pinned)
            bags = None
            if reader.meta.multi_hot:
                bags = StagedBags(
                    reader.meta.lengths,
                    row_group.rows,
                    reader.num_ids(row_group),
                    dtype=reader.ids_dtype,
                    pinned=pinned,
                )

            read = self._pool.submit(self._read, row_group, mix, self._submitted, rows, bags)
            self._reads.append(read)
            self._submitted += row_group.rows

    def _read(
        self,
        row_group: RowGroup,
        mix: Interleave | None,
        first: int,
        out: list[Tensor],
        bags: StagedBags | None,
    ) -> tuple[list[Tensor], StagedBags | None]:
        """Read a row group in file order; ``first`` is the number of its first row."""
        rows = self._reader.read(row_group)
        fill(out, rows)
        if bags is not None:
            bags.fill(rows.ids, rows.offsets)
            self._lengths[:, first : first + row_group.rows] = bags.lengths.numpy()
        if mix is not None:
            self._write_order(mix, first)
        return out, bags

    def copy_arrived(self) -> None:
        """Start to copy the row groups that have been read, and to read the next ones.

        Errors are left to :meth:`wait`.
        """
        while self._reads and self._reads[0].done() and not self._reads[0].exception():
            self._store(*self._reads.popleft().result())
            self._read_more()

    def _store(self, read: Sequence[Tensor], staged: StagedBags | None) -> None:
        """Append the rows of a row group."""
        rows = [values.to(self._device, non_blocking=True) for values in read]
        here = slice(self._arrived, self._arrived + rows[0].shape[1])
        self._arrived = here.stop

        if staged is not None:
            if self._bags is None:
                self._bags = self._make_bags(staged.values.dtype)
            self._bags.append(staged, here)
        if len(self.group.row_groups) == 1:
            self._rows = rows
            return

        if not self._rows:
            self._rows = [values.new_empty((len(values), self.group.rows)) for values in rows]
        for all_values, values in zip(self._rows, rows, strict=True):
            all_values[:, here] = values

    def _make_bags(self, dtype: torch.dtype) -> FixedBags | RaggedBags:
        """Allocate room for the ids of all rows of multi-hot data."""
        meta = self._reader.meta
        rows = self.group.rows
        if meta.bag_sizes is not None:
            return FixedBags(meta.bag_sizes, rows, dtype=dtype, device=self._device)
        counts = map(self._reader.num_ids, self.group.row_groups)
        room = [sum(feature) for feature in zip(*counts, strict=True)]
        return RaggedBags(meta.lengths, rows, room, dtype=dtype, device=self._device)

    def wait(self) -> None:
        """Wait until all rows have been read; here errors of the readers are raised.

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
        """Gather rows ``first`` to ``last - 1`` of the epoch, as far as they are in this group.

        Bags of fixed lengths are still row by row, see :func:`~dlrm.data.multi_hot.by_feature`.
        """
        part = self.group.between(first, last)
        (batch,) = self._gather(part, part.stop - part.start, 0)
        if self._bags is None:
            return batch

        index = part if self._order is None else self._order[part]
        if isinstance(self._bags, FixedBags):
            return replace(batch, ids=self._bags.take(index))

        # The host knows the number of ids, so it need not wait for the device.
        ragged = iter(self._ordered_lengths[:, part].sum(1, dtype=np.int64).tolist())
        sizes = self._reader.meta.lengths
        counts = [next(ragged) if size is None else size * batch.size for size in sizes]
        ids, offsets, bounds = self._bags.take(index, counts)
        return replace(batch, ids=ids, offsets=offsets, bounds=bounds)

    def batches(self, firsts: Sequence[int], size: int) -> list[Batch]:
        """Gather several one-hot batches of ``size`` rows of this group in as many launches as one
        takes. Their first rows in the epoch are equally far apart, at least ``size``."""
        apart = firsts[1] - firsts[0] if len(firsts) > 1 else size
        return self._gather(self.group.between(firsts[0], firsts[-1] + size), size, apart)

    def _gather(self, part: slice, size: int, apart: int) -> list[Batch]:
        """Gather batches of ``size`` rows without bags, whose starts are ``apart`` rows apart."""
        meta = self._reader.meta
        index: Tensor | slice = part if self._order is None else self._order[part]

        # A single batch takes few calls, as each may wait for the threads that read.
        if isinstance(index, Tensor) and len(index) == size:
            return [as_batch([take(values, index, 1) for values in self._rows], meta)]

        def split(values: Tensor, apart: int) -> Tensor:
            """``[..., rows]`` as one contiguous matrix for each batch, ``[batches, ..., size]``."""
            parts = values.unfold(-1, size, max(apart, 1)).movedim(-2, 0).contiguous()
            # A dimension of size 0 or 1 keeps its stride, which compiled steps depend on.
            return parts.view(-1).view(parts.shape)

        if isinstance(index, Tensor):
            index, apart = split(index, apart).view(-1), size
        columns = [split(take(values, index, 1), apart) for values in self._rows]
        return [as_batch(of_batch, meta) for of_batch in zip(*columns, strict=True)]


def gather(
    reader: RowGroupReader,
    buffers: Sequence[ShuffleBuffer],
    first: int,
    last: int,
    device: torch.device,
) -> Batch:
    """Gather rows ``first`` to ``last - 1`` of the epoch as a batch, from the buffers of a device
    that hold them, in order."""
    if not buffers:
        return empty_batch(reader).to(device)
    batch = concatenate([buffer.batch(first, last) for buffer in buffers])
    bag_sizes = reader.meta.bag_sizes
    return batch if bag_sizes is None else by_feature(batch, bag_sizes)

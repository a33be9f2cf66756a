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
from dlrm.data.device_prefetch import Run
from dlrm.data.multi_hot import FixedBags, RaggedBags, StagedBags, by_feature, take
from dlrm.data.parquet import RowGroup, RowGroupReader
from dlrm.data.rows import as_batch, empty_batch, fill, new_columns
from dlrm.data.shuffle import Interleave, ShuffleGroup, interleave


class StoredRows:
    """Rows of row groups on a device, in the order of the files, filled by the reader threads of a
    pool, which have so many row groups ``staged`` in host memory at a time.

    One thread must make all calls, on one stream.
    """

    def __init__(
        self,
        row_groups: Sequence[RowGroup],
        reader: RowGroupReader,
        pool: ThreadPoolExecutor,
        device: torch.device,
        staged: int,
    ) -> None:
        self.row_groups = tuple(row_groups)
        self.rows = sum(row_group.rows for row_group in row_groups)
        self.reader = reader
        self.device = device
        self._pool = pool
        self._staged = staged

        self._unread = deque(row_groups)
        self._reads: deque[Future[tuple[list[Tensor], StagedBags | None]]] = deque()
        self.columns: list[Tensor] = []  # see new_columns
        self.bags: FixedBags | RaggedBags | None = None
        self._arrived = self._submitted = 0  # rows

        # Ids of each row in each ragged feature.
        self.lengths = np.empty((reader.meta.lengths.count(None), self.rows), np.int32)

        self._read_more()

    @property
    def complete(self) -> bool:
        """Whether all rows have arrived."""
        return self._arrived == self.rows

    def _read_more(self) -> None:
        """Start reading until the allowed number of row groups is in host memory."""
        # Pinned by this thread, which makes all calls to CUDA.
        pinned, reader = self.device.type == "cuda", self.reader
        while self._unread and len(self._reads) < self._staged:
            row_group = self._unread.popleft()
            columns = new_columns(reader, row_group.rows, pinned=pinned)
            bags = None
            if reader.meta.multi_hot:
                bags = StagedBags(
                    reader.meta.lengths,
                    row_group.rows,
                    reader.num_ids(row_group),
                    dtype=reader.ids_dtype,
                    pinned=pinned,
                )

            read = self._pool.submit(self._read, row_group, self._submitted, columns, bags)
            self._reads.append(read)
            self._submitted += row_group.rows

    def _read(
        self, row_group: RowGroup, first: int, out: list[Tensor], bags: StagedBags | None
    ) -> tuple[list[Tensor], StagedBags | None]:
        """Read a row group; ``first`` is the number of its first row."""
        rows = self.reader.read(row_group)
        fill(out, rows)
        if bags is not None:
            bags.fill(rows.ids, rows.offsets)
            self.lengths[:, first : first + row_group.rows] = bags.lengths.numpy()
        return out, bags

    def copy_arrived(self) -> None:
        """Start to copy the row groups that have been read, and to read the next ones.

        Errors are left to :meth:`wait`.
        """
        while self._reads and self._reads[0].done() and not self._reads[0].exception():
            self._store(*self._reads.popleft().result())
            self._read_more()

    def wait(self) -> None:
        """Wait until all rows have been read.

        Raises:
            ValueError: a row group is damaged or holds an invalid value.
        """
        while self._reads:
            self._reads[0].result()
            self.copy_arrived()

    def _store(self, read: Sequence[Tensor], staged: StagedBags | None) -> None:
        """Append the rows of a row group."""
        columns = [values.to(self.device, non_blocking=True) for values in read]
        here = slice(self._arrived, self._arrived + columns[0].shape[1])
        self._arrived = here.stop

        if staged is not None:
            if self.bags is None:
                self.bags = self._make_bags(staged.values.dtype)
            self.bags.append(staged, here)
        if len(self.row_groups) == 1:
            self.columns = columns
            return

        if not self.columns:
            self.columns = [values.new_empty((len(values), self.rows)) for values in columns]
        for all_values, values in zip(self.columns, columns, strict=True):
            all_values[:, here] = values

    def _make_bags(self, dtype: torch.dtype) -> FixedBags | RaggedBags:
        """Allocate room for the ids of all rows of multi-hot data."""
        meta = self.reader.meta
        if meta.bag_sizes is not None:
            return FixedBags(meta.bag_sizes, self.rows, dtype=dtype, device=self.device)
        counts = map(self.reader.num_ids, self.row_groups)
        room = [sum(feature) for feature in zip(*counts, strict=True)]
        return RaggedBags(meta.lengths, self.rows, room, dtype=dtype, device=self.device)


class ShuffleBuffer:
    """The rows of a shuffle group in its order, which threads of a pool write. Several groups, one
    epoch after another, may share the rows.

    One thread must make all calls, on one stream.
    """

    def __init__(self, group: ShuffleGroup, stored: StoredRows, pool: ThreadPoolExecutor) -> None:
        self.group = group
        self.stored = stored
        self._pool = pool

        self._mixes = interleave(group)
        self._order: Tensor | None = None
        self._lengths = stored.lengths  # in this order
        if group.seed is not None:
            kind = torch.int32 if group.rows < 2**31 else torch.int64
            pinned = stored.device.type == "cuda"
            self._order = torch.empty(group.rows, dtype=kind, pin_memory=pinned)
            self._lengths = np.empty_like(stored.lengths)
        self._writes: list[Future[None]] = []
        self._write_order()

    def _write_order(self) -> None:
        """Start to write the order, in which the lengths of bags are arranged too, if there are."""
        if self._lengths.size and not self.stored.complete:
            return
        mixes, self._mixes = self._mixes, []
        first = 0
        for mix in mixes:
            if mix is not None:
                self._writes.append(self._pool.submit(self._write, mix, first))
                first += mix.rows

    def _write(self, mix: Interleave, first: int) -> None:
        """Write the rows of a row group, from ``first`` on in file order, to their positions."""
        assert self._order is not None
        rows, positions = first + mix.permutation(), mix.positions()
        self._order.numpy()[positions] = rows
        for lengths, ordered in zip(self.stored.lengths, self._lengths, strict=True):
            ordered[positions] = lengths[rows]

    def copy_arrived(self) -> None:
        """See :meth:`StoredRows.copy_arrived`."""
        self.stored.copy_arrived()
        self._write_order()

    def wait(self) -> None:
        """Wait until all rows have been read, and their order is written.

        Raises:
            ValueError: a row group is damaged or holds an invalid value.
        """
        self.stored.wait()
        self._write_order()
        while self._writes:
            self._writes.pop().result()
        if self._order is not None and self._order.device != self.stored.device:
            self._order = self._order.to(self.stored.device, non_blocking=True)

    def batch(self, first: int, last: int) -> Batch:
        """Gather rows ``first`` to ``last - 1`` of the epoch, as far as they are in this group.

        Bags of fixed lengths are still row by row, see :func:`~dlrm.data.multi_hot.by_feature`.
        """
        part = self.group.between(first, last)
        (batch,) = self._gather(part, part.stop - part.start, 0)
        bags, meta = self.stored.bags, self.stored.reader.meta
        if bags is None:
            return batch

        index = part if self._order is None else self._order[part]
        if isinstance(bags, FixedBags):
            return replace(batch, ids=bags.take(index))

        # The host knows the number of ids, so it need not wait for the device.
        ragged = iter(self._lengths[:, part].sum(1, dtype=np.int64).tolist())
        counts = [next(ragged) if size is None else size * batch.size for size in meta.lengths]
        ids, offsets, bounds = bags.take(index, counts)
        return replace(batch, ids=ids, offsets=offsets, bounds=bounds)

    def batches(self, firsts: Sequence[int], size: int) -> list[Batch]:
        """Gather several one-hot batches of ``size`` rows of this group in as many launches as one
        takes. Their first rows in the epoch are equally far apart, at least ``size``."""
        apart = firsts[1] - firsts[0] if len(firsts) > 1 else size
        return self._gather(self.group.between(firsts[0], firsts[-1] + size), size, apart)

    def _gather(self, part: slice, size: int, apart: int) -> list[Batch]:
        """Gather batches of ``size`` rows without bags, whose starts are ``apart`` rows apart."""
        meta = self.stored.reader.meta
        index: Tensor | slice = part if self._order is None else self._order[part]

        # A single batch takes few calls, as each may wait for the threads that read.
        if isinstance(index, Tensor) and len(index) == size:
            return [as_batch([take(values, index, 1) for values in self.stored.columns], meta)]

        def split(values: Tensor, apart: int) -> Tensor:
            """``[..., rows]`` as one contiguous matrix for each batch, ``[batches, ..., size]``."""
            parts = values.unfold(-1, size, max(apart, 1)).movedim(-2, 0).contiguous()
            # A dimension of size 0 or 1 keeps its stride, which compiled steps depend on.
            return parts.view(-1).view(parts.shape)

        if isinstance(index, Tensor):
            index, apart = split(index, apart).view(-1), size
        columns = [split(take(values, index, 1), apart) for values in self.stored.columns]
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


def gather_run(run: Sequence[tuple[ShuffleBuffer, int, int]], size: int) -> Run:
    """Gather batches of ``size`` rows of one buffer: it, the first row of each, and the position
    after each."""
    buffers, firsts, positions = zip(*run, strict=True)
    return list(zip(buffers[0].batches(firsts, size), positions, strict=True))

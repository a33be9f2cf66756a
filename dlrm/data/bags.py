"""The ids of multi-hot data in shuffle buffers, feature by feature, in host memory and on a device.

Where all bags of a feature have one length L, its ids are a block ``[rows, L]``. Where they differ
(ragged), its ids lie in the order of the file, with the start and the length of each bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dlrm.data.batch import Batch, fixed_offsets, offsets_of


class RaggedIds:
    """The ids of a feature with bags of different lengths, in host memory.

    Args:
        rows: number of bags.
        room: number of ids at most.
        dtype: of the ids.
    """

    def __init__(self, rows: int, room: int, dtype: np.dtype) -> None:
        self.values = np.empty(room, dtype)
        self.starts = np.empty(rows, np.int64)
        self.lengths = np.empty(rows, np.int32)

    def take(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """The ids ``[nnz]`` of the bags of these rows, one after another, and their lengths."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        ends = np.cumsum(lengths, dtype=np.int64)
        index = np.repeat(starts - ends + lengths, lengths)
        index += np.arange(len(index))
        return self.values.take(index, mode="clip"), lengths  # clip: skips the bounds check


def with_bags(
    batch: Batch, features: Sequence[tuple[Sequence[np.ndarray], Sequence[np.ndarray] | int]]
) -> Batch:
    """A batch with all ids as bags, in host memory.

    Args:
        batch: the rows without ids.
        features: of each feature the ids, in parts, and the lengths of its bags, in parts, or the
            length of all of them.
    """
    parts = [part.reshape(-1) for ids, _ in features for part in ids]
    counts = [sum(part.size for part in ids) for ids, _ in features]
    sizes = tuple(lengths for _, lengths in features if isinstance(lengths, int))
    bag_sizes = sizes if len(sizes) == len(features) else None
    if bag_sizes is not None:
        offsets = fixed_offsets(bag_sizes, batch.size, torch.device("cpu"))
    else:
        ends = np.zeros(len(features) * batch.size + 1, np.int64)
        lengths = [
            np.full(batch.size, known) if isinstance(known, int) else np.concatenate(known)
            for _, known in features
        ]
        np.cumsum(np.concatenate(lengths), out=ends[1:])
        offsets = torch.from_numpy(ends)
    return Batch(
        dense=batch.dense,
        ids=torch.from_numpy(np.concatenate(parts)),
        labels=batch.labels,
        offsets=offsets,
        bounds=(0, *accumulate(counts)),
        weights=batch.weights,
        bag_sizes=bag_sizes,
    )


class StagedBags:
    """The ids of a row group in host memory, from which they are copied to a device.

    Args:
        bag_sizes: ids of each bag of each feature; None for a ragged one.
        rows: rows of the row group.
        room: ids of each feature at most.
        dtype: of the ids.
        pinned: use page-locked memory.
    """

    def __init__(
        self,
        bag_sizes: Sequence[int | None],
        rows: int,
        room: Sequence[int],
        *,
        dtype: np.dtype,
        pinned: bool,
    ) -> None:
        kind = torch.int32 if dtype.itemsize == 4 else torch.int64
        ragged = sum(size is None for size in bag_sizes)
        self.starts = list(accumulate(room, initial=0))
        self.counts = [0] * len(room)
        self.values = torch.empty(self.starts[-1], dtype=kind, pin_memory=pinned)
        self.lengths = torch.empty((ragged, rows), dtype=torch.int32, pin_memory=pinned)

    def fill(self, ids: Sequence[np.ndarray], offsets: Sequence[np.ndarray | None]) -> None:
        """Take the columns of a row group, see :class:`~dlrm.data.parquet.Rows`."""
        values, lengths = self.values.numpy(), iter(self.lengths.numpy())
        self.counts = [column.size for column in ids]
        for start, column, ends in zip(self.starts, ids, offsets, strict=False):
            values[start : start + column.size] = column.reshape(-1)
            if ends is not None:
                next(lengths)[:] = ends[1:] - ends[:-1]


class DeviceBags:
    """The ids of the rows of a shuffle group on a device, in the order of the file.

    Args:
        bag_sizes: ids of each bag of each feature; None for a ragged one.
        rows: rows of the group.
        room: ids of each feature at most.
        dtype: of the ids, int32 or int64.
        device: of the ids.
    """

    def __init__(
        self,
        bag_sizes: Sequence[int | None],
        rows: int,
        room: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bag_sizes, self._room = bag_sizes, room
        self._filled = list(accumulate(room, initial=0))[:-1]  # where the next ids go
        self._values = torch.empty(sum(room), dtype=dtype, device=device)
        self._ragged = [f for f, size in enumerate(bag_sizes) if size is None]
        if self._ragged:
            self._starts = torch.empty((len(self._ragged), rows), dtype=torch.int64, device=device)
            self._lengths = self._starts.to(torch.int32)
            # Bags of a fixed length begin at a multiple of it, after those of the features before.
            self._number = torch.tensor(self._ragged, device=device)
            self._sizes = torch.tensor([size or 0 for size in bag_sizes], device=device)[:, None]
            self._bases = torch.tensor(self._filled, device=device)[:, None]

    def append(self, staged: StagedBags, rows: slice) -> None:
        """Copy the ids of ``rows``, which follow those that are here; asynchronous on a GPU."""
        device = self._values.device
        values = staged.values.to(device, non_blocking=True)
        if self._ragged:
            lengths = staged.lengths.to(device, non_blocking=True)
            first = torch.tensor([self._filled[f] for f in self._ragged])
            first = first.pin_memory().to(device, non_blocking=True) if values.is_cuda else first
            self._lengths[:, rows] = lengths
            self._starts[:, rows] = lengths.cumsum(1) - lengths + first[:, None]
        for f, (start, count) in enumerate(zip(staged.starts, staged.counts, strict=False)):
            end = self._filled[f] + count
            self._values[self._filled[f] : end] = values[start : start + count]
            self._filled[f] = end

    def gather(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """The ids, offsets and bounds of a batch, see :class:`~dlrm.data.batch.Batch`.

        Args:
            rows: the rows of the batch ``[B]``, by their number.
            counts: how many ids of each feature they have.
        """
        bounds = tuple(accumulate(counts, initial=0))
        if not self._ragged:
            ids = self._values.new_empty(bounds[-1])
            blocks = zip(
                self._bag_sizes, self._values.split(self._room), ids.split(counts), strict=True
            )
            for size, block, out in blocks:
                shape = (-1, size)
                torch.index_select(block.view(shape), 0, rows, out=out.view(shape))
            return ids, fixed_offsets(tuple(self._bag_sizes), len(rows), ids.device), bounds
        starts = self._bases + self._sizes * rows
        starts[self._number] = self._starts.index_select(1, rows)
        lengths = self._sizes.repeat(1, len(rows))
        lengths[self._number] = self._lengths.index_select(1, rows).long()
        offsets = offsets_of(lengths)
        # The ids of a bag follow one another: the place of each is its number and a shift.
        shifts = (starts.flatten() - offsets[:-1]).repeat_interleave(
            lengths.flatten(), output_size=bounds[-1]
        )
        shifts += torch.arange(bounds[-1], device=shifts.device)
        return self._values.index_select(0, shifts), offsets, bounds

"""The ids of multi-hot data in shuffle buffers.

If all bags of each feature have the same length, a row is ``W`` ids, one feature after another.
Otherwise the ids keep the order of the file, and each bag has a start and a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dlrm.data.batch import Batch, fixed_offsets
from dlrm.utils.offsets import offsets_of


def take(values: Tensor, index: Tensor | slice, dim: int) -> Tensor:
    """Select along a dimension; on a CPU with NumPy, which takes half the time."""
    if isinstance(index, slice):
        return values.narrow(dim, index.start, index.stop - index.start)
    if values.is_cuda:
        return values.index_select(dim, index)
    # clip: skips the bounds check
    return torch.from_numpy(values.numpy().take(index.numpy(), axis=dim, mode="clip"))


class StagedBags:
    """The ids of a row group in host memory, page-locked if ``pinned``, from which they are copied
    to a device. Each feature has room for a number of ids."""

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
        """Copy the columns of a row group, see :class:`~dlrm.data.parquet.Rows`."""
        values = self.values.numpy()
        lengths = iter(self.lengths.numpy())
        self.counts = [column.size for column in ids]
        for start, column, ends in zip(self.starts, ids, offsets, strict=False):
            values[start : start + column.size] = column.reshape(-1)
            if ends is not None:
                next(lengths)[:] = ends[1:] - ends[:-1]


class FixedBags:
    """The ids of the rows of a shuffle group on a device, row by row, for bags of fixed lengths.

    A batch then takes two gathers: one of rows of ``W`` ids, and one that sorts them by feature.
    """

    def __init__(
        self, bag_sizes: tuple[int, ...], rows: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._bag_sizes = bag_sizes
        self._values = torch.empty((rows, sum(bag_sizes)), dtype=dtype, device=device)

    def append(self, staged: StagedBags, rows: slice) -> None:
        """Copy the ids of ``rows``; asynchronous on a GPU."""
        values = staged.values.to(self._values.device, non_blocking=True)
        places = _from_features(self._bag_sizes, rows.stop - rows.start, values.device)
        torch.index_select(values, 0, places, out=self._values[rows].view(-1))

    def take(self, rows: Tensor | slice) -> Tensor:
        """Return the ids ``[B * W]`` of some rows, row by row; :func:`by_feature` sorts them."""
        return take(self._values, rows, 0).view(-1)


def by_feature(batch: Batch, bag_sizes: tuple[int, ...]) -> Batch:
    """Turn a batch whose ``ids [B * W]`` are row by row into one with bags."""
    size, device = batch.size, batch.ids.device
    return replace(
        batch,
        ids=take(batch.ids, _from_rows(bag_sizes, size, device), 0),
        offsets=fixed_offsets(bag_sizes, size, device),
        bounds=tuple(accumulate((length * size for length in bag_sizes), initial=0)),
        bag_sizes=bag_sizes,
    )


@lru_cache(maxsize=4)
def _from_rows(bag_sizes: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Return, for each id of bags by feature, its position among ids that are row by row."""
    places = _numbers(rows * sum(bag_sizes), device)
    blocks = places.view(rows, sum(bag_sizes)).split(bag_sizes, dim=1)
    return torch.cat([block.flatten() for block in blocks])


@lru_cache(maxsize=4)
def _from_features(bag_sizes: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Return, for each id that is row by row, its position in bags by feature."""
    places = _numbers(rows * sum(bag_sizes), device)
    blocks = places.split([rows * size for size in bag_sizes])
    return torch.cat([block.view(rows, -1) for block in blocks], dim=1).flatten()


def _numbers(count: int, device: torch.device) -> Tensor:
    kind = torch.int32 if count < 2**31 else torch.int64
    return torch.arange(count, dtype=kind, device=device)


class RaggedBags:
    """The ids of the rows of a shuffle group on a device, feature by feature, if any is ragged.
    Each feature has room for a number of ids."""

    def __init__(
        self,
        bag_sizes: Sequence[int | None],
        rows: int,
        room: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._filled = list(accumulate(room, initial=0))[:-1]  # position of the next ids
        self._values = torch.empty(sum(room), dtype=dtype, device=device)
        self._starts = torch.empty((len(room), rows), dtype=torch.int64, device=device)
        self._lengths = torch.empty((len(room), rows), dtype=torch.int64, device=device)
        self._bag_sizes = bag_sizes

    def append(self, staged: StagedBags, rows: slice) -> None:
        """Copy the ids of ``rows``, the next ones; asynchronous on a GPU."""
        device = self._values.device
        values = staged.values.to(device, non_blocking=True)
        ragged = iter(staged.lengths.to(device, non_blocking=True))

        for f, (start, count) in enumerate(zip(staged.starts, staged.counts, strict=False)):
            first, size = self._filled[f], self._bag_sizes[f]
            lengths = self._lengths[f, rows]
            if size is None:
                lengths.copy_(next(ragged))
            else:
                lengths.fill_(size)
            torch.sub(lengths.cumsum(0).add_(first), lengths, out=self._starts[f, rows])
            self._values[first : first + count] = values[start : start + count]
            self._filled[f] = first + count

    def take(
        self, rows: Tensor | slice, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """The ids, offsets and bounds of a batch of ``rows [B]``, see
        :class:`~dlrm.data.batch.Batch`; ``counts`` says how many ids of each feature they have."""
        bounds = tuple(accumulate(counts, initial=0))
        starts, lengths = take(self._starts, rows, 1), take(self._lengths, rows, 1)
        offsets = offsets_of(lengths)

        # The ids of a bag are consecutive: the position of each is its number plus a shift.
        places = (starts.flatten() - offsets[:-1]).repeat_interleave(
            lengths.flatten(), output_size=bounds[-1]
        )
        places += torch.arange(bounds[-1], device=places.device)
        return take(self._values, places, 0), offsets, bounds

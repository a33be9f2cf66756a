"""Windows of row groups: filled by reader threads in shuffled order, cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from dlrm.data.batch import Batch
from dlrm.data.parquet import Bags, RowGroup, RowGroupReader

RUN = 64
"""Rows that are dealt together: 256 bytes of a column, four cache lines. Writing them one by one to
random places of a window instead takes 5 times as long on a server CPU."""


@dataclass(frozen=True, kw_only=True)
class ShuffleGroup:
    """The row groups that are mixed with one another, and their place in the epoch's order."""

    start: int
    """Rows of the epoch that come before."""
    groups: tuple[RowGroup, ...]
    seed: tuple[int, ...] | None
    """Draws the order of the rows; None keeps that of the file, and there is one group then."""

    @property
    def rows(self) -> int:
        """Rows of all its groups."""
        return sum(group.rows for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Interleave:
    """Where the rows of one row group go: permuted among themselves, then dealt in runs.

    Run ``i`` goes to the ``slots[i]``-th run of the window. Rows that fill no run go to ``rest``.
    """

    seed: tuple[int, ...]
    run: int
    slots: np.ndarray
    rest: slice

    def permutation(self) -> np.ndarray:
        """The rows of the group in the order in which they are dealt."""
        rows = len(self.slots) * self.run + self.rest.stop - self.rest.start
        return np.random.default_rng(self.seed).permutation(rows)

    def places(self) -> np.ndarray:
        """Of each row dealt, its place in the window."""
        runs = self.slots[:, None] * self.run + np.arange(self.run)
        return np.concatenate([runs.ravel(), np.arange(self.rest.start, self.rest.stop)])

    def write(self, values: np.ndarray, out: np.ndarray) -> None:
        """Deal ``values``, already permuted, into a column ``out`` of the window."""
        dealt, whole = len(self.slots) * self.run, len(out) // self.run * self.run
        out[:whole].reshape(-1, self.run)[self.slots] = values[:dealt].reshape(-1, self.run)
        out[self.rest] = values[dealt:]


def interleave(span: ShuffleGroup) -> list[Interleave]:
    """How the row groups of ``span`` are mixed: the runs of all of them in random order."""
    assert span.seed is not None
    sizes = [group.rows for group in span.groups]
    run = max(1, min(RUN, min(sizes) // RUN))
    owners = np.repeat(np.arange(len(sizes)), [size // run for size in sizes])
    np.random.default_rng(span.seed).shuffle(owners)
    made, start = [], len(owners) * run
    for i, size in enumerate(sizes):
        rest = slice(start, start + size % run)
        slots = np.flatnonzero(owners == i)
        made.append(Interleave(seed=(*span.seed, 1 + i), run=run, slots=slots, rest=rest))
        start = rest.stop
    return made


class ShuffleBuffer:
    """The rows of one span in their final order, on their way from the reader threads.

    A row group is decoded by one thread, which writes each column to the places of its rows; a
    batch is then a run of columns of the window: one contiguous copy per feature.

    Args:
        span: what to read, and the order.
        reader: decodes row groups.
        pool: its threads do the reading.
    """

    def __init__(
        self, span: ShuffleGroup, reader: RowGroupReader, pool: ThreadPoolExecutor
    ) -> None:
        rows, meta = span.rows, reader.meta
        one_hot = sum(not column.multi_hot for column in meta.categorical)
        self.start, self.stop = span.start, span.start + rows
        self.dense = np.empty((len(meta.dense), rows), np.float32)
        self.ids = np.empty((one_hot, rows), reader.ids_dtype)
        self.labels = np.empty(rows, np.float32)
        self._bags: list[Bags] | None = None
        self._reader = reader
        places: Sequence[Interleave | slice] = (
            [slice(rows)] if span.seed is None else interleave(span)
        )
        self._reads = [
            pool.submit(self._read, group, place)
            for group, place in zip(span.groups, places, strict=True)
        ]

    def _read(
        self, group: RowGroup, place: Interleave | slice
    ) -> tuple[list[Bags], np.ndarray | None]:
        """Read one row group; its bags, and the place in the window of each of its rows."""
        rows = self._reader.read(group)
        pairs = zip(
            [rows.labels, *rows.dense, *rows.ids],
            [self.labels, *self.dense, *self.ids],
            strict=True,
        )
        if isinstance(place, slice):
            for values, out in pairs:
                out[place] = values
            return rows.bags, None
        permutation = place.permutation()
        for values, out in pairs:
            place.write(values.take(permutation, mode="clip"), out)  # clip: no check of bounds
        if not rows.bags:
            return [], None
        places = np.empty_like(permutation)
        places[permutation] = place.places()
        return rows.bags, places

    def part(self, first: int, last: int) -> Part:
        """Of the rows ``first`` to ``last - 1`` of the epoch, those that lie in this window."""
        return self, slice(max(first, self.start) - self.start, min(last, self.stop) - self.start)

    def wait(self) -> None:
        """Return when all rows are there; raises what a reader raised."""
        for read in self._reads:
            read.result()

    def bags(self) -> list[Bags]:
        """The multi-hot features in the window's order. Not for several threads at once."""
        if self._bags is None:
            reads = [read.result() for read in self._reads]
            places = [places for _, places in reads if places is not None]
            order = np.concatenate(places) if places else None
            features = zip(*(bags for bags, _ in reads), strict=True)
            self._bags = [_reordered(_joined(pieces), order) for pieces in features]
        return self._bags


class RowBuffer:
    """A one-hot batch in one piece of memory, so that one copy brings it to a GPU.

    Its columns are NumPy arrays: :func:`fill` fills them, :meth:`to` makes tensors of them. Every
    call to PyTorch costs microseconds and this is done for each batch, so there are few of them.

    Args:
        size: samples B.
        dense: dense features N.
        one_hot: one-hot features F.
        ids: type of the ids, int32 or int64.
        pinned: page-lock the memory.
    """

    def __init__(self, size: int, *, dense: int, one_hot: int, ids: np.dtype, pinned: bool) -> None:
        ids_end = one_hot * size * ids.itemsize // 4  # in words of four bytes
        self._dense_start = _aligned(ids_end)
        dense_end = self._dense_start + dense * size
        self._labels_start = _aligned(dense_end)
        end = self._labels_start + size
        self._words = torch.empty(_aligned(end), dtype=torch.int32, pin_memory=pinned)
        words = self._words.numpy()
        floats = words.view(np.float32)
        self.ids = words[:ids_end].view(ids).reshape(one_hot, size)
        self.dense = floats[self._dense_start : dense_end].reshape(dense, size)
        self.labels = floats[self._labels_start : end]

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``; a copy to a GPU is asynchronous."""
        words = self._words.to(device, non_blocking=True)
        floats = words.view(torch.float32)
        ids = words if self.ids.itemsize == 4 else words.view(torch.int64)
        (features, size), dense = self.ids.shape, len(self.dense)
        return Batch(
            dense=floats.as_strided((dense, size), (size, 1), self._dense_start),
            ids=ids.as_strided((features, size), (size, 1)),
            labels=floats.as_strided((size,), (1,), self._labels_start),
        )


def _aligned(words: int) -> int:
    """``words`` rounded up to 256 bytes, to which PyTorch aligns tensors on a GPU."""
    return -(-words // 64) * 64


Part: TypeAlias = tuple[ShuffleBuffer, slice]
"""Consecutive rows of a window."""


def fill(block: RowBuffer, parts: Sequence[Part]) -> RowBuffer:
    """Copy ``parts``, one behind the other, into the ``block`` that has room for them."""
    start = 0
    for window, rows in parts:
        window.wait()
        stop = start + rows.stop - rows.start
        block.dense[:, start:stop] = window.dense[:, rows]
        block.ids[:, start:stop] = window.ids[:, rows]
        block.labels[start:stop] = window.labels[rows]
        start = stop
    return block


def fill_multi_hot(block: RowBuffer, parts: Sequence[Part], multi_hot: Sequence[bool]) -> Batch:
    """As :func:`fill`, where some features are multi-hot: all of them become bags.

    Args:
        block: room for the one-hot features.
        parts: the rows.
        multi_hot: of each categorical feature, whether it is multi-hot.

    Returns:
        A batch with the ids of all features, table by table, and offsets.
    """
    batch = fill(block, parts).to(torch.device("cpu"))
    ones = np.arange(batch.size + 1)
    one_hot = (Bags(ids=ids, offsets=ones) for ids in block.ids)
    bags = (
        _joined([_cut(feature, rows) for feature, (_, rows) in zip(pieces, parts, strict=True)])
        for pieces in zip(*(window.bags() for window, _ in parts), strict=True)
    )
    empty = Bags(ids=np.empty(0, block.ids.dtype), offsets=np.zeros(1, np.int64))
    joined = _joined([next(bags, empty) if many else next(one_hot) for many in multi_hot])
    ids, offsets = torch.from_numpy(joined.ids), torch.from_numpy(joined.offsets)
    bounds = tuple(joined.offsets[:: batch.size].tolist()) if batch.size else None
    return Batch(batch.dense, ids, batch.labels, offsets, bounds)


def _cut(bags: Bags, rows: slice) -> Bags:
    offsets = bags.offsets[rows.start : rows.stop + 1]
    return Bags(ids=bags.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])


def _joined(pieces: Sequence[Bags]) -> Bags:
    """The bags of ``pieces`` behind one another."""
    shifts = np.cumsum([0, *(piece.offsets[-1] for piece in pieces)])
    offsets = [piece.offsets[:-1] + shift for piece, shift in zip(pieces, shifts, strict=False)]
    return Bags(
        ids=np.concatenate([piece.ids for piece in pieces]),
        offsets=np.concatenate([*offsets, shifts[-1:]]),
    )


def _reordered(bags: Bags, order: np.ndarray | None) -> Bags:
    """Bag ``i`` moved to place ``order[i]``."""
    if order is None:
        return bags
    source = np.empty_like(order)
    source[order] = np.arange(len(order))
    lengths = np.diff(bags.offsets)[source]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # An id moves by as much as its bag does.
    moves = np.repeat(bags.offsets[:-1][source] - offsets[:-1], lengths)
    return Bags(ids=bags.ids[moves + np.arange(len(moves))], offsets=offsets)

"""Windows of row groups: filled by reader threads in shuffled order, cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from dlrm.data.batch import Batch
from dlrm.data.parquet import Bags, Columns, RowGroup, RowGroupReader


@dataclass(frozen=True, kw_only=True)
class Span:
    """The row groups that are mixed with one another, and their place in the epoch's order."""

    start: int
    """Rows of the epoch that come before."""
    groups: tuple[RowGroup, ...]
    seed: tuple[int, ...] | None
    """Draws the order of the rows; None keeps that of the files."""

    @property
    def rows(self) -> int:
        """Rows of all its groups."""
        return sum(group.rows for group in self.groups)


class Window:
    """The rows of one span in their final order, on their way from the reader threads.

    A row group is decoded by one thread, which writes each column straight to the shuffled places
    of its rows; a batch is then a run of columns of the window: one contiguous copy per feature.

    Args:
        span: what to read, and the order.
        reader: decodes row groups.
        pool: its threads do the reading. They start tasks in the order of submission, so that a
            reader may wait for the order of the rows, which was submitted before.
    """

    def __init__(self, span: Span, reader: RowGroupReader, pool: ThreadPoolExecutor) -> None:
        rows, meta = span.rows, reader.meta
        one_hot = sum(not column.multi_hot for column in meta.categorical)
        self.start, self.stop = span.start, span.start + rows
        self.columns = Columns(
            dense=np.empty((len(meta.dense), rows), np.float32),
            ids=np.empty((one_hot, rows), reader.ids_dtype),
            labels=np.empty(rows, np.float32),
        )
        self._bags: list[Bags] | None = None
        self._order: Future[np.ndarray] | None = None
        if span.seed is not None:
            self._order = pool.submit(np.random.default_rng(span.seed).permutation, rows)
        self._reads: list[Future[list[Bags]]] = []
        start = 0
        for group in span.groups:
            place = slice(start, start + group.rows)
            self._reads.append(pool.submit(self._read, reader, group, place))
            start = place.stop

    def _read(self, reader: RowGroupReader, group: RowGroup, place: slice) -> list[Bags]:
        where = place if self._order is None else self._order.result()[place]
        return reader.read(group, self.columns, where)

    def run(self, first: int, last: int) -> Run:
        """Of the rows ``first`` to ``last - 1`` of the epoch, those that lie in this window."""
        return self, slice(max(first, self.start) - self.start, min(last, self.stop) - self.start)

    def wait(self) -> None:
        """Return when all rows are there; raises what a reader raised."""
        for read in self._reads:
            read.result()

    def bags(self) -> list[Bags]:
        """The multi-hot features in the window's order. Not for several threads at once."""
        if self._bags is None:
            order = None if self._order is None else self._order.result()
            features = zip(*(read.result() for read in self._reads), strict=True)
            self._bags = [_reordered(_joined(pieces), order) for pieces in features]
        return self._bags


Run: TypeAlias = tuple[Window, slice]
"""Consecutive rows of a window."""


def fill(batch: Batch, runs: Sequence[Run]) -> Batch:
    """Copy ``runs``, one behind the other, into the one-hot ``batch`` that has room for them."""
    into = Columns(dense=batch.dense.numpy(), ids=batch.ids.numpy(), labels=batch.labels.numpy())
    start = 0
    for window, rows in runs:
        window.wait()
        stop = start + rows.stop - rows.start
        into.dense[:, start:stop] = window.columns.dense[:, rows]
        into.ids[:, start:stop] = window.columns.ids[:, rows]
        into.labels[start:stop] = window.columns.labels[rows]
        start = stop
    return batch


def fill_multi_hot(batch: Batch, runs: Sequence[Run], multi_hot: Sequence[bool]) -> Batch:
    """As :func:`fill`, where some features are multi-hot: all of them become bags.

    Args:
        batch: one-hot batch with room for the rows; its ids hold the one-hot features only.
        runs: the rows.
        multi_hot: of each categorical feature, whether it is multi-hot.

    Returns:
        A batch with the ids of all features, table by table, and offsets.
    """
    fill(batch, runs)
    ones = np.arange(batch.size + 1)
    one_hot = (Bags(ids=ids, offsets=ones) for ids in batch.ids.numpy())
    bags = (
        _joined([_cut(feature, rows) for feature, (_, rows) in zip(pieces, runs, strict=True)])
        for pieces in zip(*(window.bags() for window, _ in runs), strict=True)
    )
    empty = Bags(ids=np.empty(0, batch.ids.numpy().dtype), offsets=np.zeros(1, np.int64))
    joined = _joined([next(bags, empty) if many else next(one_hot) for many in multi_hot])
    ids, offsets = torch.from_numpy(joined.ids), torch.from_numpy(joined.offsets)
    return Batch(batch.dense, ids, batch.labels, offsets)


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

"""Shuffle buffers in host memory: reader threads fill them, and batches are slices of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import pyarrow as pa
import torch

from dlrm.data.batch import Batch, RowBuffer
from dlrm.data.parquet import RowGroup, RowGroupReader, Rows

RUN = 64
"""Rows that stay together: 256 bytes of a column, four cache lines. Writing single rows to random
positions of a buffer takes 5 times as long on a server CPU."""
RUNS_PER_GROUP, RUNS_PER_WINDOW = 64, 1 << 14
"""Lowest number of runs; where there are fewer rows, the runs are shorter, down to single rows."""


@dataclass(frozen=True, kw_only=True)
class ShuffleGroup:
    """Row groups that are shuffled together, and their position in the epoch."""

    start: int
    """Rows of the epoch before them."""
    row_groups: tuple[RowGroup, ...]
    seed: tuple[int, ...] | None
    """Seed of the order of the rows; None keeps that of the file, for a single row group."""

    @property
    def rows(self) -> int:
        """Rows of all row groups."""
        return sum(row_group.rows for row_group in self.row_groups)

    @property
    def stop(self) -> int:
        """Rows of the epoch up to the end of this group."""
        return self.start + self.rows

    def between(self, first: int, last: int) -> slice:
        """Rows ``first`` to ``last - 1`` of the epoch as far as they are in this group."""
        return slice(max(first, self.start) - self.start, min(last, self.stop) - self.start)


def shuffle_groups(
    row_groups: Sequence[RowGroup], windows: int, seed: tuple[int, ...] | None
) -> list[ShuffleGroup]:
    """The row groups of an epoch in order, in ``windows`` groups that are each shuffled.

    Logs lie in the order of time, so each window takes row groups from all over the files: of every
    ``windows`` consecutive ones, it gets one at random. All windows have the same number of them,
    up to one: what a short last one holds would weigh most in the trained model.

    Args:
        row_groups: in file order.
        windows: number of groups; with more than row groups, each row group is one.
        seed: seed of the order; None keeps that of the file, in which each row group is one.
    """
    if seed is None:
        dealt = [[row_group] for row_group in row_groups]
    else:
        windows = min(windows, len(row_groups))
        random = np.random.default_rng((*seed, 0))
        dealt = [[] for _ in range(windows)]
        for first in range(0, len(row_groups), windows):
            owners = random.permutation(windows)
            for row_group, owner in zip(row_groups[first : first + windows], owners, strict=False):
                dealt[owner].append(row_group)
    groups, start = [], 0
    for index, chosen in enumerate(dealt):
        group = ShuffleGroup(
            start=start,
            row_groups=tuple(chosen),
            seed=None if seed is None else (*seed, 1 + index),
        )
        groups.append(group)
        start = group.stop
    return groups


@dataclass(frozen=True, kw_only=True)
class Interleave:
    """The positions in a shuffle buffer of the rows of one row group.

    The rows are permuted and split into runs. Run ``i`` becomes run ``slots[i]`` of the buffer.
    The rows that do not fill a run go to the positions ``rest``, after all runs.
    """

    seed: tuple[int, ...]
    run: int
    slots: np.ndarray
    rest: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of the row group."""
        return len(self.slots) * self.run + len(self.rest)

    def permutation(self) -> np.ndarray:
        """The rows of the row group in permuted order."""
        return np.random.default_rng(self.seed).permutation(self.rows)

    def positions(self) -> np.ndarray:
        """The position in the buffer of each of the permuted rows."""
        runs = self.slots[:, None] * self.run + np.arange(self.run)
        return np.concatenate([runs.ravel(), self.rest])

    def write(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write the permuted ``values`` of a column to their positions in ``out``."""
        in_runs, end = len(self.slots) * self.run, len(out) // self.run * self.run
        out[:end].reshape(-1, self.run)[self.slots] = values[:in_runs].reshape(-1, self.run)
        out[self.rest] = values[in_runs:]


def interleave(group: ShuffleGroup) -> list[Interleave] | list[None]:
    """How each row group of ``group`` is mixed with the others; None to keep the order."""
    if group.seed is None:
        return [None] * len(group.row_groups)
    sizes = np.array([row_group.rows for row_group in group.row_groups])
    most = int(np.median(sizes)) // RUNS_PER_GROUP, group.rows // RUNS_PER_WINDOW
    run = max(1, min(RUN, *most))
    random = np.random.default_rng(group.seed)
    slots, rests = _deal(sizes // run, random), _deal(sizes % run, random)
    end = (sizes // run).sum() * run
    return [
        Interleave(seed=(*group.seed, 1 + i), run=run, slots=slots[i], rest=end + rests[i])
        for i in range(len(sizes))
    ]


def _deal(counts: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Deal the numbers from 0 on at random: ``counts[i]`` of them, in rising order, to each i."""
    owners = np.repeat(np.arange(len(counts)), counts)
    random.shuffle(owners)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])


class ShuffleBuffer:
    """The rows of a shuffle group in their final order, filled by the reader threads.

    One thread decodes a row group and writes each column to the positions of its rows. A batch is
    then a run of columns of the buffer: one contiguous copy per feature.

    Args:
        group: the rows and their order.
        reader: decodes row groups.
        pool: reader threads.
    """

    def __init__(
        self, group: ShuffleGroup, reader: RowGroupReader, pool: ThreadPoolExecutor
    ) -> None:
        self.group, self._reader, meta = group, reader, reader.meta
        one_hot = sum(not column.multi_hot for column in meta.categorical)
        self.dense = np.empty((len(meta.dense), group.rows), np.float32)
        self.ids = np.empty((one_hot, group.rows), reader.ids_dtype)
        self.labels = np.empty(group.rows, np.float32)
        self.weights = None if meta.weight is None else np.empty(group.rows, np.float32)
        self._bags: list[pa.Array] | None = None
        self._joining = Lock()
        shuffled_bags = meta.multi_hot and group.seed is not None
        self._order = np.empty(group.rows, np.int64) if shuffled_bags else None  # of the bags
        self._reads, first = [], 0
        for row_group, mix in zip(group.row_groups, interleave(group), strict=True):
            self._reads.append(pool.submit(self._read, row_group, mix, first))
            first += row_group.rows

    def _read(self, row_group: RowGroup, mix: Interleave | None, first: int) -> list[pa.Array]:
        """Read a row group, the rows from ``first`` on in file order; returns its bags."""
        rows = self._reader.read(row_group)
        columns = [rows.labels, *rows.dense, *rows.ids]
        outs = [self.labels, *self.dense, *self.ids]
        if rows.weights is not None and self.weights is not None:
            columns.append(rows.weights)
            outs.append(self.weights)
        if mix is None:
            for values, out in zip(columns, outs, strict=True):
                out[:] = values
            return rows.bags
        permutation = mix.permutation()
        for values, out in zip(columns, outs, strict=True):
            mix.write(values.take(permutation, mode="clip"), out)  # clip: skips the bounds check
        if self._order is not None:
            self._order[mix.positions()] = first + permutation
        return rows.bags

    def wait(self) -> None:
        """Wait until all rows are there.

        Raises:
            ValueError: a row group is damaged or holds an invalid value.
        """
        for read in list(self._reads):
            read.result()

    def bags(self, rows: slice) -> list[pa.Array]:
        """The multi-hot features of these rows, a list per row."""
        with self._joining:
            if self._bags is None:
                features = zip(*(read.result() for read in self._reads), strict=True)
                self._bags = [pa.concat_arrays(row_groups) for row_groups in features]
                self._reads = []  # which hold the row groups
        if self._order is None:
            return [bags[rows] for bags in self._bags]
        return [bags.take(self._order[rows]) for bags in self._bags]


def row_buffer(reader: RowGroupReader, size: int, *, pinned: bool = False) -> RowBuffer:
    """Room for the dense features, one-hot ids, labels and weights of ``size`` rows."""
    return RowBuffer(
        size,
        dense=len(reader.meta.dense),
        one_hot=sum(not column.multi_hot for column in reader.meta.categorical),
        ids=reader.ids_dtype,
        pinned=pinned,
        weighted=reader.meta.weight is not None,
    )


def assemble(
    reader: RowGroupReader, buffers: Sequence[ShuffleBuffer], first: int, last: int
) -> Batch:
    """Copy rows ``first`` to ``last - 1`` of the epoch into a batch in host memory.

    Args:
        reader: the reader of the buffers.
        buffers: those that hold the rows, in order.
        first: the first row.
        last: the row after the last one.
    """
    out, start = row_buffer(reader, last - first), 0
    parts = [(buffer, buffer.group.between(first, last)) for buffer in buffers]
    for buffer, rows in parts:
        buffer.wait()
        stop = start + rows.stop - rows.start
        out.dense[:, start:stop] = buffer.dense[:, rows]
        out.ids[:, start:stop] = buffer.ids[:, rows]
        out.labels[start:stop] = buffer.labels[rows]
        if out.weights is not None and buffer.weights is not None:
            out.weights[start:stop] = buffer.weights[rows]
        start = stop
    batch = out.to(torch.device("cpu"))
    if not reader.meta.multi_hot:
        return batch
    bags = zip(*(buffer.bags(rows) for buffer, rows in parts), strict=True)
    return _with_bags(reader, batch, out.ids, bags)


def batch_of(reader: RowGroupReader, rows: Rows) -> Batch:
    """Rows as a batch in host memory, in their order.

    Args:
        reader: the reader of the rows.
        rows: what it returned.
    """
    out = row_buffer(reader, len(rows.labels))
    for target, values in zip((*out.dense, *out.ids), (*rows.dense, *rows.ids), strict=True):
        target[:] = values
    out.labels[:] = rows.labels
    if out.weights is not None:
        out.weights[:] = rows.weights
    batch = out.to(torch.device("cpu"))
    if not reader.meta.multi_hot:
        return batch
    return _with_bags(reader, batch, out.ids, ([bags] for bags in rows.bags))


def _with_bags(
    reader: RowGroupReader,
    batch: Batch,
    one_hot: np.ndarray,
    multi_hot: Iterable[Iterable[pa.Array]],
) -> Batch:
    """A batch with all ids as bags, table by table: for as soon as one feature is multi-hot.

    Args:
        reader: names the columns.
        batch: the rows with the one-hot features.
        one_hot: their ids, a row per feature.
        multi_hot: for each multi-hot feature, its bags in parts.
    """
    multi_hot, ones = iter(multi_hot), np.ones(batch.size, np.int64)
    single = iter(one_hot)
    ids, lengths = [np.empty(0, reader.ids_dtype)], [np.zeros(1, np.int64)]
    for column in reader.meta.categorical:
        if column.multi_hot:
            for bags in next(multi_hot, ()):
                ids.append(bags.flatten().to_numpy())
                lengths.append(bags.value_lengths().to_numpy())
        else:
            ids.append(next(single))
            lengths.append(ones)
    offsets = np.cumsum(np.concatenate(lengths))
    bounds = tuple(offsets[:: batch.size].tolist()) if batch.size else None
    all_ids = torch.from_numpy(np.concatenate(ids))
    return replace(batch, ids=all_ids, offsets=torch.from_numpy(offsets), bounds=bounds)

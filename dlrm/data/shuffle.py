"""Shuffle buffers in host memory: reader threads fill them, and batches are slices of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from dlrm.data.batch import Batch, RowBuffer
from dlrm.data.multi_hot import RaggedIds, with_bags
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
    """Divide the row groups of an epoch into ``windows`` groups that are shuffled one by one.

    Logs are written in the order of time, so each window takes row groups from all over the files:
    one of every ``windows`` consecutive ones, at random. The numbers of row groups of two windows
    differ by one at most, because a model remembers best what it saw in the last window.

    Args:
        row_groups: in file order.
        windows: number of groups, at most one for each row group.
        seed: seed of the order; None keeps the order of the file, one group for each row group.

    Returns:
        The groups in the order in which they are read.
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
        """Write the permuted ``values [rows, ...]`` of a column to their positions in ``out``."""
        in_runs, end = len(self.slots) * self.run, len(out) // self.run * self.run
        runs = (-1, self.run, *out.shape[1:])
        out[:end].reshape(runs)[self.slots] = values[:in_runs].reshape(runs)
        out[self.rest] = values[in_runs:]


def interleave(group: ShuffleGroup) -> list[Interleave] | list[None]:
    """How each row group of ``group`` is mixed with the others; None to keep the order."""
    if group.seed is None:
        return [None] * len(group.row_groups)

    # Long runs are faster to write, short ones mix small data better.
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
    """Deal the numbers 0, 1, ... at random: ``counts[i]`` of them, in rising order, to each i."""
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
        self.group = group
        self._reader = reader

        # Room for every column, which the reader threads fill.
        meta = reader.meta
        self.dense = np.empty((len(meta.dense), group.rows), np.float32)
        self.labels = np.empty(group.rows, np.float32)
        self.weights = None if meta.weight is None else np.empty(group.rows, np.float32)
        one_hot = 0 if meta.multi_hot else len(meta.categorical)
        self.ids = np.empty((one_hot, group.rows), reader.ids_dtype)
        room = np.array([reader.num_ids(row_group) for row_group in group.row_groups])
        self.bags = _bags(reader, group, room.sum(0)) if meta.multi_hot else []
        starts = room.cumsum(0) - room

        parts = zip(group.row_groups, interleave(group), starts.tolist(), strict=True)
        self._reads = [pool.submit(self._read, *part) for part in parts]

    def _read(self, row_group: RowGroup, mix: Interleave | None, starts: list[int]) -> None:
        """Read a row group; the ragged ids of each feature are stored from ``starts`` on."""
        rows = self._reader.read(row_group)

        # Pair each column of the file with its place in the buffer. The ids of ragged bags keep the
        # order of the file: only the start and the length of each bag are shuffled.
        columns, outs = [rows.labels, *rows.dense], [self.labels, *self.dense]
        if rows.weights is not None and self.weights is not None:
            columns.append(rows.weights)
            outs.append(self.weights)
        features = [*self.ids, *self.bags]
        for ids, offsets, out, start in zip(rows.ids, rows.offsets, features, starts, strict=True):
            if isinstance(out, np.ndarray):
                columns.append(ids)
                outs.append(out)
            elif offsets is not None:
                out.values[start : start + len(ids)] = ids
                columns += [offsets[:-1] + start, np.diff(offsets)]
                outs += [out.starts, out.lengths]

        if mix is None:
            for values, out in zip(columns, outs, strict=True):
                out[:] = values
            return

        permutation = mix.permutation()
        for values, out in zip(columns, outs, strict=True):
            # clip: skips the bounds check
            mix.write(values.take(permutation, axis=0, mode="clip"), out)

    def wait(self) -> None:
        """Wait until all rows are there.

        Raises:
            ValueError: a row group is damaged or holds an invalid value.
        """
        for read in self._reads:
            read.result()


def _bags(
    reader: RowGroupReader, group: ShuffleGroup, room: Sequence[int]
) -> list[np.ndarray | RaggedIds]:
    """Allocate room for the ids of multi-hot data, feature by feature.

    A one-hot feature takes ``[rows]``, one with bags of L ids ``[rows, L]``.
    """
    dtype, rows = reader.ids_dtype, group.rows
    return [
        RaggedIds(rows, most, dtype, in_order=group.seed is None)
        if size is None
        else np.empty((rows, size) if column.multi_hot else rows, dtype)
        for column, size, most in zip(
            reader.meta.categorical, reader.meta.lengths, room, strict=True
        )
    ]


def row_buffer(reader: RowGroupReader, size: int, *, pinned: bool = False) -> RowBuffer:
    """Allocate room for ``size`` rows: dense features, labels, weights, and one-hot ids."""
    return RowBuffer(
        size,
        dense=len(reader.meta.dense),
        one_hot=0 if reader.meta.multi_hot else len(reader.meta.categorical),
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
    out = row_buffer(reader, last - first)
    parts = [(buffer, buffer.group.between(first, last)) for buffer in buffers]

    start = 0
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

    # Bags: the parts of each feature, one after another.
    features = []
    for index, length in enumerate(reader.meta.lengths):
        ids = [np.empty(0, reader.ids_dtype)]
        lengths = [np.empty(0, np.int64)]
        for buffer, rows in parts:
            bags = buffer.bags[index]
            if isinstance(bags, np.ndarray):
                ids.append(bags[rows])
            else:
                taken, of_rows = bags.take(rows)
                ids.append(taken)
                lengths.append(of_rows)
        features.append((ids, lengths if length is None else length))
    return with_bags(batch, features)


def batch_of(reader: RowGroupReader, rows: Rows) -> Batch:
    """Make a batch in host memory of rows, in their order.

    Args:
        reader: the reader of the rows.
        rows: what :meth:`RowGroupReader.read` returned.
    """
    out = row_buffer(reader, len(rows.labels))
    for target, values in zip((*out.dense, *out.ids), (*rows.dense, *rows.ids), strict=False):
        target[:] = values
    out.labels[:] = rows.labels
    if out.weights is not None:
        out.weights[:] = rows.weights
    batch = out.to(torch.device("cpu"))
    if not reader.meta.multi_hot:
        return batch

    features: list[tuple[list[np.ndarray], list[np.ndarray] | int]] = []
    for ids, offsets, size in zip(rows.ids, rows.offsets, reader.meta.lengths, strict=True):
        lengths = size or 1 if offsets is None else [np.diff(offsets)]
        features.append(([ids.astype(reader.ids_dtype, copy=False)], lengths))
    return with_bags(batch, features)

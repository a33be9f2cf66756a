"""The order of the rows of an epoch: groups of row groups, and how the rows of each are mixed."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dlrm.data.parquet import RowGroup
from dlrm.utils.device import free_memory

RUN = 64  # permuted rows of a row group that stay together: their order is written as one run
ORDER_BYTES = 8  # of a row, for its place in a window
RUNS_PER_GROUP, RUNS_PER_WINDOW = 64, 1 << 14
"""Lowest number of runs; where there are fewer rows, the runs are shorter, down to single rows."""


@dataclass(frozen=True, kw_only=True)
class ShuffleGroup:
    """Row groups that are shuffled together, and their position in the epoch."""

    start: int
    """Rows before them, of all epochs."""
    row_groups: tuple[RowGroup, ...]
    seed: tuple[int, ...] | None
    """Seed of the order of the rows; None keeps that of the file, for a single row group."""

    @property
    def rows(self) -> int:
        """Rows of all row groups."""
        return sum(row_group.rows for row_group in self.row_groups)

    @property
    def stop(self) -> int:
        """Rows up to the end of this group."""
        return self.start + self.rows

    def between(self, first: int, last: int) -> slice:
        """Rows ``first`` to ``last - 1`` of all epochs as far as they are in this group."""
        return slice(max(first, self.start) - self.start, min(last, self.stop) - self.start)


def shuffle_groups(
    row_groups: Sequence[RowGroup], windows: int, seed: tuple[int, ...] | None, start: int = 0
) -> list[ShuffleGroup]:
    """Divide the row groups of an epoch into ``windows`` groups that are shuffled one by one.

    Logs are written in the order of time, so each window takes row groups from all over the files:
    one of every ``windows`` consecutive ones, at random. The numbers of row groups of two windows
    differ by one at most, because a model remembers best what it saw in the last window.

    Args:
        row_groups: in file order.
        windows: number of groups, at most one for each row group.
        seed: seed of the order; None keeps the order of the file, one group for each row group.
        start: first row of the first group.

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

    # Each has a seed of its own.
    groups = []
    for index, chosen in enumerate(dealt):
        group = ShuffleGroup(
            start=start,
            row_groups=tuple(chosen),
            seed=None if seed is None else (*seed, 1 + index),
        )
        groups.append(group)
        start = group.stop
    return groups


def require_positive(**sizes: int | None) -> None:
    """Check options that are given."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of each global batch that a process takes."""

    rank: int = 0
    """This process, in ``[0, world_size)``."""
    world_size: int = 1
    """Number of ranks."""

    def __post_init__(self) -> None:
        require_positive(world_size=self.world_size)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank}, it must be in [0, world_size={self.world_size})"
            )

    def of(self, first: int, rows: int) -> tuple[int, int]:
        """Where its rows begin and end among ``rows`` from ``first`` on; some get one more."""
        share, extra = divmod(rows, self.world_size)
        start = first + self.rank * share + min(self.rank, extra)
        return start, start + share + (self.rank < extra)


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of the rows in all epochs, which are numbered through, and where batches begin."""

    row_groups: Sequence[RowGroup]
    """In file order."""
    windows: int
    """See :func:`shuffle_groups`."""
    seed: int | None
    """Seed of all epochs; None keeps the order of the file."""
    shard: Shard
    """The part of each global batch that a process takes."""
    batch_size: int
    """Rows of a global batch."""
    drop_last: bool
    """Leave out the last global batch of an epoch if it is short."""
    epochs: int
    """Those that follow one another, the first one being 0."""

    def shares(self, epoch: int, start: int) -> Iterator[tuple[int, int, int]]:
        """First row and last row + 1 of the shard in each global batch from a row of an epoch on,
        and the batch's end in its epoch."""
        yield from self._shares(epoch, start)
        for following in range(epoch + 1, self.epochs):
            yield from self._shares(following, 0)

    def groups(self, epoch: int, start: int) -> Iterator[ShuffleGroup]:
        """The groups that hold the rows of :meth:`shares`, in order."""
        yield from self._groups(epoch, start)
        for following in range(epoch + 1, self.epochs):
            yield from self._groups(following, 0)

    @cached_property
    def _rows(self) -> int:
        return sum(row_group.rows for row_group in self.row_groups)

    def _shares(self, epoch: int, start: int) -> Iterator[tuple[int, int, int]]:
        before = epoch * self._rows
        for first in range(start, self._rows, self.batch_size):
            rows = min(self.batch_size, self._rows - first)
            if rows < self.batch_size and self.drop_last:
                return
            yield *self.shard.of(before + first, rows), first + rows

    def _groups(self, epoch: int, start: int) -> Iterator[ShuffleGroup]:
        seed = None if self.seed is None else (self.seed, epoch)
        groups = shuffle_groups(self.row_groups, self.windows, seed, epoch * self._rows)
        done, starts = 0, [group.start for group in groups]
        for first, last, _ in self._shares(epoch, start):
            begin, end = bisect_right(starts, first) - 1, bisect_left(starts, last)
            yield from groups[max(begin, done) : end]
            done = max(end, done)


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
        return _permutation(np.random.default_rng(self.seed), self.rows)

    def positions(self) -> np.ndarray:
        """The position in the buffer of each of the permuted rows."""
        runs = self.slots[:, None] * self.run + np.arange(self.run)
        return np.concatenate([runs.ravel(), self.rest])


def interleave(group: ShuffleGroup) -> list[Interleave] | list[None]:
    """How each row group of ``group`` is mixed with the others; None to keep the order."""
    if group.seed is None:
        return [None] * len(group.row_groups)

    # Short runs mix small data better.
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
    owners = owners[_permutation(random, len(owners))]
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])


def _permutation(random: np.random.Generator, size: int) -> np.ndarray:
    """The numbers below ``size`` in random order; unlike ``Generator.permutation``, without holding
    the interpreter's lock, for which the threads that launch work on a GPU would wait."""
    return random.choice(size, size, replace=False)


def shuffle_memory(device: torch.device) -> int:
    """Bytes that the rows to shuffle may take on ``device``, with room left for the model."""
    if device.type == "cuda":
        return free_memory(device) // 8
    return free_memory(device) // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def windows_within(memory: int, size: int, row_groups: int) -> int:
    """The least number of windows with which rows of ``size`` bytes are within ``memory``.

    One, or a power of two, because memory that is free varies a little from run to run.
    """
    if size <= memory:
        return 1
    windows = 4  # with fewer than these, three of them take more memory than one
    while windows < row_groups and 3 * size > memory * windows:
        windows *= 2
    return min(windows, row_groups)

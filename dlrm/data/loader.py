"""Batches from Parquet: read in the background, shuffled, sharded over ranks, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch

from dlrm.data.batch import Batch
from dlrm.data.device_prefetch import Run, make_ahead, queue_on, receive
from dlrm.data.negatives import sample_negatives
from dlrm.data.parquet import RowGroupReader, digest_of_footers
from dlrm.data.schema import Meta
from dlrm.data.shuffle import (
    ORDER_BYTES,
    RowOrder,
    Shard,
    ShuffleGroup,
    require_positive,
    shuffle_memory,
    windows_within,
)
from dlrm.data.shuffle_buffer import ShuffleBuffer, StoredRows, gather, gather_run
from dlrm.data.threads import thread_pool
from dlrm.utils.cpus import cpu_count
from dlrm.utils.streams import stream_of

ROWS_AT_ONCE = 4096  # that are gathered together for batches of fewer rows, on a CPU
BYTES_AT_ONCE = 16 << 20
"""Of rows that are gathered together on a GPU, as launches take longer than what they copy."""


class Reading(TypedDict, total=False):
    """How the files of a split are read. Only the window changes the order of the rows."""

    window: int | None
    """Row groups that are shuffled together at most; 1 shuffles each on its own. By default all, or
    if they take more than ``memory``, a quarter, an eighth... A resumed epoch keeps its windows."""
    memory: int | None
    """Bytes that the rows may take if there is no ``window``; by default see :class:`BatchLoader`.
    """
    readers: int | None
    """Threads that read and decode row groups; by default half of the cores, up to 8, or three
    quarters, up to 12, if the batches go to a GPU."""
    prefetch: int
    """Batches made ahead of the consumer, or runs of small ones that are gathered together; by
    default 4."""
    allow_outside: bool
    """Whether ``meta.json`` may list files outside of the directory; by default not."""
    epochs: int
    """Epochs that follow one another, the first one being 0, by default 1: during the last batches
    of each, the first rows of the next are read."""


class BatchLoader:
    """Iterates over the batches of one split of a prepared directory.

    The order of the rows in an epoch depends only on the data, ``seed``, ``windows`` and the epoch:
    the row groups are dealt to the windows, so that each gets some from all over the files, and the
    rows of a window are mixed: those of each row group are permuted, and runs of up to 64 of them
    interleaved at random. One window mixes all rows, as logs in the order of time need it.

    Global batch ``k`` is the ``k``-th run of ``world_size * batch_size`` rows in that order. Each
    rank takes its share of it, so any number of ranks sees the same rows in the same steps. The
    last global batch is divided as evenly as possible. No row is dropped or repeated, and all ranks
    see the same number of batches: if the last global batch has fewer rows than there are ranks,
    some ranks get a batch of size 0, so that collective operations stay in step.

    Each iteration is a whole epoch, except the first one after :meth:`load_state_dict`, which is
    the rest of the saved one. Only one iteration runs at a time: starting another ends the first.

    Memory (160 bytes per decoded row for Criteo): all rows of the split if they are one window;
    otherwise two windows, and three for a moment. By default that is at most half of the host's
    free memory, divided by the processes on it, or an eighth of the free memory of a GPU. A single
    window is kept from epoch to epoch. Without shuffle, as many row groups as readers.

    Args:
        directory: the directory of ``meta.json``.
        split: name of a split in ``meta.json``.
        batch_size: samples per batch and rank, B.
        shuffle: mix the rows, differently in each epoch; otherwise keep the order of the file.
        seed: seed of the shuffle, not negative.
        shard: the part of each global batch that this process takes.
        drop_last: leave out the last global batch if it is short.
        device: device of the batches. A CUDA device gets whole row groups from pinned memory and
            gathers the rows of batches itself, on a stream of its own, while earlier ones are in
            use.
        num_embeddings: rows of each table, against which ids are checked; by default the
            cardinalities in ``meta.json``.
        negatives: share of the rows with label 0 that are read, chosen by ``seed``; see
            :func:`~dlrm.data.negatives.sample_negatives`.
        reading: how the files are read.

    Attributes:
        meta: the contents of ``meta.json``.
        windows: parts of an epoch that are shuffled, each on its own.
        rows: rows of the split that are read, over all ranks.
        wait_seconds: how long the consumer has waited for data, over all iterations.

    Raises:
        FileNotFoundError: ``meta.json`` or a file of the split is missing.
        ValueError: an option is out of range; the split is unknown or empty; a file is damaged, or
            its columns, types or rows are not those of ``meta.json``. While iterating: a row group
            is damaged or holds an invalid value.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        split: str,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        shard: Shard | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        num_embeddings: Sequence[int] | None = None,
        negatives: float = 1.0,
        **reading: Unpack[Reading],
    ) -> None:
        if unknown := reading.keys() - Reading.__annotations__:
            raise TypeError(f"a loader has no option {', '.join(sorted(unknown))}")
        window, readers, shard = reading.get("window"), reading.get("readers"), shard or Shard()
        self.prefetch, self._epochs = reading.get("prefetch", 4), reading.get("epochs", 1)
        require_positive(
            batch_size=batch_size, window=window, readers=readers, prefetch=self.prefetch
        )
        if seed < 0:
            raise ValueError(f"seed is {seed}, it must not be negative")
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device is {device}, it must be cpu or cuda")

        # The files are opened, and their footers read.
        self.meta = Meta.read(directory, allow_outside=reading.get("allow_outside", False))
        self._reader = RowGroupReader(directory, self.meta, num_embeddings)
        row_groups = self._reader.row_groups(split)
        self._row_groups = sample_negatives(self._reader, row_groups, negatives, seed)
        self.rows = sum(row_group.rows for row_group in self._row_groups)

        self.split = split
        self.batch_size, self.shard = batch_size, shard
        self.global_batch = shard.world_size * batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.negatives = negatives
        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"

        cores = cpu_count()
        most = min(12, cores * 3 // 4) if self._on_gpu else min(8, cores // 2)
        self.readers = readers or max(1, most)
        self._fixed_window = window is not None
        if window is None:
            self.windows = self._default_windows(reading.get("memory"))
        else:
            self.windows = -(-len(self._row_groups) // window)

        self._resident: StoredRows | None = None  # of the only window, kept for the next epoch
        self.wait_seconds = 0.0
        self.epoch = 0
        self._position = 0  # rows of the epoch yielded so far, over all ranks
        self._start = 0  # first row of the next iteration
        self._iteration: weakref.ref[Generator[Batch, None, None]] | None = None
        self._ahead: Generator[Run, None, None] | None = None  # the runs of a coming epoch, and on
        self._coming = 0  # that epoch

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        batches, rest = divmod(self.rows, self.global_batch)
        return batches + (rest > 0 and not self.drop_last)

    def samples(self, batches: int) -> int:
        """Number of samples in the first ``batches`` batches of a training, over all ranks."""
        epochs, rest = divmod(batches, len(self))
        size = self.global_batch
        return epochs * min(self.rows, len(self) * size) + rest * size

    def __iter__(self) -> Iterator[Batch]:
        start, self._start = self._start, 0
        self._end_iteration()
        if self._coming != self.epoch or start:
            self.close()
        self._position = start
        iteration = self._iterate(start)
        self._iteration = weakref.ref(iteration)
        return iteration

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, on which the order of the rows depends.

        A position restored by :meth:`load_state_dict` is kept if it is in the same epoch.

        Raises:
            ValueError: ``epoch`` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, it must not be negative")
        if epoch != self.epoch:
            self._end_iteration()
            self.epoch, self._position, self._start = epoch, 0, 0

    def close(self) -> None:
        """End the current iteration and its threads, as an abandoned iterator does by itself."""
        self._end_iteration()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _end_iteration(self) -> None:
        """End the current iteration; what a complete one has read of the next epoch is kept."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()

    def state_dict(self, *, unused: int = 0) -> dict[str, Any]:
        """The position after the last batch that was yielded; the same on every rank, JSON-able.

        Args:
            unused: samples that were yielded but not used, over all ranks, such as those that a
                prefetcher holds; they will be yielded again.
        """
        return {"epoch": self.epoch, "position": self._position - unused, "order": self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state``, with any number of ranks.

        Raises:
            ValueError: ``state`` was saved with other data or options, under which the order of
                the rows was different, or is not the state of a loader.
        """
        complete = set(state) == {"epoch", "position", "order"}
        if not complete or not isinstance(state["order"], Mapping):
            raise ValueError(
                f"not the state of a loader: it has {sorted(state)}, not epoch, position and order"
            )

        # Windows that were chosen by default are those of the saved order.
        here, there = self._order(), state["order"]
        if not self._fixed_window and there.get("windows") is not None:
            here["windows"] = there["windows"]

        differing = [
            f"{name} is {value!r} here and {there.get(name)!r} in the state"
            for name, value in here.items()
            if there.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"the state of the {self.split!r} loader cannot be continued: "
                f"{'; '.join(differing)}; resume with the same data, options and version"
            )
        self.close()
        self.windows = here["windows"] or self.windows
        self.epoch = state["epoch"]
        self._position = self._start = state["position"]

    def footers(self) -> str:
        """See :func:`~dlrm.data.parquet.digest_of_footers`."""
        return digest_of_footers(self._row_groups)

    def _default_windows(self, memory: int | None) -> int:
        """Number of windows that are within ``memory``."""
        if not self.shuffle:
            return 1
        size = sum(map(self._reader.decoded_bytes, self._row_groups)) + ORDER_BYTES * self.rows
        return windows_within(memory or shuffle_memory(self.device), size, len(self._row_groups))

    def _order(self) -> dict[str, Any]:
        """Everything that the order of the rows, and thus the meaning of a position, depends on."""
        split = self.meta.splits[self.split]
        layout = [(row_group.path.name, row_group.rows) for row_group in self._row_groups]
        content = json.dumps([layout, split.positives, self.meta.cardinalities])
        return {
            "split": self.split,
            **({} if self.negatives == 1 else {"negatives": self.negatives}),
            "rows": self.rows,
            "data": hashlib.sha256(content.encode()).hexdigest()[:16],
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": "by choice" if self.shuffle else False,
            "seed": self.seed,
            "windows": self.windows if self.shuffle else None,
        }

    def _iterate(self, start: int) -> Generator[Batch, None, None]:
        ahead = self._ahead or self._read_ahead(self.epoch, start)
        self._ahead = None
        end = min(self.rows, len(self) * self.global_batch)
        try:
            while self._position < end:
                for batch, position in next(ahead):
                    total, self._position = position - self._position, position
                    yield replace(batch, total=total)
        except BaseException:  # also if the iteration is abandoned
            ahead.close()
            raise

        # The end of the last epoch ends the threads.
        self._coming = self.epoch + 1
        if self._coming < self._epochs:
            self._ahead = ahead
        else:
            ahead.close()

    def _read_ahead(self, epoch: int, start: int) -> Generator[Run, None, None]:
        """Runs of batches from a row of an epoch on, and of all epochs that follow."""
        # The readers end first, which cancels what the assembler waits for.
        with (
            thread_pool(1, "batch-assembler") as assembler,
            thread_pool(self.readers, "parquet-reader") as readers,
        ):
            runs = self._runs(epoch, start, readers)
            by = assembler, self.prefetch, self._waited
            if self._on_gpu:
                queued = queue_on(stream_of(self.device, "loads"), runs)
                yield from receive(make_ahead(queued, *by), self.device)
            else:
                yield from make_ahead(runs, *by)

    def _waited(self, seconds: float) -> None:
        self.wait_seconds += seconds

    def _runs(self, epoch: int, start: int, readers: ThreadPoolExecutor) -> Iterator[Run]:
        """Runs of batches that are gathered in the launches of one, with their positions."""
        run: list[tuple[ShuffleBuffer, int, int]] = []  # first row, position after the batch
        at_once = ROWS_AT_ONCE
        if self._on_gpu:
            columns = 1 + len(self.meta.dense) + len(self.meta.categorical)
            at_once = max(at_once, BYTES_AT_ONCE // (4 * columns))
        for buffers, first, last, position in self._buffered(epoch, start, readers):
            for buffer in buffers:
                buffer.copy_arrived()

            # A batch joins the run if it is full, and in the same buffer.
            mine = [buffer for buffer in buffers if buffer.group.start < last]
            full = len(mine) == 1 and last - first == self.batch_size and not self.meta.multi_hot
            more = full and len(run) * self.batch_size < at_once
            if run and not (more and mine[0] is run[0][0]):
                yield gather_run(run, self.batch_size)
                run = []

            for buffer in mine:
                buffer.wait()
            if self.shuffle and self.windows == 1 and mine:
                self._resident = mine[0].stored
            if full:
                run.append((mine[0], first, position))
                continue
            yield [(gather(self._reader, mine, first, last, self.device), position)]
        if run:
            yield gather_run(run, self.batch_size)

    def _buffer(
        self, group: ShuffleGroup, before: Sequence[ShuffleBuffer], readers: ThreadPoolExecutor
    ) -> ShuffleBuffer:
        """The buffer of a window. If it holds all rows, they are those of the epoch before."""
        stored = before[-1].stored if before else self._resident
        if stored is None or self.windows > 1 or not self.shuffle:
            staged = self.readers + 4  # some to decode, and some to copy
            stored = StoredRows(group.row_groups, self._reader, readers, self.device, staged)
        return ShuffleBuffer(group, stored, readers)

    def _buffered(
        self, epoch: int, start: int, readers: ThreadPoolExecutor
    ) -> Iterator[tuple[Sequence[ShuffleBuffer], int, int, int]]:
        """Each of this rank's shares with the buffers from its first row on, some read ahead."""
        order = RowOrder(
            row_groups=self._row_groups,
            windows=self.windows,
            seed=self.seed if self.shuffle else None,
            shard=self.shard,
            batch_size=self.global_batch,
            drop_last=self.drop_last,
            epochs=self._epochs,
        )
        groups = order.groups(epoch, start)

        # buffers beyond the batch that keep all readers busy; at most those of an epoch
        windows = self.windows if self.shuffle else len(self._row_groups)
        ahead = min(-(-self.readers * windows // len(self._row_groups)), windows)
        buffers: deque[ShuffleBuffer] = deque()
        for first, last, position in order.shares(epoch, start):
            while buffers and buffers[0].group.stop <= first:
                buffers.popleft()
            while sum(buffer.group.start >= last for buffer in buffers) < ahead and (
                group := next(groups, None)
            ):
                buffers.append(self._buffer(group, buffers, readers))
            yield buffers, first, last, position

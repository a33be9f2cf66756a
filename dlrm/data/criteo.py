"""Parquet to batches: streamed in the background, shuffled, sharded over ranks, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from dlrm.data.batch import Batch, joined
from dlrm.data.device_shuffle import DeviceShuffleBuffer
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import Meta
from dlrm.data.shuffle import Part, RowBuffer, ShuffleBuffer, ShuffleGroup, fill, fill_multi_hot
from dlrm.utils.device import cpu_count

AnyWindow = TypeVar("AnyWindow", ShuffleBuffer, DeviceShuffleBuffer)
QUEUED = 8  # batches whose work may wait on a GPU


class CriteoLoader:
    """Iterates over the batches of one split of a prepared directory.

    The order of an epoch's rows is a function of the data, ``seed``, ``window`` and the epoch
    alone: the row groups are permuted, then the rows of every ``window`` consecutive groups are
    mixed, that is each group's permuted and dealt into the window in runs of 64.

    Global batch ``k`` is the ``k``-th run of ``world_size * batch_size`` rows of that order,
    and each rank takes its share of the run, so that any number of ranks sees the same rows in the
    same steps. The last run is shared out as evenly as can be. Nothing is dropped or repeated, and
    all ranks see the same number of batches; where the last run has fewer rows than there are
    ranks, some of them get a batch of size 0, so that collective operations stay in step.

    Every iteration is a whole epoch, but the first one after :meth:`load_state_dict` brings what
    was left of it. One iteration runs at a time: starting another ends the first.

    Memory: the window in use and as many as keep the readers busy, so by default ``2 * window`` row
    groups decoded (160 bytes a row for Criteo); for a GPU on it as well.

    Args:
        directory: where ``meta.json`` lies.
        split: one of the splits in it.
        batch_size: samples per batch and rank, B.
        shuffle: mix the rows, differently in every epoch; otherwise they come in file order.
        seed: of the shuffle, not negative.
        rank: whose share of every global batch to take, in ``[0, world_size)``.
        world_size: number of ranks.
        drop_last: leave out the last global batch if it is short.
        window: row groups mixed with one another; 1 mixes only within each row group.
        readers: threads that read and decode row groups; by default half of the cores, up to 8,
            or, for a GPU, three quarters, up to 12.
        prefetch: batches assembled ahead of the consumer, where the CPU assembles them.
        device: where batches are to be. A CUDA device gets whole row groups from pinned memory and
            gathers the rows of a batch itself, on a stream of its own, while the batch before is in
            use; multi-hot batches it gets assembled.
        num_embeddings: rows of each table, which ids are checked against; by default those of
            ``meta.json``.

    Attributes:
        meta: what ``meta.json`` says.
        rows: rows of the split, over all ranks.
        wait_seconds: for how long the consumer has waited for data, in all iterations.
        look_ahead: how many batches behind the one that was yielded to know; 0 at first.
        upcoming: those batches, as many as there are.

    Raises:
        FileNotFoundError: the meta file or a file of the split is missing.
        ValueError: an option is out of range; the split is unknown or empty; a file is damaged, has
            not the columns, types or rows that the meta file tells of. While iterating: a row group
            is damaged or holds a value that cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        split: str,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        window: int = 8,
        readers: int | None = None,
        prefetch: int = 4,
        device: torch.device | str = "cpu",
        num_embeddings: Sequence[int] | None = None,
    ) -> None:
        on_gpu = torch.device(device).type == "cuda"
        if readers is None:
            readers = min(12, cpu_count() * 3 // 4) if on_gpu else min(8, cpu_count() // 2)
            readers = max(1, readers)
        counts = {"batch_size": batch_size, "world_size": world_size, "window": window}
        for name, value in {**counts, "readers": readers, "prefetch": prefetch}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, it must lie in [0, world_size={world_size})")
        if seed < 0:
            raise ValueError(f"seed is {seed}, it must not be negative")
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device is {device}, batches are brought to cpu or cuda")
        self.meta = Meta.read(directory)
        self._reader = RowGroupReader(directory, self.meta, num_embeddings)
        self._groups = self._reader.row_groups(split)
        self._multi_hot = [column.multi_hot for column in self.meta.categorical]
        self.rows = sum(group.rows for group in self._groups)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.shuffle, self.seed, self.window, self.drop_last = shuffle, seed, window, drop_last
        self.readers, self.prefetch, self.device = readers, prefetch, torch.device(device)
        self.split = split
        self._gathers = on_gpu and not self.meta.multi_hot
        self._mixed = window if shuffle else 1  # row groups of a window
        self.wait_seconds = 0.0
        self.look_ahead = 0
        self.upcoming: Sequence[Batch] = ()
        self.epoch = 0
        self._position = 0  # rows of the epoch, over all ranks, that were yielded
        self._start = 0  # where the next iteration begins
        self._iteration: weakref.ref[Generator[Batch, None, None]] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        whole, rest = divmod(self.rows, self.world_size * self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def samples(self, batches: int) -> int:
        """How many samples so many batches have, from the first of the first epoch on, over all
        ranks.
        """
        epochs, rest = divmod(batches, len(self))
        whole = self.world_size * self.batch_size
        return epochs * min(self.rows, len(self) * whole) + rest * whole

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        start, self._start = self._start, 0
        self._position = start
        iteration = self._iterate(start)
        self._iteration = weakref.ref(iteration)
        return iteration

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose rows come in an order of their own.

        A position restored by :meth:`load_state_dict` is kept if it lies in this very epoch.

        Raises:
            ValueError: ``epoch`` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, it must not be negative")
        if epoch != self.epoch:
            self.close()
            self.epoch, self._position, self._start = epoch, 0, 0

    def close(self) -> None:
        """End the running iteration and its threads. Also done when an iteration is abandoned."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch yielded, the same on every rank; JSON-able."""
        return {"epoch": self.epoch, "position": self._position, "order": self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, with any number of ranks.

        Raises:
            ValueError: ``state`` is of other data or options, so that it would not continue the
                same order of rows, or is no state of a loader.
        """
        whole = set(state) == {"epoch", "position", "order"}
        if not whole or not isinstance(state["order"], Mapping):
            raise ValueError(
                f"not a state of a loader: it has {sorted(state)}, not epoch, position and order"
            )
        here, there = self._order(), state["order"]
        differing = [
            f"{name} is {value!r} here and {there.get(name)!r} in the state"
            for name, value in here.items()
            if there.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"the state of the {self.split!r} loader cannot be continued: "
                f"{'; '.join(differing)}; resume with the same data and options"
            )
        self.close()
        self.epoch = state["epoch"]
        self._position = self._start = state["position"]

    def _order(self) -> dict[str, Any]:
        """All that decides which rows a position in an epoch leaves over, and their order."""
        split = self.meta.splits[self.split]
        layout = [(group.path.name, group.rows) for group in self._groups]
        content = json.dumps([layout, split.positives, self.meta.cardinalities])
        return {
            "split": self.split,
            "rows": self.rows,
            "data": hashlib.sha256(content.encode()).hexdigest()[:16],
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "window": self.window,
        }

    def _spans(self) -> list[ShuffleGroup]:
        """This epoch's row groups in order, by windows."""
        groups = self._groups
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch, 0)).permutation(len(groups))
            groups = [groups[i] for i in order]
        spans, start = [], 0
        for first in range(0, len(groups), self._mixed):
            seed = (self.seed, self.epoch, 1 + first) if self.shuffle else None
            span = ShuffleGroup(
                start=start, groups=tuple(groups[first : first + self._mixed]), seed=seed
            )
            spans.append(span)
            start += span.rows
        return spans

    def _shares(self, start: int) -> Iterator[tuple[int, int, int]]:
        """This rank's first and last row + 1 of each global batch, and the batch's last row + 1."""
        whole = self.world_size * self.batch_size
        for first in range(start, self.rows, whole):
            rows = min(whole, self.rows - first)
            if rows < whole and self.drop_last:
                return
            share, extra = divmod(rows, self.world_size)
            mine = first + self.rank * share + min(self.rank, extra)
            yield mine, mine + share + (self.rank < extra), first + rows

    def _iterate(self, start: int) -> Generator[Batch, None, None]:
        # The readers are ended first: what the assembler waits for is cancelled with them.
        with (
            _threads(1, "batch-assembler") as assembler,
            _threads(self.readers, "parquet-reader") as readers,
        ):
            if self._gathers:
                batches = self._gathered(start, readers)
            else:
                batches = self._assembled(start, readers, assembler)
            if self.device.type == "cuda":
                batches = self._ahead(batches)
            if self.look_ahead:
                batches = self._with_upcoming(batches)
            for batch, self._position in batches:
                yield batch

    def _with_upcoming(self, batches: Iterator[tuple[Batch, int]]) -> Iterator[tuple[Batch, int]]:
        """The batches, later than they come by as many as are known ahead."""
        held = deque(islice(batches, self.look_ahead))
        for coming in batches:
            held.append(coming)
            self.upcoming = [batch for batch, _ in islice(held, 1, None)]
            yield held.popleft()
        while held:
            self.upcoming = [batch for batch, _ in islice(held, 1, None)]
            yield held.popleft()

    def _gathered(self, start: int, readers: ThreadPoolExecutor) -> Iterator[tuple[Batch, int]]:
        """Batches that the device gathers from windows, each with the position behind it."""
        make = partial(DeviceShuffleBuffer, reader=self._reader, pool=readers, device=self.device)
        for windows, (first, last, position) in self._windowed(start, make):
            for window in windows:
                window.copy_arrived()
            mine = [window for window in windows if window.start < last]
            began = time.perf_counter()
            for window in mine:
                window.wait()
            self.wait_seconds += time.perf_counter() - began
            parts = [window.batch(first, last) for window in mine]
            yield joined(parts or [self._fill(0, []).to(self.device)]), position

    def _assembled(
        self, start: int, readers: ThreadPoolExecutor, assembler: ThreadPoolExecutor
    ) -> Iterator[tuple[Batch, int]]:
        """Batches assembled in host memory, on the device, each with the position behind it."""
        pending: deque[tuple[Future[Batch], int]] = deque()
        make = partial(ShuffleBuffer, reader=self._reader, pool=readers)
        for windows, (first, last, position) in self._windowed(start, make):
            parts = [window.part(first, last) for window in windows if window.start < last]
            pending.append((assembler.submit(self._fill, last - first, parts), position))
            if len(pending) > self.prefetch:
                yield self._wait_for(*pending.popleft())
        while pending:
            yield self._wait_for(*pending.popleft())

    def _windowed(
        self, start: int, make: Callable[[ShuffleGroup], AnyWindow]
    ) -> Iterator[tuple[Sequence[AnyWindow], tuple[int, int, int]]]:
        """Each of this rank's shares with the windows from its first row on, some read ahead."""
        spans = self._needed(start)
        # Windows to read beyond a batch's own: as many as keep all readers busy.
        ahead = -(-self.readers // self._mixed)
        windows: deque[AnyWindow] = deque()
        for first, last, position in self._shares(start):
            while windows and windows[0].stop <= first:
                windows.popleft()
            while sum(window.start >= last for window in windows) < ahead and (
                span := next(spans, None)
            ):
                windows.append(make(span))
            yield windows, (first, last, position)

    def _needed(self, start: int) -> Iterator[ShuffleGroup]:
        """The windows that this rank's rows lie in, in order."""
        spans, done = self._spans(), 0
        starts = [span.start for span in spans]
        for first, last, _ in self._shares(start):
            begin, end = bisect_right(starts, first) - 1, bisect_left(starts, last)
            yield from spans[max(begin, done) : end]
            done = max(end, done)

    def _fill(self, size: int, parts: list[Part]) -> Batch:
        block = RowBuffer(
            size,
            dense=len(self.meta.dense),
            one_hot=self._multi_hot.count(False),
            ids=self._reader.ids_dtype,
            pinned=False,
        )
        if self.meta.multi_hot:
            return fill_multi_hot(block, parts, self._multi_hot)
        return fill(block, parts).to(torch.device("cpu"))

    def _wait_for(self, assembled: Future[Batch], position: int) -> tuple[Batch, int]:
        began = time.perf_counter()
        batch = assembled.result()
        self.wait_seconds += time.perf_counter() - began
        return batch, position

    def _ahead(self, batches: Iterator[tuple[Batch, int]]) -> Iterator[tuple[Batch, int]]:
        """The batches on the GPU, each made there while the consumer works on the one before."""
        stream = torch.cuda.Stream(self.device)
        made: deque[tuple[Batch, int, torch.cuda.Event]] = deque()
        queued: deque[torch.cuda.Event] = deque()
        while True:
            with torch.cuda.stream(stream):
                batch, position = next(batches, (None, 0))
                if batch is None:
                    break
                on_device = batch if self._gathers else batch.pin_memory().to(self.device)
                made.append((on_device, position, stream.record_event()))
            if len(made) > 1:
                yield _received(*made.popleft())
                # By now the work on that batch is queued. Let it come near: memory stays bounded,
                # and waiting for data is told apart from waiting for the GPU.
                queued.append(torch.cuda.current_stream(self.device).record_event())
                if len(queued) > QUEUED:
                    queued.popleft().synchronize()
        while made:
            yield _received(*made.popleft())


def _received(batch: Batch, position: int, copied: torch.cuda.Event) -> tuple[Batch, int]:
    """A batch whose copy the current stream awaits, and which it keeps alive while in use."""
    stream = torch.cuda.current_stream(batch.labels.device)
    stream.wait_event(copied)
    batch.record_stream(stream)
    return batch, position


@contextmanager
def _threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool whose waiting tasks are dropped, and its threads awaited, on leaving."""
    pool = ThreadPoolExecutor(count, name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)

"""Batches whose rows embeddings fetch ahead, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dlrm.data.batch import Batch
from dlrm.distributed.peer_lookup import SortedLookups
from dlrm.kernels.streams import SideStream
from dlrm.sparse_arch.arch import Lookups, SparseArch


class RowPrefetcher:
    """Cuts the batches of a training into rounds, and has the rows of each fetched during the last.

    Rows of several batches lie nearer to one another than those of one, so that fewer pages of host
    memory are visited for each; what is found out about them is found out once. Batches are known
    by their identity: one that was not announced is a round by itself, whose rows are fetched
    while the step waits.

    Args:
        arch: the tables; one object at a time may cut their batches into rounds.
    """

    def __init__(self, arch: SparseArch) -> None:
        self._arch = arch
        self._now: list[Batch] = []  # left of the round under way
        self._coming: list[Batch] = []  # the next round

    def look_ahead(self, samples: int) -> int:
        """How many batches of so many samples behind the present one are of use."""
        return self._arch.look_ahead(samples)

    @contextmanager
    def step(self, batch: Batch, upcoming: Sequence[Batch]) -> Iterator[None]:
        """Around the training look-ups of a batch and the update of its rows.

        Args:
            batch: one-hot or not, on the device of the tables.
            upcoming: the batches that follow it, as far as they are known. They must stay as they
                are until their turn.
        """
        following = self._now or self._coming
        if not (self._arch.rows_ready and following and following[0] is batch):
            self._now, self._coming = [], []
        if not self._now:
            announced, self._coming = self._coming, []  # for good if this round can't begin
            now = announced or [batch]
            size = self._arch.round_of(batch.ids.numel())
            coming = [batch, *upcoming][len(now) :][:size]
            self._arch.begin_round([] if announced else _lookups(now), _lookups(coming))
            self._now, self._coming = now, coming
        self._now.pop(0)
        self._arch.in_round(True)
        try:
            yield
        finally:
            self._arch.in_round(False)


def _lookups(batches: Sequence[Batch]) -> list[Lookups]:
    return [(batch.ids, batch.offsets, batch.bounds) for batch in batches]


class SortPrefetcher:
    """Has the look-ups of a batch at peers sorted before its step, which begins with them.

    A sort needs the ids alone: those of the next batch, if it is known, are sorted beside the step
    under way, else the step waits. Batches are known by their identity. What a step of a batch size
    reads lies in the same place every time, so that it can be captured.

    Args:
        arch: the tables.
        device: of the step.
    """

    def __init__(self, arch: SparseArch, device: torch.device) -> None:
        self._arch = arch
        self._beside = SideStream(device, priority=0)  # nobody waits for it
        self._places: dict[int, list[SortedLookups]] = {}  # by batch size
        self._next: tuple[Batch, list[SortedLookups]] | None = None

    def look_ahead(self, samples: int) -> int:
        """How many batches of so many samples behind the present one are of use."""
        return 1

    @contextmanager
    def step(self, batch: Batch, upcoming: Sequence[Batch]) -> Iterator[None]:
        """Around a training step; one with bags of ids goes without.

        Args:
            batch: of the step.
            upcoming: the batches that follow it, as far as they are known. They must stay as they
                are until their turn.
        """
        self._beside.join()
        known, self._next = self._next, None
        if batch.offsets is None:
            found = known[1] if known and known[0] is batch else self._arch.sort(batch.ids)
            self._arch.use(self._put(batch.size, found))
        begin = self._beside.mark()
        try:
            yield
        finally:
            self._arch.use([])
        coming = upcoming[0] if upcoming else None
        if coming is not None and coming.offsets is None:
            with self._beside.fork(behind=begin):
                self._next = coming, self._arch.sort(coming.ids)

    def _put(self, size: int, found: list[SortedLookups]) -> list[SortedLookups]:
        """Copy look-ups to where steps of this batch size read them."""
        if size not in self._places:
            self._places[size] = [lookups.like() for lookups in found]
        for to, lookups in zip(self._places[size], found, strict=True):
            for old, new in zip(to.tensors, lookups.tensors, strict=True):
                old.copy_(new)
        return self._places[size]

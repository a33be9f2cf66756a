"""Batches whose rows embeddings fetch ahead, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dlrm.data.batch import Batch
from dlrm.embeddings.sparse_arch import Lookups, SparseArch


class Rounds:
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

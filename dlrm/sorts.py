"""Look-ups at peers, sorted beside the step before theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dlrm.data.batch import Batch
from dlrm.embeddings.direct import Sorted
from dlrm.embeddings.sparse_arch import SparseArch
from dlrm.kernels.branch import Branch


class Sorts:
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
        self._beside = Branch(device, priority=0)  # nobody waits for it
        self._places: dict[int, list[Sorted]] = {}  # by batch size
        self._next: tuple[Batch, list[Sorted]] | None = None

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

    def _put(self, size: int, found: list[Sorted]) -> list[Sorted]:
        """Copy look-ups to where steps of this batch size read them."""
        if size not in self._places:
            self._places[size] = [lookups.like() for lookups in found]
        for to, lookups in zip(self._places[size], found, strict=True):
            for old, new in zip(to.tensors, lookups.tensors, strict=True):
                old.copy_(new)
        return self._places[size]

"""Batches whose look-ups are prepared ahead of their step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from dlrm.data.batch import Batch
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.lookup.peer import SortedLookups
from dlrm.kernels.streams import SideStream
from dlrm.sparse_arch.arch import SparseArch


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch, and what was done ahead of its step."""

    batch: Batch
    """On the device of the step."""
    context: LookupContext = NO_CONTEXT
    """What is known of its look-ups."""


class Prefetcher(ABC):
    """Prepares batches for the step that trains on them::

        for prepared in prefetcher(batches):
            step(prepared)

    It holds back as many batches as it prepares ahead, and is asked for the next one when the step
    of the last is under way.

    Attributes:
        samples_held: of the batches that were taken and not given out yet, over all processes.
    """

    def __init__(self) -> None:
        self.samples_held = 0

    def __call__(self, batches: Iterable[Batch]) -> Iterator[PreparedBatch]:
        """The batches in their order, which must stay as they are until their step."""
        self._reset()
        source = iter(batches)
        held = deque(islice(source, 1))
        held.extend(islice(source, self.look_ahead(held[0].size) if held else 0))
        while held:
            self.samples_held = sum(batch.total_size for batch in islice(held, 1, None))
            # Kept here: what follows may use its memory again, as soon as it is dropped.
            prepared = PreparedBatch(batch=held[0], context=self._prepare(list(held)))
            yield prepared
            held.popleft()
            if held:
                self._overlap(held[0])
            held.extend(islice(source, 1))

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Prepare a single batch, for which the step waits."""
        self._reset()
        return PreparedBatch(batch=batch, context=self._prepare([batch]))

    @abstractmethod
    def look_ahead(self, samples: int) -> int:
        """How many batches of so many samples behind the present one are of use."""

    @abstractmethod
    def _reset(self) -> None:
        """Forget the batches that were seen."""

    @abstractmethod
    def _prepare(self, batches: Sequence[Batch]) -> LookupContext:
        """Prepare the first batch; the others follow it."""

    @abstractmethod
    def _overlap(self, batch: Batch) -> None:
        """Prepare what can be of the next batch while the step of the last one is under way."""


class NoPrefetcher(Prefetcher):
    """For tables of which nothing can be prepared."""

    def look_ahead(self, samples: int) -> int:
        return 0

    def _reset(self) -> None:
        pass

    def _prepare(self, batches: Sequence[Batch]) -> LookupContext:
        return NO_CONTEXT

    def _overlap(self, batch: Batch) -> None:
        pass


class RowPrefetcher(Prefetcher):
    """Fetches the rows of tables in host memory, those of several batches at a time.

    Such a prefetch window has its rows fetched while the batches of the one before are computed.
    Rows of several batches lie nearer to one another than those of one, so that fewer pages of host
    memory are visited for each; what is found out about them is found out once. The first batch is
    a window by itself, for whose rows the step waits, and so is one before which something else
    moved the rows, such as saving.

    Args:
        arch: the tables; one prefetcher at a time may fetch their rows.
    """

    def __init__(self, arch: SparseArch) -> None:
        super().__init__()
        self._arch = arch
        self._reset()

    def look_ahead(self, samples: int) -> int:
        size = self._arch.window_size(samples * len(self._arch.num_embeddings))
        return max(2 * size - 1, 0)

    def _reset(self) -> None:
        self._left = 0  # batches left of the window under way
        self._coming = 0  # batches of the next window

    def _prepare(self, batches: Sequence[Batch]) -> LookupContext:
        if not self._arch.rows_ready:
            self._reset()
        if not self._left:
            fetched, self._coming = self._coming, 0  # for good if this window can't begin
            count = fetched or 1
            size = self._arch.window_size(batches[0].ids.numel())
            coming = batches[count : count + size]
            self._arch.begin_window([] if fetched else batches[:1], coming)
            self._left, self._coming = count, len(coming)
        self._left -= 1
        return LookupContext(rows_fetched=True)

    def _overlap(self, batch: Batch) -> None:
        """Nothing: the rows of a whole window are on their way."""


class SortPrefetcher(Prefetcher):
    """Sorts the look-ups of a batch at peers before its step, which begins with them.

    A sort needs the ids alone: those of the next batch are sorted next to the step under way, those
    of the first before it. Batches with bags of ids go without.

    Args:
        arch: the tables.
        device: of the step.
    """

    def __init__(self, arch: SparseArch, device: torch.device) -> None:
        super().__init__()
        self._arch = arch
        self._side = SideStream(device, priority=0)  # nobody waits for it
        self._reset()

    def look_ahead(self, samples: int) -> int:
        return 1

    def _reset(self) -> None:
        self._next: list[SortedLookups] | None = None

    def _prepare(self, batches: Sequence[Batch]) -> LookupContext:
        self._side.join()
        found, self._next = self._next, None
        context = LookupContext(lookups=self._sort(batches[0]) if found is None else found)
        self._begin = self._side.record_event()
        return context

    def _overlap(self, batch: Batch) -> None:
        with self._side.fork(after=self._begin):
            self._next = self._sort(batch)

    def _sort(self, batch: Batch) -> list[SortedLookups]:
        return [] if batch.offsets is not None else self._arch.sort(batch.ids)


def make_prefetcher(arch: SparseArch, device: torch.device, *, alone: bool) -> Prefetcher:
    """What can be prepared for these tables, by one process or by each of several."""
    if alone:  # what others update must not move
        return RowPrefetcher(arch) if arch.window_size(1) else NoPrefetcher()
    return SortPrefetcher(arch, device) if arch.at_peers else NoPrefetcher()

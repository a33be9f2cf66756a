"""Batches whose look-ups are prepared ahead of their step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from dlrm.data.batch import Batch
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.sparse_arch.arch import SparseArch
from dlrm.training.data_parallel import GradientReducer


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch, and what was prepared ahead of its step."""

    batch: Batch
    """On the device of the step."""
    context: LookupContext = NO_CONTEXT
    """The work that was done ahead for its look-ups."""


class Prefetcher:
    """Prepares batches for the step that trains on them: this class, for tables that need nothing::

        for prepared in prefetcher(batches):
            step(prepared)

    It reads as many batches ahead as it prepares. The next one is prepared while the step of the
    last one still runs on the GPU.
    """

    def __init__(self) -> None:
        self._held: deque[Batch] = deque()

    @property
    def samples_held(self) -> int:
        """Samples of the batches that were read but not yielded yet, over all processes."""
        return sum(batch.total_size for batch in islice(self._held, 1, None))

    def __call__(self, batches: Iterable[Batch]) -> Iterator[PreparedBatch]:
        """Yield the batches in order. They must not change until their step."""
        self._reset()
        source = iter(batches)
        held = self._held = deque(islice(source, 1))
        held.extend(islice(source, self.look_ahead(held[0].size) if held else 0))
        while held:
            # Held until the step has been launched: then its memory may be reused.
            prepared = PreparedBatch(batch=held[0], context=self._prepare(list(held)))
            yield prepared
            held.popleft()
            ahead = self.look_ahead(prepared.batch.size)  # may have changed
            held.extend(islice(source, max(ahead + 1 - len(held), 0)))

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Prepare a single batch, for which the step waits."""
        self._reset()
        return PreparedBatch(batch=batch, context=self._prepare([batch]))

    def look_ahead(self, samples: int) -> int:
        """Number of batches of ``samples`` samples to read ahead of the current one."""
        return 0

    def _reset(self) -> None:
        """Forget the batches so far."""

    def _prepare(self, batches: Sequence[Batch]) -> LookupContext:
        """Prepare the first batch; the others come next."""
        return NO_CONTEXT


class RowPrefetcher(Prefetcher):
    """Fetches the rows of tables in host memory, for several batches at a time.

    Consecutive batches form a prefetch window. Its rows are fetched while the batches of the window
    before are computed. A larger window visits fewer pages of host memory per row, and looks up a
    row in the cache index once. The first batch is a window by itself, and its step waits for its
    rows. So is a batch before which the rows were moved otherwise, as by saving.

    With several processes, an update changes the rows that any of them looks up, so the rows of all
    of these are fetched. Batches with bags of ids are then looked up without.

    Args:
        arch: the tables; only one prefetcher at a time may fetch their rows.
        reducer: of several processes.
    """

    def __init__(self, arch: SparseArch, reducer: GradientReducer | None = None) -> None:
        super().__init__()
        self._arch = arch
        self._reducer = reducer
        self._ahead = 0  # batches to read ahead, the same number on every process
        self._reset()

    def look_ahead(self, samples: int) -> int:
        lookups = samples * len(self._arch.num_embeddings)
        if self._reducer is None:
            if not self._left:
                self._ahead = 2 * self._arch.window_size(lookups) - 1
        elif not self._ahead:
            world = self._reducer.world
            self._ahead = min(world.from_all(2 * self._arch.window_size(lookups * world.size) - 1))
        return self._ahead

    def _reset(self) -> None:
        self._left = 0  # batches left of the current window
        self._coming = 0  # batches of the next window
        self._of_all: deque[Batch] = deque()  # batches read so far, with the ids of all processes

    def _prepare(self, batches: Sequence[Batch]) -> LookupContext:
        if self._reducer is not None:
            if any(batch.offsets is not None for batch in batches):
                self._reset()
                return NO_CONTEXT
            # Each batch once, as it is read: the processes may begin windows at different steps.
            self._of_all.extend(map(self._reducer.with_all_ids, batches[len(self._of_all) :]))
            batches = [*self._of_all]
            self._of_all.popleft()

        if not self._arch.rows_ready:
            self._left = self._coming = 0
        if not self._left:
            fetched, self._coming = self._coming, 0  # it stays 0 if begin_window raises
            count = fetched or 1
            size = self._arch.window_size(batches[0].ids.numel())
            coming = batches[count : count + size]
            self._arch.begin_window([] if fetched else batches[:1], coming)
            self._left, self._coming = count, len(coming)
        self._left -= 1
        return LookupContext(rows_fetched=True)


def make_prefetcher(arch: SparseArch, reducer: GradientReducer | None = None) -> Prefetcher:
    """The prefetcher for these tables; with a reducer, in each of several processes."""
    return RowPrefetcher(arch, reducer) if arch.window_size(1) else Prefetcher()

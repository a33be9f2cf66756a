"""Mixins for embeddings that have a cache of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from dlrm.embeddings.common.hot_rows import PopulateReport

Lookups = tuple[Tensor, Tensor | None]
"""The ids of a batch, and their offsets if it has bags."""


class CachesRows(ABC):
    """An embedding with a cache of rows."""

    @abstractmethod
    def cache_stats(self) -> Mapping[str, float]:
        """``hits`` and ``lookups`` of training batches so far; and ``steps``, ``bytes_in`` and
        ``bytes_out``, moved to the GPU and back, of a cache in front of host memory.
        """


class CachesHotRows(CachesRows):
    """An embedding that counts the ids of training batches, and keeps the most used rows apart."""

    @property
    def has_cache(self) -> bool:
        """Whether there is a cache; without one nothing is counted."""
        return True

    @abstractmethod
    def observe(self, tables: Tensor, ids: Tensor) -> None:
        """Count the ids of a training batch; arguments as of ``Embedding.vectors``."""

    @abstractmethod
    def cache_populate(self) -> PopulateReport | None:
        """Renew the cache, if there is one. The caller must reset the optimizer state of the
        report's ``reset``: rows of parameters that have changed owner.
        """


class PrefetchesRows(CachesRows):
    """An embedding that fetches the rows of coming training batches while others are computed.

    Consecutive batches make up a prefetch window, whose rows are fetched together.
    """

    @abstractmethod
    def window_size(self, lookups: int) -> int:
        """How many batches of so many look-ups make a good prefetch window; 0 without a cache."""

    @abstractmethod
    def begin_window(self, now: Sequence[Lookups], coming: Sequence[Lookups]) -> None:
        """Begin a prefetch window of training look-ups; those that follow are of its batches.

        Args:
            now: its batches, whose rows are fetched at once; empty if they were the ``coming``
                ones of the window before.
            coming: those of the next window: their rows are fetched next to the look-ups of this
                one. They must stay as they are until then.
        """

    @property
    @abstractmethod
    def rows_ready(self) -> bool:
        """Whether the rows of the window are still where :meth:`begin_window` has put them."""

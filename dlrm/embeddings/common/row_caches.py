"""Mixins for embeddings that have a cache of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from dlrm.embeddings.common.hot_rows import PopulateReport
from dlrm.utils.bags import Bags

Ids = Tensor | Bags
"""The ids of a batch: ``[F, B]``, or bags."""


class CachesRows(ABC):
    """An embedding with a cache of rows."""

    @abstractmethod
    def cache_stats(self) -> Mapping[str, float]:
        """``hits`` and ``lookups`` in training so far; for a cache of host memory also ``steps``,
        ``bytes_in`` (to the GPU) and ``bytes_out``.
        """


class CachesHotRows(CachesRows):
    """An embedding that counts the ids of training batches and caches the most used rows."""

    @property
    def has_cache(self) -> bool:
        """Whether there is a cache; without one nothing is counted."""
        return True

    @abstractmethod
    def observe(self, tables: Tensor, ids: Tensor) -> None:
        """Count the ids of a training batch; arguments as of ``Embedding.vectors``."""

    @abstractmethod
    def cache_populate(self) -> PopulateReport | None:
        """Renew the cache, if there is one. The caller must reset the optimizer state of the rows
        in the report's ``reset``, which have changed owner.
        """


class PrefetchesRows(CachesRows):
    """An embedding that fetches the rows of coming training batches while others are computed.

    The rows of several consecutive batches, a prefetch window, are fetched together.
    """

    @abstractmethod
    def window_size(self, lookups: int) -> int:
        """Number of batches of ``lookups`` look-ups in a prefetch window; 0 without a cache."""

    @abstractmethod
    def begin_window(self, now: Sequence[Ids], coming: Sequence[Ids]) -> None:
        """Begin a prefetch window: the training look-ups that follow are of its batches.

        Args:
            now: its batches, whose rows are fetched at once; empty if they were ``coming`` in the
                window before.
            coming: the batches of the next window, whose rows are fetched during this one. They
                must not change until then.
        """

    @property
    @abstractmethod
    def rows_ready(self) -> bool:
        """Whether the rows of the window are still where :meth:`begin_window` put them."""


class CountsIds(ABC):
    """An embedding whose rows belong to the ids that occur."""

    @abstractmethod
    def id_counts(self) -> Mapping[str, int]:
        """In training so far: look-ups of ids with a row as ``found``, of ids that wait for one as
        ``waiting``, of ids for which there was no room as ``not_placed``; ``inserted`` and
        ``evicted`` ids.
        """

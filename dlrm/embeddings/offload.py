"""Dense tables in host memory, with a cache of their most used rows on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.common.host_rows import HostRows


class Offload(HostRows):
    """Every row in full, in pinned host memory with its optimizer state; the GPU caches rows.

    The cache changes only the speed: results, checkpoints and initial rows are those of ``dense``.
    See :class:`dlrm.embeddings.common.host_rows.HostRows`.

    Once there is an optimizer, call ``cached.release()`` before you write to the weight in place;
    otherwise the write is lost for rows in the cache. ``load_state_dict`` and :meth:`load_dense`
    do so.

    Args:
        cache_rows: rows in the GPU's cache, over all tables with the same options; 0 for none.
            Default: cache_share of the rows.
        cache_share: share of the rows in the GPU's cache, if cache_rows is not set.
        half_life: number of prefetch windows in which the LFU score of an unused row halves.
    """

    grows = True
    of_speed = frozenset({"cache_rows", "cache_share", "half_life"})

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        cache_rows: int | None = None,
        cache_share: float = 0.1,
        half_life: float = 1000.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            num_embeddings,
            cache_rows=cache_rows,
            cache_share=cache_share,
            half_life=half_life,
            **common,
        )
        self.reset_parameters()

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        return weight

"""Hashed tables, the modulo trick: ids with equal remainders share a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.common.budget import Budget, max_rows_options
from dlrm.embeddings.shared_rows import SharedRows


class Hash(SharedRows):
    """``row = W[id % rows]``; a table of at most ``rows`` ids keeps one row per id.

    Ids are in order of falling frequency, so the ``rows`` most frequent ids never share a row with
    each other.

    Args:
        rows: the maximum number of rows per table.

    Reference:
        Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
    """

    by_frequency = True
    trains_from_fit = False

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rows: int = 10_000,
        **common: Unpack[Common],
    ) -> None:
        if rows < 1:
            raise ValueError(f"hash rows is {rows}; set --hash.rows to 1 or more")
        num_kept = [min(table, rows) for table in num_embeddings]
        super().__init__(num_embeddings, embedding_dim, num_kept, shared="modulo", **common)
        self.reset_parameters()

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        """For each row, the mean of the rows of the dense table that share it."""
        kept = self.num_kept[table]
        times, rest = divmod(len(weight), kept)
        dtype = torch.promote_types(weight.dtype, torch.float32)  # fp16 ends at 65,504
        total = weight[: times * kept].unflatten(0, (times, kept)).sum(0, dtype=dtype)
        total[:rest] += weight[times * kept :]
        count = total.new_full((kept, 1), times)
        count[:rest] += 1
        return total / count

    @classmethod
    def for_budget(cls, budget: Budget) -> list[dict[str, Any] | None]:
        """The largest ``rows``, the same for all tables, that fits."""
        return max_rows_options(budget, cls.kind())

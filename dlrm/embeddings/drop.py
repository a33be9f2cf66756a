"""Frequent ids only: the baseline that every compression must beat at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.common.budget import Budget, max_rows
from dlrm.embeddings.common.frequency_order import FrequencyOrder
from dlrm.embeddings.shared_rows import SharedRows, num_kept_of

KEEP = 10_000


class Drop(SharedRows):
    """The first ``keep`` ids of a table have a row each; all later ids share one more row.

    Ids are in order of falling frequency, so this is the usual frequency threshold.

    Args:
        keep: how many ids of a table have a row of their own. In code it may be a list with one
            number for each table.
        shared: whether the row of the later ids learns; otherwise it stays zero. It learns that its
            ids remain rare, which nobody knows of ids that are new after training.
    """

    per_table = frozenset({"keep"})
    budget_by_counts = True
    by_frequency = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        keep: int | list[int] = KEEP,
        shared: bool = True,
        **common: Unpack[Common],
    ) -> None:
        num_kept = num_kept_of(num_embeddings, keep, self.kind())
        super().__init__(num_embeddings, embedding_dim, num_kept, shared="overflow", **common)
        if not shared:
            self._without_shared_rows(num_kept, torch.tensor(num_kept).cumsum(0) - 1)
        self.reset_parameters()

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        return kept_and_mean(weight, self.num_kept[table])

    @classmethod
    def for_budget(cls, budget: Budget) -> list[dict[str, Any] | None]:
        """Keep the ids that are most frequent in all tables together.

        Without ``counts`` every table keeps the same number of ids.
        """
        num_embeddings = budget.num_embeddings
        keep = [max_rows(budget, cls.kind()) - 1] * len(num_embeddings)
        if budget.counts is not None:
            # A table that keeps all ids but the last needs no shared row: that row is the last's.
            others = [count[:-1] for count in budget.counts]
            number = budget.size // budget.row_bytes - len(num_embeddings)
            keep = FrequencyOrder(others).first(number)
        return [
            None if table <= own + 1 else {"keep": own}
            for table, own in zip(num_embeddings, keep, strict=True)
        ]


def kept_and_mean(weight: Tensor, rows: int) -> Tensor:
    """The rows of a dense table that are kept, and the mean of the others: ``rows`` in all."""
    own = rows - 1
    return torch.cat([weight[:own], weight[own:].mean(0, keepdim=True)])

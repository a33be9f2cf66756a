"""Frequent ids only: the baseline that every compression must beat at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.common.budget import even_rows
from dlrm.embeddings.shared_rows import SharedRows, kept_rows


class Drop(SharedRows):
    """The first ``keep`` ids of a table have a row each, all later ones share one more row.

    Ids stand in order of falling frequency, so this is the frequency threshold of common practice.

    Args:
        keep: how many ids of a table have a row of their own, one number or, in code, a list of
            one for each table.
    """

    per_table = frozenset({"keep"})
    budget_by_counts = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        keep: int | list[int] = 10_000,
        **common: Unpack[Common],
    ) -> None:
        kept = kept_rows(num_embeddings, keep, self.kind())
        super().__init__(num_embeddings, embedding_dim, kept, shared="last", **common)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Take over the kept rows of ``weights``, each ``[V, D]``, and the mean of the others."""
        self._check_dense(weights)
        for rows, weight in zip(self.weight.split(self.kept_rows), weights, strict=True):
            head, tail = weight.split([len(rows) - 1, len(weight) - len(rows) + 1])
            rows[:-1] = head
            rows[-1] = tail.mean(0)

    @classmethod
    def for_budget(
        cls,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        budget: int,
        *,
        counts: Sequence[Tensor] | None = None,
        weight_bytes: int = 4,
    ) -> list[dict[str, Any] | None]:
        """Keep the ids that occur most often in all tables together; see :class:`Embedding`.

        Without ``counts`` every table keeps the same number of ids.
        """
        row = weight_bytes * embedding_dim
        rows = even_rows(num_embeddings, row, budget, cls.kind())
        kept = [rows - 1] * len(num_embeddings)
        if counts is not None:
            # Where all others are kept, the shared row is the last id's own: it costs no other.
            others = [count[:-1] for count in counts]
            kept = most_frequent(others, budget // row - len(num_embeddings))
        return [
            None if table <= keep + 1 else {"keep": keep}
            for table, keep in zip(num_embeddings, kept, strict=True)
        ]


def most_frequent(counts: Sequence[Tensor], number: int) -> list[int]:
    """How many ids of each table are among the ``number`` most frequent of all tables.

    Args:
        counts: occurrences of each id, falling, one tensor ``[V]`` per table.
        number: ids to keep in all; of equal counts those of earlier tables.
    """
    sizes = [len(count) for count in counts]
    order = torch.cat(list(counts)).argsort(descending=True, stable=True)[:number]
    table = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return table[order].bincount(minlength=len(sizes)).tolist()

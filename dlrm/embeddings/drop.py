"""Frequent ids only: the baseline that every compression must beat at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding, kept_rows, row_offsets
from dlrm.embeddings.budget import even_rows
from dlrm.kernels.bags import lookup_bags
from dlrm.kernels.lookup import lookup, lookup_tables


class Drop(Embedding):
    """The first ``keep`` ids of a table have a row each, all later ones share one more row.

    Ids stand in order of falling frequency, so this is the frequency threshold of common practice.

    Args:
        keep: how many ids of a table have a row of their own, a number or one per table.
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
        super().__init__(num_embeddings, embedding_dim, **common)
        self.kept_rows = kept_rows(self.num_embeddings, keep, self.kind())
        self.weight = nn.Parameter(torch.empty(sum(self.kept_rows), embedding_dim))
        self.register_buffer("_last", torch.tensor(self.kept_rows) - 1, persistent=False)
        self.register_buffer("_offsets", row_offsets(self.kept_rows), persistent=False)
        self._last: Tensor  # [F]
        self._offsets: Tensor  # [F]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows anew, U(-1/sqrt(V), 1/sqrt(V)) for a table of V ids."""
        for table, rows in zip(self.num_embeddings, self.weight.split(self.kept_rows), strict=True):
            nn.init.uniform_(rows, -(table**-0.5), table**-0.5)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        rows = ids.minimum(self._last[tables]) + self._offsets[tables]
        return lookup(self.weight, rows, sparse=self.sparse)

    def lookup(self, ids: Tensor) -> Tensor:
        return lookup_tables(self.weight, self._offsets, ids, last=self._last, sparse=self.sparse)

    def lookup_bags(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if self.mode == "max" and not self.weight.is_cuda:
            return super().lookup_bags(ids, offsets, weights)  # embedding_bag's would be dense
        return lookup_bags(
            self.weight,
            self._offsets,
            ids,
            offsets,
            per_sample_weights=weights,
            mode=self.mode,
            last=self._last,
            sparse=self.sparse,
        )

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Take over the kept rows of ``weights``, each ``[V, D]``, and the mean of the others."""
        self._check_dense(weights)
        for rows, weight in zip(self.weight.split(self.kept_rows), weights, strict=True):
            head, tail = weight.split([len(rows) - 1, len(weight) - len(rows) + 1])
            rows[:-1] = head
            rows[-1] = tail.mean(0)

    def footprint(self) -> list[dict[str, int]]:
        row = self.embedding_dim * self.weight.element_size()
        return [{"weights": rows * row} for rows in self.kept_rows]

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
            kept = most_frequent(counts, budget // row - len(num_embeddings))
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

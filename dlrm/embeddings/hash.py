"""Hashed tables, the modulo trick: ids share the rows that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding, row_offsets
from dlrm.embeddings.budget import even_rows
from dlrm.kernels.bags import lookup_bags
from dlrm.kernels.lookup import lookup, lookup_tables


class Hash(Embedding):
    """``row = W[id % rows]``; a table of at most ``rows`` rows keeps a row per id.

    Since ids stand in order of falling frequency, the ``rows`` most frequent ids never share a row
    among themselves.

    Args:
        rows: the most rows that a table has.

    Reference:
        Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rows: int = 10_000,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if rows < 1:
            raise ValueError(f"hash rows is {rows}; set --hash.rows to 1 or more")
        self.kept_rows = tuple(min(table, rows) for table in self.num_embeddings)
        self.weight = nn.Parameter(torch.empty(sum(self.kept_rows), embedding_dim))
        self.register_buffer("_rows", torch.tensor(self.kept_rows), persistent=False)
        self.register_buffer("_offsets", row_offsets(self.kept_rows), persistent=False)
        self._rows: Tensor  # [F]
        self._offsets: Tensor  # [F]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows anew, U(-1/sqrt(V), 1/sqrt(V)) for a table of V ids."""
        for table, rows in zip(self.num_embeddings, self.weight.split(self.kept_rows), strict=True):
            nn.init.uniform_(rows, -(table**-0.5), table**-0.5)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        rows = ids % self._rows[tables] + self._offsets[tables]
        return lookup(self.weight, rows, sparse=self.sparse)

    def lookup(self, ids: Tensor) -> Tensor:
        return lookup_tables(self.weight, self._offsets, ids, modulo=self._rows, sparse=self.sparse)

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
            modulo=self._rows,
            sparse=self.sparse,
        )

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Set each row to the mean of the rows of ``weights``, each ``[V, D]``, that share it."""
        self._check_dense(weights)
        for rows, weight in zip(self.weight.split(self.kept_rows), weights, strict=True):
            rounds, rest = divmod(len(weight), len(rows))
            total = weight[: rounds * len(rows)].unflatten(0, (rounds, len(rows))).sum(0)
            total[:rest] += weight[rounds * len(rows) :]
            count = total.new_full((len(rows), 1), rounds)
            count[:rest] += 1
            rows.copy_(total / count)

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
        """The largest ``rows``, the same for all tables, that fits; see :class:`Embedding`."""
        rows = even_rows(num_embeddings, weight_bytes * embedding_dim, budget, cls.kind())
        return [None if table <= rows else {"rows": rows} for table in num_embeddings]

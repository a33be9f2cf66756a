"""Dense tables: one row of weights per id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding, row_offsets
from dlrm.kernels.bags import lookup_bags
from dlrm.kernels.lookup import lookup, lookup_tables


class Dense(Embedding):
    """Every row in full, the tables behind one another in one weight ``[sum(V), D]``.

    Rows start as U(-1/sqrt(V), 1/sqrt(V)), as in Naumov et al., "Deep Learning Recommendation
    Model for Personalization and Recommendation Systems", arXiv 1906.00091.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        self.weight = nn.Parameter(torch.empty(sum(self.num_embeddings), embedding_dim))
        self.register_buffer("_offsets", row_offsets(self.num_embeddings), persistent=False)
        self._offsets: Tensor  # [F]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows anew."""
        for rows in self.weight.split(self.num_embeddings):
            nn.init.uniform_(rows, -(len(rows) ** -0.5), len(rows) ** -0.5)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        return lookup(self.weight, ids + self._offsets[tables], sparse=self.sparse)

    def lookup(self, ids: Tensor) -> Tensor:
        return lookup_tables(self.weight, self._offsets, ids, sparse=self.sparse)

    def lookup_bags(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if self.mode == "max" and not self.weight.is_cuda:
            # PyTorch's embedding_bag would make a dense gradient of the table.
            return super().lookup_bags(ids, offsets, weights)
        return lookup_bags(
            self.weight,
            self._offsets,
            ids,
            offsets,
            per_sample_weights=weights,
            mode=self.mode,
            sparse=self.sparse,
        )

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Take over the rows of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        for rows, weight in zip(self.weight.split(self.num_embeddings), weights, strict=True):
            rows.copy_(weight)

    def footprint(self) -> list[dict[str, int]]:
        row = self.embedding_dim * self.weight.element_size()
        return [{"weights": rows * row} for rows in self.num_embeddings]

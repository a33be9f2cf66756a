"""Dense tables: one row of weights per id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.shared_rows import SharedRows


class Dense(SharedRows):
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
        super().__init__(num_embeddings, embedding_dim, num_embeddings, **common)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Take over the rows of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        for rows, weight in zip(self.weight.split(self.kept_rows), weights, strict=True):
            rows.copy_(weight)

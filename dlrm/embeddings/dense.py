"""Dense tables: one row of weights per id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.shared_rows import SharedRows


class Dense(SharedRows):
    """Every row in full: all tables, one after another, in one weight ``[sum(V), D]``.

    Rows start as U(-0.1/sqrt(V), 0.1/sqrt(V)), a tenth of what they start as in Naumov et al.,
    "Deep Learning Recommendation Model for Personalization and Recommendation Systems", arXiv
    1906.00091; see :mod:`dlrm.embeddings.common.initial_rows`.
    """

    grows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, num_embeddings, **common)
        self.reset_parameters()

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        return weight

"""Hashed tables, the modulo trick: ids share the rows that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from dlrm.embeddings.base import Common
from dlrm.embeddings.common.budget import even_rows
from dlrm.embeddings.shared_rows import SharedRows


class Hash(SharedRows):
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
        if rows < 1:
            raise ValueError(f"hash rows is {rows}; set --hash.rows to 1 or more")
        kept = [min(table, rows) for table in num_embeddings]
        super().__init__(num_embeddings, embedding_dim, kept, shared="modulo", **common)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Set each row to the mean of the rows of ``weights``, each ``[V, D]``, that share it."""
        self._check_dense(weights)
        for rows, weight in zip(self.weight.split(self.kept_rows), weights, strict=True):
            rounds, rest = divmod(len(weight), len(rows))
            wide = torch.promote_types(weight.dtype, torch.float32)  # fp16 ends at 65,504
            whole = weight[: rounds * len(rows)].unflatten(0, (rounds, len(rows)))
            total = whole.sum(0, dtype=wide)
            total[:rest] += weight[rounds * len(rows) :]
            count = total.new_full((len(rows), 1), rounds)
            count[:rest] += 1
            rows.copy_(total / count)

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

"""CAFE: hot ids have rows of their own; all others share pieces of hashed rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, gcd
from typing import Any, Unpack

from torch import Tensor

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.common.dynamic_budget import CHANCE, common_sizes
from dlrm.embeddings.common.dynamic_sizes import LOAD
from dlrm.embeddings.dynamic import Dynamic

HOT = 0.4  # of the rows


class Cafe(Dynamic):
    """The hottest ids have their own rows, all others share pieces of rows as in ``robe``.

    Which ids are hot is learned during training, so ids may be in any order. These are tables as of
    ``dynamic`` that share all rows: an id that is used takes the row of the id that was used least,
    with a low probability in each step, so that the many rare ids do not drive out the frequent
    ones. (In the paper, scores are the sums of the norms of an id's gradients, and admission
    follows from them.) It starts from the row that it shared before, with the optimizer state.

    Args:
        rows: rows of a table, those of hot ids and shared ones; tables share the sum of theirs.
        hot: share of the rows that hot ids have. Each takes 13 bytes more for the index.
        pieces: how many pieces a shared row has, each of them shared with other ids; a divisor of
            the embedding dim, by default 4 if possible.
        half_life: steps in which the frequency of an unused id halves.

    Reference:
        Zhang et al., "CAFE: Towards Compact, Adaptive, and Fast Embedding for Large-scale
        Recommendation Models", SIGMOD 2024, arXiv 2312.03256. Admission: Ben Basat et al.,
        "Randomized Admission Policy for Efficient Top-k and Frequency Estimation", INFOCOM 2017.
    """

    per_table = of_speed = frozenset()
    trains_from_fit = False
    any_ids = budget_by_counts = False

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rows: int = 10_000,
        hot: float = HOT,
        pieces: int | None = None,
        half_life: int = 1000,
        **common: Unpack[Common],
    ) -> None:
        if rows < 1:
            raise ValueError(f"cafe rows is {rows}; set --cafe.rows to 1 or more")
        if not 0 <= hot <= 1:
            raise ValueError(f"cafe hot is {hot}, it must be between 0 and 1; set --cafe.hot")
        of_ids = round(hot * rows)
        super().__init__(
            num_embeddings,
            embedding_dim,
            rows=[max(1, min(ceil(known / LOAD), of_ids)) for known in num_embeddings],
            shared=[max(1, min(known, rows - of_ids)) for known in num_embeddings],
            half_life=half_life,
            chance=CHANCE,
            pieces=pieces or gcd(4, embedding_dim),
            **common,
        )

    def _check(self, tables: Tensor, ids: Tensor) -> None:
        Embedding._check(self, tables, ids)

    @classmethod
    def for_budget(  # type: ignore[override]
        cls, budget: Budget, *, hot: float | None = None, pieces: int | None = None
    ) -> list[dict[str, Any] | None]:
        """The largest ``rows``, the same for all tables, that fits; half of the bytes for ids."""
        pieces = pieces or gcd(4, budget.embedding_dim)
        sizes = common_sizes(budget, pieces, cls.kind())
        return [own and {"rows": sum(own), "hot": own[0] / sum(own)} for own in sizes]

"""Sizes of tensor-train tables, and how a budget of bytes is spent on them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from dlrm.embeddings.common.budget import Budget, highest_level
from dlrm.embeddings.common.factorization import factorize_rows
from dlrm.embeddings.common.frequency_order import FrequencyOrder

TRAIN_SHARE = 0.25  # of a budget: what trains of the rare rows take; the rest is exact rows


def slice_widths(q: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Weights of one slice of each core, ``r_{k-1} q_k r_k``."""
    return [left * factor * right for factor, (left, right) in zip(q, pairwise(ranks), strict=True)]


def tt_weights(p: Sequence[int], q: Sequence[int], ranks: Sequence[int]) -> int:
    """Weights of one table."""
    return sum(rows * width for rows, width in zip(p, slice_widths(q, ranks), strict=True))


def clip_ranks(rank: int, p: Sequence[Sequence[int]], q: Sequence[int]) -> tuple[int, ...]:
    """Ranks ``(1, r_1, .., 1)``: ``rank``, or less where no table can use as much.

    Rank ``k`` joins a matrix of ``prod(p[:k]) prod(q[:k])`` rows and ``prod(p[k:]) prod(q[k:])``
    columns; a larger rank than the smaller of the two adds weights and no freedom.
    """
    largest = [
        max(min(prod(t[:k]) * prod(q[:k]), prod(t[k:]) * prod(q[k:])) for t in p)
        for k in range(1, len(q))
    ]
    return (1, *(min(rank, limit) for limit in largest), 1)


@dataclass(frozen=True)
class Plan:
    """Tables of which the first rows are exact and the others a train."""

    keep: Sequence[int]
    """Exact rows of each table."""
    compressed: Sequence[int]
    """The tables for which this takes less than dense rows."""
    rank: int
    """The highest rank of the trains."""
    size: int
    """Bytes of all tables."""


class Planner:
    """Divides bytes between exact rows and trains.

    Args:
        budget: the tables, and how often each id occurs; by default as often as by Zipf's law.
        size: bytes for exact rows and trains.
        d: number of cores.
        q: factors of the dim.
        p: factors of the rows, if they are given.
    """

    def __init__(
        self, budget: Budget, size: int, d: int, q: Sequence[int], p: Sequence[int] | None
    ) -> None:
        self._budget, self._size, self._d, self._q, self._p = budget, size, d, q, p
        self._weight = 4 if budget.dtype == "fp32" else 2  # bytes of one in a core
        counts = budget.counts
        if counts is None:
            counts = [1 / torch.arange(1, rows + 1) for rows in budget.num_embeddings]
        # A table that keeps all ids but the last is dense.
        self._order = FrequencyOrder([count[:-1] for count in counts])

    def plan(self, keep: Sequence[int], rank: int) -> Plan:
        """The plan of some exact rows and a rank."""
        row, weight = self._budget.row_bytes, self._weight
        dense = [rows * row for rows in self._budget.num_embeddings]
        tails = [
            tuple(self._p) if self._p else factorize_rows(rows - own, self._d)
            for rows, own in zip(self._budget.num_embeddings, keep, strict=True)
        ]
        exact = [row * (own + 1) if any(keep) else 0 for own in keep]

        # Tables that a train does not make smaller are left out; then ranks may be shorter.
        tables = [t for t, own in enumerate(keep) if own + 1 < self._budget.num_embeddings[t]]
        sizes = list(dense)
        while tables:
            ranks = clip_ranks(rank, [tails[t] for t in tables], self._q)
            for t in tables:
                sizes[t] = exact[t] + weight * tt_weights(tails[t], self._q, ranks)
            smaller = [t for t in tables if sizes[t] < dense[t]]
            if smaller == tables:
                return Plan(keep, tables, max(ranks), sum(sizes))
            for t in set(tables) - set(smaller):
                sizes[t] = dense[t]
            tables = smaller
        return Plan(keep, [], 1, sum(dense))

    def fit(self, keep: Sequence[int]) -> Plan:
        """The highest rank next to some exact rows.

        Raises:
            ValueError: not even trains of rank 1 fit.
        """
        highest = self._budget.embedding_dim * max(self._budget.num_embeddings)
        level = highest_level(lambda r: self.plan(keep, r + 1).size, highest, self._size, "tt")
        return self.plan(keep, level + 1)

    def best(self, share: float = TRAIN_SHARE) -> Plan:
        """The plan that spends ``share`` of the bytes on trains: of all ids the most frequent have
        exact rows, and the rank is the highest that fits.

        Raises:
            ValueError: as :meth:`fit`.
        """
        row, tables = self._budget.row_bytes, len(self._budget.num_embeddings)
        number = max(int((1 - share) * self._size) // row - tables, 0)
        while number and self._with(number, 1).size > self._size:
            number = number * 3 // 4
        rank = self.fit(self._order.first(number)).rank
        if number:  # a higher rank would not fit: more exact rows take what is left
            levels = range(number, self._size // row + 1)
            fit = bisect_right(levels, self._size, key=lambda n: self._with(n, rank).size)
            number = levels[max(fit - 1, 0)]
        return self._with(number, rank)

    def next_frequent(self, plan: Plan, number: int) -> list[int]:
        """How many ids of each table are among the ``number`` most frequent ones in the trains."""

        def rest(most: int) -> list[int]:
            frequent = self._order.first(most)
            own = [max(ids - exact, 0) for ids, exact in zip(frequent, plan.keep, strict=True)]
            return [ids if table in plan.compressed else 0 for table, ids in enumerate(own)]

        lengths = range(len(self._order) + 1)
        return rest(bisect_right(lengths, number, key=lambda most: sum(rest(most))) - 1)

    def _with(self, number: int, rank: int) -> Plan:
        return self.plan(self._order.first(number), rank)

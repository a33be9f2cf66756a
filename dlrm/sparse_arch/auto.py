"""``--emb auto``: the kind and size of each table that make the best use of a budget of bytes.

How much a table loses by compression follows from how often its ids occur. An id that occurs ``n``
times in training has a fraction ``n / (n + RARE)`` of its effect learned, and is used ``n`` times:
the utility of a row of its own is ``n^2 / (n + RARE)``. A row of ``d`` weights, projected to the
embedding dim by the matrix of its table, keeps all of that except a part that falls as ``1 / d``.
All bytes have the same price. At that price each table gets the number of rows and the row length
with the highest utility minus price, and the price is such that all tables together use up the
budget: no byte would be of more use in another table.

The rare ids of a table share a row. A table that keeps all rows at full length is ``dense``, one
that keeps some of them is ``drop``, and one with shorter rows is ``block``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RARE = 10.0  # occurrences at which half of the effect of an id on the label is known
FIRST = 0.8  # utility of rows with one weight, relative to rows of any length
PRICES = (1e-9, 1e9)  # bounds of the price of a byte, in occurrences
STEPS = 80  # of the bisection


class Table:
    """The options of one table: the length of its rows and how many ids keep a row of their own.

    Args:
        rows: number of ids V.
        embedding_dim: length D of a full row.
        count: occurrences of each id, ``[V]``, in falling order except for single ids.
        weight_bytes: bytes of a weight.
    """

    def __init__(self, rows: int, embedding_dim: int, count: Tensor, weight_bytes: int = 4) -> None:
        self.rows, self.embedding_dim, self.weight_bytes = rows, embedding_dim, weight_bytes
        utility = count.double().square() / (count + RARE)
        self._total = torch.cat([utility.new_zeros(1), utility.cumsum(0)])  # of the first ids
        self._rising = -utility.flip(0).cummax(0).values.flip(0)
        shorter = (2**k for k in range(embedding_dim.bit_length()))
        self.dims = [dim for dim in shorter if dim < embedding_dim] + [embedding_dim]

    def size(self, dim: int, keep: int) -> int:
        """Bytes of the table."""
        matrix = dim * self.embedding_dim if dim < self.embedding_dim else 0
        return self.weight_bytes * (dim * min(keep + 1, self.rows) + matrix)

    def utility(self, dim: int, keep: int) -> float:
        """How much of the effect of the ids ``keep`` rows of length ``dim`` preserve."""
        return self._quality(dim) * float(self._total[keep])

    def best_at_price(self, price: float) -> tuple[int, int]:
        """The ``dim`` and ``keep`` with the highest utility minus price."""
        options = []
        for dim in self.dims:
            least = self.weight_bytes * dim * price / self._quality(dim)
            keep = int(torch.searchsorted(self._rising, -least))
            if keep >= self.rows - 1:
                keep = self.rows  # a single id needs no shared row
            gain = self.utility(dim, keep) - price * self.size(dim, keep)
            options.append((gain, dim, keep))
        _, dim, keep = max(options)
        return dim, keep

    def best_within(self, size: int) -> tuple[int, int]:
        """The ``dim`` and ``keep`` with the highest utility that fit into ``size`` bytes."""
        options = []
        for dim in self.dims:
            keep = (size - self.size(dim, 0)) // (self.weight_bytes * dim)
            if keep >= 0:
                keep = self.rows if keep >= self.rows - 1 else keep
                options.append((self.utility(dim, keep), dim, keep))
        _, dim, keep = max(options)
        return dim, keep

    def kind_and_options(self, dim: int, keep: int) -> tuple[str, dict[str, Any]]:
        """The embedding kind of such a table, and its options."""
        if dim < self.embedding_dim:
            return "block", {"dim": dim, "keep": keep}
        return ("drop", {"keep": keep}) if keep < self.rows - 1 else ("dense", {})

    def _quality(self, dim: int) -> float:
        """The utility of a row of ``dim`` weights relative to a full row."""
        return (1 - (1 - FIRST) / dim) / (1 - (1 - FIRST) / self.embedding_dim)


def choose_tables(
    num_embeddings: Sequence[int],
    embedding_dim: int,
    budget: int,
    counts: Sequence[Tensor],
    *,
    weight_bytes: int = 4,
) -> list[tuple[str, dict[str, Any]]]:
    """Choose the kind and the options of every table.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        budget: bytes for all tables together.
        counts: how often each id of each table occurs; ids are in order of falling frequency.
        weight_bytes: 4 for tables in fp32, 2 in bf16.

    Raises:
        ValueError: the budget is too small for one row per table.
    """
    tables = [
        Table(rows, embedding_dim, count, weight_bytes)
        for rows, count in zip(num_embeddings, counts, strict=True)
    ]

    def total(choice: Sequence[tuple[int, int]]) -> int:
        return sum(table.size(*own) for table, own in zip(tables, choice, strict=True))

    low, high = PRICES
    for _ in range(STEPS):
        price = (low * high) ** 0.5
        fits = total([table.best_at_price(price) for table in tables]) <= budget
        low, high = (low, price) if fits else (price, high)
    choice = [table.best_at_price(high) for table in tables]
    left = budget - total(choice)
    if left < 0:
        raise ValueError(
            f"a budget of {budget} bytes is too small for --emb auto: {len(tables)} tables need at "
            f"least {total(choice)} bytes; raise the budget"
        )
    # At any price, either all ids with equal counts keep a row or none, and from one price to the
    # next a table may change its row length. So bytes are left over. They go to the table with the
    # largest gain, again and again.
    while True:
        gains = []
        for index, (table, own) in enumerate(zip(tables, choice, strict=True)):
            more = table.best_within(table.size(*own) + left)
            gains.append((table.utility(*more) - table.utility(*own), index, more))
        gain, index, more = max(gains)
        if gain <= 0:
            break
        left += tables[index].size(*choice[index]) - tables[index].size(*more)
        choice[index] = more
    return [table.kind_and_options(*own) for table, own in zip(tables, choice, strict=True)]

"""``--emb auto``: the kind and the size of each table that make the most of a budget of bytes.

What a table loses by compression follows from how often its ids occur. The effect of an id that
occurs ``n`` times in training is known to a share of ``n / (n + RARE)``, and it is asked for ``n``
times: a row of its own is worth ``n^2 / (n + RARE)``. Of that, a row of ``d`` weights, widened to
the embedding dim by the table's matrix, keeps all but a part that falls as ``1 / d``. Every table
then takes the number of rows and their length whose worth less price is the highest, at the one
price of a byte at which all tables together use up the budget: no byte would be worth more
elsewhere.

The rest of a table's ids, the rare ones, share a row. A table that keeps all rows at full length is
of the dense kind, one that keeps some at full length is ``drop``, one of shorter rows is ``block``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RARE = 10.0  # occurrences at which half of what an id says about the label is known
FIRST = 0.8  # of what rows of any length can say, the share that rows of one weight do
PRICES = (1e-9, 1e9)  # between which the price of a byte is looked for, in occurrences
STEPS = 80  # of the bisection


class Table:
    """What one table has to offer at a price.

    Args:
        rows: number of ids V.
        embedding_dim: length D of a full row.
        count: occurrences of each id, ``[V]``, in falling order but for single ids.
        weight_bytes: bytes of a weight.
    """

    def __init__(self, rows: int, embedding_dim: int, count: Tensor, weight_bytes: int = 4) -> None:
        self.rows, self.embedding_dim, self.weight_bytes = rows, embedding_dim, weight_bytes
        worth = count.double().square() / (count + RARE)
        self._worth = torch.cat([worth.new_zeros(1), worth.cumsum(0)])
        self._rising = -worth.flip(0).cummax(0).values.flip(0)
        shorter = (2**k for k in range(embedding_dim.bit_length()))
        self.dims = [dim for dim in shorter if dim < embedding_dim] + [embedding_dim]

    def choose(self, price: float) -> tuple[int, int]:
        """The length of the rows and the number of ids with one of their own, at a price."""
        options = []
        for dim in self.dims:
            least = self.weight_bytes * dim * price / self._kept(dim)
            keep = int(torch.searchsorted(self._rising, -least))
            if keep >= self.rows - 1:
                keep = self.rows  # the shared row is of no use to a single id
            gain = self.worth(dim, keep) - price * self.size(dim, keep)
            options.append((gain, dim, keep))
        _, dim, keep = max(options)
        return dim, keep

    def size(self, dim: int, keep: int) -> int:
        """Bytes of the table."""
        matrix = dim * self.embedding_dim if dim < self.embedding_dim else 0
        return self.weight_bytes * (dim * min(keep + 1, self.rows) + matrix)

    def worth(self, dim: int, keep: int) -> float:
        """What so many rows of this length keep of the effect of the ids."""
        return self._kept(dim) * float(self._worth[keep])

    def fill(self, room: int) -> tuple[int, int]:
        """The length and the number of rows that are worth the most in so many bytes."""
        options = []
        for dim in self.dims:
            keep = (room - self.size(dim, 0)) // (self.weight_bytes * dim)
            if keep >= 0:
                keep = self.rows if keep >= self.rows - 1 else keep
                options.append((self.worth(dim, keep), dim, keep))
        _, dim, keep = max(options)
        return dim, keep

    def plan(self, dim: int, keep: int) -> tuple[str, dict[str, Any]]:
        """Kind and options."""
        if dim < self.embedding_dim:
            return "block", {"dim": dim, "keep": keep}
        return ("drop", {"keep": keep}) if keep < self.rows - 1 else ("dense", {})

    def _kept(self, dim: int) -> float:
        """The share of the worth of a row that ``dim`` weights keep, relative to a full row."""
        return (1 - (1 - FIRST) / dim) / (1 - (1 - FIRST) / self.embedding_dim)


def choose_tables(
    num_embeddings: Sequence[int],
    embedding_dim: int,
    budget: int,
    counts: Sequence[Tensor],
    *,
    weight_bytes: int = 4,
) -> list[tuple[str, dict[str, Any]]]:
    """Kind and options of every table.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        budget: bytes for all tables together.
        counts: how often each id of each table occurs; ids stand in order of falling frequency.
        weight_bytes: 4 for tables in fp32, 2 in bf16.

    Raises:
        ValueError: the budget is too small for a row per table.
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
        fits = total([table.choose(price) for table in tables]) <= budget
        low, high = (low, price) if fits else (price, high)
    choice = [table.choose(high) for table in tables]
    left = budget - total(choice)
    if left < 0:
        raise ValueError(
            f"a budget of {budget} bytes is too small for --emb auto: {len(tables)} tables need at "
            f"least {total(choice)} bytes; raise the budget"
        )
    # At any price ids of equal counts come all or none, and a table may change its length from one
    # price to the next: what is left goes to the table that makes the most of it, then to others.
    while True:
        gains = []
        for index, (table, own) in enumerate(zip(tables, choice, strict=True)):
            more = table.fill(table.size(*own) + left)
            gains.append((table.worth(*more) - table.worth(*own), index, more))
        gain, index, more = max(gains)
        if gain <= 0:
            break
        left += tables[index].size(*choice[index]) - tables[index].size(*more)
        choice[index] = more
    return [table.plan(*own) for table, own in zip(tables, choice, strict=True)]

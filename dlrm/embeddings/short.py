"""Short rows: a few weights followed by zeros, with the rows of several ids stored as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, allocate
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.shared_rows import SharedRows, check_row_dim, num_kept_of
from dlrm.kernels import use_triton
from dlrm.kernels.lookup.pool import lookup_bags, pool_bags
from dlrm.kernels.lookup.tables import TableRows, rows_of_torch
from dlrm.utils.bags import Bags


class Short(SharedRows):
    """A row of ``dim`` weights, and zeros up to the embedding dim.

    Nothing widens the rows, as a matrix does in ``block``: the other layers learn what the first
    places of a vector mean. So a table costs no more than its rows. ``D // dim`` ids, neighbours in
    the order of frequency, are stored in one row of the weight, which saves scales of packed rows:
    of ``dim`` 1 in int8 an id takes 18 bytes / 16 at ``D`` 16, and not 4 bytes.

    With ``keep``, only the first ids of a table have a row each, and all later ids share one more;
    ids are in order of falling frequency. The shared row is stored first.

    Where each weight moves as far in a step as those of longer rows, as with Adagrad and Adam, a
    vector of fewer weights learns less. A ``scale`` above 1 makes up for that.

    Optimizer rules see the stored rows: row-wise Adagrad has one accumulator for all ids of a
    stored row, and Adam's momentum moves them all when one is used.

    Args:
        dim: weights of a row.
        keep: how many ids of a table have a row of their own; by default all. In code it may be a
            list with one number for each table.
        scale: factor on the weights of a row. A budget sets it to ``sqrt(D / dim)``.

    Raises:
        ValueError: ``dim`` is out of range, or ``scale`` is not positive.
    """

    per_table = frozenset({"keep"})
    by_frequency = True
    trains_from_fit = False

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        dim: int = 4,
        keep: int | list[int] | None = None,
        scale: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        check_row_dim(dim, embedding_dim, self.kind())
        if not scale > 0:
            raise ValueError(f"short scale is {scale}; set --short.scale to a number above 0")
        num_short = num_kept_of(num_embeddings, keep, self.kind())
        per_row = embedding_dim // dim
        stored = [-(-rows // per_row) for rows in num_short]
        super().__init__(num_embeddings, embedding_dim, stored, row_dim=per_row * dim, **common)
        self.dim, self.per_row, self.scale = dim, per_row, scale
        self.num_short = num_short
        self.register_buffer("_num_short", torch.tensor(num_short), persistent=False)
        self._num_short: Tensor  # [F], rows of each table, the shared one included
        self.reset_parameters()

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows, place = place_of(ids, self._num_short[tables], self.per_row)
        stored = super().vectors(tables, rows, context)
        return widen(stored, place, self.scale, self.dim, self.embedding_dim)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows, place = place_of(ids, self._num_short[:, None], self.per_row)
        stored = super().lookup(rows, context)
        return widen(stored, place.t(), self.scale, self.dim, self.embedding_dim)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        if not use_triton(self.weight, None):
            return Embedding.lookup_bags(self, bags.filled() if context.padded else bags, context)
        tables = bags.tables(self.num_tables)
        rows, place = place_of(bags.ids, self._num_short[tables], self.per_row)
        rows = rows_of_torch(rows, tables, self._table_rows)

        # The stored row of each id as a bag of one, so that the backward pass may update it; what
        # lies beyond the last bag is in none.
        ones = torch.arange(rows.numel() + 1, device=rows.device).minimum(bags.offsets[-1])
        begin, of_rows = TableRows(self._offsets[:1]), replace(context, dtype=None)
        stored = lookup_bags(
            self.weight, begin, Bags(rows, ones), sparse=self.sparse, context=of_rows
        ).squeeze(1)

        short = widen(stored, place, self.scale, self.dim, self.dim)
        pooled = pool_bags(short, bags, self.num_tables, mode=self.mode, dtype=context.dtype)
        return functional.pad(pooled, (0, self.embedding_dim - self.dim))

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        """The first ``dim`` weights of the rows that are kept, and the mean of the others.

        The other weights are lost: ``block`` fits trained tables better.
        """
        own, kept = self.num_short[table] - 1, self.num_kept[table]
        weight = weight[:, : self.dim] / self.scale
        short = torch.cat([weight[own:].mean(0, keepdim=True), weight[:own]])
        short = functional.pad(short, (0, 0, 0, kept * self.per_row - len(short)))
        return short.view(kept, -1)

    @classmethod
    def for_budget(cls, budget: Budget) -> list[dict[str, Any] | None]:
        """For each table the longest rows that fit; all tables get an equal number of bytes.

        A row keeps at least one weight, so no budget below ``1 / D`` of the dense tables fits.
        """
        embedding_dim = budget.embedding_dim

        def size(rows: int, dim: int) -> int:
            return -(-rows // (embedding_dim // dim)) * budget.row_bytes

        def longest(rows: int, room: int) -> int:
            dims = range(1, embedding_dim + 1)
            return max(1, bisect_right(dims, room, key=lambda dim: size(rows, dim)))

        options = allocate(budget.num_embeddings, longest, size, budget.size, cls.kind())
        return [
            None if dim == embedding_dim else {"dim": dim, "scale": scale_of(dim, embedding_dim)}
            for dim in options
        ]


def scale_of(dim: int, embedding_dim: int) -> float:
    """The scale of rows of ``dim`` weights that are trained."""
    return round((embedding_dim / dim) ** 0.5, 2)


def place_of(ids: Tensor, count: Tensor, per_row: int) -> tuple[Tensor, Tensor]:
    """The stored row of ids, and the place in it.

    Args:
        ids: any integer tensor ``[...]``.
        count: short rows of the table of each, which broadcasts against ``ids``; the ids from
            ``count - 1`` on share the first one.
        per_row: short rows of a stored one.
    """
    index = (ids.minimum(count - 1) + 1) % count
    return index // per_row, index % per_row


def widen(stored: Tensor, place: Tensor, scale: float, dim: int, embedding_dim: int) -> Tensor:
    """The ``dim`` weights at a ``place [...]`` of stored rows ``[..., k * dim]`` times ``scale``,
    with zeros up to the embedding dim.
    """
    parts = stored.unflatten(-1, (-1, dim))
    index = place[..., None, None].expand(*place.shape, 1, dim)
    short = parts.gather(-2, index).squeeze(-2)
    short = short if scale == 1 else short * scale
    return functional.pad(short, (0, embedding_dim - dim))

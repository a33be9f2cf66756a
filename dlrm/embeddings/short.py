"""Short rows: a few weights followed by zeros, with the rows of several ids stored as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.embeddings.base import Common
from dlrm.embeddings.common.budget import Budget, allocate
from dlrm.embeddings.shared_rows import SharedRows, check_row_dim, num_kept_of
from dlrm.kernels.lookup.source import ShortRows
from dlrm.kernels.lookup.tables import TableRows


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
        shared: whether the row of the later ids learns; otherwise it stays zero. It learns that its
            ids remain rare, which nobody knows of ids that are new after training.
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
        shared: bool = True,
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

        # The shared row comes first, as in tables in two parts; those of one type have one part.
        last, wide = torch.tensor(num_short) - 1, torch.tensor(self.num_wide or stored)
        narrow = self._offsets if self._narrow is None else self._narrow
        starts, wide, narrow = (per_row * of_stored for of_stored in (self._offsets, wide, narrow))
        short = torch.stack([starts, last, wide, narrow])
        self.register_buffer("_short", short, persistent=False)
        self._short: Tensor  # [4, F], see _table_rows; they count short rows
        if not shared:
            self._without_shared_rows(num_short, self._offsets, dim)
        self.reset_parameters()

    @property
    def _source(self) -> ShortRows:
        return ShortRows(self.weight, self.dim, self.embedding_dim, self.scale)

    @property
    def _table_rows(self) -> TableRows:
        starts, last, wide, narrow = self._short
        return TableRows(starts, last=last, num_wide=wide, narrow_starts=narrow)

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

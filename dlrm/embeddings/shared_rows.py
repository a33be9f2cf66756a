"""Base of the kinds that keep rows of all tables in one weight: dense, hash, drop and block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.bags import row_offsets
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.lookup.bags import lookup_bags
from dlrm.kernels.lookup.tables import lookup, lookup_tables


class SharedRows(Embedding):
    """The rows of all tables, one table after another, in one weight ``[sum(num_kept), row_dim]``.

    A kind decides how many rows a table keeps, which ids share a row, and how dense tables are
    fitted. It calls :meth:`reset_parameters` once it is complete.

    Args:
        num_kept: rows that each table keeps.
        shared: ``modulo``: an id has the row of its remainder by ``num_kept``. ``overflow``: ids
            from the last row on share it. None: each id has a row of its own.
        row_dim: length of the rows kept; by default the embedding dim.
    """

    captures_bags = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        num_kept: Sequence[int],
        *,
        shared: Literal["modulo", "overflow"] | None = None,
        row_dim: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        self.num_kept = tuple(num_kept)
        self.weight = nn.Parameter(torch.empty(sum(self.num_kept), row_dim or embedding_dim))
        rows = torch.tensor(self.num_kept)
        modulo = rows if shared == "modulo" else None
        overflow_row = rows - 1 if shared == "overflow" else None
        self.register_buffer("_offsets", row_offsets(self.num_kept), persistent=False)
        self.register_buffer("_modulo", modulo, persistent=False)
        self.register_buffer("_overflow_row", overflow_row, persistent=False)
        self._offsets: Tensor  # [F], the first row of each table
        self._modulo: Tensor | None  # [F]
        self._overflow_row: Tensor | None  # [F]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows: U(-b, b) with b = sqrt(D / row_dim / V) for a table of V ids."""
        scale = (self.embedding_dim / self.weight.shape[1]) ** 0.5
        for table, rows in zip(self.num_embeddings, self.rows_by_table(), strict=True):
            bound = scale * table**-0.5
            nn.init.uniform_(rows, -bound, bound)

    def rows_by_table(self) -> Sequence[Tensor]:
        """The rows kept of each table, ``[num_kept, row_dim]``."""
        return self.weight.split(self.num_kept)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self._modulo is not None:
            ids = ids % self._modulo[tables]
        if self._overflow_row is not None:
            ids = ids.minimum(self._overflow_row[tables])
        rows = ids + self._offsets[tables]
        return lookup(self.weight, rows, sparse=self.sparse, sorter=context.sorter)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        return lookup_tables(
            self.weight,
            self._offsets,
            ids,
            modulo=self._modulo,
            last=self._overflow_row,
            sparse=self.sparse,
            sorter=context.sorter,
        )

    def lookup_bags(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        context: LookupContext = NO_CONTEXT,
    ) -> Tensor:
        if self.mode == "max" and not self.weight.is_cuda:
            # PyTorch's embedding_bag would make a dense gradient of the table.
            return super().lookup_bags(ids, offsets, weights, context)
        return lookup_bags(
            self.weight,
            self._offsets,
            ids,
            offsets,
            per_sample_weights=weights,
            mode=self.mode,
            modulo=self._modulo,
            last=self._overflow_row,
            sparse=self.sparse,
            context=context.of_bags,
        )

    def footprint(self) -> list[dict[str, int]]:
        row = self.weight.shape[1] * self.weight.element_size()
        return [{"weights": rows * row} for rows in self.num_kept]


def num_kept_of(
    num_embeddings: Sequence[int], keep: int | Sequence[int] | None, kind: str
) -> tuple[int, ...]:
    """Rows of each table if the first ``keep`` ids have a row each and the others share one.

    Args:
        num_embeddings: ids of each table.
        keep: one number for all tables or one for each; None keeps all ids.
        kind: the embedding kind, for the message.

    Raises:
        ValueError: a negative number, or not one for each table.
    """
    if keep is None:
        return tuple(num_embeddings)
    each = [keep] * len(num_embeddings) if isinstance(keep, int) else keep
    valid = all(isinstance(own, int) and own >= 0 for own in each)
    if not valid or len(each) != len(num_embeddings):
        raise ValueError(
            f"{kind} keep is {keep}: set --{kind}.keep to a number of ids, 0 or more; in code it "
            f"may be a list of one for each of the {len(num_embeddings)} tables"
        )
    return tuple(min(table, own + 1) for table, own in zip(num_embeddings, each, strict=True))

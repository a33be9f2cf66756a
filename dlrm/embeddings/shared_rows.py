"""Base of the kinds that keep rows of all tables in one weight: dense, hash, drop, block, short."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import WIDE
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.kernels.lookup.pool import lookup_bags
from dlrm.kernels.lookup.source import RowSource, Weight
from dlrm.kernels.lookup.tables import TableRows, lookup, lookup_tables, rows_of_torch
from dlrm.kernels.update.packed import CHUNK, chunks_to_write, clear_rows, record_bytes
from dlrm.utils.bags import Bags
from dlrm.utils.offsets import row_offsets


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
    packs_rows = True
    scale = 1.0  # factor on the weights of a row

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
        self.num_wide = self._wide_rows()
        self.weight = self._new_rows(
            sum(self.num_kept), row_dim or embedding_dim, sum(self.num_wide or ())
        )

        rows = torch.tensor(self.num_kept)
        modulo = rows if shared == "modulo" else None
        overflow_row = rows - 1 if shared == "overflow" else None
        index: dict[str, Tensor | None] = {"_modulo": modulo, "_overflow_row": overflow_row}
        index |= {"_offsets": row_offsets(self.num_kept), "_num_wide": None, "_narrow": None}
        index["_zeros"] = None
        if self.num_wide is not None:  # the wide rows of all tables come first
            narrow = [n - wide for n, wide in zip(self.num_kept, self.num_wide, strict=True)]
            index["_offsets"] = row_offsets(self.num_wide)
            index["_num_wide"] = torch.tensor(self.num_wide)
            index["_narrow"] = sum(self.num_wide) + row_offsets(narrow)

        for name, tensor in index.items():
            self.register_buffer(name, tensor, persistent=False)
        self._offsets: Tensor  # [F], the first row of each table
        self._modulo: Tensor | None  # [F]
        self._overflow_row: Tensor | None  # [F]
        self._num_wide: Tensor | None  # [F], how many of them have 8 bits, of int4 tables
        self._narrow: Tensor | None  # [F], and the first row of the others
        self._zeros: Tensor | None  # rows that stay zero, of tables where ids share one
        self._zero_columns: int | None = None  # of these rows; None: all

    def _without_shared_rows(
        self, kept: Sequence[int], rows: Tensor, columns: int | None = None
    ) -> None:
        """Let the row that later ids share stay zero: ``rows [F]``, of tables that keep so many."""
        partly = [f for f, own in enumerate(kept) if own < self.num_embeddings[f]]
        self._zeros = rows.index_select(0, torch.tensor(partly, dtype=torch.int64))
        self._zero_columns = columns

    def clear_shared_rows(self) -> None:
        """Set the shared rows to zero again that do not learn, after a step."""
        if self._zeros is not None:
            clear_rows(self.weight, self._zeros, self._zero_columns)

    def _wide_rows(self) -> tuple[int, ...] | None:
        """Rows of each table with 8 bits, the others having 4; None if all rows are alike.

        They are one row in eight of all tables together, the most used ones: as ids are in order
        of falling frequency, the first of each table, equally many where there are so many.
        """
        if self.dtype != "int4":
            return None

        def wide(most: int) -> int:
            return sum(min(own, most) for own in self.num_kept)

        limit = sum(self.num_kept) // WIDE
        most = bisect_right(range(max(self.num_kept) + 1), limit, key=wide) - 1
        return tuple(min(own, most) for own in self.num_kept)

    @property
    def _source(self) -> RowSource:
        return Weight(self.weight)

    @property
    def _table_rows(self) -> TableRows:
        return TableRows(
            self._offsets,
            modulo=self._modulo,
            last=self._overflow_row,
            num_wide=self._num_wide,
            narrow_starts=self._narrow,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows: U(-b, b) with b = 0.1 sqrt(D / row_dim / V) for a table of V ids."""
        scale = (self.embedding_dim / self.weight.shape[1]) ** 0.5 / self.scale
        for table, rows in enumerate(self.num_embeddings):
            bound = scale * initial_bound(rows)
            for _, part in self.rows_to_write(table):
                for drawn in part.split(CHUNK):  # as shards do: a GPU draws others all at once
                    nn.init.uniform_(drawn, -bound, bound)
        self.clear_shared_rows()

    def rows_to_write(
        self, table: int, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows that a table keeps, in parts: the number of the first one, and memory
        ``[n, row_dim]`` to fill. What was filled in is stored before the next part.
        """
        kept = self.num_kept[table]
        for first, last, shift in self._ranges(table):
            start, stop = max(first, begin), min(last, kept if end is None else end)
            if start < stop:
                for at, part in chunks_to_write(self.weight, start + shift, stop + shift):
                    yield at - shift, part

    def _ranges(self, table: int) -> list[tuple[int, int, int]]:
        """Ranges of rows that a table keeps, with what to add for their place in the weight."""
        kept, offset = self.num_kept[table], sum(self.num_kept[:table])
        if self.num_wide is None:
            return [(0, kept, offset)]
        wide, offset = self.num_wide[table], sum(self.num_wide[:table])
        narrow = sum(self.num_wide) + sum(self.num_kept[:table]) - offset - wide
        if self._overflow_row is None:
            return [(0, wide, offset), (wide, kept, narrow)]
        # The row that many ids share comes first: it is used most.
        own = max(wide - 1, 0)
        ranges = [(0, own, offset + 1), (own, kept - 1, narrow + 1)]
        return [*ranges, (kept - 1, kept, (offset if wide else narrow) - kept + 1)]

    @torch.no_grad()
    def kept_rows(self) -> Tensor:
        """The rows of all tables, one table after another, ``[sum(num_kept), row_dim]``: the weight
        itself or, if it is packed, a copy in fp32.
        """
        if self.dtype is None:
            return self.weight.detach()
        out = self._tables.new_empty(self.weight.shape, dtype=self.weight.dtype)
        for table, rows in enumerate(out.split(self.num_kept)):
            for first, last, shift in self._ranges(table):
                places = torch.arange(first + shift, last + shift, device=out.device)
                for at, part in zip(
                    places.split(CHUNK), rows[first:last].split(CHUNK), strict=True
                ):
                    part.copy_(lookup(self.weight, at))
        return out

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit the rows to dense tables, each ``[V, D]``, by :meth:`fitted_rows`."""
        self._check_dense(weights)
        for table, weight in enumerate(weights):
            rows = self.fitted_rows(table, weight)
            for at, part in self.rows_to_write(table):
                part.copy_(rows[at : at + len(part)])

    @abstractmethod
    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        """Fit the rows that a table keeps, ``[num_kept, row_dim]``, to a dense one ``[V, D]``."""

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = rows_of_torch(ids, tables, self._table_rows)
        return lookup(self._source, rows, sparse=self.sparse, context=context)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        source, tables = self._source, self._table_rows
        return lookup_tables(source, tables, ids, sparse=self.sparse, context=context)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        return lookup_bags(
            self._source,
            self._table_rows,
            bags,
            mode=self.mode,
            sparse=self.sparse,
            context=context,
        )

    def footprint(self) -> list[dict[str, int]]:
        dim, size = self.weight.shape[1], self.weight.element_size()
        if self.dtype is None:
            return [{"weights": rows * dim * size} for rows in self.num_kept]
        wide = self.num_kept if self.num_wide is None else self.num_wide
        return [
            {"weights": own * record_bytes(dim, 8) + (rows - own) * record_bytes(dim, 4)}
            for rows, own in zip(self.num_kept, wide, strict=True)
        ]


def check_row_dim(dim: int, embedding_dim: int, kind: str) -> None:
    """Raise a ``ValueError`` unless rows of ``dim`` weights fit into the embedding dim."""
    if not 1 <= dim <= embedding_dim:
        raise ValueError(
            f"{kind} dim is {dim}; set --{kind}.dim to 1 .. {embedding_dim}, the embedding dim"
        )


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

"""ROBE: all tables of a group in one array, in blocks at random offsets that may overlap."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, max_rows_options, row_bytes, split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.fitting import fit_shared
from dlrm.kernels.lookup.hashing import hashed_offsets
from dlrm.kernels.lookup.tables import lookup
from dlrm.kernels.update.packed import chunks_to_write, record_bytes, storage
from dlrm.utils.offsets import row_offsets


class Robe(Embedding):
    """Random offset block embedding array: one array of weights, shared by all tables.

    Every table, flattened row by row, is divided into blocks. The first block begins at an offset
    of its own for each table, each later one at a random distance from there, a hash of its number;
    the array wraps around. In the paper a block may begin at any weight. Here it begins at a
    multiple of ``min(block, D)``: a look-up reads rows of a matrix, and its gradient is a few of
    these rows, summed as those of any other table, not ``D`` single weights. Two pieces share all
    of their weights or none.

    Args:
        rows: size of the array, in rows per table; a smaller table adds all of its rows.
        block: weights of a block, a divisor or a multiple of the embedding dim; by default a
            quarter of it if 4 divides it. With smaller blocks two rows that share a piece differ in
            the others; in larger ones neighbouring ids share nothing. On real rows at 100x
            compression, test AUC is 0.753 with 4 pieces per row, 0.751 with 2 and 0.747 with 1.

    Reference:
        Desai, Chou, Shrivastava, "Random Offset Block Embedding Array (ROBE) for CriteoTB
        Benchmark MLPerf DLRM Model: 1000x Compression and 3.1x Faster Inference", MLSys 2022,
        arXiv 2108.02191.
    """

    trains_from_fit = False
    packs_rows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rows: int = 10_000,
        block: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if rows < 1:
            raise ValueError(f"robe rows is {rows}; set --robe.rows to 1 or more")
        block = embedding_dim // gcd(4, embedding_dim) if block is None else block
        if block < 1 or (embedding_dim % block and block % embedding_dim):
            raise ValueError(
                f"robe block is {block}; set --robe.block to a divisor or a multiple of the "
                f"embedding dim, {embedding_dim}"
            )
        self.piece = min(block, embedding_dim)  # weights of a row of the array
        self.pieces = embedding_dim // self.piece  # of a row of a table
        self.pieces_in_block = block // self.piece
        kept = [min(table, rows) for table in self.num_embeddings]
        self.weight = self._new_rows(sum(kept) * self.pieces, self.piece)
        self.register_buffer("_first", self.pieces * row_offsets(kept), persistent=False)
        self._first: Tensor  # [F], the row of the array where each table begins
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the array: U(-1/sqrt(V), 1/sqrt(V)) for tables of V ids on average."""
        bound = (self.num_tables / sum(self.num_embeddings)) ** 0.5
        for _, part in chunks_to_write(self.weight, 0, len(self.weight)):
            nn.init.uniform_(part, -bound, bound)

    def _pieces_of(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The rows of the array that are concatenated to the row of an id, ``[..., pieces]``."""
        first, size = self._first[tables], len(self.weight)
        return hashed_offsets(first, ids, self.pieces, size, block=self.pieces_in_block)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = self._pieces_of(tables, ids)
        return lookup(self.weight, rows, sparse=self.sparse, context=context).flatten(-2)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Set each weight to the mean of those of ``weights``, each ``[V, D]``, that share it."""
        self._check_dense(weights)
        tables = self._tables
        fit_shared(self.weight, weights, lambda table, ids: self._pieces_of(tables[table], ids))

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table; the array is divided in proportion to the tables' rows."""
        parts = split_by_rows(storage(self.weight)[0].nbytes, self.num_embeddings)
        return [{"weights": part} for part in parts]

    @classmethod
    def for_budget(cls, budget: Budget, *, block: int | None = None) -> list[dict[str, Any] | None]:
        """The largest ``rows``, the same for all tables, that fits."""
        dim = budget.embedding_dim
        block = dim // gcd(4, dim) if block is None else block
        piece = max(1, min(block, dim))
        size = row_bytes(piece, budget.dtype)  # a piece has a scale
        if budget.dtype == "int4":
            size = record_bytes(piece, 4)  # all are used alike
        row = -(-dim // piece) * size
        return max_rows_options(budget, cls.kind(), row)

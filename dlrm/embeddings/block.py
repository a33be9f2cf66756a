"""Block embedding: short rows, widened by a small matrix per table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.bags import row_offsets
from dlrm.embeddings.common.budget import share_out
from dlrm.embeddings.shared_rows import kept_rows
from dlrm.kernels.lookup.bags import lookup_bags
from dlrm.kernels.lookup.projected import lookup_widened, widen
from dlrm.kernels.lookup.tables import lookup, lookup_tables

CHUNK = 1 << 20  # rows at a time when fitting to a dense table


class Block(Embedding):
    """``row = W[id] @ L``: rows of ``dim`` weights, one matrix ``L [dim, D]`` per table, no bias.

    With ``keep``, only the first ids of a table have a row each and all later ones share one more;
    ids stand in order of falling frequency.

    Where ``dim`` is the embedding dim there is no ``L`` and the kind is the dense one. Rows of the
    composed table start with the deviation of a dense one, ``1 / sqrt(3 V)``, and the rows of
    ``L`` orthonormal, so that the gradient of ``W`` has the size that a dense table's has.

    Args:
        dim: the block dim, the length of the rows that are kept.
        keep: how many ids of a table have a row of their own, one number or, in code, a list of
            one for each table; by default all.

    Reference:
        Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient
        Recommendation Systems", ISIT 2021, arXiv 1909.11810.
    """

    per_table = frozenset({"keep"})

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        dim: int = 4,
        keep: int | list[int] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if not 1 <= dim <= embedding_dim:
            raise ValueError(
                f"block dim is {dim}; set --block.dim to 1 .. {embedding_dim}, the embedding dim"
            )
        self.dim = dim
        self.kept_rows = kept_rows(self.num_embeddings, keep, self.kind())
        self.weight = nn.Parameter(torch.empty(sum(self.kept_rows), dim))
        self.projection = (
            nn.Parameter(torch.empty(self.num_tables, dim, embedding_dim))
            if dim < embedding_dim
            else None
        )
        self.register_buffer("_offsets", row_offsets(self.kept_rows), persistent=False)
        last = None if self.kept_rows == self.num_embeddings else torch.tensor(self.kept_rows) - 1
        self.register_buffer("_last", last, persistent=False)
        self._offsets: Tensor  # [F]
        self._last: Tensor | None  # [F], the shared row of each table
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw rows and matrices anew."""
        wider = (self.embedding_dim / self.dim) ** 0.5  # an entry of L has a variance of 1 / D
        for table, rows in zip(self.num_embeddings, self.weight.split(self.kept_rows), strict=True):
            bound = wider * table**-0.5
            nn.init.uniform_(rows, -bound, bound)
        if self.projection is not None:
            for matrix in self.projection:
                nn.init.orthogonal_(matrix)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        if self._last is not None:
            ids = ids.minimum(self._last[tables])
        rows = lookup(self.weight, ids + self._offsets[tables], sparse=self.sparse)
        if self.projection is None:
            return rows
        if self.num_tables == 1:
            short = rows.reshape(-1, 1, self.dim)
            return widen(short, self.projection).view(*ids.shape, self.embedding_dim)
        # The tables come in any order: each row is the weights of a bag of the rows of its L.
        index = tables[..., None] * self.dim + torch.arange(self.dim, device=ids.device)
        return functional.embedding_bag(
            index.expand(rows.shape).reshape(-1, self.dim),
            self.projection.flatten(0, 1),
            per_sample_weights=rows.reshape(-1, self.dim),
            mode="sum",
        ).view(*ids.shape, self.embedding_dim)

    def lookup(self, ids: Tensor) -> Tensor:
        if self.projection is None:
            last = self._last
            return lookup_tables(self.weight, self._offsets, ids, last=last, sparse=self.sparse)
        return lookup_widened(
            self.weight,
            self.projection,
            self._offsets,
            ids,
            last=self._last,
            sparse=self.sparse,
        )

    def lookup_bags(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if self.mode == "max":  # a maximum can not be taken of short rows
            return super().lookup_bags(ids, offsets, weights)
        short = lookup_bags(
            self.weight,
            self._offsets,
            ids,
            offsets,
            per_sample_weights=weights,
            mode=self.mode,
            last=self._last,
            sparse=self.sparse,
        )
        return short if self.projection is None else widen(short, self.projection)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit each table ``[V, D]`` by its truncated singular value decomposition.

        Rows that are not kept take part as their mean.
        """
        self._check_dense(weights)
        for table, rows in enumerate(self.weight.split(self.kept_rows)):
            weight = weights[table]
            head, tail = weight.split([len(rows) - 1, len(weight) - len(rows) + 1])
            mean = tail.mean(0, keepdim=True)
            if self.projection is None:
                torch.cat([head, mean], out=rows)
                continue
            wide = mean.double()
            gram = len(tail) * wide.T @ wide
            for part in head.split(CHUNK):
                gram += part.double().T @ part.double()
            basis = torch.linalg.eigh(gram).eigenvectors[:, -self.dim :].to(weight.dtype)  # [D, E]
            torch.cat([head @ basis, mean @ basis], out=rows)
            self.projection[table] = basis.T

    def footprint(self) -> list[dict[str, int]]:
        size = self.weight.element_size()
        parts = [{"weights": rows * self.dim * size} for rows in self.kept_rows]
        if self.projection is not None:
            for part in parts:
                part["projection"] = self.dim * self.embedding_dim * size
        return parts

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
        """Per table the largest block dim that fits an equal share; see :class:`Embedding`.

        A row keeps at least one weight, so no budget below ``1 / D`` of the dense tables fits.
        """

        def size(rows: int, dim: int) -> int:
            matrix = dim * embedding_dim if dim < embedding_dim else 0
            return (rows * dim + matrix) * weight_bytes

        def largest(rows: int, share: int) -> int:
            dense = size(rows, embedding_dim)
            dim = max(1, share // (weight_bytes * (rows + embedding_dim)))
            if dense <= share or dim >= embedding_dim or size(rows, dim) >= dense:
                return embedding_dim
            return dim

        return [
            None if dim == embedding_dim else {"dim": dim}
            for dim in share_out(num_embeddings, largest, size, budget, cls.kind())
        ]

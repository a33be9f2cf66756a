"""Block embedding: short rows that a small matrix per table projects to the embedding dim."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, allocate, row_bytes
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.shared_rows import SharedRows, check_row_dim, num_kept_of
from dlrm.utils.bags import Bags

CHUNK = 1 << 20  # rows at a time when fitting to a dense table
MOST_ENTRIES = 1 << 20
"""Entries of the matrix of a product for all tables together, at most, where a GPU computes one."""


class Block(SharedRows):
    """``row = W[id] @ L``: rows of ``dim`` weights, one matrix ``L [dim, D]`` per table, no bias.

    With ``keep``, only the first ids of a table have a row each, and all later ids share one more;
    ids are in order of falling frequency.

    Where ``dim`` is the embedding dim there is no ``L``, and the tables are dense. Rows of the
    composed table start with the deviation of dense rows, ``0.1 / sqrt(3 V)``. The rows of ``L``
    start orthonormal, so that gradients of ``W`` are as large as those of a dense table.

    Args:
        dim: the length of the rows that are kept, the block dim.
        keep: how many ids of a table have a row of their own; by default all. In code it may be a
            list with one number for each table.

    Reference:
        Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient
        Recommendation Systems", ISIT 2021, arXiv 1909.11810.
    """

    per_table = frozenset({"keep"})
    by_frequency = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        dim: int = 4,
        keep: int | list[int] | None = None,
        **common: Unpack[Common],
    ) -> None:
        check_row_dim(dim, embedding_dim, self.kind())
        num_kept = num_kept_of(num_embeddings, keep, self.kind())
        super().__init__(
            num_embeddings,
            embedding_dim,
            num_kept,
            shared=None if num_kept == tuple(num_embeddings) else "overflow",
            row_dim=dim,
            **common,
        )
        self.dim = dim
        self.projection = (
            nn.Parameter(torch.empty(self.num_tables, dim, embedding_dim))
            if dim < embedding_dim
            else None
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize rows and matrices."""
        super().reset_parameters()
        if self.projection is not None:
            wide = torch.promote_types(self.projection.dtype, torch.float32)  # else unsupported
            for matrix in self.projection:
                matrix.copy_(nn.init.orthogonal_(torch.empty_like(matrix, dtype=wide)))

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = super().vectors(tables, ids, context)
        if self.projection is None:
            return rows
        if self.num_tables == 1:
            short = rows.reshape(-1, 1, self.dim)
            return project(short, self.projection).view(*ids.shape, self.embedding_dim)
        # Tables come in any order: each row is the weights of a bag that holds the rows of its L.
        index = tables[..., None] * self.dim + torch.arange(self.dim, device=ids.device)
        return functional.embedding_bag(
            index.expand(rows.shape).reshape(-1, self.dim),
            self.projection.flatten(0, 1),
            per_sample_weights=rows.reshape(-1, self.dim),
            mode="sum",
        ).view(*ids.shape, self.embedding_dim)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self.projection is None:
            return super().lookup(ids, context)
        return project(super().lookup(ids, context), self.projection)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self.projection is None:
            return super().lookup_bags(bags, context)
        if self.mode == "max":  # of projected rows
            return Embedding.lookup_bags(self, bags, context)
        return project(super().lookup_bags(bags, context), self.projection)

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        """The truncated singular value decomposition of the dense table, whose matrix is set too.

        Rows that are not kept are replaced by their mean.
        """
        own = self.num_kept[table] - 1
        head, tail = weight[:own], weight[own:]
        mean = tail.mean(0, keepdim=True)
        if self.projection is None:
            return torch.cat([head, mean])
        basis = self._basis(head, mean, len(tail))
        self.projection[table] = basis.T
        return torch.cat([head @ basis, mean @ basis])

    def _basis(self, head: Tensor, mean: Tensor, shared: int) -> Tensor:
        """The ``dim`` main directions of rows, ``[D, dim]``; ``mean`` counts as many."""
        gram = shared * mean.double().T @ mean.double()
        for part in head.split(CHUNK):
            gram += part.double().T @ part.double()
        return torch.linalg.eigh(gram).eigenvectors[:, -self.dim :].to(head.dtype)

    def footprint(self) -> list[dict[str, int]]:
        parts = super().footprint()
        if self.projection is not None:
            for part in parts:
                part["projection"] = self.projection[0].nbytes
        return parts

    @classmethod
    def for_budget(cls, budget: Budget) -> list[dict[str, Any] | None]:
        """For each table the largest block dim that fits.

        All tables get an equal number of bytes. A row keeps at least one weight, so no budget below
        ``1 / D`` of the dense tables fits.
        """
        embedding_dim = budget.embedding_dim

        def size(rows: int, dim: int) -> int:
            matrix = dim * embedding_dim if dim < embedding_dim else 0
            return rows * row_bytes(dim, budget.dtype) + matrix * budget.weight_bytes

        def largest(rows: int, room: int) -> int:
            dims = range(1, embedding_dim)
            dim = max(1, bisect_right(dims, room, key=lambda dim: size(rows, dim)))
            dense = size(rows, embedding_dim)
            return embedding_dim if dense <= room or size(rows, dim) >= dense else dim

        options = allocate(budget.num_embeddings, largest, size, budget.size, cls.kind())
        return [None if dim == embedding_dim else {"dim": dim} for dim in options]


def project(rows: Tensor, projection: Tensor, *, together: bool | None = None) -> Tensor:
    """Project the rows of each table by its own matrix.

    Args:
        rows: ``[B, F, E]``.
        projection: the matrices, ``[F, E, D]``.
        together: in one product for all tables; by default where a GPU is faster that way.

    Returns:
        ``[B, F, D]``.
    """
    tables, short, dim = projection.shape
    if together is None:
        small = tables * short * tables * dim <= MOST_ENTRIES
        together = rows.is_cuda and small

    with torch.autocast(rows.device.type, enabled=False):  # it would cast rows and gradients too
        projection = projection.to(rows.dtype)
        if not together:
            return torch.bmm(rows.transpose(0, 1), projection).transpose(0, 1)

        # The gradient of a matrix sums over all samples, which a GPU does slowly table by table.
        matrix = torch.diag_embed(projection.permute(1, 2, 0)).permute(2, 0, 3, 1)
        matrix = matrix.reshape(tables * short, tables * dim)
        return (rows.flatten(1) @ matrix).unflatten(1, (tables, dim))

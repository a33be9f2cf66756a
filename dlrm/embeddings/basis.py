"""Basis (codebook) embedding: a vector is a concatenation of parts that many vectors share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, allocate
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.fitting import kmeans
from dlrm.kernels.lookup.codebook import code_bits, pack, unpack
from dlrm.kernels.lookup.tables import lookup
from dlrm.utils.offsets import row_offsets

CHUNK = 1 << 18  # rows whose codes are drawn at a time
MOST_BITS = 16  # of a code


class Basis(Embedding):
    """``row = (centroid of part 1, centroid of part 2, ...)``, each selected by a code of the id.

    The vector is divided into parts of equal length, and each part is one of a few centroids of its
    table. Codes are frozen; centroids are trained. Codes come from a trained table, by k-means
    (:meth:`load_dense`, ``from_dense``); those of a fresh table are random. Codes are packed bit by
    bit: 8 parts with 384 centroids each take 9 bytes per row.

    Use it to compress trained models: with codes of a dense model trained on real rows, and no
    training after that, test AUC falls by 0.0004 at 10x, 0.002 at 20x and 0.005 at 40x (three
    seeds); trained from random codes it is 0.01 lower at 10x.

    Args:
        parts: number of parts of a vector, a divisor of the embedding dim.
        clusters: number of centroids for each part, at most 65,536.

    Reference:
        Shi and Yu, "Structured Word Embedding for Low Memory Neural Network Language Model",
        Interspeech 2018.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        parts: int = 2,
        clusters: int = 256,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        check_codebook(parts, clusters, embedding_dim, "embedding dim")
        self.parts = parts
        self.bits = code_bits(min(clusters, max(self.num_embeddings)))
        self.clusters = tuple(min(rows, clusters) for rows in self.num_embeddings)
        self.weight = nn.Parameter(torch.empty(parts * sum(self.clusters), embedding_dim // parts))
        codes = torch.empty(
            sum(self.num_embeddings), code_bytes(parts, self.bits), dtype=torch.uint8
        )
        self.register_buffer("codes", codes)
        self.register_buffer("_starts", row_offsets(self.num_embeddings), persistent=False)
        first = parts * row_offsets(self.clusters)[:, None]
        first = first + torch.arange(parts) * torch.tensor(self.clusters)[:, None]
        self.register_buffer("_first", first, persistent=False)
        self.codes: Tensor  # [sum(V), bytes], uint8
        self._starts: Tensor  # [F], the first row of each table in codes
        self._first: Tensor  # [F, parts], the first centroid of each part in weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw random codes, and centroids U(-1/sqrt(V), 1/sqrt(V)) for a table of V ids."""
        if self.codes.is_meta:  # which has sizes, but no values
            return
        for table, (codes, centroids) in enumerate(self._tables_of_codes()):
            nn.init.uniform_(centroids, -(len(codes) ** -0.5), len(codes) ** -0.5)
            for part in codes.split(CHUNK):
                shape = (len(part), self.parts)
                drawn = torch.randint(self.clusters[table], shape, device=part.device)
                part.copy_(pack(drawn, self.bits))

    def _tables_of_codes(self) -> list[tuple[Tensor, Tensor]]:
        """Codes ``[V, bytes]`` and centroids ``[parts, clusters, D / parts]`` of each table."""
        weights = self.weight.detach().split([self.parts * own for own in self.clusters])
        return [
            (codes, weight.unflatten(0, (self.parts, -1)))
            for codes, weight in zip(self.codes.split(self.num_embeddings), weights, strict=True)
        ]

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        codes = unpack(self.codes[ids + self._starts[tables]], self.parts, self.bits)
        rows = codes + self._first[tables]
        return lookup(self.weight, rows, sparse=self.sparse, context=context).flatten(-2)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit codes and centroids to dense tables, each ``[V, D]``, by k-means for each part."""
        self._check_dense(weights)
        for weight, (codes, centroids) in zip(weights, self._tables_of_codes(), strict=True):
            codes.copy_(pack(fit_codebook(weight, centroids), self.bits))

    def footprint(self) -> list[dict[str, int]]:
        row = self.embedding_dim * self.weight.element_size()
        return [
            {"weights": clusters * row, "codes": rows * self.codes.shape[1]}
            for rows, clusters in zip(self.num_embeddings, self.clusters, strict=True)
        ]

    @classmethod
    def for_budget(cls, budget: Budget) -> list[dict[str, Any] | None]:
        """For each table the longest codes that fit.

        All tables get an equal number of bytes. A row keeps at least one byte of codes, so no
        budget below 1/64 of dense tables of dim 16 fits.
        """
        row, dim = budget.row_bytes, budget.embedding_dim
        divisors = [parts for parts in range(1, dim + 1) if dim % parts == 0]

        def size(rows: int, option: tuple[int, int] | None) -> int:
            if option is None:
                return rows * row
            parts, clusters = option
            return rows * code_bytes(parts, code_bits(clusters)) + clusters * row

        def longest(rows: int, room: int) -> tuple[int, int] | None:
            if rows * row <= room:
                return None
            fitting = []  # bits of a row's codes, clusters, parts
            for parts, bits in product(divisors, range(1, MOST_BITS + 1)):
                affordable = (room - rows * code_bytes(parts, bits)) // row
                clusters = min(1 << bits, affordable, rows)
                if clusters > 1 << (bits - 1):
                    fitting.append((parts * bits, clusters, parts))
            _, clusters, parts = max(fitting, default=(1, 2, 1))
            return (parts, clusters) if size(rows, (parts, clusters)) < rows * row else None

        options = allocate(budget.num_embeddings, longest, size, budget.size, cls.kind())
        return [
            None if option is None else {"parts": option[0], "clusters": option[1]}
            for option in options
        ]


def code_bytes(parts: int, bits: int) -> int:
    """Bytes of a row of codes."""
    return (parts * bits + 7) // 8


def check_codebook(parts: int, clusters: int, dim: int, name: str) -> None:
    """Raise a ValueError unless ``parts`` divide ``dim`` and codes of ``clusters`` fit 16 bits."""
    if parts < 1 or dim % parts:
        raise ValueError(
            f"basis parts is {parts}; set --basis.parts to a divisor of the {name}, {dim}"
        )
    if not 1 <= clusters <= 1 << MOST_BITS:
        raise ValueError(
            f"basis clusters is {clusters}; set --basis.clusters to 1 .. {1 << MOST_BITS:,}"
        )


def fit_codebook(weight: Tensor, centroids: Tensor) -> Tensor:
    """Fit ``centroids [parts, clusters, d]`` to ``weight [V, parts * d]``, part by part, in place.

    Returns:
        The codes, int64 ``[V, parts]``.
    """
    columns = []
    for own, piece in zip(centroids, weight.chunk(len(centroids), 1), strict=True):
        found, codes = kmeans(piece, len(own))
        own.copy_(found)
        columns.append(codes)
    return torch.stack(columns, 1)

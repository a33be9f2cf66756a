"""Basis (codebook) embedding: a vector is put together from parts that many vectors share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding, row_offsets
from dlrm.embeddings.budget import share_out
from dlrm.embeddings.kmeans import kmeans
from dlrm.kernels.codebook import Members, code_bits, codebook_sum, members, pack, unpack
from dlrm.kernels.lookup import lookup

CHUNK = 1 << 18  # rows whose codes are drawn at a time
MOST_BITS = 16  # of a code


class Basis(Embedding):
    """``row = (centroid of part 1, centroid of part 2, ...)``, each named by a code of the id.

    The vector is cut into parts of equal length, and each part is one of a few centroids, which
    every table has for itself. Codes are frozen; centroids are trained. Codes come from a trained
    table, by k-means (:meth:`load_dense`, ``from_dense``); those of a fresh table are random.
    Codes take the bits they need and no more: 8 parts of 384 centroids are 9 bytes a row.

    It is a kind for compressing what is trained: with codes of a dense model trained on real rows,
    and no training after that, test AUC falls by 0.0004 at 10x, 0.002 at 20x and 0.005 at 40x
    (three seeds); trained from random codes it is 0.01 lower at 10x.

    Args:
        parts: parts of a vector, a divisor of the dim.
        clusters: centroids to choose from for each part, at most 65,536.

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
        _check(parts, clusters, embedding_dim, "dim")
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
        self.codes: Tensor  # [sum(V), bytes] uint8
        self._starts: Tensor  # [F], the first row of each table in codes
        self._first: Tensor  # [F, parts], the first centroid of each part in weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw codes anew, and centroids, U(-1/sqrt(V), 1/sqrt(V)) for a table of V ids."""
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

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        codes = unpack(self.codes[ids + self._starts[tables]], self.parts, self.bits)
        return lookup(self.weight, codes + self._first[tables], sparse=self.sparse).flatten(-2)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Learn codes and centroids of dense tables, each ``[V, D]``, by k-means for each part."""
        self._check_dense(weights)
        for weight, (codes, centroids) in zip(weights, self._tables_of_codes(), strict=True):
            codes.copy_(pack(_fit(weight, centroids), self.bits))

    def footprint(self) -> list[dict[str, int]]:
        row = self.embedding_dim * self.weight.element_size()
        return [
            {"weights": clusters * row, "codes": rows * self.codes.shape[1]}
            for rows, clusters in zip(self.num_embeddings, self.clusters, strict=True)
        ]

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
        """Per table the longest codes that fit an equal share; see :class:`Embedding`.

        A row keeps at least a byte of codes, so no budget below 1/64 of tables of dim 16 fits.
        """
        row = weight_bytes * embedding_dim
        divisors = [parts for parts in range(1, embedding_dim + 1) if embedding_dim % parts == 0]

        def size(rows: int, option: tuple[int, int] | None) -> int:
            if option is None:
                return rows * row
            parts, clusters = option
            return rows * code_bytes(parts, code_bits(clusters)) + clusters * row

        def longest(rows: int, share: int) -> tuple[int, int] | None:
            if rows * row <= share:
                return None
            fitting = []  # bits of a row's codes, clusters, parts
            for parts, bits in product(divisors, range(1, MOST_BITS + 1)):
                room = (share - rows * code_bytes(parts, bits)) // row
                clusters = min(1 << bits, room, rows)
                if clusters > 1 << (bits - 1):
                    fitting.append((parts * bits, clusters, parts))
            _, clusters, parts = max(fitting, default=(1, 2, 1))
            return (parts, clusters) if size(rows, (parts, clusters)) < rows * row else None

        return [
            None if option is None else {"parts": option[0], "clusters": option[1]}
            for option in share_out(num_embeddings, longest, size, budget, cls.kind())
        ]


class BasisLinear(nn.Module):
    """A drop-in for an ``nn.Linear`` with many outputs whose weight is a basis embedding.

    ``logits[n, v] = sum_p <x_p[n], centroid[p, code[v, p]]> + bias[v]``: the products of the input
    with all centroids are few, and each output adds up the ``parts`` of them that its codes name.

    Args:
        in_features: length of the input, and of the vectors.
        out_features: outputs V, the vocabulary.
        bias: add a bias.
        parts: parts of a vector, a divisor of ``in_features``.
        clusters: centroids to choose from for each part.
        device, dtype: where and as what the parameters are made.

    Reference:
        As :class:`Basis`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parts: int = 8,
        clusters: int = 384,
    ) -> None:
        super().__init__()
        clusters = min(clusters, out_features)
        _check(parts, clusters, in_features, "in_features")
        self.in_features, self.out_features = in_features, out_features
        self.parts, self.clusters, self.bits = parts, clusters, code_bits(clusters)
        shape = (parts, clusters, in_features // parts)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        codes = torch.empty(
            out_features, code_bytes(parts, self.bits), dtype=torch.uint8, device=device
        )
        self.register_buffer("codes", codes)
        self.codes: Tensor  # [V, bytes]
        self._members: Members | None = None
        self._members_of: tuple[Tensor, int] | None = None  # the codes and their version
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw random codes, and centroids and bias as ``nn.Linear`` draws its weights."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        shape = (self.out_features, self.parts)
        drawn = torch.randint(self.clusters, shape, device=self.codes.device)
        self.codes.copy_(pack(drawn, self.bits))

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, *, parts: int = 8, clusters: int = 384) -> Self:
        """Compress a trained layer, on its device and in its type; nothing of it is kept."""
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            weight.device,
            weight.dtype,
            parts=parts,
            clusters=clusters,
        )
        made.codes.copy_(pack(_fit(weight, made.weight), made.bits))
        if made.bias is not None:
            made.bias.copy_(bias)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Logits of the vocabulary: ``[..., in_features]`` to ``[..., out_features]``.

        Raises:
            ValueError: the input is of another length.
        """
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"input has shape {tuple(input.shape)}, it must be [..., {self.in_features}]"
            )
        tokens = input.reshape(-1, self.parts, self.in_features // self.parts)
        products = torch.bmm(self.weight, tokens.permute(1, 2, 0))  # [parts, clusters, N]
        index = self._index() if torch.is_grad_enabled() and products.is_cuda else None
        out = codebook_sum(products, self.codes, self.bias, self.bits, index)
        return out.view(*input.shape[:-1], self.out_features)

    def codes_of_outputs(self) -> Tensor:
        """The codes, int64 ``[V, parts]``."""
        return unpack(self.codes, self.parts, self.bits)

    def _index(self) -> Members:
        """The outputs that have each centroid, found once for given codes."""
        codes, version = self._members_of or (None, -1)
        if self._members is None or codes is not self.codes or version != self.codes._version:
            self._members = members(self.codes, self.parts, self.bits, self.clusters)
            self._members_of = self.codes, self.codes._version
        return self._members

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        """The weight that an ``nn.Linear`` with the same outputs has, ``[V, in_features]``."""
        codes = unpack(self.codes, self.parts, self.bits)
        vectors = [
            centroids[names] for centroids, names in zip(self.weight, codes.t(), strict=True)
        ]
        return torch.cat(vectors, 1)

    def footprint(self) -> dict[str, int]:
        """Bytes by part; only training on a GPU keeps the index, which follows from the codes."""
        bias = 0 if self.bias is None else self.bias.nbytes
        index = self._index().nbytes if self.training and self.codes.is_cuda else 0
        return {"weights": self.weight.nbytes + bias, "codes": self.codes.nbytes, "index": index}

    def extra_repr(self) -> str:
        """Sizes for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, parts={self.parts}, clusters={self.clusters}"
        )


def code_bytes(parts: int, bits: int) -> int:
    """Bytes of a row of codes."""
    return (parts * bits + 7) // 8


def _check(parts: int, clusters: int, dim: int, name: str) -> None:
    if parts < 1 or dim % parts:
        raise ValueError(
            f"basis parts is {parts}; set --basis.parts to a divisor of the {name}, {dim}"
        )
    if not 1 <= clusters <= 1 << MOST_BITS:
        raise ValueError(
            f"basis clusters is {clusters}; set --basis.clusters to 1 .. {1 << MOST_BITS:,}"
        )


def _fit(weight: Tensor, centroids: Tensor) -> Tensor:
    """Fit ``centroids [parts, clusters, d]`` to ``weight [V, parts * d]``, part by part, in place.

    Returns:
        The codes, int64 ``[V, parts]``.
    """
    names = []
    for own, piece in zip(centroids, weight.chunk(len(centroids), 1), strict=True):
        found, codes = kmeans(piece, len(own))
        own.copy_(found)
        names.append(codes)
    return torch.stack(names, 1)

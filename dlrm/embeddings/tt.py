"""Tensor-train tables: every row is a product of slices of a few small cores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.base import Common, Embedding, row_offsets
from dlrm.embeddings.factorize import factorize_dim, factorize_rows, tt_svd


def tt_vectors(
    cores: Sequence[Tensor],
    p: Tensor,
    core_offsets: Tensor,
    q: Sequence[int],
    ranks: Sequence[int],
    tables: Tensor,
    ids: Tensor,
) -> Tensor:
    """Stand-in until the kernel is there."""
    rest, table = ids.reshape(-1).long(), tables.expand_as(ids).reshape(-1)
    digits: list[Tensor] = []
    for k in reversed(range(len(q))):
        digits.insert(0, rest % p[table, k])
        rest = rest // p[table, k]
    out = cores[0].new_ones(len(rest), 1, 1)
    for k, core in enumerate(cores):
        slices = functional.embedding(digits[k] + core_offsets[table, k], core)
        out = out @ slices.view(-1, ranks[k], q[k] * ranks[k + 1])
        out = out.view(len(rest), prod(q[: k + 1]), ranks[k + 1])
    return out.view(*ids.shape, prod(q))


class TT(Embedding):
    """Tables in tensor-train format.

    Id ``i`` is written with ``d`` digits to the bases ``p``, the first the most significant, and
    row ``i`` is the product ``G_1[i_1] G_2[i_2] ... G_d[i_d]`` of one slice per core, where slice
    ``i_k`` of core ``k`` is a matrix ``[r_{k-1}, q_k r_k]`` and ``r_0 = r_d = 1``. ``prod(p)`` is
    at least the number of rows and ``prod(q)`` is the dim. All tables of a group have the same
    ``q`` and ranks; core ``k`` of all of them is one parameter ``cores.k`` of shape
    ``[sum(p_k), r_{k-1} q_k r_k]``, a row per slice, the tables behind one another.

    Args:
        rank: length of the bonds between cores. Larger is closer to a dense table; the weights
            grow with its square. Bonds longer than any table of the group can use are cut.
        d: number of cores.
        q: factors of the dim, as ``2 2 4`` for 16; by default the most balanced ones.
        p: factors of the number of rows, for every table of the group, their product at least
            its rows; by default balanced ones, for each table its own.

    Raises:
        ValueError: factors that do not fit, or a rank or d below what makes a product.

    Reference: Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning
        Recommendation Models", MLSys 2021, arXiv 2101.11714.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rank: int = 32,
        d: int = 3,
        q: list[int] | None = None,
        p: list[int] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}: set --tt.rank 32")
        if d < 2:
            raise ValueError(f"a tensor train has at least 2 cores, got d {d}: set --tt.d 3")
        self.q = tuple(q) if q else factorize_dim(embedding_dim, d)
        self.p = [tuple(p) if p else factorize_rows(rows, d) for rows in self.num_embeddings]
        self._check_factors(d)
        self.ranks = clip_ranks(rank, self.p, self.q)
        sizes = [sum(slices) for slices in zip(*self.p, strict=True)]
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(rows, width))
            for rows, width in zip(sizes, slice_widths(self.q, self.ranks), strict=True)
        )
        offsets = torch.stack([row_offsets(slices) for slices in zip(*self.p, strict=True)], 1)
        self.register_buffer("_p", torch.tensor(self.p), persistent=False)
        self.register_buffer("_core_offsets", offsets, persistent=False)
        self._p: Tensor  # [F, d]
        self._core_offsets: Tensor  # [F, d]
        self.reset_parameters()

    def _check_factors(self, d: int) -> None:
        for name, factors in (("q", self.q), ("p", self.p[0])):
            if len(factors) != d or min(factors) < 1:
                raise ValueError(
                    f"{name} is {list(factors)}, it must have d = {d} factors of at least 1: "
                    f"change --tt.{name} or --tt.d"
                )
        if prod(self.q) != self.embedding_dim:
            valid = " ".join(map(str, factorize_dim(self.embedding_dim, d)))
            raise ValueError(
                f"q is {list(self.q)}, whose product is {prod(self.q)}; it must be the dim, "
                f"{self.embedding_dim}: set --tt.q {valid}"
            )
        for rows, p in zip(self.num_embeddings, self.p, strict=True):
            if prod(p) < rows:
                valid = " ".join(map(str, factorize_rows(rows, d)))
                raise ValueError(
                    f"p is {list(p)}, whose product is {prod(p)}; it must be at least the rows of "
                    f"the table, {rows}: set --tt.p {valid}"
                )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the cores anew, the deviation of the rows of a table being ``1 / sqrt(3 V)``.

        That is the deviation of U(-1/sqrt(V), 1/sqrt(V)), the start of dense tables. As in the
        paper no entry is near zero: they are normal given ``|x| >= 2``. Slices are brought to
        equal norm, so that rows of one leading digit deviate as all do, and the cores are scaled
        by the mean square of the product, which :func:`mean_square` knows exactly for any rank.
        """
        for core in self.cores:
            tail = torch.rand_like(core).mul_(-0.0227501).add_(0.0227501)  # P(x < -2) = 0.02275
            sign = torch.randint_like(core, 2).mul_(2).sub_(1)
            core.copy_(torch.special.ndtri(tail).mul_(sign))
            core.div_(core.square().mean(1, keepdim=True).sqrt_())
        for table, rows in enumerate(self.num_embeddings):
            slices = self._slices(table)
            scale = (1 / (3 * rows) / mean_square(slices)) ** (0.5 / len(slices))
            for core in slices:
                core.mul_(scale)

    def _slices(self, table: int) -> list[Tensor]:
        """The cores of one table, views of shape ``[p_k, r_{k-1}, q_k, r_k]``."""
        return [
            core.detach()
            .narrow(0, int(self._core_offsets[table, k]), p)
            .view(p, self.ranks[k], self.q[k], self.ranks[k + 1])
            for k, (core, p) in enumerate(zip(self.cores, self.p[table], strict=True))
        ]

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        return tt_vectors(
            list(self.cores), self._p, self._core_offsets, self.q, self.ranks, tables, ids
        )

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Decompose dense tables, each ``[V, D]``, by TT-SVD; exact where the rank suffices.

        A table needs about three times its own memory meanwhile.
        """
        for table, weight in enumerate(weights):
            fitted = tt_svd(weight, self.p[table], self.q, self.ranks)
            for core, new in zip(self._slices(table), fitted, strict=True):
                core.copy_(new)

    def footprint(self) -> list[dict[str, int]]:
        size = self.cores[0].element_size()
        return [{"weights": tt_weights(p, self.q, self.ranks) * size} for p in self.p]

    def extra_repr(self) -> str:
        """Also the ranks and factors."""
        return f"{super().extra_repr()}, ranks={list(self.ranks)}, q={list(self.q)}, p={self.p}"


def slice_widths(q: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Weights of one slice of each core, ``r_{k-1} q_k r_k``."""
    return [left * factor * right for factor, (left, right) in zip(q, pairwise(ranks), strict=True)]


def tt_weights(p: Sequence[int], q: Sequence[int], ranks: Sequence[int]) -> int:
    """Weights of one table."""
    return sum(rows * width for rows, width in zip(p, slice_widths(q, ranks), strict=True))


def clip_ranks(rank: int, p: Sequence[Sequence[int]], q: Sequence[int]) -> tuple[int, ...]:
    """Ranks ``(1, r_1, .., 1)``: ``rank``, or less where no table can use as much.

    Bond ``k`` joins a matrix of ``prod(p[:k]) prod(q[:k])`` rows and ``prod(p[k:]) prod(q[k:])``
    columns; a longer bond than the smaller of the two adds weights and no freedom.
    """
    bonds = [
        max(min(prod(t[:k]) * prod(q[:k]), prod(t[k:]) * prod(q[k:])) for t in p)
        for k in range(1, len(q))
    ]
    return (1, *(min(rank, bond) for bond in bonds), 1)


def mean_square(cores: Sequence[Tensor]) -> float:
    """Mean square of the entries of all rows of a table, without making them.

    The sum over a core's digits of ``G[i]^T M G[i]``, core after core from ``M = 1``, ends as the
    sum of squares of the table; it costs ``p q r^3`` a core. (In expectation, for independent
    entries of variance ``s^2``, the mean square is ``prod(r) s^(2 d)``.)

    Args:
        cores: one table's, each ``[p_k, r_{k-1}, q_k, r_k]``.
    """
    gram = torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)
    entries = 1
    for core in cores:
        flat = core.double().transpose(0, 1).flatten(1, 2)  # [r, p q, r']
        entries *= flat.shape[1]
        weighted = (gram @ flat.flatten(1)).view_as(flat)
        gram = flat.flatten(0, 1).T @ weighted.flatten(0, 1)  # [r', r']
    return gram.item() / entries

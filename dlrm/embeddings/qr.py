"""Quotient-remainder embedding: each row is composed of one row from each of two small tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, allocate, row_bytes
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.lookup.tables import TableRows, lookup, lookup_tables, rows_of_torch
from dlrm.kernels.update.packed import chunks_to_write, packed_rows, record_bytes
from dlrm.utils.offsets import row_offsets

Operation = Literal["multiply", "add", "concat"]
ITERATIONS = 30  # of the alternating fits


class QR(Embedding):
    """``row = Q[id // collisions] op R[id % collisions]``: no two ids have the same pair of rows.

    Rows are composed for each id and pooled afterwards. Rows of the composed table start with the
    deviation ``1 / sqrt(3 V)``, as in the reference DLRM. Of int4 tables the quotient rows have 4
    bits and the remainder rows, which are few, 8.

    Args:
        collisions: how many ids share a quotient row, which is also the number of remainder rows.
        operation: how the two rows are combined; with concat each has half of the embedding dim.

    Reference:
        Shi et al., "Compositional Embeddings Using Complementary Partitions for Memory-Efficient
        Recommendation Systems", KDD 2020, arXiv 1909.02107.
    """

    trains_from_fit = False
    packs_rows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        collisions: int = 4,
        operation: Operation = "multiply",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if collisions < 1:
            raise ValueError(f"qr collisions is {collisions}; set --qr.collisions to 1 or more")
        quotient_dim, remainder_dim = dims(embedding_dim, operation)
        # No more than ids: a divisor of more than 31 bits would overflow where ids are int32.
        self.collisions = collisions = min(collisions, max(self.num_embeddings))
        self.operation = operation
        self.quotients = tuple(-(-rows // collisions) for rows in self.num_embeddings)
        self.remainders = tuple(min(rows, collisions) for rows in self.num_embeddings)
        self.quotient = self._new_rows(sum(self.quotients), quotient_dim)
        # Many ids share each remainder row, and it may be a factor: of int4 tables it has 8 bits.
        remainders = sum(self.remainders)
        self.remainder = self._new_rows(remainders, remainder_dim, wide=remainders)

        shared = torch.full((self.num_tables,), collisions)
        self.register_buffer("_quotients", row_offsets(self.quotients), persistent=False)
        self.register_buffer("_remainders", row_offsets(self.remainders), persistent=False)
        self.register_buffer("_collisions", shared, persistent=False)
        self._quotients: Tensor  # [F], the first quotient row of each table
        self._remainders: Tensor  # [F], the first remainder row of each table
        self._collisions: Tensor  # [F]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize both tables.

        With multiply, entries of remainder rows start near 1 or -1: ids that share a quotient row
        start uncorrelated, and its gradient is as large as that of a dense row. Small random
        factors on both sides would slow each other down, and with positive ones, as in the
        reference DLRM, ids start alike: on real rows at 30x compression, test AUC is 0.751 with
        signs, 0.745 with small factors and 0.734 with positive ones.
        """
        for table, rows in enumerate(self.num_embeddings):
            bound = (2 * rows if self.operation == "add" else rows) ** -0.5
            for _, quotient in self._to_write(self.quotient, self.quotients, table):
                nn.init.uniform_(quotient, -bound, bound)
            for _, remainder in self._to_write(self.remainder, self.remainders, table):
                if self.operation == "multiply":
                    signs = torch.empty_like(remainder).bernoulli_().mul_(2).sub_(1)
                    remainder.uniform_(0.9, 1.1).mul_(signs)
                else:
                    nn.init.uniform_(remainder, -bound, bound)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        q, r = (
            lookup(weight, rows_of_torch(ids, tables, rows), sparse=self.sparse, context=context)
            for weight, rows in self._sides()
        )
        return compose(q, r, self.operation)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        q, r = (
            lookup_tables(weight, rows, ids, sparse=self.sparse, context=context)
            for weight, rows in self._sides()
        )
        return compose(q, r, self.operation)

    def _sides(self) -> Sequence[tuple[Tensor, TableRows]]:
        """The two weights, each with the row of an id in it."""
        return (
            (self.quotient, TableRows(self._quotients, divisor=self._collisions)),
            (self.remainder, TableRows(self._remainders, modulo=self._collisions)),
        )

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit to dense tables, each ``[V, D]``, by least squares, weighted by Zipf's law.

        Ids are in order of falling frequency: the error of id ``i`` counts ``1 / (1 + i)`` times.
        With concat, each row becomes the mean of the rows that share it. Multiply and add alternate
        between the two tables, each step exact given the other table: for each column, multiply
        finds the best matrix of rank one (quotient by remainder) and add the two-way means.
        """
        self._check_dense(weights)
        for table, weight in enumerate(weights):
            cells, present = self._cells(weight)
            place = torch.arange(1, present.numel() + 1, device=present.device)
            present = present / place.view_as(present)
            cells = cells * present
            if self.operation == "concat":
                split = self.quotient.shape[1]
                q = cells[:split].sum(2) / present.sum(1)
                r = cells[split:].sum(1) / present.sum(0)
            else:
                q, r = (rank_one if self.operation == "multiply" else two_way)(cells, present)
            for at, part in self._to_write(self.quotient, self.quotients, table):
                part.copy_(q.T[at : at + len(part)])
            for at, part in self._to_write(self.remainder, self.remainders, table):
                part.copy_(r.T[at : at + len(part)])

    def footprint(self) -> list[dict[str, int]]:
        sides = (self.quotient, self.quotients), (self.remainder, self.remainders)
        q, r = ([rows * bytes_of_a_row(weight) for rows in own] for weight, own in sides)
        return [{"weights": sum(both)} for both in zip(q, r, strict=True)]

    @classmethod
    def for_budget(
        cls, budget: Budget, *, operation: Operation = "multiply"
    ) -> list[dict[str, Any] | None]:
        """For each table the fewest collisions that fit, all tables getting equal bytes."""
        quotient_dim, remainder_dim = dims(budget.embedding_dim, operation)

        def size(rows: int, collisions: int | None) -> int:
            if collisions is None:
                return rows * budget.row_bytes
            quotients = -(-rows // collisions)
            of_remainders = "int8" if budget.dtype == "int4" else budget.dtype
            remainder = row_bytes(remainder_dim, of_remainders)
            return quotients * row_bytes(quotient_dim, budget.dtype) + collisions * remainder

        def fewest(rows: int, room: int) -> int | None:
            choices = [None, *range(2, isqrt(rows) + 1)]  # beyond the root the size rises again
            first = bisect_left(choices, -room, key=lambda m: -size(rows, m))
            choice = choices[min(first, len(choices) - 1)]
            return choice if size(rows, choice) < size(rows, None) else None

        options = allocate(budget.num_embeddings, fewest, size, budget.size, cls.kind())
        return [
            None if collisions is None else {"collisions": collisions} for collisions in options
        ]

    def _to_write(
        self, weight: Tensor, counts: Sequence[int], table: int
    ) -> Iterator[tuple[int, Tensor]]:
        """The rows of a table in one of the two weights, in parts: the number of the first one, and
        memory to fill, which is stored before the next part.
        """
        begin = sum(counts[:table])
        for at, part in chunks_to_write(weight, begin, begin + counts[table]):
            yield at - begin, part

    def _cells(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A matrix for each column of a table, ``[D, quotients, remainders]``, zero without an id.

        Also returns which cells have an id, ``[quotients, remainders]`` of 0 and 1.
        """
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        remainders = min(len(weight), self.collisions)
        quotients = -(-len(weight) // remainders)
        padding = (0, quotients * remainders - len(weight))
        present = functional.pad(weight.new_ones(len(weight)), padding)
        cells = functional.pad(weight.T, padding)
        return cells.unflatten(1, (quotients, remainders)), present.view(quotients, remainders)


def compose(q: Tensor, r: Tensor, operation: Operation) -> Tensor:
    """The product, sum or concatenation of two sets of rows."""
    if operation == "multiply":
        return q * r
    if operation == "add":
        return q + 1 * r  # r gets a gradient of its own: gradients are scaled in place
    return torch.cat([q, r], -1)


def bytes_of_a_row(weight: Tensor) -> int:
    """Bytes of a row of a weight ``[V, D]``, all of whose rows have the same number of bits."""
    dim, packed = weight.shape[1], packed_rows(weight)
    return dim * weight.element_size() if packed is None else record_bytes(dim, packed.format)


def dims(embedding_dim: int, operation: Operation) -> tuple[int, int]:
    """Length of a quotient row and of a remainder row.

    Raises:
        ValueError: an unknown operation, or a dim that can not be split.
    """
    if operation not in get_args(Operation):
        raise ValueError(
            f"qr operation is {operation!r}; set --qr.operation to one of "
            f"{', '.join(get_args(Operation))}"
        )
    if operation != "concat":
        return embedding_dim, embedding_dim
    if embedding_dim < 2:
        raise ValueError("qr concat needs an embedding_dim of at least 2; use multiply or add")
    return embedding_dim - embedding_dim // 2, embedding_dim // 2


def two_way(cells: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares fit of ``q[:, i] + r[:, j]`` to ``cells [C, I, J]`` where ``present [I, J]``.

    Returns:
        ``q [C, I]`` and ``r [C, J]``.
    """
    rows, columns = cells.sum(2), cells.sum(1)
    r = torch.zeros_like(columns)
    for _ in range(ITERATIONS):
        q = (rows - r @ present.T) / present.sum(1)
        r = (columns - q @ present) / present.sum(0)
    return q, r


def rank_one(cells: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares fit of ``q[:, i] * r[:, j]`` to ``cells [C, I, J]`` where ``present [I, J]``.

    Returns:
        ``q [C, I]`` and ``r [C, J]``, the entries of ``r`` with a root mean square of 1.
    """
    tiny = torch.finfo(cells.dtype).tiny
    largest = cells.square().sum(2).argmax(1)
    r = cells[torch.arange(len(cells)), largest]
    for _ in range(ITERATIONS):
        r = r / r.square().mean(1, keepdim=True).sqrt().clamp_min(tiny)
        q = torch.bmm(cells, r[..., None])[..., 0] / (r.square() @ present.T).clamp_min(tiny)
        r = torch.bmm(q[:, None], cells)[:, 0] / (q.square() @ present).clamp_min(tiny)
    scale = r.square().mean(1, keepdim=True).sqrt()
    return q * scale, r / scale.clamp_min(tiny)

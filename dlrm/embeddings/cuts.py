"""The pieces of tables that are cut in one way, and the exchange of their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dlrm.distributed import World, exchange
from dlrm.embeddings.partition import Piece
from dlrm.kernels.lookup import lookup, lookup_tables


class Cut(nn.Module, ABC):
    """The pieces of tables that are cut in one way, and the exchange with their holders.

    Args:
        pieces: of all ranks.
        num_tables: tables of the group.
        world: the processes.
        wire: type in which vectors travel.
    """

    name = ""

    def __init__(
        self, pieces: Sequence[Piece], num_tables: int, world: World, wire: torch.dtype | None
    ) -> None:
        super().__init__()
        self.world, self.wire = world, wire
        self.by_rank = [[p for p in pieces if p.rank == rank] for rank in range(world.size)]
        self.mine = self.by_rank[world.rank]
        self.width = self.mine[0].width if self.mine else max(piece.width for piece in pieces)
        self.first_column = self.mine[0].columns[0] if self.mine else 0
        self.tables = sorted({piece.table for piece in pieces})
        self.complete = len({(p.table, p.rows) for p in pieces}) == len(self.tables)
        at = [0]
        for piece in self.mine:
            at.append(at[-1] + piece.height)
        self.height = at.pop()
        held: Mapping[str, list[int]] = {
            "_ask": [piece.table for own in self.by_rank for piece in own],
            "_mine": [piece.table for piece in self.mine],
            "_first": [0] * num_tables,
            "_count": [0] * num_tables,
            "_place": [0] * num_tables,
        }
        for piece, begin in zip(self.mine, at, strict=True):
            held["_first"][piece.table] = piece.rows[0]
            held["_count"][piece.table] = piece.height
            held["_place"][piece.table] = begin
        for name, values in held.items():
            self.register_buffer(name, torch.tensor(values).long(), persistent=False)
        self._ask: Tensor  # tables that each rank holds a piece of, rank after rank
        self._mine: Tensor  # tables that this rank holds a piece of
        self._first: Tensor  # [F], first row of the local piece of each table
        self._count: Tensor  # [F], its rows; 0 where there is none
        self._place: Tensor  # [F], where it begins in the weight

    @property
    def order(self) -> list[int]:
        """The tables in the order in which :meth:`finish` gives their vectors."""
        return self.tables

    def held(self) -> Iterator[tuple[Piece, int]]:
        """The local pieces and where each begins in the weight."""
        for piece in self.mine:
            yield piece, int(self._place[piece.table])

    def answer(self, weight: Tensor, tables: Tensor, ids: Tensor) -> Tensor:
        """Rows of ``ids`` of ``tables``, ``[..., width]``; zeros for those that others hold."""
        rows = ids - self._first[tables]
        inside = (rows >= 0) & (rows < self._count[tables])
        rows = torch.where(inside, rows + self._place[tables], self.height)
        return lookup(weight, rows, sparse=True) * inside[..., None]

    def start(self, weight: Tensor, ids: Tensor) -> list[Tensor]:
        """Look up ``ids [F, B]`` at their holders: from every rank ``[B, pieces, width]``."""
        batch = ids.shape[1]
        sizes = self.world.sizes(batch, ids.device)
        asked = exchange(
            ids.index_select(0, self._ask).view(-1),
            [len(own) * batch for own in self.by_rank],
            [len(self.mine) * size for size in sizes],
        )
        asked = torch.cat(
            [
                part.view(len(self.mine), size)
                for part, size in zip(
                    asked.split([len(self.mine) * size for size in sizes]), sizes, strict=True
                )
            ],
            dim=1,
        )  # [pieces, global batch]
        if self.complete:
            found = lookup_tables(weight, self._place[self._mine], asked)
        else:
            found = self.answer(weight, self._mine[:, None], asked).transpose(0, 1)
        widths = [own[0].width if own else 0 for own in self.by_rank]
        get = [batch * len(own) * w for own, w in zip(self.by_rank, widths, strict=True)]
        give = [size * len(self.mine) * self.width for size in sizes]
        got = exchange(found.reshape(-1), give, get, self.wire)
        return [
            part.view(batch, len(own), width)
            for part, own, width in zip(got.split(get), self.by_rank, widths, strict=True)
            if own
        ]

    @abstractmethod
    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        """Full vectors ``[B, F_i, D]`` from what every rank that holds a piece has sent."""


class WholeTables(Cut):
    """Tables that lie whole on one rank each: what arrives is what is wanted."""

    name = "whole"

    @property
    def order(self) -> list[int]:
        return [piece.table for own in self.by_rank for piece in own]

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return chunks


class RowCut(Cut):
    """Tables cut by rows: of every sample one holder sends the row, the others zeros."""

    name = "by_rows"

    def __init__(
        self, pieces: Sequence[Piece], num_tables: int, world: World, wire: torch.dtype | None
    ) -> None:
        super().__init__(pieces, num_tables, world, wire)
        place = {table: slot for slot, table in enumerate(self.tables)}
        slots = [place[piece.table] for own in self.by_rank for piece in own]
        self.register_buffer("_slots", torch.tensor(slots), persistent=False)
        self._slots: Tensor  # place in the output of all that arrives

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        arrived = torch.cat(chunks, dim=1)
        arrived = arrived.to(torch.promote_types(arrived.dtype, torch.float32))
        out = arrived.new_zeros(len(arrived), len(self.tables), self.width)
        return [out.index_add(1, self._slots, arrived)]


class ColumnCut(Cut):
    """Tables cut by columns: every holder sends a part of every vector."""

    name = "by_columns"

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return [torch.cat(chunks, dim=2)]

"""The shards of tables that are split in one way, and the exchange of their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from dlrm.distributed.peer_lookup import PeerLookup
from dlrm.distributed.planner import Shard
from dlrm.distributed.world import World, exchange
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.lookup.peer import SortedLookups
from dlrm.kernels.lookup.tables import lookup, lookup_tables


class Sharding(nn.Module, ABC):
    """The shards of tables that are split in one way, and the exchange with their holders.

    Args:
        shards: of all ranks.
        num_tables: tables of the group.
        world: the processes.
        comm_dtype: type in which vectors and gradients travel; rows that peers read keep theirs.
        peers: processes read rows and write gradients in each other's memory, where they can.
    """

    name = ""

    def __init__(
        self,
        shards: Sequence[Shard],
        num_tables: int,
        world: World,
        comm_dtype: torch.dtype | None,
        peers: bool,
    ) -> None:
        super().__init__()
        self.world, self.comm_dtype = world, comm_dtype
        self.by_rank = [[p for p in shards if p.rank == rank] for rank in range(world.size)]
        self.mine = self.by_rank[world.rank]
        self.width = self.mine[0].width if self.mine else max(shard.width for shard in shards)
        self.first_column = self.mine[0].columns[0] if self.mine else 0
        self.tables = sorted({shard.table for shard in shards})
        self.complete = len({(p.table, p.rows) for p in shards}) == len(self.tables)
        at = [0]
        for shard in self.mine:
            at.append(at[-1] + shard.height)
        self.height = at.pop()
        held: Mapping[str, list[int]] = {
            "_ask": [shard.table for own in self.by_rank for shard in own],
            "_mine": [shard.table for shard in self.mine],
            "_first": [0] * num_tables,
            "_count": [0] * num_tables,
            "_place": [0] * num_tables,
        }
        for shard, begin in zip(self.mine, at, strict=True):
            held["_first"][shard.table] = shard.rows[0]
            held["_count"][shard.table] = shard.height
            held["_place"][shard.table] = begin
        for name, values in held.items():
            self.register_buffer(name, torch.tensor(values).long(), persistent=False)
        self._ask: Tensor  # tables that each rank holds a shard of, rank after rank
        self._mine: Tensor  # tables that this rank holds a shard of
        self._first: Tensor  # [F], first row of the local shard of each table
        self._count: Tensor  # [F], its rows; 0 where there is none
        self._place: Tensor  # [F], where it begins in the weight
        self.peer_lookup: PeerLookup | None = None
        if peers and len({shard.width for shard in shards}) == 1:
            self._reach()

    def _reach(self) -> None:
        """Give every row the key by which peers look it up."""
        heights = [sum(shard.height for shard in own) for own in self.by_rank]
        asked = [len(own) for own in self.by_rank]
        self.peer_lookup = PeerLookup(
            self.world, max(heights) + 1, self.width, asked, self.comm_dtype
        )
        keys: dict[Shard, int] = {}  # of the first row of a shard
        for rank, own in enumerate(self.by_rank):
            begins = accumulate((shard.height for shard in own[:-1]), initial=0)
            keys |= {
                p: self.peer_lookup.key_of(rank, at) for p, at in zip(own, begins, strict=False)
            }
        for name, values in self._slots_of(keys).items():
            tensor = torch.tensor(values, dtype=self.peer_lookup.key_type)
            self.register_buffer(name, tensor, persistent=False)
        self._slot_tables: Tensor  # [S], table of each look-up of a sample
        self._slot_keys: Tensor  # [S], key of its row 0

    def _slots_of(self, keys: Mapping[Shard, int]) -> dict[str, list[int]]:
        """What :meth:`keys` needs, from the key of each shard's first row."""
        place = {table: index for index, table in enumerate(self.order)}
        slots = sorted(keys, key=lambda shard: (place[shard.table], shard.columns))
        return {
            "_slot_tables": [shard.table for shard in slots],
            "_slot_keys": [keys[shard] for shard in slots],
        }

    @property
    def at_peers(self) -> bool:
        """Whether peers read these rows in this process's memory."""
        return self.peer_lookup is not None and self.peer_lookup.ready

    def sort(self, ids: Tensor) -> SortedLookups:
        """The look-ups of ``ids [F, B]`` at peers, sorted."""
        assert self.peer_lookup is not None
        return self.peer_lookup.sort(self.keys(ids))

    def keys(self, ids: Tensor) -> Tensor:
        """By which peers look up ``ids [F, B]``: ``[B, S]``, S a multiple of the tables."""
        keys = ids.index_select(0, self._slot_tables) + self._slot_keys[:, None]
        return keys.t().contiguous()

    @property
    def order(self) -> list[int]:
        """The tables in the order in which their vectors are given."""
        return self.tables

    def held(self) -> Iterator[tuple[Shard, int]]:
        """The local shards and where each begins in the weight."""
        for shard in self.mine:
            yield shard, int(self._place[shard.table])

    def answer(
        self, weight: Tensor, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT
    ) -> Tensor:
        """Rows of ``ids`` of ``tables``, ``[..., width]``; zeros for those that others hold."""
        rows = ids - self._first[tables]
        inside = (rows >= 0) & (rows < self._count[tables])
        rows = torch.where(inside, rows + self._place[tables], self.height)
        return lookup(weight, rows, sparse=True, sorter=context.sorter) * inside[..., None]

    def new_weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Zeros for the local rows, and one row more, for ids that others hold."""
        if self.peer_lookup is not None:
            return self.peer_lookup.new_weight(self.height + 1, device, dtype)
        return torch.zeros(self.height + 1, self.width, device=device, dtype=dtype)

    def start(
        self,
        weight: Tensor,
        ids: Tensor,
        context: LookupContext = NO_CONTEXT,
        lookups: SortedLookups | None = None,
    ) -> Callable[[], list[Tensor]]:
        """Look up ``ids [F, B]`` at their holders.

        Args:
            weight: the local rows.
            ids: of this process's samples.
            context: see ``Embedding.forward``.
            lookups: what :meth:`sort` gives for the ids, where it is known.

        Returns:
            What gives the full vectors ``[B, F_i, D]``, tables in ``order``, to be called where
            they are wanted.
        """
        peers = self.peer_lookup if context.equal_sizes else None
        if peers is not None and peers.serves(weight):
            found = peers(weight, lookups or self.sort(ids), ids.shape[1], context.sorter)
            return lambda: [found.view(len(found), len(self.order), -1)]
        return partial(self.finish, self._exchange(weight, ids, context))

    def _exchange(self, weight: Tensor, ids: Tensor, context: LookupContext) -> list[Tensor]:
        """Ids to their holders, and vectors back: from every rank ``[B, shards, width]``."""
        batch = ids.shape[1]
        sizes = self.world.sizes(batch, ids.device, equal=context.equal_sizes)
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
        )  # [shards, global batch]
        if self.complete:
            found = lookup_tables(weight, self._place[self._mine], asked, sorter=context.sorter)
        else:
            found = self.answer(weight, self._mine[:, None], asked, context).transpose(0, 1)
        widths = [own[0].width if own else 0 for own in self.by_rank]
        get = [batch * len(own) * w for own, w in zip(self.by_rank, widths, strict=True)]
        give = [size * len(self.mine) * self.width for size in sizes]
        got = exchange(found.reshape(-1), give, get, self.comm_dtype)
        return [
            part.view(batch, len(own), width)
            for part, own, width in zip(got.split(get), self.by_rank, widths, strict=True)
            if own
        ]

    @abstractmethod
    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        """Full vectors ``[B, F_i, D]`` from what every rank that holds a shard has sent."""


class TableWise(Sharding):
    """Tables that are on one rank each: the vectors that arrive are complete."""

    name = "whole"

    @property
    def order(self) -> list[int]:
        return [shard.table for own in self.by_rank for shard in own]

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return chunks


class RowWise(Sharding):
    """Tables split by rows: of every sample one holder sends the row, the others zeros."""

    name = "by_rows"

    def __init__(
        self,
        shards: Sequence[Shard],
        num_tables: int,
        world: World,
        comm_dtype: torch.dtype | None,
        peers: bool,
    ) -> None:
        super().__init__(shards, num_tables, world, comm_dtype, peers)
        place = {table: slot for slot, table in enumerate(self.tables)}
        slots = [place[shard.table] for own in self.by_rank for shard in own]
        self.register_buffer("_slots", torch.tensor(slots), persistent=False)
        self._slots: Tensor  # place in the output of all that arrives
        self._firsts: Tensor  # [shards], first row of each, one table after another
        self._moves: Tensor  # [shards], how far the keys of its rows are from there

    def _slots_of(self, keys: Mapping[Shard, int]) -> dict[str, list[int]]:
        starts = [0]
        for table in self.tables:
            starts.append(starts[-1] + max(p.rows[1] for p in keys if p.table == table))
        first = {p: starts[self.tables.index(p.table)] + p.rows[0] for p in keys}
        ordered = sorted(first, key=first.__getitem__)
        return {
            "_slot_tables": self.tables,
            "_slot_keys": starts[:-1],
            "_firsts": [first[shard] for shard in ordered],
            "_moves": [keys[shard] - first[shard] for shard in ordered],
        }

    def keys(self, ids: Tensor) -> Tensor:
        rows = super().keys(ids)
        shard = torch.searchsorted(self._firsts, rows, right=True) - 1
        return rows + self._moves[shard]

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        arrived = torch.cat(chunks, dim=1)
        arrived = arrived.to(torch.promote_types(arrived.dtype, torch.float32))
        out = arrived.new_zeros(len(arrived), len(self.tables), self.width)
        return [out.index_add(1, self._slots, arrived)]


class ColumnWise(Sharding):
    """Tables split by columns: every holder sends a part of every vector."""

    name = "by_columns"

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return [torch.cat(chunks, dim=2)]

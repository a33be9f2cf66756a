"""Sharding strategies: table-wise, row-wise and column-wise, and the exchange of their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.distributed.counted_bags import CountedBags
from dlrm.distributed.peer_exchange import PeerExchange
from dlrm.distributed.peer_lookup import PeerLookup
from dlrm.distributed.planner import Shard
from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.distributed.world import exchange
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.lookup.peer import WIDE, peer_keys
from dlrm.kernels.lookup.pool import lookup_bags
from dlrm.kernels.lookup.tables import (
    RowContext,
    TableRows,
    held_rows_torch,
    lookup,
    lookup_tables,
)
from dlrm.kernels.update.packed import record_bytes


class Sharding(nn.Module, ABC):
    """The shards of tables with one sharding type, and the exchange of rows with their holders.

    Args:
        shards: the shards of all ranks.
        num_tables: number of tables in the group.
        plan: the processes, and how they exchange rows.
        packed: the rows are records of int8 rows.
    """

    name = ""

    def __init__(
        self,
        shards: Sequence[Shard],
        num_tables: int,
        plan: ShardingPlan,
        packed: bool,
    ) -> None:
        super().__init__()
        self.world = world = plan.world
        self._link = PeerExchange(world) if plan.linked else None
        self.comm_dtype = plan.comm_dtype
        self.by_rank = [[s for s in shards if s.rank == rank] for rank in range(world.size)]
        self.mine = self.by_rank[world.rank]
        self.width = self.mine[0].width if self.mine else max(shard.width for shard in shards)
        self.columns = record_bytes(self.width, 8) if packed else self.width  # in memory
        self.first_column = self.mine[0].columns[0] if self.mine else 0
        self.tables = sorted({shard.table for shard in shards})
        self.complete = len({(s.table, s.rows) for s in shards}) == len(self.tables)

        # The local shards, one after another in the weight.
        first, count, start = ([0] * num_tables for _ in range(3))
        self.height = 0
        for shard in self.mine:
            first[shard.table] = shard.rows[0]
            count[shard.table] = shard.height
            start[shard.table] = self.height
            self.height += shard.height

        requested = [shard.table for rank in self.by_rank for shard in rank]
        self._add_buffer("_requested", requested)
        self._add_buffer("_slots", [self.tables.index(table) for table in requested])
        self._add_buffer("_mine", [shard.table for shard in self.mine])
        self._add_buffer("_held", [first, count])
        self._add_buffer("_start", start)
        self._requested: Tensor  # tables of the shards of all ranks, rank after rank
        self._slots: Tensor  # positions of these among the tables
        self._mine: Tensor  # tables of the local shards
        self._held: Tensor  # [2, F] first row and number of rows of the local shard of each table
        self._start: Tensor  # [F] its first row in the weight

        self.peer_lookup: PeerLookup | None = None
        if plan.peers and len({shard.width for shard in shards}) == 1:
            self._make_peer_lookup()

    def _add_buffer(self, name: str, values: Sequence[Any]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def _make_peer_lookup(self) -> None:
        heights = [sum(shard.height for shard in own) for own in self.by_rank]
        lookups = [len(own) for own in self.by_rank]
        self.peer_lookup = PeerLookup(
            self.world, max(heights) + 1, self.width, lookups, self.comm_dtype, self.columns
        )

        # A look-up of a sample finds its row in one of the shards of a table with the same columns.
        position = {table: index for index, table in enumerate(self.order)}
        slots: dict[tuple[int, tuple[int, int]], list[tuple[int, int, int]]] = {}
        for rank, shards in enumerate(self.by_rank):
            start = 0
            for index, shard in enumerate(shards):
                shift = self.peer_lookup.key_of(rank, start) - shard.rows[0]
                section = self.world.rank * len(shards) + index
                slot = position[shard.table], shard.columns
                slots.setdefault(slot, []).append((shard.rows[0], shift, section))
                start += shard.height
        parts = [sorted(slots[slot]) for slot in sorted(slots)]
        most, end = max(map(len, parts)), (torch.iinfo(torch.int64).max, 0, 0)
        parts = [[*own, *[end] * (most - len(own))] for own in parts]

        self._add_buffer("_slot_tables", [self.order[table] for table, _ in sorted(slots)])
        self._add_buffer("_parts", parts)
        self._slot_tables: Tensor  # [S] table of each look-up of a sample
        self._parts: Tensor  # [S, parts, 3], see peer_keys

    @property
    def order(self) -> list[int]:
        """The tables in the order in which their vectors are returned."""
        return self.tables

    @property
    def table_rows(self) -> TableRows:
        """The local rows of each table of the group in the weight."""
        return TableRows(self._start, held=self._held)

    def held(self) -> Iterator[tuple[Shard, int]]:
        """The local shards, each with its first row in the weight."""
        for shard in self.mine:
            yield shard, int(self._start[shard.table])

    def lookup_local(
        self, weight: Tensor, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT
    ) -> Tensor:
        """Rows of ``ids`` of ``tables``, ``[..., width]``; zeros for rows of other ranks."""
        rows, inside = held_rows_torch(ids, tables, self.table_rows)
        rows = torch.where(inside, rows, self.height)  # or the last row
        found = lookup(weight, rows, sparse=True, context=RowContext(sorter=context.sorter))
        return found * inside[..., None]

    def new_weight(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Zeros for the local rows, and for one more row, which ids of other ranks get."""
        if self.peer_lookup is not None:
            return self.peer_lookup.new_weight(self.height + 1, device, dtype)
        return torch.zeros(self.height + 1, self.columns, device=device, dtype=dtype)

    def look_up(
        self, weight: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT
    ) -> list[Tensor]:
        """Look up ``ids [F, B]`` at their holders.

        Args:
            weight: the local rows.
            ids: of this process's samples.
            context: see ``Embedding.forward``.

        Returns:
            The vectors ``[B, F_i, D]``, tables in ``order``.
        """
        peers = self.peer_lookup if context.equal_sizes else None
        if peers is not None and peers.serves(weight):
            shape, sort = (peers.height, self.world.size), self.width >= WIDE
            lookups = peer_keys(ids, self._slot_tables, self._parts, *shape, sort=sort)
            found = peers(weight, lookups, ids.shape[1], context.sorter)
            return [found.view(len(found), len(self.order), -1)]
        return self.finish(self._exchange(weight, ids, context))

    def _exchange(self, weight: Tensor, ids: Tensor, context: LookupContext) -> list[Tensor]:
        """Send ids to their holders, and receive vectors ``[B, shards, width]`` from each rank."""
        batch = ids.shape[1]
        sizes = self.world.sizes(batch, ids.device, equal=context.equal_sizes)
        asked = ids.index_select(0, self._requested).view(-1)
        give = [len(own) * batch for own in self.by_rank]
        get = [len(self.mine) * size for size in sizes]
        requests = self._by_shard(exchange(asked, give, get), sizes)
        if self.complete:  # requests are [shards, global batch]
            tables = TableRows(self._start[self._mine])
            sorting = RowContext(sorter=context.sorter)
            found = lookup_tables(weight, tables, requests, context=sorting)
        else:
            found = self.lookup_local(weight, self._mine[:, None], requests, context)
            found = found.transpose(0, 1)
        return self._send_back(found, batch, sizes)

    def pool(
        self, weight: Tensor, bags: CountedBags, context: LookupContext = NO_CONTEXT
    ) -> list[Tensor]:
        """Sum the rows of bags at their holders: a bag crosses a link as one vector per holder.

        Args:
            weight: the local rows.
            bags: of this process's samples, of all tables.
            context: see ``Embedding.forward``.

        Returns:
            The sums ``[B, F_i, D]``, tables in ``order``.
        """
        sizes = self.world.sizes(bags.batch, bags.ids.device, equal=context.equal_sizes)
        asked = bags.select(self._requested, [s.table for rank in self.by_rank for s in rank])
        link = self._link if context.equal_sizes else None
        served = self._serve(asked, sizes, link)

        tables = TableRows(self._start[self._mine])
        if not self.complete:
            tables = tables._replace(held=self._held[:, self._mine])
        if self.mine:
            found = lookup_bags(weight, tables, served.bags(), context=context)
        else:  # no vectors, but of the type that the other ranks send
            sorting = RowContext(sorter=context.sorter)
            found = lookup_tables(weight, tables, served.lengths, context=sorting)
            found = found.to(context.dtype or found.dtype)
        return self.finish(self._send_back(found, bags.batch, sizes, link))

    def _serve(
        self, asked: CountedBags, sizes: Sequence[int], link: PeerExchange | None
    ) -> CountedBags:
        """The bags that all ranks request from this one.

        Args:
            asked: the bags that this rank requests, rank after rank.
            sizes: number of samples of each rank.
            link: exchanges ids of bags of fixed sizes.
        """
        shards = [len(of_rank) for of_rank in self.by_rank]
        own = len(self.mine)
        if asked.bag_sizes is None:
            counts = torch.tensor(asked.counts, device=asked.ids.device)
            counts = exchange(counts, shards, [own] * len(sizes))
            get = counts.view(len(sizes), own).tolist()
            lengths = exchange(
                asked.lengths.reshape(-1),
                [count * asked.batch for count in shards],
                [own * size for size in sizes],
            )
            lengths = self._by_shard(lengths, sizes)
        else:
            # Bags of fixed sizes are known without an exchange.
            first = sum(shards[: self.world.rank])
            bag_sizes = asked.bag_sizes[first : first + own]
            get = [[bag_size * size for bag_size in bag_sizes] for size in sizes]
            lengths = asked.lengths[first : first + own, :1]
            if not asked.batch:  # not in a captured step, where nothing is copied from the host
                lengths = torch.tensor(bag_sizes, device=asked.ids.device).long()[:, None]
            lengths = lengths.expand(own, sum(sizes))

        # The ids of each shard, rank after rank.
        ends = list(accumulate(shards, initial=0))
        give = [sum(asked.counts[begin:end]) for begin, end in pairwise(ends)]
        if link is not None and asked.bag_sizes is not None:
            received = link.ids(asked.ids, give)
        else:
            received = exchange(asked.ids, give, [sum(counts) for counts in get])
        parts = received.split([count for counts in get for count in counts])
        ids = torch.cat([received[:0], *(part for s in range(own) for part in parts[s::own])])
        return CountedBags(ids, lengths, [sum(column) for column in zip(*get, strict=True)])

    def _by_shard(self, received: Tensor, sizes: Sequence[int]) -> Tensor:
        """``[shards, global batch]`` from what each rank sent, one rank after another."""
        own = len(self.mine)
        parts = zip(received.split([own * size for size in sizes]), sizes, strict=True)
        return torch.cat([part.view(own, size) for part, size in parts], dim=1)

    def _send_back(
        self, found: Tensor, batch: int, sizes: Sequence[int], link: PeerExchange | None = None
    ) -> list[Tensor]:
        """Send vectors ``[global batch, shards, width]`` to the ranks of their samples.

        Returns:
            The vectors ``[B, shards, width]`` from each rank with shards.
        """
        widths = [own[0].width if own else 0 for own in self.by_rank]
        get = [batch * len(own) * w for own, w in zip(self.by_rank, widths, strict=True)]
        give = [size * len(self.mine) * self.width for size in sizes]
        if link is not None:
            parts = link.vectors(found.reshape(-1).to(self.comm_dtype or found.dtype), give, get)
        else:
            parts = exchange(found.reshape(-1), give, get, self.comm_dtype).split(get)
        return [
            part.view(batch, len(own), width)
            for part, own, width in zip(parts, self.by_rank, widths, strict=True)
            if own
        ]

    @abstractmethod
    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        """Full vectors ``[B, F_i, D]`` from the parts that the holders of shards sent."""


class TableWise(Sharding):
    """Tables on one rank each, which sends full vectors."""

    name = "table_wise"

    @property
    def order(self) -> list[int]:
        return [shard.table for own in self.by_rank for shard in own]

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return chunks


class RowWise(Sharding):
    """Tables split by rows: for each id, one holder sends the row, and the others send zeros."""

    name = "row_wise"

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        received = torch.cat(chunks, dim=1)
        received = received.to(torch.promote_types(received.dtype, torch.float32))
        out = received.new_zeros(len(received), len(self.tables), self.width)
        return [out.index_add(1, self._slots, received)]


class ColumnWise(Sharding):
    """Tables split by columns: each holder sends a part of every vector."""

    name = "column_wise"

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return [torch.cat(chunks, dim=2)]

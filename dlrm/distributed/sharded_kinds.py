"""The kinds of tables that can be sharded over processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from dlrm.distributed.sharded_tables import ShardedTables
from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.embeddings.base import Common
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.dynamic_tables import DynamicTables, RowPart
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.embeddings.drop import KEEP, kept_and_mean
from dlrm.embeddings.shared_rows import num_kept_of
from dlrm.kernels.update.packed import CHUNK, clear_rows
from dlrm.utils.bags import Bags
from dlrm.utils.streams import side_stream_of


class ShardedDense(ShardedTables):
    """Dense tables in shards; equal to a dense group of the same seed.

    Args:
        num_kept: rows that each table keeps, the first ones; by default all.
    """

    grows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: ShardingPlan,
        *,
        num_kept: Sequence[int] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, plan, num_kept=num_kept, **common)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows like a dense group: each process draws all, and keeps its own."""
        like = next(self.parameters())
        for table, (ids, rows) in enumerate(zip(self.num_embeddings, self.num_kept, strict=True)):
            for start in range(0, rows, CHUNK):
                drawn = like.new_empty(min(CHUNK, rows - start), self.embedding_dim)
                nn.init.uniform_(drawn, -initial_bound(ids), initial_bound(ids))
                self.copy_rows(table, drawn, start)

    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Copy the local chunks of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        for table, weight in enumerate(weights):
            self.copy_rows(table, weight)


class ShardedDrop(ShardedDense):
    """Tables whose later ids share a row, in shards; equal to a drop group of the same seed."""

    grows = False

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: ShardingPlan,
        *,
        keep: int | list[int] = KEEP,
        shared: bool = True,
        **common: Unpack[Common],
    ) -> None:
        num_kept = num_kept_of(num_embeddings, keep, self.kind())
        super().__init__(num_embeddings, embedding_dim, plan, num_kept=num_kept, **common)
        self.register_buffer("_last", torch.tensor(self.num_kept) - 1, persistent=False)
        self._last: Tensor  # [F] the row that the later ids share
        if not shared:
            for name, rows in self._local_shared_rows().items():
                self.register_buffer(f"_zeros_{name}", torch.tensor(rows), persistent=False)
        self.clear_shared_rows()

    def _local_shared_rows(self) -> dict[str, list[int]]:
        """By parameter, the shared rows in the shards of this process."""
        found: dict[str, list[int]] = {}
        for table, (ids, kept) in enumerate(zip(self.num_embeddings, self.num_kept, strict=True)):
            for name, chunk in self.chunks(table):
                begin, end = chunk.rows
                if begin < kept <= end and kept < ids:
                    found.setdefault(name, []).append(chunk.at + kept - 1 - begin)
        return found

    def clear_shared_rows(self) -> None:
        """As in :class:`~dlrm.embeddings.drop.Drop`."""
        for name, rows in self.named_buffers(recurse=False):
            if name.startswith("_zeros_"):
                clear_rows(self.get_parameter(name.removeprefix("_zeros_")), rows)

    def parts(self, ids: Tensor | Bags, context: LookupContext = NO_CONTEXT) -> list[Tensor]:
        if isinstance(ids, Bags):
            last = self._last[ids.tables(self.num_tables)]
            ids = replace(ids, ids=ids.ids.minimum(last))
        return super().parts(ids, context)

    def exchange(
        self, ids: Tensor, context: LookupContext, after: torch.cuda.Event | None = None
    ) -> tuple[list[Tensor], Tensor]:
        with side_stream_of(ids.device, self.exchange_stream).fork(after=after):
            kept = ids.minimum(self._last[:, None])
        return super().exchange(kept, context, after)[0], ids

    def replicated_part(self, ids: Tensor, context: LookupContext) -> list[Tensor]:
        return super().replicated_part(ids.minimum(self._last[:, None]), context)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        return super().vectors(tables, ids.minimum(self._last[tables]), context)

    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Copy the local chunks of dense tables, each ``[V, D]``, fitted as those of drop."""
        self._check_dense(weights)
        for table, weight in enumerate(weights):
            self.copy_rows(table, kept_and_mean(weight, self.num_kept[table]))


class ShardedDynamic(DynamicTables, ShardedTables):
    """Tables of any ids whose rows are in shards; equal to a dynamic group of the same seed.

    Every process has the whole index and places the ids of all, so that all agree on which id has
    which row. A new row is initialized by the process that holds it. Tables are not sharded by
    column.

    Args:
        plan: the processes, and the shards of the rows that the tables keep: of each table the
            shared ones come first.
    """

    @property
    def row_parts(self) -> list[RowPart]:
        parts = [
            RowPart(self.get_parameter(sharding.name), sharding.table_rows)
            for sharding in self._shardings()
        ]
        if self.replicated is not None:
            parts.append(RowPart(self.replicated, self._replicated_rows))
        return parts

    def parts(self, ids: Tensor | Bags, context: LookupContext = NO_CONTEXT) -> list[Tensor]:
        if isinstance(ids, Bags):
            rows = self._placed_rows(ids.tables(self.num_tables), ids.ids, context)
            ids = replace(ids, ids=self._narrow(rows))
        return super().parts(ids, context)

    def exchange(
        self, ids: Tensor, context: LookupContext, after: torch.cuda.Event | None = None
    ) -> tuple[list[Tensor], Tensor]:
        rows = self._placed_rows(self._tables[:, None], ids, context)
        return super().exchange(self._narrow(rows), context)

    def _narrow(self, rows: Tensor) -> Tensor:
        """Rows for collectives, in fewer bytes if they have room."""
        narrow = not self.opens_peer_memory and max(self.num_kept) < 2**31
        return rows.int() if narrow else rows

"""Dense tables sharded over many processes, in fp32, bf16 or int8.

Every process holds some shards of the tables (:mod:`dlrm.distributed.planner`), and small tables in
full. A look-up sends the ids of the local samples to the holders of their rows. These look them up
for the global batch and send every process the vectors of its samples. The backward pass sends the
gradients back, so that each holder has the row gradients of the global batch, which its optimizer
applies locally. GPUs of one host need no collectives: they read unique rows from each other's
memory and write merged gradients there (:mod:`dlrm.distributed.peer_lookup`). The shapes of one-hot
batches depend only on the plan: nothing waits for the host, and a CUDA graph can capture it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dlrm.distributed.counted_bags import CountedBags
from dlrm.distributed.planner import Shard
from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.distributed.shardings import ColumnWise, RowWise, Sharding, TableWise
from dlrm.distributed.world import exchange
from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.lookup.bags import lookup_bags
from dlrm.kernels.lookup.peer import SortedLookups
from dlrm.kernels.lookup.tables import TableRows, lookup, lookup_tables
from dlrm.kernels.update.packed import packed_rows, record_bytes, storage, write_rows
from dlrm.utils.bags import Bags
from dlrm.utils.local_shards import LocalShards, saved_weight
from dlrm.utils.offsets import row_offsets
from dlrm.utils.streams import side_stream_of

CHUNK = 1 << 20  # rows initialized at a time


class ShardedTables(Embedding):
    """Dense tables held in shards by many processes; equal to a dense group of the same seed.

    The state dict has the tables as one ``weight [sum(V), D]`` in shards on many processes
    (:class:`~dlrm.utils.local_shards.LocalShards`); a plain tensor can be loaded as well. With int8
    rows these are the records of all rows, one after another, as in a dense group.

    Args:
        plan: the processes, and the shards of this group's tables, numbered within the group.
            Tables without a shard are replicated.
    """

    grows = True
    captures_bags = True
    packs_rows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: ShardingPlan,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if self.dtype == "int4":  # the rows of 8 bits of all tables would have to come first
            raise ValueError(
                "tables in int4 can't be sharded: set --sharding.by replicate, or --tables.dtype "
                "int8"
            )
        if self.dtype is not None and any(s.width < embedding_dim for s in plan.shards):
            raise ValueError(
                "rows in int8 have one scale each and can't be sharded by column: set "
                "--sharding.by row or table"
            )
        self.world = plan.world
        sharded = {shard.table for shard in plan.shards}
        self.replicated_tables = [t for t in range(self.num_tables) if t not in sharded]
        by_table = {
            table: [s for s in plan.shards if s.table == table] for table in sorted(sharded)
        }
        kinds: dict[type[Sharding], list[Shard]] = {TableWise: [], RowWise: [], ColumnWise: []}
        for own in by_table.values():
            narrow = any(shard.width < embedding_dim for shard in own)
            kind = ColumnWise if narrow else RowWise if len(own) > 1 else TableWise
            kinds[kind] += own
        self.shardings = nn.ModuleList(
            kind(own, self.num_tables, plan.world, plan.comm_dtype, plan.peers and not self.dtype)
            for kind, own in kinds.items()
            if own
        )
        rows = [self.num_embeddings[table] for table in self.replicated_tables]
        self.replicated = self._new_rows(sum(rows), embedding_dim) if rows else None
        for sharding, weight in zip(self._shardings(), self._new_weights(), strict=True):
            self.register_parameter(sharding.name, weight)
        self.order = [
            *self.replicated_tables,
            *(table for sharding in self._shardings() for table in sharding.order),
        ]
        self.register_buffer("_starts", row_offsets(rows or [0]), persistent=False)
        replicated = torch.tensor(self.replicated_tables).long()
        self.register_buffer("_replicated", replicated, persistent=False)
        self.register_buffer("_order", torch.tensor(self.order), persistent=False)
        self.register_buffer("_back", self._order.argsort(), persistent=False)
        self._starts: Tensor  # [replicated tables], where each begins
        self._replicated: Tensor  # [replicated tables]
        self._order: Tensor  # [F]
        self._back: Tensor  # [F], position of each table in the order
        self._tables_at = row_offsets(self.num_embeddings).tolist()
        self.reset_parameters()

    def _shardings(self) -> list[Sharding]:
        return list(self.shardings)  # type: ignore[arg-type]

    def _new_weights(self) -> list[nn.Parameter]:
        """A weight per sharding."""
        where = torch.get_default_device(), torch.get_default_dtype()
        weights = [
            nn.Parameter(sharding.new_weight(*where))
            if self.dtype is None
            else self._new_rows(sharding.height + 1, sharding.width)
            for sharding in self._shardings()
        ]
        for weight in weights:
            weight.grad_dtype = None  # gradients have the type in which they are sent
        return weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """For ``.to`` and the like: move weights to memory that peers can read."""
        shardings = [sharding for sharding in self._shardings() if sharding.peer_lookup is not None]
        held = {sharding.name: self._parameters.pop(sharding.name) for sharding in shardings}
        super()._apply(fn, recurse)
        for sharding in shardings:
            weight = held[sharding.name]
            assert weight is not None
            like = fn(weight.data[:0])
            if (like.device, like.dtype) != (weight.device, weight.dtype):
                weight.data = sharding.new_weight(like.device, like.dtype).copy_(weight.data)
                weight.grad = None if weight.grad is None else fn(weight.grad)
        self._parameters.update(held)
        for own in self._shardings():  # packed rows may have become a new parameter
            self.get_parameter(own.name).grad_dtype = None
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows as a dense group does: every process draws all and keeps its own."""
        like = next(self.parameters())
        for table, rows in enumerate(self.num_embeddings):
            for start in range(0, rows, CHUNK):
                drawn = like.new_empty(min(CHUNK, rows - start), self.embedding_dim)
                nn.init.uniform_(drawn, -(rows**-0.5), rows**-0.5)
                for name, chunk in self.chunks(table):
                    chunk.copy_rows(self.get_parameter(name), drawn, start)

    def at_peers(self) -> list[Sharding]:
        """The shardings whose rows peers read in this process's memory."""
        return [sharding for sharding in self._shardings() if sharding.at_peers]

    def sort(self, ids: Tensor) -> list[SortedLookups]:
        """Sort the look-ups of ``ids [F, B]`` at peers, for each sharding."""
        return [sharding.sort(ids) for sharding in self.at_peers()]

    def local_parameters(self) -> list[nn.Parameter]:
        """The parameters that differ between processes."""
        return [self.get_parameter(sharding.name) for sharding in self._shardings()]

    def chunks(self, table: int) -> Iterator[tuple[str, Chunk]]:
        """The local chunks of a table, each with the name of the parameter that holds it."""
        if table in self.replicated_tables:
            at = int(self._starts[self.replicated_tables.index(table)])
            rows = (0, self.num_embeddings[table])
            yield "replicated", Chunk(at=at, rows=rows, columns=(0, self.embedding_dim))
        for sharding in self._shardings():
            for shard, at in sharding.held():
                if shard.table == table:
                    yield sharding.name, Chunk(at=at, rows=shard.rows, columns=shard.columns)

    def parts(self, ids: Tensor | Bags, context: LookupContext = NO_CONTEXT) -> list[Tensor]:
        """As :meth:`forward`, without copying the parts ``[B, F_i, D]`` together; tables in
        ``order``.

        Every process must call it at the same time.
        """
        plain = self.mode == "sum" and self.padding_idx is None and not self.check_ids
        if isinstance(ids, Bags) and plain and not self._packed_on_cpu:
            return self._pool(self._counted(ids, context), context)
        if isinstance(ids, Bags) or self.padding_idx is not None:
            return [self(ids, context=context).index_select(1, self._order)]
        if self.check_ids:
            self._check(self._tables[:, None], ids)
        side, sorted_ahead = side_stream_of(ids.device, "exchange"), iter(context.lookups)
        with side.fork():
            finish = [
                sharding.start(
                    self.get_parameter(sharding.name),
                    ids,
                    context,
                    next(sorted_ahead, None) if sharding.at_peers else None,
                )
                for sharding in self._shardings()
            ]
        found = []
        if self.replicated is not None:
            own, tables = ids.index_select(0, self._replicated), TableRows(self._starts)
            found.append(
                lookup_tables(
                    self.replicated, tables, own, sparse=self.sparse, sorter=context.sorter
                )
            )
        side.join()
        for vectors in finish:
            found += vectors()
        return found

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        return self._in_order(self.parts(ids, context=context), None)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self.mode == "max" or bags.weights is not None or self._packed_on_cpu:
            return super().lookup_bags(bags, context)
        counted = self._counted(bags, context)
        out = self._in_order(self._pool(counted, context), context.dtype)
        return out / counted.lengths.t().clamp(min=1)[..., None] if self.mode == "mean" else out

    @property
    def _packed_on_cpu(self) -> bool:
        return self.dtype is not None and not self._order.is_cuda

    def _counted(self, bags: Bags, context: LookupContext) -> CountedBags:
        fixed = context.bag_sizes if self.padding_idx is None else None
        return CountedBags.of(bags, self.num_tables, fixed)

    def _pool(self, bags: CountedBags, context: LookupContext) -> list[Tensor]:
        """The sums of bags, ``[B, F_i, D]``, tables in ``order``."""
        found = []
        if self.replicated is not None:
            own = bags.select(self._replicated, self.replicated_tables)
            found.append(
                lookup_bags(
                    self.replicated, TableRows(self._starts), own.bags(),
                    sparse=self.sparse, context=context,
                )
            )  # fmt: skip
        for sharding in self._shardings():
            found += sharding.pool(self.get_parameter(sharding.name), bags, context)
        return found

    def _in_order(self, parts: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
        """Parts ``[B, F_i, D]`` as one ``[B, F, D]``, in the order of the tables.

        Its type holds that of every part, and ``dtype``, by default that of the parameters.
        """
        least = dtype or next(self.parameters()).dtype
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), least)
        return torch.cat([part.to(dtype) for part in parts], 1).index_select(1, self._back)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        """As every kind does, for the ids of every process; all must call it at the same time."""
        flat, own = ids.reshape(-1), tables.expand_as(ids).reshape(-1)
        sizes = self.world.sizes(len(flat), flat.device)
        pairs = torch.stack([own, flat.long()], 1)
        all_tables, all_ids = torch.cat(self.world.gather(pairs, sizes)).unbind(1)
        out = next(self.parameters()).new_zeros(len(all_ids), self.embedding_dim)
        for sharding in self._shardings():
            weight = self.get_parameter(sharding.name)
            first = sharding.first_column
            found = sharding.lookup_local(weight, all_tables, all_ids, context)
            out = out + nn.functional.pad(
                found, (first, self.embedding_dim - first - sharding.width)
            )
        give = [size * self.embedding_dim for size in sizes]
        got = exchange(out.view(-1), give, [flat.numel() * self.embedding_dim] * len(sizes))
        result = got.view(len(sizes), len(flat), self.embedding_dim).sum(0)
        if self.replicated is not None:
            starts = torch.full_like(self._tables, -1)
            starts[self._replicated] = self._starts
            at = starts[own]
            mine = (at >= 0).nonzero()[:, 0]
            rows = (at + flat)[mine]
            local = lookup(self.replicated, rows, sparse=self.sparse, sorter=context.sorter)
            result = result.index_copy(0, mine, local)
        return result.view(*ids.shape, self.embedding_dim)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Copy the local chunks of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        for table, weight in enumerate(weights):
            for name, chunk in self.chunks(table):
                chunk.copy_rows(self.get_parameter(name), weight, 0)

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table, over all processes; replicas are counted once."""
        row = self.embedding_dim * next(self.parameters()).element_size()
        if self.dtype is not None:
            row = record_bytes(self.embedding_dim, 8)
        return [{"weights": rows * row} for rows in self.num_embeddings]

    # State dicts ------------------------------------------------------------------------------

    def shards(self, tensors: Mapping[str, Tensor], *, per_row: bool = False) -> LocalShards:
        """Shards of one tensor over all processes, from local tensors by name of the parameter.

        These are the parameters, or states of an optimizer with an entry per weight or per row.
        """
        if any(packed_rows(tensor) is not None for tensor in tensors.values()):
            return self._packed_shards(tensors)
        found = []
        width = 1 if per_row else self.embedding_dim
        for table in range(self.num_tables):
            for name, chunk in self.chunks(table):
                first = 0 if per_row else chunk.columns[0]
                offset = (self._tables_at[table] + chunk.rows[0], first)
                height = chunk.rows[1] - chunk.rows[0]
                found.append((offset, tensors[name].detach()[chunk.at : chunk.at + height]))
        like = next(iter(tensors.values()))
        return LocalShards((sum(self.num_embeddings), width), found, like.dtype)

    def _packed_shards(self, parameters: Mapping[str, Tensor]) -> LocalShards:
        """As :meth:`shards`, of the bytes of packed rows."""
        found, record = [], record_bytes(self.embedding_dim, 8)
        for table, first in enumerate(self._tables_at[: self.num_tables]):
            for name, chunk in self.chunks(table):
                begin, end = (chunk.at + row - chunk.rows[0] for row in chunk.rows)
                data = storage(parameters[name])[0][begin * record : end * record]
                found.append((((first + chunk.rows[0]) * record,), data))
        return LocalShards((sum(self.num_embeddings) * record,), found, torch.uint8)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.shards(dict(self.named_parameters()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        shape: tuple[int, ...] = sum(self.num_embeddings), self.embedding_dim
        if self.dtype is not None:
            shape = (shape[0] * record_bytes(self.embedding_dim, 8),)
        weight = saved_weight(state_dict, prefix, shape, strict, missing, unexpected, errors)
        if weight is None:
            return
        own = self.shards(dict(self.named_parameters()))
        if not isinstance(weight, Tensor):
            weight.copy_to(own)
        elif self.dtype is None:
            self.load_dense(weight.split(self.num_embeddings))
        else:
            with torch.no_grad():
                for (first,), part in own.parts.items():
                    part.copy_(weight[first : first + len(part)])


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a table that begins at row ``at`` of a parameter."""

    at: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    def copy_rows(self, parameter: Tensor, rows: Tensor, start: int) -> None:
        """Copy the rows of this chunk from ``rows [n, D]``, the table's rows from ``start`` on."""
        low, high = max(self.rows[0], start), min(self.rows[1], start + len(rows))
        if low >= high:
            return
        values = rows[low - start : high - start, slice(*self.columns)]
        shift = self.at - self.rows[0]
        if packed_rows(parameter) is None:
            parameter[low + shift : high + shift].copy_(values)
        else:
            to = torch.arange(low + shift, high + shift, device=parameter.device)
            write_rows(parameter, to, values)

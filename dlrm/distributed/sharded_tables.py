"""Tables sharded over many processes, in fp32, bf16 or int8.

Every process holds some shards of the tables (:mod:`dlrm.distributed.planner`), and all rows of
small tables. A look-up sends the ids of the local samples to the holders of their rows. They look
up the rows for the global batch and send each process the vectors of its samples. The backward pass
sends the gradients back: each holder gets the row gradients of the global batch, and its optimizer
applies them locally. GPUs of one host need no collectives: they read rows from each other's memory
and write gradients there (:mod:`dlrm.distributed.peer_lookup`). The shapes of one-hot batches
depend only on the plan, so nothing waits for the host, and a CUDA graph can capture it all.
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
from dlrm.kernels.lookup.pool import lookup_bags
from dlrm.kernels.lookup.tables import (
    RowContext,
    TableRows,
    held_rows_torch,
    lookup,
    lookup_tables,
)
from dlrm.kernels.update.packed import (
    PackedParameter,
    PackedRows,
    chunks_to_write,
    packed_rows,
    record_bytes,
    storage,
)
from dlrm.utils.bags import Bags
from dlrm.utils.local_shards import LocalShards, saved_weight
from dlrm.utils.offsets import row_offsets
from dlrm.utils.streams import side_stream_of


class ShardedTables(Embedding):
    """Base of tables held in shards by many processes.

    The state dict has the tables as one ``weight [sum(V), D]`` in shards on many processes
    (:class:`~dlrm.utils.local_shards.LocalShards`); a plain tensor can be loaded as well. With int8
    rows, the weight is the records of all rows, one after another, as in a dense group.

    Args:
        plan: the processes, and the shards of this group's tables, numbered within the group.
            Tables without a shard are replicated.
        num_kept: rows that each table keeps; by default one for each id.
    """

    captures_bags = True
    packs_rows = True
    exchange_stream = "exchange"
    """Rows are exchanged on this one of :data:`dlrm.utils.streams.PURPOSES`."""

    @classmethod
    def kind(cls) -> str:
        return cls.__name__.removeprefix("Sharded").lower()

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: ShardingPlan,
        *,
        num_kept: Sequence[int] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        self.num_kept = tuple(num_kept or self.num_embeddings)
        self.world, self.opens_peer_memory = plan.world, plan.peers
        self.shardings = nn.ModuleList(
            sharding(shards, self.num_tables, plan, self.dtype is not None)
            for sharding, shards in _by_sharding(plan.shards, embedding_dim).items()
        )

        # The weights: one for all replicated tables, and one for each sharding.
        sharded = {shard.table for shard in plan.shards}
        self.replicated_tables = [t for t in range(self.num_tables) if t not in sharded]
        counts = [0 if t in sharded else rows for t, rows in enumerate(self.num_kept)]
        self.replicated = self._new_rows(sum(counts), embedding_dim) if any(counts) else None
        for sharding, weight in zip(self._shardings(), self._new_weights(), strict=True):
            self.register_parameter(sharding.name, weight)

        # The order in which the vectors of the tables are computed.
        self.order = [*self.replicated_tables]
        for sharding in self._shardings():
            self.order += sharding.order
        buffers = {
            "_starts": row_offsets(counts)[self.replicated_tables],
            "_all_starts": row_offsets(counts),
            "_whole": torch.tensor([[0] * self.num_tables, counts]),
            "_replicated": torch.tensor(self.replicated_tables).long(),
            "_back": torch.tensor(self.order).argsort(),
        }
        for name, values in buffers.items():
            self.register_buffer(name, values, persistent=False)
        self._starts: Tensor  # [replicated tables] first row of each in the weight
        self._all_starts: Tensor  # [F] the same for each table; 0 if it is not replicated
        self._whole: Tensor  # [2, F] 0, and rows of each replicated table
        self._replicated: Tensor  # [replicated tables]
        self._back: Tensor  # [F] position of each table in the order
        self._first_rows = row_offsets(self.num_kept).tolist()  # in the state dict

    @property
    def _replicated_rows(self) -> TableRows:
        """The rows of each table in the weight of the replicated ones."""
        return TableRows(self._all_starts, held=self._whole)

    def _shardings(self) -> list[Sharding]:
        return list(self.shardings)  # type: ignore[arg-type]

    def _new_weights(self) -> list[nn.Parameter]:
        """A weight per sharding."""
        device, dtype = torch.get_default_device(), torch.get_default_dtype()
        weights: list[nn.Parameter] = []
        for sharding in self._shardings():
            if self.dtype is None:
                weights.append(nn.Parameter(sharding.new_weight(device, dtype)))
                continue
            data, rows = sharding.new_weight(device, torch.uint8), sharding.height + 1
            records = PackedRows(data=data.view(-1), num_rows=rows, dim=sharding.width, wide=rows)
            weights.append(PackedParameter(records))
        for weight in weights:
            weight.grad_dtype = None  # gradients have the type in which they are sent
        return weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Implement ``.to`` and others: weights that peers read move to memory of that kind."""
        shardings = [sharding for sharding in self._shardings() if sharding.peer_lookup is not None]
        held = {sharding.name: self._parameters.pop(sharding.name) for sharding in shardings}
        super()._apply(fn, recurse)

        for sharding in shardings:
            weight = held[sharding.name]
            assert weight is not None
            data = storage(weight)[0]
            like = fn(data[:0])
            if (like.device, like.dtype) != (data.device, data.dtype):
                new = sharding.new_weight(like.device, like.dtype)
                if isinstance(weight, PackedParameter):
                    weight.moved(new.view(-1).copy_)
                else:
                    weight.data = new.copy_(data)
                weight.grad = None if weight.grad is None else fn(weight.grad)

        self._parameters.update(held)
        for weight in self.local_parameters():  # packed rows may be a new parameter
            weight.grad_dtype = None
        return self

    def local_parameters(self) -> list[nn.Parameter]:
        """The parameters that differ between processes."""
        return [self.get_parameter(sharding.name) for sharding in self._shardings()]

    def chunks(self, table: int) -> Iterator[tuple[str, Chunk]]:
        """The local chunks of a table, each with the name of the parameter that holds it."""
        if table in self.replicated_tables:
            start = int(self._starts[self.replicated_tables.index(table)])
            rows = (0, self.num_kept[table])
            yield "replicated", Chunk(at=start, rows=rows, columns=(0, self.embedding_dim))
        for sharding in self._shardings():
            for shard, start in sharding.held():
                if shard.table == table:
                    yield sharding.name, Chunk(at=start, rows=shard.rows, columns=shard.columns)

    def parts(self, ids: Tensor | Bags, context: LookupContext = NO_CONTEXT) -> list[Tensor]:
        """The vectors of :meth:`forward` in parts ``[B, F_i, D]``, tables in ``order``.

        All processes must call it at the same time. The ids are inside their tables.
        """
        if isinstance(ids, Bags):
            return self._pool(ids, context)
        exchanged, stored = self.exchange(ids, context)
        parts = [*self.replicated_part(stored, context), *exchanged]
        side_stream_of(ids.device, self.exchange_stream).join()
        return parts

    def exchange(
        self, ids: Tensor, context: LookupContext, after: torch.cuda.Event | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Look up sharded tables, on a second stream.

        Args:
            ids: of all tables, ``[F, B]``.
            context: see ``Embedding.forward``.
            after: the ids are known since this event; by default since now.

        Returns:
            The vectors, and the ids for :meth:`replicated_part`, to be kept until that stream has
            been joined.
        """
        with side_stream_of(ids.device, self.exchange_stream).fork(after=after):
            found = (
                sharding.look_up(self.get_parameter(sharding.name), ids, context)
                for sharding in self._shardings()
            )
            return [part for parts in found for part in parts], ids

    def replicated_part(self, ids: Tensor, context: LookupContext) -> list[Tensor]:
        """The vectors of replicated tables, if there are any."""
        if self.replicated is None:
            return []
        own, tables = ids.index_select(0, self._replicated), TableRows(self._starts)
        sorting = RowContext(sorter=context.sorter)
        return [lookup_tables(self.replicated, tables, own, sparse=self.sparse, context=sorting)]

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        return self._in_order(self.parts(ids, context=context), None)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self.mode == "max" or bags.weights is not None:
            return super().lookup_bags(bags, context)
        out = self._in_order(self.parts(bags, context), context.dtype)
        lengths = bags.offsets.diff().view(self.num_tables, -1)
        return out / lengths.t().clamp(min=1)[..., None] if self.mode == "mean" else out

    def _pool(self, given: Bags, context: LookupContext) -> list[Tensor]:
        """The sums of bags, ``[B, F_i, D]``, tables in ``order``."""
        fixed = context.bag_sizes if self.padding_idx is None else None
        bags, found = CountedBags.of(given, self.num_tables, fixed), []
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
        """Concatenate parts ``[B, F_i, D]`` to ``[B, F, D]``, in the order of the tables.

        The type of the parts is promoted to ``dtype``, by default the type of the parameters.
        """
        least = dtype or next(self.parameters()).dtype
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), least)
        return torch.cat([part.to(dtype) for part in parts], 1).index_select(1, self._back)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        """Look up ids in any shape; all processes must call it at the same time."""
        flat_ids = ids.reshape(-1)
        flat_tables = tables.expand_as(ids).reshape(-1)

        # Gather the ids of all processes, and look up the local parts of their rows.
        sizes = self.world.sizes(len(flat_ids), flat_ids.device)
        pairs = torch.stack([flat_tables, flat_ids.long()], 1)
        all_tables, all_ids = torch.cat(self.world.gather(pairs, sizes)).unbind(1)
        out = next(self.parameters()).new_zeros(len(all_ids), self.embedding_dim)
        for sharding in self._shardings():
            weight = self.get_parameter(sharding.name)
            first = sharding.first_column
            found = sharding.lookup_local(weight, all_tables, all_ids, context)
            out = out + nn.functional.pad(
                found, (first, self.embedding_dim - first - sharding.width)
            )

        # Send them back: a vector is the sum of the parts of all processes.
        give = [size * self.embedding_dim for size in sizes]
        got = exchange(out.view(-1), give, [flat_ids.numel() * self.embedding_dim] * len(sizes))
        result = got.view(len(sizes), len(flat_ids), self.embedding_dim).sum(0)

        if self.replicated is not None:
            rows, here = held_rows_torch(flat_ids, flat_tables, self._replicated_rows)
            mine = here.nonzero()[:, 0]
            sorting = RowContext(sorter=context.sorter)
            local = lookup(self.replicated, rows[mine], sparse=self.sparse, context=sorting)
            result = result.index_copy(0, mine, local)
        return result.view(*ids.shape, self.embedding_dim)

    @torch.no_grad()
    def copy_rows(self, table: int, rows: Tensor, start: int = 0) -> None:
        """Copy rows ``[n, D]`` of a table, from row ``start`` on, to the local chunks."""
        for name, chunk in self.chunks(table):
            low, high = max(chunk.rows[0], start), min(chunk.rows[1], start + len(rows))
            shift, weight = chunk.at - chunk.rows[0], self.get_parameter(name)
            for at, part in chunks_to_write(weight, low + shift, max(low, high) + shift):
                first = at - shift - start
                part.copy_(rows[first : first + len(part), slice(*chunk.columns)])

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table, over all processes; replicas are counted once."""
        row = self.embedding_dim * next(self.parameters()).element_size()
        if self.dtype is not None:
            row = record_bytes(self.embedding_dim, 8)
        return [{"weights": rows * row} for rows in self.num_kept]

    # State dicts ------------------------------------------------------------------------------

    def shards(self, tensors: Mapping[str, Tensor], *, per_row: bool = False) -> LocalShards:
        """The shards of one tensor over all processes.

        Args:
            tensors: local tensors by name of their parameter: the parameters themselves, or states
                of an optimizer.
            per_row: the tensors have one entry per row, not one per weight.
        """
        if any(packed_rows(tensor) is not None for tensor in tensors.values()):
            return self._packed_shards(tensors)

        parts = []
        for table, first_row in enumerate(self._first_rows[: self.num_tables]):
            for name, chunk in self.chunks(table):
                offset = (first_row + chunk.rows[0], 0 if per_row else chunk.columns[0])
                height = chunk.rows[1] - chunk.rows[0]
                parts.append((offset, tensors[name].detach()[chunk.at : chunk.at + height]))
        shape = sum(self.num_kept), 1 if per_row else self.embedding_dim
        return LocalShards(shape, parts, next(iter(tensors.values())).dtype)

    def _packed_shards(self, parameters: Mapping[str, Tensor]) -> LocalShards:
        """The shards of the bytes of packed rows; see :meth:`shards`."""
        parts, record = [], record_bytes(self.embedding_dim, 8)
        for table, first_row in enumerate(self._first_rows[: self.num_tables]):
            for name, chunk in self.chunks(table):
                begin, end = (chunk.at + row - chunk.rows[0] for row in chunk.rows)
                data = storage(parameters[name])[0][begin * record : end * record]
                parts.append((((first_row + chunk.rows[0]) * record,), data))
        return LocalShards((sum(self.num_kept) * record,), parts, torch.uint8)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._without(self._parameters):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.shards(dict(self.named_parameters()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        rest = {name: value for name, value in state_dict.items() if name != f"{prefix}weight"}
        with self._without(self._parameters):
            super()._load_from_state_dict(
                rest, prefix, metadata, strict, missing, unexpected, errors
            )

        shape: tuple[int, ...] = sum(self.num_kept), self.embedding_dim
        if self.dtype is not None:
            shape = (shape[0] * record_bytes(self.embedding_dim, 8),)
        weight = saved_weight(state_dict, prefix, shape, missing, errors)
        if weight is None:
            return

        own = self.shards(dict(self.named_parameters()))
        if not isinstance(weight, Tensor):
            weight.copy_to(own)
        elif self.dtype is None:
            for table, rows in enumerate(weight.split(self.num_kept)):
                self.copy_rows(table, rows)
        else:
            with torch.no_grad():
                for (first,), part in own.parts.items():
                    part.copy_(weight[first : first + len(part)])


def _by_sharding(shards: Sequence[Shard], dim: int) -> dict[type[Sharding], list[Shard]]:
    """The shards of tables by their sharding type."""
    found: dict[type[Sharding], list[Shard]] = {TableWise: [], RowWise: [], ColumnWise: []}
    for table in sorted({shard.table for shard in shards}):
        of_table = [shard for shard in shards if shard.table == table]
        if any(shard.width < dim for shard in of_table):
            found[ColumnWise] += of_table
        else:
            found[RowWise if len(of_table) > 1 else TableWise] += of_table
    return {sharding: shards for sharding, shards in found.items() if shards}


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a table that begins at row ``at`` of a parameter."""

    at: int
    rows: tuple[int, int]
    columns: tuple[int, int]

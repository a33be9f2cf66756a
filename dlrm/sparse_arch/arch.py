"""The sparse architecture of a model: which table is of which kind, and their joint look-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from dlrm.data.batch import Batch
from dlrm.distributed.sharded_kinds import ShardedDense, ShardedDrop, ShardedDynamic
from dlrm.distributed.sharded_tables import ShardedTables
from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.budget import DTYPES, MANY_IDS
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.row_caches import (
    CachesHotRows,
    CachesRows,
    CountsIds,
    PrefetchesRows,
)
from dlrm.embeddings.registry import build
from dlrm.embeddings.shared_rows import SharedRows
from dlrm.kernels.update.packed import BITS
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.feature_order import FeatureOrder, features_of_tables, group_tables
from dlrm.sparse_arch.table_plan import TablePlan
from dlrm.utils.bags import Bags
from dlrm.utils.messages import did_you_mean
from dlrm.utils.streams import SideStream, side_stream_of

EXCHANGES = ("exchange", "exchange 1", "exchange 2")
LANES = ("tables 1", "tables 2", "tables 3")
SHARDED = {"drop": ShardedDrop, "dynamic": ShardedDynamic}  # tables of other kinds are dense then


class SparseArch(nn.Module):
    """A list of groups of tables, each of one kind.

    The vectors of the groups are not copied into one tensor: the interaction reads them in place,
    those of feature ``f`` at position ``feature_order.positions[f]`` of all groups together.

    Args:
        num_embeddings: rows of the table of each feature.
        embedding_dim: length of a row.
        plan: kind and options of each table; see :func:`group_tables`. With the option ``dtype``
            a table has a type of its own.
        dtype: type of the other tables: ``fp32``, ``bf16``, or ``int8`` and ``int4``, whose vectors
            are fp32.
        sharding: shards of tables that several processes hold.

    Raises:
        ValueError: an unknown type, or one that a kind, or sharded tables, do not have.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: TablePlan,
        *,
        dtype: str = "fp32",
        sharding: ShardingPlan | None = None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"unknown tables_dtype {dtype!r}{did_you_mean(dtype, DTYPES)}")
        self.num_embeddings = tuple(num_embeddings)
        self.embedding_dim = embedding_dim

        # The features of each table, which have the same ids.
        groups = group_tables(plan)
        self._features = features_of_tables(plan)
        for table, features in self._features.items():
            for feature in features:
                if num_embeddings[feature] != num_embeddings[table]:
                    raise ValueError(
                        f"features {table} and {feature} share a table, but have "
                        f"{num_embeddings[table]} and {num_embeddings[feature]} ids"
                    )

        # The tables of each group, as modules.
        self.groups = nn.ModuleList()
        returned: list[list[int]] = []
        for slots, kind, options in groups:
            rows = [num_embeddings[slot] for slot in slots]
            own_dtype = options.pop("dtype", dtype)
            common = {"check_ids": False, "dtype": own_dtype if own_dtype in BITS else None}
            group: Embedding
            if (sharded := _sharding_of(slots, sharding)) is None:
                group = build(kind, rows, embedding_dim, **common, **options)
                returned.append([f for slot in slots for f in self._features[slot]])
            else:
                options = options if kind in SHARDED else {}
                make: Callable[..., ShardedTables] = SHARDED.get(kind, ShardedDense)
                group = make(rows, embedding_dim, plan=sharded, **common, **options)
                group.exchange_stream = EXCHANGES[len(self.groups) % len(EXCHANGES)]
                returned.append([slots[table] for table in group.order])
            self.groups.append(group.bfloat16() if own_dtype == "bf16" else group)

        # The order of the features: those of a table are next to each other.
        self._slots = [slots for slots, _, _ in groups]
        by_group = [[f for slot in slots for f in self._features[slot]] for slots in self._slots]
        sharing = [len(self._features[slots[0]]) for slots in self._slots]
        self.feature_order = FeatureOrder(by_group, returned, sharing)
        # Dense tables last: they take one launch, the others a chain of several.
        self._launch_order = sorted(range(len(groups)), key=lambda i: groups[i][1] == "dense")
        self._last_stats: Counter[str] = Counter()  # of the caches of host memory

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        *,
        bounds: Sequence[int] | None = None,
        context: LookupContext = NO_CONTEXT,
    ) -> list[Tensor]:
        """Look up every table. Ids are not checked: the loader has done that.

        Args:
            ids, offsets: of all features, as in ``Embedding.forward``.
            bounds: where the ids of each table begin, and the end, ``[F + 1]``; without it the host
                may have to read them from the offsets, and waits for the device.
            context: what a training step prepared for these look-ups.

        Returns:
            The vectors of each group, ``[B, F_g, D]``; of a sharded one in several parts.
        """
        order = self._launch_order
        every = ids if offsets is None else Bags(ids, offsets)
        shares = self.feature_order.split(order, every, bounds=bounds, grouped=context.grouped)
        contexts = self._contexts(context)

        # Groups that exchange rows do so side by side, each on a stream of its own.
        lanes = [side_stream_of(ids.device), *self._lanes(ids.device)]
        start = lanes[0].record_event()
        exchanged: dict[int, tuple[list[Tensor], Tensor]] = {}
        for index in order if offsets is None else ():
            group, ids_of_group = self.groups[index], shares[index]
            if isinstance(group, ShardedTables) and isinstance(ids_of_group, Tensor):
                exchanged[index] = group.exchange(ids_of_group, contexts[index], start)

        # The others, and tables that all processes have: the first group on the current stream.
        found: dict[int, list[Tensor]] = {}
        for number, index in enumerate(order):
            group, share, group_context = self.groups[index], shares[index], contexts[index]
            if isinstance(group, ShardedTables):
                if index in exchanged:
                    parts, stored = exchanged[index]
                    found[index] = [*group.replicated_part(stored, group_context), *parts]
                else:
                    found[index] = group.parts(share, group_context)
                continue
            lane = number % len(lanes)
            with lanes[lane].fork(after=start) if lane else nullcontext():
                vectors = group(share, context=group_context)
                found[index] = [self.feature_order.of_features(index, vectors)]
        self.join()
        for side in self.exchanges if exchanged else ():
            side.join()
        if context.sorter is not None:
            context.sorter.sort()
        return [part for index in range(len(self.groups)) for part in found[index]]

    def _lanes(self, device: torch.device) -> list[SideStream]:
        """Streams next to the current one, among which the groups are dealt out; none where groups
        exchange rows, which they do in turn.
        """
        if any(isinstance(group, ShardedTables) for group in self.groups):
            return []
        return [side_stream_of(device, name) for name in LANES[: len(self.groups) - 1]]

    @property
    def exchanges(self) -> list[SideStream]:
        """The streams on which sharded tables exchange rows, except those of bags."""
        names = {g.exchange_stream: None for g in self.groups if isinstance(g, ShardedTables)}
        return [side_stream_of(self.feature_order.positions.device, name) for name in names]

    def join(self) -> None:
        """Make the current stream wait for the look-ups, or the updates, of all groups."""
        for lane in self._lanes(self.feature_order.positions.device):
            lane.join()

    def _contexts(self, context: LookupContext) -> list[LookupContext]:
        """The context of each group, with the bag sizes of that group."""
        if (sizes := context.bag_sizes) is None:
            return [context] * len(self.groups)
        by_group = [[sizes[slot] for slot in slots] for slots in self.feature_order.groups]
        return [replace(context, bag_sizes=sizes) for sizes in by_group]

    # Work ahead of a step ---------------------------------------------------------------------

    def window_size(self, lookups: int) -> int:
        """Number of batches of ``lookups`` look-ups in a prefetch window, whose rows are fetched
        together; 0 if no group fetches rows.
        """
        tables = len(self.num_embeddings)
        sizes = [
            group.window_size(lookups * len(features) // tables)
            for group, features in zip(self.groups, self.feature_order.groups, strict=True)
            if isinstance(group, PrefetchesRows)
        ]
        return min((size for size in sizes if size), default=0)

    def begin_window(self, now: Sequence[Batch], coming: Sequence[Batch]) -> None:
        """Have the groups that fetch rows ahead begin a prefetch window; see
        :meth:`~dlrm.embeddings.common.row_caches.PrefetchesRows.begin_window`.
        """
        groups = {
            index: group
            for index, group in enumerate(self.groups)
            if isinstance(group, PrefetchesRows) and group.window_size(1)
        }
        windows = [
            [self.feature_order.split(groups, b.lookups, bounds=b.bounds) for b in batches]
            for batches in (now, coming)
        ]
        for index, group in groups.items():
            group.begin_window(*([shares[index] for shares in each] for each in windows))

    @property
    def rows_ready(self) -> bool:
        """Whether the rows of the window are still where :meth:`begin_window` put them."""
        caches = (group for group in self.groups if isinstance(group, PrefetchesRows))
        return all(group.rows_ready for group in caches)

    def captures_bags(self, *, ragged: bool) -> bool:
        """Whether a captured step can look up bags; ragged ones only of a single group."""
        alone = self.feature_order.sharing == [1] or not ragged
        return alone and all(group.captures_bags for group, _ in self.embeddings())

    @property
    def opens_peer_memory(self) -> bool:
        """Whether the processes that hold tables open memory for each other."""
        return any(isinstance(g, ShardedTables) and g.opens_peer_memory for g in self.groups)

    def embeddings(self) -> list[tuple[Embedding, list[int]]]:
        """Each group with the features whose tables it holds; of a shared table, the first one."""
        return list(zip(self.groups, self._slots, strict=True))  # type: ignore[arg-type]

    def clear_shared_rows(self) -> None:
        """Set the shared rows to zero again that do not learn, after a step."""
        for group in self.groups:
            if isinstance(group, SharedRows | ShardedDrop):
                group.clear_shared_rows()

    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit each table to a dense one ``[V, D]``, in feature order, as well as its kind allows.

        Raises:
            ValueError: the tables have other shapes.
        """
        for group, slots in self.embeddings():
            group.load_dense([weights[slot] for slot in slots])

    def to_dense(self) -> list[Tensor]:
        """The table of every feature in full, ``[V, D]``."""
        tables: dict[int, Tensor] = {}
        for group, slots in self.embeddings():
            for table, slot in enumerate(slots):
                tables |= dict.fromkeys(self._features[slot], group.to_dense(table))
        return [tables[feature] for feature in range(len(tables))]

    def local_parameters(self) -> list[nn.Parameter]:
        """Parameters that differ between processes: the shards of tables."""
        sharded = [group for group in self.groups if isinstance(group, ShardedTables)]
        return [parameter for group in sharded for parameter in group.local_parameters()]

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of the table of each feature by part; a shared one counts once."""
        tables: list[dict[str, int]] = [{} for _ in self.num_embeddings]
        for group, slots in self.embeddings():
            for slot, parts in zip(slots, group.footprint(), strict=True):
                tables[slot] = parts
        return tables

    def cache_stats(self) -> dict[str, float]:
        """Hit rate of the caches in training, if there are any; and of caches of host memory, the
        megabytes moved per step since the last call. The hit rate of these is since the last call
        too: the first call has none, as the cache was empty.
        """
        hot, host = Counter[str](), Counter[str]()  # counts since a renewal, and since the start
        for group in self.groups:
            if isinstance(group, CachesRows):
                stats = group.cache_stats()
                host["steps"] = int(stats.get("steps", host["steps"]))  # of all groups alike
                (host if "steps" in stats else hot).update({**stats, "steps": 0})
        before, self._last_stats = self._last_stats, host
        since = {name: host[name] - before[name] for name in host}

        if before["steps"]:  # a cache of host memory is empty at the start, and after a resume
            hot.update({name: since[name] for name in ("hits", "lookups")})
        values = {"cache/hit_rate": hot["hits"] / hot["lookups"]} if hot["lookups"] else {}
        if steps := since.get("steps"):
            for name in ("in", "out"):
                values[f"cache/MB_{name}_per_step"] = since[f"bytes_{name}"] / steps / 1e6
        return values

    def id_counts(self) -> dict[str, float]:
        """Counts of the ids in training so far, of tables whose rows belong to the ids that
        occur; empty without such tables. See :meth:`CountsIds.id_counts`.
        """
        total = Counter[str]()
        for group in self.groups:
            if isinstance(group, CountsIds):
                total.update(group.id_counts())
        return {f"ids/{name}": float(count) for name, count in total.items()}

    def renew_caches(self, optimizer: RowOptimizer) -> dict[str, float]:
        """Renew the caches of hot rows. Rows that change owner get fresh optimizer state.

        Returns:
            Values to log.
        """
        values: dict[str, float] = {}
        for index, (group, _) in enumerate(self.embeddings()):
            report = group.cache_populate() if isinstance(group, CachesHotRows) else None
            if report is not None:
                for name, rows in report.reset.items():
                    optimizer.reset_rows(group.get_parameter(name), rows)
                logged = report.values().items()
                values |= {f"cache/{name}_{index}": value for name, value in logged}
        return values

    def sizes(self) -> dict[str, float]:
        """Bytes by part and in total, and the compression: how many times larger the same tables
        are if dense in fp32; those of unknown ids count as they are. Everything that look-ups need
        counts.
        """
        parts: dict[str, float] = {}
        dense, tables = 0, self.footprint()
        for slot in self._features:
            rows, table = self.num_embeddings[slot], tables[slot]
            known = rows < MANY_IDS
            dense += 4 * self.embedding_dim * rows if known else sum(table.values())
            for part, size in table.items():
                parts[f"{part}_bytes"] = parts.get(f"{part}_bytes", 0.0) + size
        total = sum(parts.values())
        return {**parts, "bytes": total, "compression": dense / total}


def _sharding_of(slots: Sequence[int], sharding: ShardingPlan | None) -> ShardingPlan | None:
    """The shards of a group's tables, numbered within the group; None if it has none."""
    index = {slot: table for table, slot in enumerate(slots)}
    shards = [
        replace(shard, table=index[shard.table])
        for shard in (sharding.shards if sharding else ())
        if shard.table in index
    ]
    return replace(sharding, shards=shards) if sharding and shards else None

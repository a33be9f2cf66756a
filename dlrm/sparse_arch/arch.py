"""The sparse architecture of a model: which table is of which kind, and their joint look-up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dlrm.distributed.peer_lookup import SortedLookups
from dlrm.distributed.sharded_tables import ShardedTables
from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.distributed.shardings import Sharding
from dlrm.embeddings.base import Embedding
from dlrm.embeddings.registry import available, build
from dlrm.kernels.update.row_sort import sort_announced
from dlrm.sparse_arch.table_plan import TablePlan

LINK = 53e9  # bytes a second each way between pinned host memory and an H100 (PCIe 5), as measured

Lookups = tuple[Tensor, Tensor | None, Sequence[int] | None]  # ids, offsets and bounds of a batch
Share = tuple[Tensor, Tensor | None, Tensor | None]  # ids, offsets and weights of a group


class _Resets(Protocol):
    def reset_rows(
        self, parameter: Tensor, rows: Tensor, sources: Tensor | None = None
    ) -> None: ...


class SparseArch(nn.Module):
    """A list of groups of tables, each of one kind.

    The groups' vectors are not put behind one another: the interaction reads them where they lie,
    feature ``f`` being number ``order[f]`` of them, counted through the groups.

    Args:
        num_embeddings: rows of each table, in feature order.
        embedding_dim: length of a row.
        plan: kind and options of each table; see :func:`plan` and :func:`grouped`.
        check_ids: see :class:`~dlrm.embeddings.base.Embedding`.
        sharding: pieces of tables that several processes hold.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: TablePlan,
        *,
        check_ids: bool = False,
        sharding: ShardingPlan | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = tuple(num_embeddings)
        self.embedding_dim = embedding_dim
        groups = grouped(plan)
        self.slots = [slots for slots, _, _ in groups]
        self.groups = nn.ModuleList()
        order: list[int] = []
        for slots, kind, options in groups:
            rows = [num_embeddings[slot] for slot in slots]
            own = _own(sharding, slots)
            group: Embedding
            if own is None:
                group = build(kind, rows, embedding_dim, check_ids=check_ids, **options)
                order += slots
            else:
                group = ShardedTables(rows, embedding_dim, own, check_ids=check_ids)
                order += [slots[table] for table in group.order]
            self.groups.append(group)
        # Dense tables last: one launch, where the others are chains of several.
        self._turns = sorted(range(len(groups)), key=lambda index: groups[index][1] == "dense")
        self.register_buffer("order", torch.tensor(order).argsort(), persistent=False)
        features = [slot for slots in self.slots for slot in slots]
        self.register_buffer("features", torch.tensor(features), persistent=False)
        self.order: Tensor  # [F]
        self.features: Tensor  # [F], group after group
        self._measured: tuple[float, Counter[str]] = time.perf_counter(), Counter()  # sums then

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        bounds: Sequence[int] | None = None,
        grouped: bool = False,
    ) -> list[Tensor]:
        """Look up every table.

        Args:
            ids, offsets, per_sample_weights: of all features, as in ``Embedding.forward``.
            bounds: where the ids of each table begin, and the end, ``[F + 1]``; without it they
                may have to be read from the offsets, and the host waits for the device.
            grouped: ``ids [F, B]`` are those of the features in the order of :attr:`features`.

        Returns:
            The vectors of each group, ``[B, F_g, D]``; of sharded ones in several parts.
        """
        found: dict[int, list[Tensor]] = {}
        bounds = bounds or self._bounds(offsets)
        shares = self._shares(
            self._turns, ids, offsets, per_sample_weights, bounds, grouped=grouped
        )
        for index in self._turns:
            group, share = self.groups[index], shares[index]
            found[index] = (
                group.parts(*share) if isinstance(group, ShardedTables) else [group(*share)]
            )
        sort_announced()
        return [part for index in range(len(self.groups)) for part in found[index]]

    def look_ahead(self, samples: int) -> int:
        """How many batches of so many samples :meth:`begin_round` asks for behind the present."""
        return max(2 * self.round_of(samples * len(self.num_embeddings)) - 1, 0)

    def round_of(self, lookups: int) -> int:
        """How many batches of so many look-ups had better be a round; 0 if no group has rounds."""
        tables = len(self.num_embeddings)
        sizes = [g.round_of(lookups * len(s) // tables) for g, s in self.embeddings()]
        return min((size for size in sizes if size), default=0)

    def begin_round(self, now: Sequence[Lookups], coming: Sequence[Lookups]) -> None:
        """Have the groups that fetch rows ahead begin a round; see ``Embedding.begin_round``."""
        groups = {i: g for i, (g, _) in enumerate(self.embeddings()) if g.round_of(1)}
        known = [
            [
                self._shares(groups, ids, offsets, None, at or self._bounds(offsets))
                for ids, offsets, at in each
            ]
            for each in (now, coming)
        ]
        for index, group in groups.items():
            group.begin_round(*([shares[index][:2] for shares in each] for each in known))

    def in_round(self, value: bool) -> None:
        """Say whether the look-ups to come are of the round that was begun."""
        for group, _ in self.embeddings():
            group.in_round = value

    @property
    def rows_ready(self) -> bool:
        """Whether the rows of the round under way are still where :meth:`begin_round` put them."""
        return all(group.rows_ready for group, _ in self.embeddings())

    def at_peers(self) -> list[tuple[int, Sharding]]:
        """The parts of sharded groups whose rows peers read where they lie, and their groups."""
        found = enumerate(self.groups)
        return [
            (i, cut) for i, g in found if isinstance(g, ShardedTables) for cut in g.direct_cuts()
        ]

    def sort(self, ids: Tensor) -> list[SortedLookups]:
        """Sort the look-ups of ``ids [F, B]`` at peers, part after part: needs no rows, and no
        other process.
        """
        cuts = self.at_peers()
        shares = self._shares({index for index, _ in cuts}, ids, None, None, ())
        return [cut.sort(shares[index][0]) for index, cut in cuts]

    def use(self, lookups: Sequence[SortedLookups | None]) -> None:
        """Give the look-ups to come, until told otherwise, what :meth:`sort` has found for them.

        Args:
            lookups: for each part; empty for nothing.
        """
        for (_, cut), own in zip_longest(self.at_peers(), lookups):
            cut.lookups = own

    def in_order(self, vectors: list[Tensor]) -> Tensor:
        """The groups' vectors in one ``[B, F, D]``, in the order of the features."""
        return torch.cat(vectors, dim=1).index_select(1, self.order)

    def _bounds(self, offsets: Tensor | None) -> list[int]:
        """The bounds of a batch, if :meth:`_shares` needs them: read once, not for each group."""
        if offsets is None or len(self.groups) == 1:
            return []
        tables = len(self.num_embeddings)
        batch = (offsets.numel() - 1) // tables
        return offsets[::batch].tolist() if batch else [0] * (tables + 1)

    def _shares(
        self,
        groups: Iterable[int],
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        bounds: Sequence[int],
        *,
        grouped: bool = False,
    ) -> dict[int, Share]:
        """The parts of the batch that concern the tables of some groups."""
        if len(self.groups) == 1:
            return {0: (ids, offsets, weights)}
        sizes = [len(slots) for slots in self.slots]
        if offsets is None:  # one gather for all groups
            if len(ids) != len(self.num_embeddings):
                raise ValueError(
                    f"ids have shape {tuple(ids.shape)}, they must be "
                    f"[{len(self.num_embeddings)}, B]: a row per table"
                )
            parts = (ids if grouped else ids[self.features]).split(sizes)
            own = None if weights is None else weights[self.features].split(sizes)
            return {i: (parts[i], None, None if own is None else own[i]) for i in groups}
        batch = (offsets.numel() - 1) // len(self.num_embeddings)
        lengths = offsets.diff().view(len(self.num_embeddings), batch)[self.features].split(sizes)
        shares: dict[int, Share] = {}
        for index in groups:
            spans = [slice(bounds[slot], bounds[slot + 1]) for slot in self.slots[index]]
            counts = lengths[index].view(-1)
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            factors = None if weights is None else torch.cat([weights[span] for span in spans])
            shares[index] = torch.cat([ids[span] for span in spans]), starts, factors
        return shares

    def embeddings(self) -> list[tuple[Embedding, list[int]]]:
        """Each group with the features whose tables it holds."""
        return list(zip(self.groups, self.slots, strict=True))  # type: ignore[arg-type]

    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit each table to a dense one ``[V, D]``, in feature order, as well as its kind allows.

        Raises:
            ValueError: the tables are not of the shapes of this one's.
        """
        for group, slots in self.embeddings():
            group.load_dense([weights[slot] for slot in slots])

    def to_dense(self) -> list[Tensor]:
        """Every table in full, ``[V, D]``, in feature order."""
        tables = {
            slot: group.to_dense(table)
            for group, slots in self.embeddings()
            for table, slot in enumerate(slots)
        }
        return [tables[slot] for slot in range(len(tables))]

    def local_parameters(self) -> list[nn.Parameter]:
        """Parameters of which every process has others."""
        sharded = [group for group in self.groups if isinstance(group, ShardedTables)]
        return [parameter for group in sharded for parameter in group.local_parameters()]

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table by part, in feature order."""
        tables: list[dict[str, int]] = [{} for _ in self.num_embeddings]
        for group, slots in self.embeddings():
            for slot, parts in zip(slots, group.footprint(), strict=True):
                tables[slot] = parts
        return tables

    def cache_stats(self) -> dict[str, float]:
        """Share of the training look-ups that the caches of the groups answered, if any has one;
        and of caches of host memory, since the last call, the megabytes moved per step and the
        share of the link's rate that the busier direction took.
        """
        sums: Counter[str] = Counter()
        steps = 0
        for group, _ in self.embeddings():
            stats = group.cache_stats()
            steps = max(steps, int(stats.get("steps", 0)))
            sums.update(stats)
        if not sums["lookups"]:
            return {}
        values = {"cache/hit_rate": sums["hits"] / sums["lookups"]}
        if steps:
            sums["steps"] = steps  # of all groups alike
            (began, before), self._measured = self._measured, (time.perf_counter(), sums)
            moved = {
                name: sums[f"bytes_{name}"] - before[f"bytes_{name}"] for name in ("in", "out")
            }
            for name, size in moved.items():
                values[f"cache/MB_{name}_per_step"] = size / max(steps - before["steps"], 1) / 1e6
            values["cache/link_share"] = max(moved.values()) / (self._measured[0] - began) / LINK
        return values

    def renew_caches(self, optimizer: _Resets) -> dict[str, float]:
        """Renew the caches of rows, where groups have one; rows that change owner start with fresh
        optimizer state, or with that of the row that they copy.

        Returns:
            What the renewals did, to be logged.
        """
        values: dict[str, float] = {}
        for index, (group, _) in enumerate(self.embeddings()):
            report = group.cache_populate()
            if report is not None:
                for name, rows in report.reset.items():
                    sources = report.sources.get(name)
                    optimizer.reset_rows(group.get_parameter(name), rows, sources)
                told = report.values().items()
                values |= {f"cache/{name}_{index}": value for name, value in told}
        return values

    def sizes(self) -> dict[str, float]:
        """Bytes by part and in all, and the compression: how many times larger dense tables are.

        Compression is measured against the same tables uncompressed in fp32, and counts all that
        is kept for look-ups.
        """
        parts: dict[str, float] = {}
        for table in self.footprint():
            for part, size in table.items():
                parts[f"{part}_bytes"] = parts.get(f"{part}_bytes", 0.0) + size
        total = sum(parts.values())
        dense = 4 * self.embedding_dim * sum(self.num_embeddings)
        return {**parts, "bytes": total, "compression": dense / total}


def _own(sharding: ShardingPlan | None, slots: Sequence[int]) -> ShardingPlan | None:
    """The pieces of a group's tables, numbered as there; None if it has none."""
    place = {slot: table for table, slot in enumerate(slots)}
    pieces = [
        replace(piece, table=place[piece.table])
        for piece in (sharding.pieces if sharding else ())
        if piece.table in place
    ]
    return replace(sharding, pieces=pieces) if sharding and pieces else None


def grouped(plan: TablePlan) -> list[tuple[list[int], str, dict[str, Any]]]:
    """The tables that are looked up together: of one kind, with equal options.

    Options that a kind takes per table may differ; the group has a list of them.

    Returns:
        For each group its tables, its kind and its options.
    """
    kinds = available()

    def free(kind: str) -> frozenset[str]:
        return kinds[kind].per_table if kind in kinds else frozenset()

    members: dict[str, list[int]] = {}
    for table, (kind, options) in enumerate(plan):
        named = sorted(options.items())  # equal in whatever order they came
        equal = [(name, None if name in free(kind) else own) for name, own in named]
        members.setdefault(repr((kind, equal)), []).append(table)
    groups = []
    for tables in members.values():
        kind, options = plan[tables[0]]
        lists = {n: [plan[t][1][n] for t in tables] for n in options if n in free(kind)}
        groups.append((tables, kind, {**options, **lists}))
    return groups

"""Plan the shards of tables: which process holds which part.

A table is sharded table-wise (one process holds all of it), row-wise or column-wise. Small tables
are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import torch
from torch import Tensor

from dlrm.utils.messages import printable

NARROW = 16  # columns: fewer cost as much, since a memory transaction has 32 or 64 bytes
# Work of a look-up that finds its row on another rank: its id is received and sorted, but no row is
# read or updated. Measured on one H200 with DLRM-DCNv2.
ELSEWHERE = 0.25
BALANCED = 1.25  # an imbalance below which no further table is split: splitting costs copies


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangle of a table that one process holds."""

    table: int
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    share: float = 1.0
    """Share of the table's look-ups that find their row here; 1 if unknown."""

    @property
    def height(self) -> int:
        """Number of rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns[1] - self.columns[0]


def greedy(
    costs: Sequence[Sequence[float]],
    ranks: int,
    least: Sequence[float] = (),
    held: Sequence[Sequence[float]] = (),
) -> list[list[int]]:
    """Give each item to the rank with the smallest load, the heaviest items first.

    The load of a rank is the largest of its shares of a resource.

    Args:
        costs: cost of each item by resource (bytes, look-ups).
        ranks: number of ranks.
        least: amount of each resource below which the total of all ranks does not count as a load.
        held: what each rank has of each resource before; nothing by default.

    Returns:
        The items of each rank.
    """
    totals = [sum(column) or 1.0 for column in zip(*costs, *held, strict=True)]
    totals = list(map(max, totals, least)) if least else totals
    shares, load = (
        [[c / t for c, t in zip(item, totals, strict=True)] for item in amounts]
        for amounts in (costs, held or [[0.0] * len(totals)] * ranks)
    )
    groups: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-max(shares[i]), -sum(shares[i]))):
        after = [[b + s for b, s in zip(before, shares[item], strict=True)] for before in load]
        rank = min(range(ranks), key=lambda r: (max(after[r]), sum(after[r])))
        groups[rank].append(item)
        load[rank] = after[rank]
    return groups


def imbalance(shards: Sequence[Shard], loads: Sequence[float], ranks: int, room: int = 0) -> float:
    """How far the fullest or busiest rank exceeds the ideal; 1 is perfect.

    Ideally, every byte is held once and every look-up is done once, in equal shares. Each rank of a
    row-wise table gets all ids, and looks up those whose rows it has.

    Args:
        shards: the shards of all tables.
        loads: number of look-ups of each table, in any unit.
        ranks: number of ranks.
        room: number of weights that a rank may hold without counting as too full.
    """
    held, busy, _ = zip(*_held(shards, loads, ranks), strict=True)
    useful: dict[int, float] = {}
    for shard in shards:
        useful[shard.table] = max(useful.get(shard.table, 0.0), shard.columns[1])
    work = sum(loads[table] * max(width, NARROW) for table, width in useful.items())
    ideal_held, ideal_busy = max(sum(held) / ranks, room) or 1.0, work / ranks or 1.0
    return max(max(held) / ideal_held, max(busy) / ideal_busy)


def _held(shards: Sequence[Shard], loads: Sequence[float], ranks: int) -> list[list[float]]:
    """The weights, the work, and the length of the vectors of each rank, ``[ranks][3]``."""
    amounts = [[0.0, 0.0, 0.0] for _ in range(ranks)]
    for shard in shards:
        amounts[shard.rank][0] += shard.height * shard.width
        amounts[shard.rank][1] += _work(shard, loads)
        amounts[shard.rank][2] += shard.width
    return amounts


def _work(shard: Shard, loads: Sequence[float]) -> float:
    looked_up = shard.share + (1 - shard.share) * ELSEWHERE
    return loads[shard.table] * max(shard.width, NARROW) * looked_up


def shard_rows(
    table: int,
    rows: int,
    dim: int,
    ranks: int,
    page: int = 1,
    counts: Tensor | None = None,
    *,
    by_count: bool = False,
) -> list[Shard]:
    """Shard a table row-wise into runs of whole pages, none empty.

    Args:
        table: its number.
        rows: number of its rows.
        dim: length of a row.
        ranks: number of ranks.
        page: rows of a page.
        counts: look-ups of each row, ``[rows]``, if known.
        by_count: the shards have equal shares of look-ups, as nearly as possible, instead of rows.
    """
    pages = -(-rows // page)
    bounds = [min(pages * rank // ranks * page, rows) for rank in range(ranks + 1)]
    shares = [1.0] * ranks
    if counts is not None:
        ends = counts.double().cumsum(0)
        if by_count:
            parts = ends[-1] * torch.arange(1, ranks, device=ends.device) / ranks
            inner = (torch.searchsorted(ends, parts) + 1) // page * page
            bounds = [0, *inner.tolist(), rows]
        before = torch.cat([ends[:1] * 0, ends])[bounds] / ends[-1].clamp(min=1)
        shares = before.diff().tolist()
    return [
        Shard(table=table, rank=rank, rows=(low, high), columns=(0, dim), share=share)
        for rank, ((low, high), share) in enumerate(zip(pairwise(bounds), shares, strict=True))
        if low < high
    ]


def shard_columns(table: int, rows: int, dim: int, ranks: int) -> list[Shard]:
    """Shard a table column-wise, as equally as possible, no shard empty."""
    bounds = [dim * rank // ranks for rank in range(ranks + 1)]
    return [
        Shard(table=table, rank=rank, rows=(0, rows), columns=(low, high))
        for rank, (low, high) in enumerate(pairwise(bounds))
        if low < high
    ]


def plan_shards(
    num_embeddings: Sequence[int],
    embedding_dim: int,
    ranks: int,
    *,
    sharding_types: Sequence[str],
    loads: Sequence[float] | None = None,
    counts: Sequence[Tensor] | None = None,
    page: int = 1,
    room: int = 0,
    column_wise: bool = True,
) -> list[Shard]:
    """Assign shards of tables to ranks.

    Tables of type ``auto`` are sharded table-wise, balanced greedily by bytes and look-ups. The
    largest of them, of equal ones the busiest, are sharded column-wise, or row-wise where columns
    would be too narrow, until that is balanced. Shards by rows have equally many rows or, if it is
    known how often each row is looked up and the ranks are balanced better so, look-ups.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        ranks: number of ranks.
        sharding_types: of each table: auto, replicate, table, row or column; a replicated table has
            no shards.
        loads: look-ups of each table, in any unit; equal by default.
        counts: look-ups of each row of each table, ``[rows]``, where known; others are empty.
        page: rows of a page; row-wise shards begin at multiples of it.
        room: see :func:`imbalance`.
        column_wise: whether ``auto`` may shard column-wise.

    Returns:
        The shards, ordered by table.
    """
    loads = [1.0] * len(sharding_types) if loads is None else loads
    size = dict(enumerate(num_embeddings))

    known = {table: each for table, each in enumerate(counts or ()) if len(each) == size[table]}

    @cache
    def split(table: int, name: str, by_count: bool) -> list[Shard]:
        wide = column_wise and embedding_dim // ranks >= NARROW
        if name == "column" or (name == "auto" and wide):
            return shard_columns(table, size[table], embedding_dim, ranks)
        shape = table, size[table], embedding_dim, ranks
        return shard_rows(*shape, page, known.get(table), by_count=by_count)

    def of_type(name: str) -> list[int]:
        return [table for table, own in enumerate(sharding_types) if own == name]

    whole = of_type("table")
    free = sorted(of_type("auto"), key=lambda table: (-size[table], -loads[table]))
    best, lowest = None, float("inf")
    splits = range(len(free) + 1 if ranks > 1 else 1)
    for count, by_count in product(splits, [False, True] if known else [False]):
        cut = [*((t, n) for n in ("row", "column") for t in of_type(n))]
        cut += [(table, "auto") for table in free[:count]]
        shards = [shard for table, name in cut for shard in split(table, name, by_count)]

        # The whole tables fill up the ranks.
        tables = [*whole, *free[count:]]
        width = max(embedding_dim, NARROW)
        costs = [(size[t] * embedding_dim, loads[t] * width, embedding_dim) for t in tables]
        groups = greedy(costs, ranks, (room * ranks, 0, 0), _held(shards, loads, ranks))
        for rank, group in enumerate(groups):
            columns = (0, embedding_dim)
            shards += [
                Shard(table=tables[i], rank=rank, rows=(0, size[tables[i]]), columns=columns)
                for i in group
            ]
        found = imbalance(shards, loads, ranks, room)
        if best is None or found < lowest:
            best, lowest = shards, found
        if lowest <= BALANCED:
            break
    return sorted(best or [], key=lambda shard: (shard.table, shard.rows, shard.columns))


def describe_shards(
    shards: Sequence[Shard], names: Mapping[int, str], loads: Sequence[float], ranks: int
) -> str:
    """The plan as text: for each rank its shards, their bytes in fp32 and its share of look-ups."""
    work = sum(_work(shard, loads) for shard in shards) or 1.0
    lines = []
    for rank in range(ranks):
        own = [shard for shard in shards if shard.rank == rank]
        parts = []
        for shard in own:
            full = [p for p in shards if p.table == shard.table]
            text = printable(names[shard.table])
            if len({p.rows for p in full}) > 1:
                text += f" rows {shard.rows[0]:,}-{shard.rows[1]:,}"
            if len({p.columns for p in full}) > 1:
                text += f" columns {shard.columns[0]}-{shard.columns[1]}"
            parts.append(text)
        held = sum(shard.height * shard.width for shard in own) * 4e-6
        busy = sum(_work(shard, loads) for shard in own) / work
        text = "; ".join(parts) or "no table"
        lines.append(f"rank {rank}: {held:,.1f} MB, {busy:.0%} of the look-ups: {text}")
    return "\n".join([*lines, f"imbalance {imbalance(shards, loads, ranks):.2f}"])

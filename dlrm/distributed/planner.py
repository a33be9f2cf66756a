"""Plan the shards of tables: which process holds which part.

A table is sharded table-wise (one process holds all of it), row-wise or column-wise. Small tables
are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlrm.utils.messages import printable

NARROW = 16  # columns: fewer cost as much, since a memory transaction has 32 or 64 bytes
BALANCED = 1.25  # an imbalance below which no further table is split: splitting costs copies


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangle of a table that one process holds."""

    table: int
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def height(self) -> int:
        """Number of rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.columns[1] - self.columns[0]


def greedy(
    costs: Sequence[Sequence[float]], ranks: int, least: Sequence[float] = ()
) -> list[list[int]]:
    """Give each item to the rank with the smallest load, the heaviest items first.

    The load of a rank is the largest of its shares of a resource.

    Args:
        costs: cost of each item by resource (bytes, look-ups).
        ranks: number of ranks.
        least: amount of each resource below which the total of all ranks does not count as a load.

    Returns:
        The items of each rank.
    """
    totals = [sum(column) or 1.0 for column in zip(*costs, strict=True)]
    totals = list(map(max, totals, least)) if least else totals
    shares = [[c / t for c, t in zip(item, totals, strict=True)] for item in costs]
    load = [[0.0] * len(totals) for _ in range(ranks)]
    groups: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-max(shares[i]), -sum(shares[i]))):
        after = [[b + s for b, s in zip(held, shares[item], strict=True)] for held in load]
        rank = min(range(ranks), key=lambda r: (max(after[r]), sum(after[r])))
        groups[rank].append(item)
        load[rank] = after[rank]
    return groups


def imbalance(shards: Sequence[Shard], loads: Sequence[float], ranks: int, room: int = 0) -> float:
    """How far the fullest or busiest rank exceeds the ideal; 1 is perfect.

    Ideally, every byte is held once and every look-up is done once, in equal shares. A row-wise
    table is looked up by each of its ranks, for every id.

    Args:
        shards: the shards of all tables.
        loads: number of look-ups of each table, in any unit.
        ranks: number of ranks.
        room: number of weights that a rank may hold without counting as too full.
    """
    held, busy = [0.0] * ranks, [0.0] * ranks
    useful: dict[int, float] = {}
    for shard in shards:
        held[shard.rank] += shard.height * shard.width
        busy[shard.rank] += _work(shard, loads)
        useful[shard.table] = max(useful.get(shard.table, 0.0), shard.columns[1])
    work = sum(loads[table] * max(width, NARROW) for table, width in useful.items())
    ideal_held, ideal_busy = max(sum(held) / ranks, room) or 1.0, work / ranks or 1.0
    return max(max(held) / ideal_held, max(busy) / ideal_busy)


def _work(shard: Shard, loads: Sequence[float]) -> float:
    return loads[shard.table] * max(shard.width, NARROW)


def shard_rows(table: int, rows: int, dim: int, ranks: int, page: int = 1) -> list[Shard]:
    """Shard a table row-wise into runs of whole pages, as equal as possible, none empty."""
    pages = -(-rows // page)
    bounds = [min(pages * rank // ranks * page, rows) for rank in range(ranks + 1)]
    return [
        Shard(table=table, rank=rank, rows=(low, high), columns=(0, dim))
        for rank, (low, high) in enumerate(pairwise(bounds))
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
    page: int = 1,
    room: int = 0,
    column_wise: bool = True,
) -> list[Shard]:
    """Assign shards of tables to ranks.

    Tables of type ``auto`` are sharded table-wise, balanced greedily by bytes and look-ups. The
    largest of them, of equal ones the busiest, are sharded column-wise, or row-wise where columns
    would be too narrow, until that is balanced.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        ranks: number of ranks.
        sharding_types: of each table: auto, replicate, table, row or column; a replicated table has
            no shards.
        loads: look-ups of each table, in any unit; equal by default.
        page: rows of a page; row-wise shards begin at multiples of it.
        room: see :func:`imbalance`.
        column_wise: whether ``auto`` may shard column-wise.

    Returns:
        The shards, ordered by table.
    """
    loads = [1.0] * len(sharding_types) if loads is None else loads
    size = dict(enumerate(num_embeddings))

    def split(table: int, name: str) -> list[Shard]:
        wide = column_wise and embedding_dim // ranks >= NARROW
        if name == "column" or (name == "auto" and wide):
            return shard_columns(table, size[table], embedding_dim, ranks)
        return shard_rows(table, size[table], embedding_dim, ranks, page)

    def of_type(name: str) -> list[int]:
        return [table for table, own in enumerate(sharding_types) if own == name]

    fixed = [shard for name in ("row", "column") for t in of_type(name) for shard in split(t, name)]
    whole = of_type("table")
    free = sorted(of_type("auto"), key=lambda table: (-size[table], -loads[table]))
    best, lowest = None, float("inf")
    for count in range(len(free) + 1 if ranks > 1 else 1):
        shards = [*fixed, *(p for table in free[:count] for p in split(table, "auto"))]
        tables = [*whole, *free[count:]]
        costs = [(size[t] * embedding_dim, loads[t] * max(embedding_dim, NARROW)) for t in tables]
        groups = greedy(costs, ranks, (room * ranks, 0)) if tables else []
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

"""Which process holds which part of which table: cuts and balance.

A table is held whole by one process, cut by rows or by columns, or, if it is small, replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, stack

from dlrm.utils.messages import did_you_mean

SHARDING_TYPES = ("auto", "replicate", "table", "row", "column")
NARROW = 16  # elements: a look-up of fewer costs as much, a memory transaction being 32 or 64 bytes
EVEN = 1.25  # an imbalance below which no further table is cut: cuts cost copies


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rectangle of a table, held by one process."""

    table: int
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def height(self) -> int:
        """Rows."""
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        """Columns."""
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True, kw_only=True)
class FairCut:
    """The tables' rows behind one another, cut into equal shares."""

    share: int
    """Rows of each rank; the last one has the remainder too."""
    cuts: dict[int, list[int]]
    """Rows, counted within the table, before which a table is cut."""
    groups: list[list[int]]
    """Tables that each rank has a part of."""
    starts: list[list[int]]
    """Where the part of each of these tables begins among the rank's rows."""

    def pieces(self, num_embeddings: Sequence[int], embedding_dim: int) -> list[Shard]:
        """The parts, table by table for each rank."""
        found = []
        for rank, group in enumerate(self.groups):
            for table in group:
                bounds = [0, *self.cuts.get(table, []), num_embeddings[table]]
                holders = [r for r, tables in enumerate(self.groups) if table in tables]
                part = holders.index(rank)
                rows = (bounds[part], bounds[part + 1])
                found.append(Shard(table=table, rank=rank, rows=rows, columns=(0, embedding_dim)))
        return found


def fair_cut(num_embeddings: Sequence[int], ranks: int) -> FairCut:
    """Cut the joint row space into equal shares, tables being cut where a share ends in them.

    The remainder belongs to the last rank; a boundary that falls between two tables is no cut.
    With fewer rows than ranks the last rank has them all.
    """
    ends = list(accumulate(num_embeddings))
    share = ends[-1] // ranks
    cuts: dict[int, list[int]] = {}
    groups, starts = [], []
    for rank in range(ranks):
        low, high = rank * share, ends[-1] if rank == ranks - 1 else (rank + 1) * share
        group, begin = [], []
        for table, end in enumerate(ends):
            first = end - num_embeddings[table]
            if max(first, low) < min(end, high):
                group.append(table)
                begin.append(max(first - low, 0))
                if low > first:
                    cuts.setdefault(table, []).append(low - first)
        groups.append(group)
        starts.append(begin)
    return FairCut(share=share, cuts=cuts, groups=groups, starts=starts)


def group_offsets(num_embeddings: Sequence[int], group: Sequence[int]) -> list[int]:
    """Where each table of a group begins when they lie behind one another in this order."""
    return list(accumulate((num_embeddings[table] for table in group), initial=0))[:-1]


def joint_ids(ids: Tensor, group: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Ids of a feature-major batch ``[F, B]`` as rows of a group's joint table ``[len(group), B]``.

    Args:
        ids: of all features.
        group: tables of the group.
        offsets: as :func:`group_offsets` gives them.
    """
    rows = [ids[table] + offset for table, offset in zip(group, offsets, strict=True)]
    return stack(rows) if rows else ids[:0]


def greedy(
    costs: Sequence[Sequence[float]], ranks: int, least: Sequence[float] = ()
) -> list[list[int]]:
    """Give each item to the rank that it burdens least, the heaviest items first.

    Args:
        costs: of each item by resource (bytes, load).
        ranks: number of ranks.
        least: what all ranks together have of each resource with ease; zeros if not given.

    Returns:
        The items of each rank; a rank's burden is the largest of its shares of a resource.
    """
    totals = [sum(column) or 1.0 for column in zip(*costs, strict=True)]
    totals = list(map(max, totals, least)) if least else totals
    shares = [[c / t for c, t in zip(item, totals, strict=True)] for item in costs]
    burden = [[0.0] * len(totals) for _ in range(ranks)]
    groups: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-max(shares[i]), -sum(shares[i]))):
        after = [[b + s for b, s in zip(held, shares[item], strict=True)] for held in burden]
        rank = min(range(ranks), key=lambda r: (max(after[r]), sum(after[r])))
        groups[rank].append(item)
        burden[rank] = after[rank]
    return groups


def imbalance(pieces: Sequence[Shard], loads: Sequence[float], ranks: int, room: int = 0) -> float:
    """How far the fullest or busiest rank is above the ideal, 1 being perfect.

    The ideal is that every byte is held and every look-up done once, shared out evenly. A table
    cut by rows is looked up by each of its holders, for every id.

    Args:
        pieces: of all tables.
        loads: look-ups of each table, in any unit.
        ranks: number of ranks.
        room: weights that a rank can hold with ease, up to which none is too full.
    """
    held, busy = [0.0] * ranks, [0.0] * ranks
    useful: dict[int, float] = {}
    for piece in pieces:
        held[piece.rank] += piece.height * piece.width
        busy[piece.rank] += _work(piece, loads)
        useful[piece.table] = max(useful.get(piece.table, 0.0), piece.columns[1])
    work = sum(loads[table] * max(width, NARROW) for table, width in useful.items())
    held_ideally, busy_ideally = max(sum(held) / ranks, room) or 1.0, work / ranks or 1.0
    return max(max(held) / held_ideally, max(busy) / busy_ideally)


def _work(piece: Shard, loads: Sequence[float]) -> float:
    return loads[piece.table] * max(piece.width, NARROW)


def shard_rows(table: int, rows: int, dim: int, ranks: int, page: int = 1) -> list[Shard]:
    """A table by rows: runs of whole pages as equal as can be, no empty ones."""
    pages = -(-rows // page)
    bounds = [min(pages * rank // ranks * page, rows) for rank in range(ranks + 1)]
    return [
        Shard(table=table, rank=rank, rows=(low, high), columns=(0, dim))
        for rank, (low, high) in enumerate(pairwise(bounds))
        if low < high
    ]


def shard_columns(table: int, rows: int, dim: int, ranks: int) -> list[Shard]:
    """A table by columns: as equal as can be, no empty ones."""
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
    ways: Sequence[str],
    loads: Sequence[float] | None = None,
    page: int = 1,
    room: int = 0,
    narrow: bool = True,
) -> list[Shard]:
    """Place tables on ranks.

    ``auto`` tables stay whole, shared out greedily by bytes and load; the largest of them are cut
    by columns (by rows, where columns would be too narrow) until that is fairly balanced.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        ranks: number of ranks.
        ways: of each table one of ``SHARDING_TYPES``; replicated ones have no pieces.
        loads: look-ups of each table, in any unit; equal if not known.
        page: rows of a page; row cuts fall between pages.
        room: as of :func:`imbalance`; tables are cut no further than it asks for.
        narrow: whether ``auto`` may cut by columns.

    Returns:
        The pieces, ordered by table.

    Raises:
        ValueError: an unknown way.
    """
    for way in ways:
        if way not in SHARDING_TYPES:
            raise ValueError(f"unknown sharding {way!r}{did_you_mean(way, SHARDING_TYPES)}")
    loads = [1.0] * len(ways) if loads is None else loads
    size = dict(enumerate(num_embeddings))

    def cut(table: int, way: str) -> list[Shard]:
        wide = narrow and embedding_dim // ranks >= NARROW
        if way == "column" or (way == "auto" and wide):
            return shard_columns(table, size[table], embedding_dim, ranks)
        return shard_rows(table, size[table], embedding_dim, ranks, page)

    fixed = [p for t, way in enumerate(ways) if way in ("row", "column") for p in cut(t, way)]
    whole = [table for table, way in enumerate(ways) if way == "table"]
    free = sorted((t for t, way in enumerate(ways) if way == "auto"), key=lambda t: -size[t])
    best, lowest = None, float("inf")
    for count in range(len(free) + 1 if ranks > 1 else 1):
        pieces = [*fixed, *(p for table in free[:count] for p in cut(table, "auto"))]
        tables = [*whole, *free[count:]]
        costs = [(size[t] * embedding_dim, loads[t] * max(embedding_dim, NARROW)) for t in tables]
        groups = greedy(costs, ranks, (room * ranks, 0)) if tables else []
        for rank, group in enumerate(groups):
            columns = (0, embedding_dim)
            pieces += [
                Shard(table=tables[i], rank=rank, rows=(0, size[tables[i]]), columns=columns)
                for i in group
            ]
        found = imbalance(pieces, loads, ranks, room)
        if best is None or found < lowest:
            best, lowest = pieces, found
        if lowest <= EVEN:
            break
    return sorted(best or [], key=lambda piece: (piece.table, piece.rows, piece.columns))


def describe_shards(
    pieces: Sequence[Shard], names: Mapping[int, str], loads: Sequence[float]
) -> str:
    """The plan as text, a line per rank: what it holds, its bytes in fp32 and its share of work."""
    ranks = 1 + max(piece.rank for piece in pieces)
    work = sum(_work(piece, loads) for piece in pieces) or 1.0
    lines = []
    for rank in range(ranks):
        own = [piece for piece in pieces if piece.rank == rank]
        parts = []
        for piece in own:
            full = [p for p in pieces if p.table == piece.table]
            text = names[piece.table]
            if len({p.rows for p in full}) > 1:
                text += f" rows {piece.rows[0]:,}-{piece.rows[1]:,}"
            if len({p.columns for p in full}) > 1:
                text += f" columns {piece.columns[0]}-{piece.columns[1]}"
            parts.append(text)
        held = sum(piece.height * piece.width for piece in own) * 4e-6
        busy = sum(_work(piece, loads) for piece in own) / work
        lines.append(f"rank {rank}: {held:,.1f} MB, {busy:.0%} of the look-ups: {'; '.join(parts)}")
    return "\n".join([*lines, f"imbalance {imbalance(pieces, loads, ranks):.2f}"])

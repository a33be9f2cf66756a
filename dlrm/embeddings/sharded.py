"""Dense tables over many processes: ids go to the holders of rows, vectors come back.

Every process holds some pieces of the tables (:mod:`dlrm.embeddings.partition`), small tables in
full. A look-up sends the ids of the local samples to the holders, which look them up for the global
batch, and send every process the vectors of its samples; the backward pass sends the gradients the
same way back, so that a holder has the gradient rows of the global batch, which its optimizer
applies locally. One-hot batches are exchanged in shapes that depend on the plan alone: nothing
waits for the host, and a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.distributed import World, exchange
from dlrm.embeddings.base import Common, Embedding, row_offsets
from dlrm.embeddings.partition import Piece, describe, place
from dlrm.kernels.branch import branch_of
from dlrm.kernels.lookup import lookup, lookup_tables
from dlrm.shards import Shards

CHUNK = 1 << 20  # rows drawn at a time
EXCHANGE = 1  # the branch beside which small tables are looked up, and their gradients reduced


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the tables of a model are spread over processes."""

    world: World
    pieces: Sequence[Piece]
    """Of the tables of the model that are not replicated."""
    wire: torch.dtype | None = None
    """Type in which vectors and gradients travel; their own if None."""
    text: str = ""
    """The plan, to be read."""


def spread(
    world: World,
    names: Sequence[str],
    recipe: Mapping[str, Any],
    *,
    by: str = "auto",
    tables: Mapping[str, str] | None = None,
    threshold: int = 0,
    wire: str = "fp32",
) -> Sharding | None:
    """Decide which tables are held in pieces, and by whom.

    Args:
        world: the processes.
        names: of the features.
        recipe: the arguments of the model. Its tables of kind paged, and dense ones, can be held
            in pieces.
        by: how tables are held, one of ``partition.WAYS``.
        tables: ways of tables by name.
        threshold: dense tables of fewer rows are replicated.
        wire: fp32 or bf16, see :class:`Sharding`.

    Returns:
        None where nothing is: with one process, or only replicated tables.

    Raises:
        ValueError: an unknown name or way, or a table of a kind that is not held in pieces.
    """
    num_embeddings, plan = recipe["num_embeddings"], recipe["plan"]
    tables = tables or {}
    for name in tables:
        if name not in names:
            raise ValueError(
                f"sharding.tables names table {name!r}; the data has {', '.join(names)}"
            )
    ways = []
    for name, rows, (kind, _) in zip(names, num_embeddings, plan, strict=True):
        large = kind == "paged" or (kind == "dense" and rows >= threshold)
        way = tables.get(name, by if large else "replicate")
        if way != "replicate" and kind not in ("dense", "paged"):
            raise ValueError(
                f"--sharding.tables has {name} by {way}, but it is of kind {kind}, which is "
                "replicated: drop it there"
            )
        ways.append(way)
    if world.size == 1 or set(ways) == {"replicate"}:
        return None
    page = min((o["page_size"] for _, o in plan if "page_size" in o), default=1)
    pieces = place(num_embeddings, recipe["embedding_dim"], world.size, ways=ways, page=page)
    text = describe(pieces, dict(enumerate(names)), [1.0] * len(names))
    narrow = torch.bfloat16 if wire == "bf16" else None
    return Sharding(world=world, pieces=pieces, wire=narrow, text=text)


class Sharded(Embedding):
    """Dense tables held in pieces by many processes; equal to a dense group of the same seed.

    The state dict has the tables as one ``weight [sum(V), D]`` whose parts lie on many processes
    (:class:`~dlrm.shards.Shards`), and takes a plain one as well.

    Args:
        sharding: the processes, and the pieces of this group's tables, numbered as here. Tables
            without a piece are replicated.
    """

    is_kind = False

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        sharding: Sharding,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        pieces = sharding.pieces
        self.world, self.wire = sharding.world, sharding.wire
        cut = {piece.table for piece in pieces}
        self.copied = [table for table in range(self.num_tables) if table not in cut]
        by_table = {table: [p for p in pieces if p.table == table] for table in sorted(cut)}
        kinds: dict[type[_Cut], list[Piece]] = {_Whole: [], _ByRows: [], _ByColumns: []}
        for own in by_table.values():
            narrow = any(piece.width < embedding_dim for piece in own)
            kind = _ByColumns if narrow else _ByRows if len(own) > 1 else _Whole
            kinds[kind] += own
        self.cuts = nn.ModuleList(
            kind(own, self.num_tables, sharding.world, sharding.wire)
            for kind, own in kinds.items()
            if own
        )
        rows = [self.num_embeddings[table] for table in self.copied]
        self.replicated = nn.Parameter(torch.empty(sum(rows), embedding_dim)) if rows else None
        for cut_, weight in zip(self._cuts(), self._new_weights(), strict=True):
            self.register_parameter(cut_.name, weight)
        self.order = [*self.copied, *(table for cut_ in self._cuts() for table in cut_.order)]
        self.register_buffer("_starts", row_offsets(rows or [0]), persistent=False)
        self.register_buffer("_copied", torch.tensor(self.copied).long(), persistent=False)
        self.register_buffer("_order", torch.tensor(self.order), persistent=False)
        self.register_buffer("_back", self._order.argsort(), persistent=False)
        self._starts: Tensor  # [replicated tables], where each begins
        self._copied: Tensor  # [replicated tables]
        self._order: Tensor  # [F]
        self._back: Tensor  # [F], place of each table among the parts
        self._tables_at = row_offsets(self.num_embeddings).tolist()
        self.reset_parameters()

    def _cuts(self) -> list[_Cut]:
        return list(self.cuts)  # type: ignore[arg-type]

    def _new_weights(self) -> list[nn.Parameter]:
        """A weight per cut, with one row more than it holds, for ids that others hold."""
        return [nn.Parameter(torch.zeros(cut.height + 1, cut.width)) for cut in self._cuts()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows anew, as a dense group would: every process draws all and keeps its own."""
        like = next(self.parameters())
        for table, rows in enumerate(self.num_embeddings):
            for start in range(0, rows, CHUNK):
                drawn = like.new_empty(min(CHUNK, rows - start), self.embedding_dim)
                nn.init.uniform_(drawn, -(rows**-0.5), rows**-0.5)
                for name, chunk in self.chunks(table):
                    chunk.take(self.get_parameter(name), drawn, start)

    def local_parameters(self) -> list[nn.Parameter]:
        """Those of which every process has others."""
        return [self.get_parameter(cut.name) for cut in self._cuts()]

    def chunks(self, table: int) -> Iterator[tuple[str, Chunk]]:
        """Name of a parameter and where it holds a part of the table, for each local part."""
        if table in self.copied:
            at = int(self._starts[self.copied.index(table)])
            rows = (0, self.num_embeddings[table])
            yield "replicated", Chunk(at=at, rows=rows, columns=(0, self.embedding_dim))
        for cut in self._cuts():
            for piece, at in cut.held():
                if piece.table == table:
                    yield cut.name, Chunk(at=at, rows=piece.rows, columns=piece.columns)

    def parts(
        self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> list[Tensor]:
        """As :meth:`forward`, the vectors where they arrive: ``[B, F_i, D]``, tables in ``order``.

        Every process must call it at once.
        """
        if offsets is not None or weights is not None or self.padding_idx is not None:
            return [self(ids, offsets, weights).index_select(1, self._order)]
        if self.check_ids:
            self._check(self._tables[:, None], ids)
        side = branch_of(ids.device, EXCHANGE)
        with side.fork():
            arriving = [cut.start(self.get_parameter(cut.name), ids) for cut in self._cuts()]
        found = []
        if self.replicated is not None:
            own = ids.index_select(0, self._copied)
            found.append(lookup_tables(self.replicated, self._starts, own, sparse=self.sparse))
        side.join()
        for cut, chunks in zip(self._cuts(), arriving, strict=True):
            found += cut.finish(chunks)
        return found

    def lookup(self, ids: Tensor) -> Tensor:
        found = self.parts(ids)
        like = torch.promote_types(found[0].dtype, next(self.parameters()).dtype)
        return torch.cat([part.to(like) for part in found], 1).index_select(1, self._back)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        """As every kind does, for other ids on every process; all must call it at once."""
        flat, own = ids.reshape(-1), tables.expand_as(ids).reshape(-1)
        sizes = self.world.sizes(len(flat), flat.device)
        pairs = torch.stack([own, flat.long()], 1)
        asked = torch.cat(self.world.gather(pairs, sizes))
        out = next(self.parameters()).new_zeros(len(asked), self.embedding_dim)
        for cut in self._cuts():
            weight = self.get_parameter(cut.name)
            first = cut.first_column
            found = cut.answer(weight, asked[:, 0], asked[:, 1])
            out = out + nn.functional.pad(found, (first, self.embedding_dim - first - cut.width))
        give = [size * self.embedding_dim for size in sizes]
        got = exchange(out.view(-1), give, [flat.numel() * self.embedding_dim] * len(sizes))
        result = got.view(len(sizes), len(flat), self.embedding_dim).sum(0)
        if self.replicated is not None:
            places = torch.full_like(self._tables, -1)
            places[self._copied] = self._starts
            at = places[own]
            mine = at >= 0
            local = lookup(self.replicated, torch.where(mine, at + flat, 0), sparse=self.sparse)
            result = torch.where(mine[:, None], local, result)
        return result.view(*ids.shape, self.embedding_dim)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Take over the local parts of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        for table, weight in enumerate(weights):
            for name, chunk in self.chunks(table):
                chunk.take(self.get_parameter(name), weight, 0)

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table, over all processes; replicas are counted once."""
        row = self.embedding_dim * next(self.parameters()).element_size()
        return [{"weights": rows * row} for rows in self.num_embeddings]

    # State dicts ------------------------------------------------------------------------------

    def shards(self, tensors: Mapping[str, Tensor]) -> Shards:
        """Tensors laid out like the parameters of these names as one over all processes.

        They are the parameters, or states of an optimizer with an entry per weight or per row.
        """
        found = []
        width = self.embedding_dim if any(t.shape[1] > 1 for t in tensors.values()) else 1
        for table in range(self.num_tables):
            for name, chunk in self.chunks(table):
                first = chunk.columns[0] if width > 1 else 0
                offset = (self._tables_at[table] + chunk.rows[0], first)
                height = chunk.rows[1] - chunk.rows[0]
                found.append((offset, tensors[name].detach()[chunk.at : chunk.at + height]))
        like = next(iter(tensors.values()))
        return Shards((sum(self.num_embeddings), width), found, like.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.shards(dict(self.named_parameters()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        weight = state_dict.get(f"{prefix}weight")
        if weight is None:
            missing.append(f"{prefix}weight")
        elif isinstance(weight, Tensor):
            self.load_dense(weight.split(self.num_embeddings))
        else:
            weight.copy_to(self.shards(dict(self.named_parameters())))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a table in a parameter, beginning there at row ``at``."""

    at: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    def take(self, parameter: Tensor, rows: Tensor, start: int) -> None:
        """Copy what belongs here from ``rows [n, D]``, which are the table's from ``start`` on."""
        low, high = max(self.rows[0], start), min(self.rows[1], start + len(rows))
        if low < high:
            to = parameter[self.at + low - self.rows[0] : self.at + high - self.rows[0]]
            to.copy_(rows[low - start : high - start, slice(*self.columns)])


class _Cut(nn.Module):
    """The pieces of tables that are cut in one way, and the exchange with their holders.

    Args:
        pieces: of all ranks.
        num_tables: tables of the group.
        world: the processes.
        wire: type in which vectors travel.
    """

    name = ""

    def __init__(
        self, pieces: Sequence[Piece], num_tables: int, world: World, wire: torch.dtype | None
    ) -> None:
        super().__init__()
        self.world, self.wire = world, wire
        self.by_rank = [[p for p in pieces if p.rank == rank] for rank in range(world.size)]
        self.mine = self.by_rank[world.rank]
        self.width = self.mine[0].width if self.mine else max(piece.width for piece in pieces)
        self.first_column = self.mine[0].columns[0] if self.mine else 0
        self.tables = sorted({piece.table for piece in pieces})
        self.complete = len({(p.table, p.rows) for p in pieces}) == len(self.tables)
        at = [0]
        for piece in self.mine:
            at.append(at[-1] + piece.height)
        self.height = at.pop()
        held: Mapping[str, list[int]] = {
            "_ask": [piece.table for own in self.by_rank for piece in own],
            "_mine": [piece.table for piece in self.mine],
            "_first": [0] * num_tables,
            "_count": [0] * num_tables,
            "_place": [0] * num_tables,
        }
        for piece, begin in zip(self.mine, at, strict=True):
            held["_first"][piece.table] = piece.rows[0]
            held["_count"][piece.table] = piece.height
            held["_place"][piece.table] = begin
        for name, values in held.items():
            self.register_buffer(name, torch.tensor(values).long(), persistent=False)
        self._ask: Tensor  # tables that each rank holds a piece of, rank after rank
        self._mine: Tensor  # tables that this rank holds a piece of
        self._first: Tensor  # [F], first row of the local piece of each table
        self._count: Tensor  # [F], its rows; 0 where there is none
        self._place: Tensor  # [F], where it begins in the weight

    @property
    def order(self) -> list[int]:
        """The tables in the order in which :meth:`finish` gives their vectors."""
        return self.tables

    def held(self) -> Iterator[tuple[Piece, int]]:
        """The local pieces and where each begins in the weight."""
        for piece in self.mine:
            yield piece, int(self._place[piece.table])

    def answer(self, weight: Tensor, tables: Tensor, ids: Tensor) -> Tensor:
        """Rows of ``ids`` of ``tables``, ``[..., width]``; zeros for those that others hold."""
        rows = ids - self._first[tables]
        inside = (rows >= 0) & (rows < self._count[tables])
        rows = torch.where(inside, rows + self._place[tables], self.height)
        return lookup(weight, rows, sparse=True) * inside[..., None]

    def start(self, weight: Tensor, ids: Tensor) -> list[Tensor]:
        """Look up ``ids [F, B]`` at their holders: from every rank ``[B, pieces, width]``."""
        batch = ids.shape[1]
        sizes = self.world.sizes(batch, ids.device)
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
        )  # [pieces, global batch]
        if self.complete:
            found = lookup_tables(weight, self._place[self._mine], asked)
        else:
            found = self.answer(weight, self._mine[:, None], asked).transpose(0, 1)
        widths = [own[0].width if own else 0 for own in self.by_rank]
        get = [batch * len(own) * w for own, w in zip(self.by_rank, widths, strict=True)]
        give = [size * len(self.mine) * self.width for size in sizes]
        got = exchange(found.reshape(-1), give, get, self.wire)
        return [
            part.view(batch, len(own), width)
            for part, own, width in zip(got.split(get), self.by_rank, widths, strict=True)
            if own
        ]

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        """Full vectors ``[B, F_i, D]`` from what every rank that holds a piece has sent."""
        raise NotImplementedError


class _Whole(_Cut):
    """Tables that lie whole on one rank each: what arrives is what is wanted."""

    name = "whole"

    @property
    def order(self) -> list[int]:
        return [piece.table for own in self.by_rank for piece in own]

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return chunks


class _ByRows(_Cut):
    """Tables cut by rows: of every sample one holder sends the row, the others zeros."""

    name = "by_rows"

    def __init__(
        self, pieces: Sequence[Piece], num_tables: int, world: World, wire: torch.dtype | None
    ) -> None:
        super().__init__(pieces, num_tables, world, wire)
        place = {table: slot for slot, table in enumerate(self.tables)}
        slots = [place[piece.table] for own in self.by_rank for piece in own]
        self.register_buffer("_slots", torch.tensor(slots), persistent=False)
        self._slots: Tensor  # place in the output of all that arrives

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        arrived = torch.cat(chunks, dim=1)
        arrived = arrived.to(torch.promote_types(arrived.dtype, torch.float32))
        out = arrived.new_zeros(len(arrived), len(self.tables), self.width)
        return [out.index_add(1, self._slots, arrived)]


class _ByColumns(_Cut):
    """Tables cut by columns: every holder sends a part of every vector."""

    name = "by_columns"

    def finish(self, chunks: list[Tensor]) -> list[Tensor]:
        return [torch.cat(chunks, dim=2)]

"""Dense tables over many processes: ids go to the holders of rows, vectors come back.

Every process holds some pieces of the tables (:mod:`dlrm.embeddings.partition`), small tables in
full. A look-up sends the ids of the local samples to the holders, which look them up for the global
batch, and send every process the vectors of its samples; the backward pass sends the gradients the
same way back, so that a holder has the gradient rows of the global batch, which its optimizer
applies locally. GPUs of one host do without these collectives: they read distinct rows where they
lie, and write merged gradients there (:mod:`dlrm.embeddings.direct`). One-hot batches are exchanged
in shapes that depend on the plan alone: nothing waits for the host, and a CUDA graph can hold all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dlrm.distributed import World, exchange
from dlrm.embeddings.base import Common, Embedding, row_offsets
from dlrm.embeddings.cuts import ColumnCut, Cut, RowCut, WholeTables
from dlrm.embeddings.partition import Piece, describe, place
from dlrm.hints import nearest
from dlrm.kernels.branch import branch_of
from dlrm.kernels.lookup import lookup, lookup_tables
from dlrm.peers import in_reach, one_host
from dlrm.shards import Shards

CHUNK = 1 << 20  # rows drawn at a time
EXCHANGES = ("auto", "peers", "collective")
EXCHANGE = 1  # the branch beside which small tables are looked up, and their gradients reduced
# Numbers of a table from which sending rows to and fro pays, in place of summing the gradients of
# all: 12,000 rows of 128, 96,000 of 16. Measured on four H200: Terabyte from 12,000 rows 4.51 ms a
# step, from 50,000 4.86; Kaggle with `tt`, one table of 93,145 sent 1.74 ms, none 1.61.
LARGE = 1_536_000


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the tables of a model are spread over processes."""

    world: World
    pieces: Sequence[Piece]
    """Of the tables of the model that are not replicated."""
    wire: torch.dtype | None = None
    """Type in which vectors and gradients travel, other than rows that peers read; None: theirs,
    and sums of gradients between peers in fp32 at least."""
    peers: bool = False
    """Whether processes read each other's rows where they lie and write gradients there."""
    text: str = ""
    """The plan, to be read."""


def spread(
    world: World,
    names: Sequence[str],
    recipe: Mapping[str, Any],
    counts: Callable[[], Sequence[Tensor]] | None = None,
    rule: str = "sgd",
    *,
    by: str = "auto",
    tables: Mapping[str, str] | None = None,
    threshold: int | None = 0,
    wire: str = "fp32",
    exchange: str = "auto",
) -> Sharding | None:
    """Decide which tables are held in pieces, and by whom.

    Args:
        world: the processes.
        names: of the features.
        recipe: the arguments of the model. Its tables of kind paged, and dense ones, can be held
            in pieces.
        counts: gives how often each id of each table occurs in the data; asked for where there is
            something to place. If None, every table is looked up once a sample.
        rule: of the optimizer of the embeddings, one of ``dlrm.rules.RULES``.
        by: how tables are held, one of ``partition.WAYS``.
        tables: ways of tables by name.
        threshold: dense tables of fewer rows are replicated; None stands for as many rows as have
            ``LARGE`` numbers.
        wire: fp32 or bf16, see :class:`Sharding`.
        exchange: peers, collective, or auto: peers where GPUs of one host reach each other.

    Returns:
        None where nothing is: with one process, or only replicated tables.

    Raises:
        ValueError: an unknown name, way or exchange, a table of a kind that is not held in pieces
            or whose columns the rule needs together, pages that have devices of their own, or
            peers that can't be.
    """
    num_embeddings, plan = recipe["num_embeddings"], recipe["plan"]
    _check_exchange(world, exchange)
    _check_devices(world, plan)
    dim = recipe["embedding_dim"]
    ways = _ways(names, recipe, by, tables or {}, sharded_from(threshold, dim))
    if world.size == 1 or set(ways) == {"replicate"}:
        return None
    whole_rows = rule == "rowwise_adagrad"  # its one sum of a row is of all columns
    if whole_rows and "column" in ways:
        raise ValueError(
            f"--sharding cuts {names[ways.index('column')]} by column, but --optim.embeddings "
            f"{rule} keeps one sum for a whole row: have it by row or table, or use "
            "--optim.embeddings adagrad"
        )
    page = min((o["page_size"] for _, o in plan if "page_size" in o), default=1)
    loads = [float(count.sum()) for count in counts()] if counts else [1.0] * len(names)
    narrow = torch.bfloat16 if wire == "bf16" else None
    peers = exchange == "peers" or (exchange == "auto" and in_reach(world))
    pieces = place(
        num_embeddings, dim, world.size, ways=ways, loads=loads,
        page=page, room=_room() if peers else 0, narrow=not whole_rows,
    )  # fmt: skip
    text = describe(pieces, dict(enumerate(names)), loads)
    text += f"\nexchange by {'peers' if peers else 'collectives'}"
    return Sharding(world=world, pieces=pieces, wire=narrow, peers=peers, text=text)


def sharded_from(threshold: int | None, dim: int) -> int:
    """Rows from which dense tables of ``dim`` columns are held in pieces; see :func:`spread`."""
    return LARGE // dim if threshold is None else threshold


def _ways(
    names: Sequence[str],
    recipe: Mapping[str, Any],
    by: str,
    tables: Mapping[str, str],
    threshold: int,
) -> list[str]:
    """How each table is held; arguments as of :func:`spread`."""
    for name in tables:
        if name not in names:
            raise ValueError(
                f"sharding.tables names table {name!r}; the data has {', '.join(names)}"
            )
    ways = []
    for name, rows, (kind, _) in zip(names, recipe["num_embeddings"], recipe["plan"], strict=True):
        large = kind == "paged" or (kind == "dense" and rows >= threshold)
        way = tables.get(name, by if large else "replicate")
        if way != "replicate" and kind not in ("dense", "paged"):
            raise ValueError(
                f"--sharding.tables has {name} by {way}, but it is of kind {kind}, which is "
                "replicated: drop it there"
            )
        ways.append(way)
    return ways


def _check_devices(world: World, plan: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if world.size > 1 and any(options.get("devices") for _, options in plan):
        raise ValueError(
            "--paged.devices places the pages of one process; under torchrun every process holds "
            "its share where it computes: drop --paged.devices, or start python train.py alone"
        )


def _room() -> int:
    """Weights that every GPU of this host holds in a third of its memory, beside what an optimizer
    keeps for them; whole tables are then quicker than balanced memory.
    """
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return min((gpu.total_memory // 12 for gpu in gpus), default=0)


def _check_exchange(world: World, exchange: str) -> None:
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}{nearest(exchange, EXCHANGES)}")
    if exchange == "peers" and not one_host(world):
        raise ValueError(
            "--sharding.exchange peers needs all processes on one host, these are on several: use "
            "--sharding.exchange collective"
        )
    if exchange == "peers" and world.device.type == "cuda" and not in_reach(world):
        raise ValueError(
            "--sharding.exchange peers needs GPUs that read each other's memory, these can't: use "
            "--sharding.exchange collective"
        )


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
        kinds: dict[type[Cut], list[Piece]] = {WholeTables: [], RowCut: [], ColumnCut: []}
        for own in by_table.values():
            narrow = any(piece.width < embedding_dim for piece in own)
            kind = ColumnCut if narrow else RowCut if len(own) > 1 else WholeTables
            kinds[kind] += own
        self.cuts = nn.ModuleList(
            kind(own, self.num_tables, sharding.world, sharding.wire, sharding.peers)
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

    def _cuts(self) -> list[Cut]:
        return list(self.cuts)  # type: ignore[arg-type]

    def _new_weights(self) -> list[nn.Parameter]:
        """A weight per cut."""
        where = torch.get_default_device(), torch.get_default_dtype()
        weights = [nn.Parameter(cut.new_weight(*where)) for cut in self._cuts()]
        for weight in weights:
            weight.grad_dtype = None  # that of the wire
        return weights

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``.to`` and its kind do: weights move to where peers can read them."""
        cuts = [cut for cut in self._cuts() if cut.direct is not None]
        held = {cut.name: self._parameters.pop(cut.name) for cut in cuts}
        super()._apply(fn, recurse)
        for cut in cuts:
            weight = held[cut.name]
            assert weight is not None
            like = fn(weight.data[:0])
            if (like.device, like.dtype) != (weight.device, weight.dtype):
                weight.data = cut.new_weight(like.device, like.dtype).copy_(weight.data)
        self._parameters.update(held)
        return self

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

    def direct_cuts(self) -> list[Cut]:
        """Those whose rows peers read where they lie."""
        return [cut for cut in self._cuts() if cut.direct is not None and cut.direct.ready]

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
        for vectors in arriving:
            found += vectors()
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
            mine = (at >= 0).nonzero()[:, 0]
            local = lookup(self.replicated, (at + flat)[mine], sparse=self.sparse)
            result = result.index_copy(0, mine, local)
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

"""The index of tables for any ids of 64 bits, wherever their rows are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.budget import MANY_IDS, split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.dynamic_sizes import check_options, sizes_of
from dlrm.embeddings.common.fitting import fit_shared, index_add
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.embeddings.common.row_caches import CountsIds
from dlrm.kernels import require_integers
from dlrm.kernels.dynamic.index import find_rows, place, raise_scores
from dlrm.kernels.dynamic.new_rows import NewIds, SharedPieces, follow_ids, reset_rows, row_states
from dlrm.kernels.dynamic.scores import Eviction
from dlrm.kernels.dynamic.slot_index import EMPTY, NAMES, Admission, SlotIndex, begin_step
from dlrm.kernels.lookup.hashing import hashed_offsets
from dlrm.kernels.lookup.tables import TableRows, held_rows_torch
from dlrm.kernels.offload.row_cache import cached_rows
from dlrm.kernels.update.packed import storage, write_rows
from dlrm.utils.offsets import row_offsets

CHUNK = 1 << 18  # ids of a dense table that are placed at a time
STATE, _SIZES = ("ids", "scores", "time", "sketch", "counts"), ("first", "buckets", "salts")


class RowPart(NamedTuple):
    """A part of the rows of dynamic tables."""

    weight: nn.Parameter
    rows: TableRows
    """Which of the weight's rows are of which table."""


class DynamicTables(CountsIds, Embedding):
    """Base of tables with rows for the ids that occur: an index that says which id has which row.

    A class says where the rows are. Its other base takes the number of rows of each table as
    ``num_kept``. The options are described in :class:`dlrm.embeddings.dynamic.Dynamic`.
    """

    per_table = frozenset({"rows", "shared"})
    any_ids = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rows: int | list[int] | None = None,
        shared: int | list[int | None] | None = None,
        evict: str = "lfu",
        half_life: int = 1000,
        age: int = 100_000,
        admit: int = 1,
        chance: float | None = None,
        pieces: int | None = None,
        cache_share: float | None = None,
        **common: Any,
    ) -> None:
        self.pieces = pieces or 0
        admission = Admission(admit, 1.0 if chance is None else chance)
        rules = Eviction(evict, half_life, age), admission
        check_options(self.kind(), *rules, shared, self.pieces, embedding_dim)
        if cache_share is not None:
            if evict == "score":
                raise ValueError(
                    "rows of dynamic tables in host memory are fetched ahead of the step, where "
                    "scores are not known: leave out --dynamic.cache_share or --dynamic.evict score"
                )
            common["cache_share"] = cache_share

        # With pieces, the tables share all slots and rows.
        slots, others = sizes_of(num_embeddings, rows, shared)
        self.split = slots  # in these proportions they share what they have in common
        known = zip(num_embeddings, slots, strict=True)
        bounds = [initial_bound(own if ids >= MANY_IDS else ids) for ids, own in known]
        tables = len(slots)
        if self.pieces:
            common["row_dim"] = embedding_dim // self.pieces
            slots, others, bounds = [sum(slots)], [sum(others)], [sum(bounds) / tables]
        self.num_slots, self.num_shared, self.bounds = tuple(slots), tuple(others), bounds
        kept = [(self.pieces or 1) * (own + few) for own, few in zip(slots, others, strict=True)]
        super().__init__(num_embeddings, embedding_dim, num_kept=kept, **common)  # type: ignore[call-arg]

        # The state of the index, which a checkpoint has, and what follows from the options.
        sharing = tables if self.pieces else 0
        index = SlotIndex.empty(slots, *rules, sharing=sharing)
        self._rules = index.eviction, index.admission
        for name in (*STATE, "columns"):
            self.register_buffer(f"_{name}", getattr(index, name))
        self.register_buffer("_seed", torch.randint(2**62, ()))
        self._given_scores: Tensor | None = None  # of the shape of the ids, by set_clock
        derived = {name: getattr(index, name) for name in _SIZES} | {
            "num_shared": torch.tensor(others).repeat(sharing or 1),
            "bounds": torch.tensor(bounds).repeat(sharing or 1),
            "first_piece": torch.arange(sharing) * (self.pieces * sum(others)) // tables,
        }
        for name, tensor in derived.items():
            self.register_buffer(f"_{name}", tensor, persistent=False)

        self._time: Tensor  # [3]
        self._seed: Tensor  # []
        self._columns: Tensor | None  # [slots]
        self._first: Tensor  # [F]
        self._num_shared: Tensor  # [F]
        self._bounds: Tensor  # [F], of the first values of rows
        self._first_piece: Tensor  # [F], from which hashes of a table's ids count
        self._follow_ids()
        self.reset_parameters()

    @property
    @abstractmethod
    def row_parts(self) -> list[RowPart]:
        """The weights that have the rows of the tables."""

    @property
    def index(self) -> SlotIndex:
        """The index of the slots, where it is now."""
        names = (*STATE, "columns", *_SIZES)
        buffers = {name: getattr(self, f"_{name}") for name in names}
        return SlotIndex(**buffers, eviction=self._rules[0], admission=self._rules[1])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forget all ids, and draw the rows that ids without a row of their own share."""
        self._clear()
        for part in self.row_parts:
            storage(part.weight)[0].zero_()
        for table, (few, bound) in enumerate(zip(self.num_shared, self.bounds, strict=True)):
            rows = torch.empty(few, self.embedding_dim, device=self._tables.device)
            nn.init.uniform_(rows, -bound, bound)
            self._write(table, torch.arange(few, device=rows.device), rows)

    def _clear(self) -> None:
        for part in self.row_parts:
            if (cached := cached_rows(part.weight)) is not None:
                cached.release()
        index, self._given_scores = self.index, None
        index.ids.fill_(EMPTY)
        index.scores.clamp_(max=0)
        for tensor in (index.sketch, index.counts, index.time[:2]):
            tensor.zero_()

    def set_clock(self, value: int | Tensor) -> None:
        """Set the clock by which ids are evicted, and stop it: it no longer follows the steps.

        Under ``lru`` and ``age``, give the time, in any unit, before each step; ages are then in
        that unit. Under ``score``, give the score of the ids of the coming step, from 0 to
        2^23 - 1. It may be called between the steps of a captured graph.

        Under ``score`` it may be a tensor of integers, one for each look-up: the highest one of an
        id counts. It is read in every step until the next call, in captured ones too.

        Raises:
            ValueError: a tensor, and ids are not evicted by score.
        """
        each = isinstance(value, Tensor)
        if each and self._rules[0].rule != "score":
            raise ValueError(
                f"each look-up has a score, but ids are evicted by {self._rules[0].rule}: set "
                "--dynamic.evict score, or give one number"
            )
        self._given_scores = value if isinstance(value, Tensor) else None
        self._time[1:] = torch.tensor([0 if each else value, 0])

    # Looking up -------------------------------------------------------------------------------

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        return super().vectors(*self.stored_rows(tables, ids), context).flatten(-2)  # type: ignore[safe-super]

    def stored_rows(self, tables: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, or pieces of rows, of ids ``[..., pieces]``, and the tables of the weight that
        they are counted in; tables broadcast.
        """
        rows = self.local_rows(tables, ids)
        if not self.pieces:
            return tables[..., None], rows[..., None]
        return tables[..., None] * 0, self.piece_rows(tables, ids, rows)

    def piece_rows(self, tables: Tensor, ids: Tensor, rows: Tensor | None) -> Tensor:
        """The rows of the weight that are the pieces of ids. A shared piece may be any one of the
        group: the more ids a table has, the more of them it uses.

        Args:
            tables: of the ids; they broadcast against them.
            ids: ``[...]``.
            rows: those of :meth:`local_rows`; None: all ids have shared ones.

        Returns:
            ``[..., pieces]``.
        """
        shared, few = self._shared_pieces, self.num_shared[0]
        first = shared.first if tables is self._tables else shared.first[tables]
        return hashed_offsets(
            first, ids, self.pieces, shared.size, start=shared.start, rows=rows, few=few
        )

    @property
    def _shared_pieces(self) -> SharedPieces:
        size, start = (self.pieces * own[0] for own in (self.num_shared, self.num_slots))
        return SharedPieces(self._first_piece, size, start, self.pieces)

    def _placed_rows(
        self, tables: Tensor, ids: Tensor, context: LookupContext, end: Tensor | None = None
    ) -> Tensor:
        """The rows of look-ups within their tables; in training, new ids get theirs first."""
        trained = self.row_parts[0].weight.requires_grad
        if not (self.training and torch.is_grad_enabled() and trained):
            return self.local_rows(tables, ids)
        of_all, every, own = tables, ids, None
        if context.gather_ids is not None:
            of_all, every, own = context.gather_ids(tables, ids)  # the same on every process
        if self.pieces:  # a new id uses its copy of the shared row from the next step on
            rows = self.local_rows(tables, ids)
            context.do_later(partial(self._place, of_all, every, end))
            return rows
        rows = self._place(of_all, every, end)
        if context.gather_ids is None:
            return rows
        return self.local_rows(tables, ids) if own is None else rows[:, own]

    def place(self, ids: Tensor) -> Tensor:
        """Give rows to new ids ``[F, B]``, as a training step does; returns the row of each id
        within its table.
        """
        return self._place(self._tables[:, None], ids, None)

    @torch.no_grad()
    def _place(
        self, tables: Tensor, ids: Tensor, end: Tensor | None, *, loads: bool = False
    ) -> Tensor:
        """Place ids of a step; returns the row of each in its table. Ids that are loaded are all of
        the step that has begun, and need no admission.
        """
        scores = self._given_scores
        if scores is not None and scores.shape != ids.shape:
            raise ValueError(
                f"the scores have shape {tuple(scores.shape)} and the ids {tuple(ids.shape)}: give "
                "set_clock one score for each look-up of the step, in one process"
            )
        index = self.index._replace(admission=Admission()) if loads else self.index
        placed = place(index, self._num_shared, tables, ids, end=end, begins=not loads)
        if scores is not None:
            raise_scores(self.index, self._num_shared, tables, placed.rows, scores)

        # An id starts from the pieces that it shared, with their optimizer state. Without pieces it
        # starts from the row that it started from before, if it comes back.
        new = NewIds(placed, tables, ids, self._num_shared, self._bounds)
        for part in self.row_parts:
            cached = cached_rows(part.weight)
            reset_rows(
                part.weight,
                row_states(part.weight) or [],
                part.rows,
                new,
                self._seed,
                pieces=self._shared_pieces if self.pieces else None,
                cached=cached.cached_slots if cached is not None and cached.active else None,
            )
        return placed.rows

    def local_rows(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The rows of ids within their tables: of each table the shared ones come first. Nothing
        changes; tables broadcast against ids.
        """
        return find_rows(self.index, self._num_shared, tables, ids)

    def _check(self, tables: Tensor, ids: Tensor) -> None:
        """Any integer is an id."""
        require_integers(self._sizes, ids=ids)

    # The tables as a whole --------------------------------------------------------------------

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Copy the rows of dense tables, each ``[V, D]``, to the ids 0 to V - 1.

        If they do not all fit, the first ones do: they are the most frequent. A shared row becomes
        the mean of those of its other ids. With pieces, the longest rows fit, which training has
        moved most, and shared pieces are as in :func:`~dlrm.embeddings.common.fitting.fit_shared`.
        """
        self._check_dense(weights)
        self._clear()
        begin_step(self.index)  # all ids are of one step, so that none is evicted
        if self.pieces:
            self._load_pieces(weights)
        for table, weight in enumerate(weights if not self.pieces else ()):
            few, dim = self.num_shared[table], self.embedding_dim
            total = torch.zeros(few, dim + 1, device=weight.device)

            # Rows of ids that got a slot; the others add to the sum of their shared row.
            for start in range(0, len(weight), CHUNK):
                part = weight[start : start + CHUNK]
                ids = torch.arange(start, start + len(part), device=weight.device)
                local = self._place(torch.full_like(ids, table), ids, None, loads=True)
                own = local >= few
                self._write(table, local[own], part[own])
                counted = torch.cat([part.float(), torch.ones_like(part[:, :1].float())], 1)
                index_add(total, local[~own], counted[~own])

            if total[:, dim].any():
                means = total[:, :dim] / total[:, dim:].clamp(min=1)
                self._write(table, torch.arange(few, device=means.device), means)
        self.index.counts.zero_()

    def _load_pieces(self, weights: Sequence[Tensor]) -> None:
        """The longest rows of dense tables get rows of their own."""
        length = torch.cat([weight.float().norm(dim=1) for weight in weights])
        longest = length.sort(descending=True, stable=True).indices[: self.num_slots[0]]
        starts = row_offsets(self.num_embeddings).to(longest.device)
        tables = torch.bucketize(longest, starts, right=True) - 1
        ids = longest - starts[tables]
        parts = zip(tables.split(CHUNK), ids.split(CHUNK), strict=True)
        rows = torch.cat([self._place(*part, None, loads=True) for part in parts])
        own, placed = rows >= self.num_shared[0], []
        for table, weight in enumerate(weights):
            here = own & (tables == table)
            placed.append(ids[here])
            self._write(0, rows[here], weight[ids[here]])

        def pieces(table: int, ids: Tensor) -> Tensor:
            return self.piece_rows(self._tables[table], ids, None)

        fit_shared(self.row_parts[0].weight, weights, pieces, placed)

    def _write(self, table: int, rows: Tensor, values: Tensor) -> None:
        """Set rows of a table to ``values [n, D]``, where they are."""
        if self.pieces:  # those of shared rows come last
            own, few = self.num_slots[0], self.num_shared[0]
            rows = torch.where(rows < few, rows + own, rows - few)
            pieces = torch.arange(self.pieces, device=rows.device)
            rows = (rows[:, None] * self.pieces + pieces).flatten()
            values = values.reshape(len(rows), self.embedding_dim // self.pieces)
        for part in self.row_parts:
            if not part.weight.is_meta:
                to, here = held_rows_torch(rows, torch.full_like(rows, table), part.rows)
                write_rows(part.weight, to[here], values[here])

    def to_dense(self, table: int = 0, *, chunk: int = 1 << 16) -> Tensor:
        if self.num_embeddings[table] >= MANY_IDS:
            raise ValueError(
                "the ids of this table are hashed texts: there is no dense table of all of them"
            )
        return super().to_dense(table, chunk=chunk)

    def id_counts(self) -> Mapping[str, int]:
        return dict(zip(NAMES, self.index.counts.tolist(), strict=True))

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table: ``weights`` with the shared rows, and ``index`` for which id has
        which row, with scores and sketch.
        """
        parts = super().footprint()  # type: ignore[safe-super]
        if self.pieces:
            split = {name: split_by_rows(size, self.split) for name, size in parts[0].items()}
            parts = [{n: split[n][table] for n in split} for table in range(self.num_tables)]
        index = split_by_rows(self.index.nbytes + self._seed.nbytes, self.split)
        return [
            {**part, "index": part.get("index", 0) + size}
            for part, size in zip(parts, index, strict=True)
        ]

    # Moving and loading may replace the parameter ----------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._follow_ids()
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._follow_ids()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow_ids()

    def _follow_ids(self) -> None:
        for part in self.row_parts:
            follow_ids(part.weight)

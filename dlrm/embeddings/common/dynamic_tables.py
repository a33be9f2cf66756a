"""The index of tables for any ids of 64 bits, wherever their rows are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.budget import MANY_IDS, split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.dynamic_sizes import index_bytes, shared_rows, slots_of
from dlrm.embeddings.common.fitting import fit_shared, index_add
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.embeddings.common.row_caches import CountsIds
from dlrm.kernels import require_integers
from dlrm.kernels.dynamic.hashing import GOLDEN, mix, scale, shift
from dlrm.kernels.dynamic.index import find_rows, place, raise_scores
from dlrm.kernels.dynamic.new_rows import NewIds, follow_ids, reset_rows, row_states
from dlrm.kernels.dynamic.scores import RULES, Eviction
from dlrm.kernels.dynamic.slot_index import EMPTY, NAMES, Admission, SlotIndex, begin_step
from dlrm.kernels.lookup.tables import TableRows, held_rows_torch
from dlrm.kernels.offload.row_cache import cached_rows
from dlrm.kernels.update.packed import storage, write_rows

CHUNK = 1 << 18  # ids of a dense table that are placed at a time
STATE, _SIZES = ("ids", "scores", "time", "sketch", "counts"), ("first", "buckets")


class RowPart(NamedTuple):
    """A part of the rows of dynamic tables, or of their columns."""

    weight: nn.Parameter
    rows: TableRows
    """Which of the weight's rows are of which table."""
    first: int = 0
    """The first column."""


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
        chance: float = 1.0,
        pieces: int | None = None,
        cache_share: float | None = None,
        **common: Any,
    ) -> None:
        if evict not in RULES:
            raise ValueError(
                f"dynamic evict is {evict!r}; set --dynamic.evict to one of {', '.join(RULES)}"
            )

        # Numbers of 1 or more.
        least = {"half_life": half_life, "age": age, "admit": admit}
        few = shared if isinstance(shared, list) else [shared] * len(num_embeddings)
        least |= {"shared": min((own for own in few if own is not None), default=1)}
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"dynamic {name} is {value}; set --dynamic.{name} to 1 or more")
        if not 0 < chance <= 1:
            raise ValueError(
                f"dynamic chance is {chance}, it must be above 0, at most 1; set --dynamic.chance"
            )

        pieces = 1 if pieces is None else pieces
        if pieces < 1 or embedding_dim % pieces:
            raise ValueError(
                f"dynamic pieces is {pieces}; set --dynamic.pieces to a divisor of the embedding "
                f"dim, {embedding_dim}"
            )
        if pieces > 1 and common.get("dtype") == "int4":
            raise ValueError(
                "int4 rows of dynamic tables are not in pieces: leave out --dynamic.pieces, or set "
                "--tables.dtype int8"
            )

        if cache_share is not None:
            if evict == "score":
                raise ValueError(
                    "rows of dynamic tables in host memory are fetched ahead of the step, where "
                    "scores are not known: leave out --dynamic.cache_share or --dynamic.evict score"
                )
            common["cache_share"] = cache_share
        slots = slots_of(num_embeddings, rows)
        if sum(slots) >= 2**31:
            raise ValueError(
                f"the tables have {sum(slots):,} rows together, dynamic takes up to 2^31 - 1: set "
                "fewer --dynamic.rows, or give some of them other options, so that they form "
                "another group"
            )
        self.num_slots = tuple(slots)
        self.num_shared = tuple(map(shared_rows, slots, few))
        kept = [own + others for own, others in zip(slots, self.num_shared, strict=True)]
        self.pieces = pieces
        if pieces > 1:  # those of each table come after the first ones of all
            common["row_dim"] = embedding_dim // pieces
        super().__init__(num_embeddings, embedding_dim, num_kept=kept * pieces, **common)  # type: ignore[call-arg]

        # The state of the index, which a checkpoint has, and what follows from the options.
        index = SlotIndex.empty(slots, Eviction(evict, half_life, age), Admission(admit, chance))
        self._rules = index.eviction, index.admission
        known = zip(num_embeddings, slots, strict=True)
        self.bounds = [initial_bound(own if ids >= MANY_IDS else ids) for ids, own in known]
        for name in STATE:
            self.register_buffer(f"_{name}", getattr(index, name))
        self.register_buffer("_seed", torch.randint(2**62, ()))
        self._given_scores: Tensor | None = None  # of the shape of the ids, by set_clock
        for name in _SIZES:
            self.register_buffer(f"_{name}", getattr(index, name), persistent=False)
        self.register_buffer("_num_shared", torch.tensor(self.num_shared), persistent=False)
        self.register_buffer("_bounds", torch.tensor(self.bounds), persistent=False)
        self._time: Tensor  # [3]
        self._seed: Tensor  # []
        self._first: Tensor  # [F]
        self._num_shared: Tensor  # [F]
        self._bounds: Tensor  # [F], of the first values of rows
        self._offsets: Tensor  # [pieces * F], of rows in one weight: where those of each begin
        if pieces > 1:  # where the shared pieces of each table end, counted together, and begin
            each = self._num_shared.repeat(pieces)
            ends = each.cumsum(0)
            self.register_buffer("_shared_ends", ends, persistent=False)
            self.register_buffer("_shared_begins", self._offsets - ends + each, persistent=False)
            self._shared_ends: Tensor  # [pieces * F]
            self._shared_begins: Tensor  # [pieces * F]
        self._follow_ids()
        self.reset_parameters()

    @property
    @abstractmethod
    def row_parts(self) -> list[RowPart]:
        """The weights that have the rows of the tables."""

    @property
    def index(self) -> SlotIndex:
        """The index of the slots, where it is now."""
        buffers = {name: getattr(self, f"_{name}") for name in STATE + _SIZES}
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
        tables, rows = self.pieces_of(tables, ids)
        return super().vectors(tables, rows, context).flatten(-2)  # type: ignore[safe-super]

    def pieces_of(self, tables: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The pieces of ids as tables and rows of one, ``[..., pieces]``; tables broadcast."""
        rows = self.piece_rows(tables, ids, self.local_rows(tables, ids))
        numbers = torch.arange(self.pieces, device=ids.device) * self.num_tables
        return tables[..., None] + numbers, rows.movedim(0, -1)

    def piece_rows(self, tables: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        """The row of each piece of ids, counted from where the piece of their table begins.

        A shared piece may be any shared piece of the group, of any table: the more ids a table has,
        the more of them it uses.

        Args:
            tables: of the ids; they broadcast against them.
            ids: ``[...]``.
            rows: those of :meth:`local_rows`.

        Returns:
            ``[pieces, ...]``.
        """
        if self.pieces == 1:
            return rows[None]
        number = torch.arange(self.pieces, device=ids.device).view(-1, *[1] * ids.dim())
        key = mix(ids.long() + 1 + number * GOLDEN.value) ^ mix(tables + 1)
        shared = scale(shift(key, 16), self._shared_ends[-1])
        holder = torch.bucketize(shared, self._shared_ends, right=True)
        shared += self._shared_begins[holder] - self._offsets[tables + number * self.num_tables]
        return torch.where(rows < self._num_shared[tables], shared, rows)

    def _placed_rows(
        self, tables: Tensor, ids: Tensor, context: LookupContext, end: Tensor | None = None
    ) -> Tensor:
        """The rows of look-ups within their tables; in training, new ids get theirs first."""
        trained = self.row_parts[0].weight.requires_grad
        if not (self.training and torch.is_grad_enabled() and trained):
            return self.local_rows(tables, ids)
        if context.gather_ids is None:
            return self._place(tables, ids, end)
        of_all, every, own = context.gather_ids(tables, ids)
        rows = self._place(of_all, every, end)  # the same on every process
        return self.local_rows(tables, ids) if own is None else rows[:, own]

    def place(self, ids: Tensor) -> Tensor:
        """Give rows to new ids ``[F, B]``, as a training step does; returns the row of each id
        within its table.
        """
        return self._place(self._tables[:, None], ids, None)

    @torch.no_grad()
    def _place(
        self, tables: Tensor, ids: Tensor, end: Tensor | None, *, begins: bool = True
    ) -> Tensor:
        """Place ids of a step, by default the first ones; returns the row of each in its table."""
        scores = self._given_scores
        if scores is not None and scores.shape != ids.shape:
            raise ValueError(
                f"the scores have shape {tuple(scores.shape)} and the ids {tuple(ids.shape)}: give "
                "set_clock one score for each look-up of the step, in one process"
            )
        placed = place(self.index, self._num_shared, tables, ids, end=end, begins=begins)
        if scores is not None:
            raise_scores(self.index, self._num_shared, tables, placed.rows, scores)

        # An id starts from the pieces that it shared, with their optimizer state. Without pieces it
        # starts from the row that it started from before, if it comes back.
        new = NewIds(placed, tables, ids, self._num_shared, self._bounds)
        sources = None
        if self.pieces > 1:
            sources = self.piece_rows(tables, ids, torch.zeros_like(placed.rows))
        for number, part in enumerate(self.row_parts):
            cached = cached_rows(part.weight)
            reset_rows(
                part.weight,
                row_states(part.weight) or [],
                part.rows,
                new,
                self._seed + part.first if part.first else self._seed,
                sources=None if sources is None else sources[number],
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
        the mean of those of its other ids; a piece as in
        :func:`~dlrm.embeddings.common.fitting.fit_shared`.
        """
        self._check_dense(weights)
        self._clear()
        begin_step(self.index)  # all ids are of one step, so that none is evicted
        placed: list[list[Tensor]] = [[] for _ in weights]
        for table, weight in enumerate(weights):
            few, dim = self.num_shared[table], self.embedding_dim
            total = torch.zeros(few, dim + 1, device=weight.device)

            # Rows of ids that got a slot; the others add to the sum of their shared row.
            for start in range(0, len(weight), CHUNK):
                part = weight[start : start + CHUNK]
                ids = torch.arange(start, start + len(part), device=weight.device)
                tables = torch.full_like(ids, table)
                local = self._place(tables, ids, None, begins=False)
                own = local >= few
                self._write(table, local[own], part[own])
                placed[table].append(ids[own])
                counted = torch.cat([part.float(), torch.ones_like(part[:, :1].float())], 1)
                index_add(total, local[~own], counted[~own])

            if self.pieces == 1 and total[:, dim].any():
                means = total[:, :dim] / total[:, dim:].clamp(min=1)
                self._write(table, torch.arange(few, device=means.device), means)
        self.index.counts.zero_()

        if self.pieces > 1:
            weight = self.row_parts[0].weight
            fit_shared(weight, weights, self._rows_of_pieces, [torch.cat(own) for own in placed])

    def _rows_of_pieces(self, table: int, ids: Tensor) -> Tensor:
        """The rows of the weight that are the pieces of ids ``[n]``, ``[n, pieces]``."""
        numbers, rows = self.pieces_of(torch.full_like(ids, table), ids)
        return rows + self._offsets[numbers]

    def _write(self, table: int, rows: Tensor, values: Tensor) -> None:
        """Set rows of a table to ``values [n, D]``, where they are."""
        for part in self.row_parts:
            if not part.weight.is_meta:
                to, here = held_rows_torch(rows, torch.full_like(rows, table), part.rows)
                columns = slice(part.first, part.first + part.weight.shape[1])
                write_rows(part.weight, to[here], values[here, columns])

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
        own = [index_bytes(slots) for slots in self.num_slots]
        rest = sum(
            getattr(self, f"_{name}").nbytes for name in ("time", "sketch", "counts", "seed")
        )
        split = split_by_rows(rest, self.num_slots)
        parts = super().footprint()  # type: ignore[safe-super]
        pieces = [parts[table :: self.num_tables] for table in range(self.num_tables)]
        weights = [{name: sum(part[name] for part in own) for name in own[0]} for own in pieces]
        return [
            {**table, "index": table.get("index", 0) + size + share}
            for table, size, share in zip(weights, own, split, strict=True)
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

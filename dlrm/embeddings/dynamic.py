"""Tables for any ids of 64 bits: a row belongs to an id as long as that is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.budget import (
    MANY_IDS,
    Budget,
    highest_level,
    row_bytes,
    split_by_rows,
)
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.dynamic_sizes import LOAD, index_bytes, shared_rows, slots_of
from dlrm.embeddings.common.dynamic_tables import STATE, DynamicTables, RowPart
from dlrm.embeddings.common.host_rows import HostRows
from dlrm.embeddings.common.index_ahead import IndexAhead
from dlrm.embeddings.common.row_caches import Ids
from dlrm.kernels.lookup.tables import TableRows
from dlrm.utils.bags import Bags

FIXED_BYTES = 80  # time, counts, seed and the smallest sketch
GROWTH = 4  # times as many ids are expected as have occurred
LEAST = 16  # a table of which few ids have occurred gets one of so many rows of the largest
SCARCE, SCARCE_CHANCE, SCARCE_SHARE = 0.03, 0.01, 0.5
"""If a smaller share of the ids has room, ids get rows by chance, and these take so large a part of
the bytes: the rest is for shared rows in pieces."""


class Dynamic(DynamicTables, HostRows):
    """Rows for the ids that occur: an id gets a row when training first uses it, and loses it to
    another one when room is scarce.

    Ids are any integers of 64 bits, such as hashes of texts. No vocabulary is needed. While there
    is room, results are those of ``dense``, except for the rows that ids start from, which are a
    hash of the id. Ids without a row share ``shared`` rows of their table. Which id gets which row
    is the same on every run and device: see :mod:`dlrm.kernels.dynamic.index`. Evaluation changes
    nothing.

    ``RowOptimizer`` resets the state of a row with the row; optimizers of ``torch.optim`` keep the
    state of its former id.

    Args:
        rows: ids of a table that have a row at a time. In code it may be a list with one number for
            each table. Default: room for all ids, if their number is known.
        shared: rows of a table that all other ids share. Default: 1 for 32 others.
        evict: which id loses its row. lfu: the least frequently used one, by the number of steps
            that used it, which halves every ``half_life`` steps; lru: the least recently used one;
            age: the same, but only if unused for ``age`` steps; score: the one with the lowest
            score, which code sets with set_clock.
        half_life: steps in which the frequency of an unused id halves.
        age: steps for which an unused id keeps its row under ``--dynamic.evict age``.
        admit: occurrence from which on an id gets a row; occurrences are counted roughly, a little
            too high at times, and the counts of ids without a row halve every ``half_life`` steps.
        chance: probability with which an id that could get a row gets it, in each step.
        pieces: number of pieces of a shared row, a divisor of the embedding dim. Each piece is
            shared with other ids, also those of other tables of the group: hardly two ids share all
            of theirs. With several, a row of an id's own starts as a copy of its shared one, with
            the optimizer state. Default: 1.
        cache_share: rows are in host memory with their optimizer state, and this share of them is
            cached on the GPU. Default: all rows are in GPU memory.

    Reference:
        HierarchicalKV (Merlin), 2022, and dynamicemb in NVIDIA recsys-examples, for the interface.
        Two choices: Azar et al., "Balanced Allocations", SIAM J. Comput. 1999.
    """

    of_speed = frozenset({"cache_share"})
    budget_by_counts = True
    _ahead: IndexAhead | None = None

    @property
    def row_parts(self) -> list[RowPart]:
        if self.pieces == 1:
            return [RowPart(self.weight, self._table_rows)]
        begins, width = self._offsets.split(self.num_tables), self.weight.shape[1]
        return [RowPart(self.weight, TableRows(own), n * width) for n, own in enumerate(begins)]

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = self._placed_rows(self._tables[:, None], ids, context)
        return self._joined(super().lookup(self._in_pieces(ids, rows), context))

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        bags = bags.filled() if context.padded and not self.weight.is_cuda else bags
        end = bags.offsets[-1:] if context.padded else None
        rows = self._placed_rows(bags.tables(self.num_tables), bags.ids, context, end)
        if (self.dtype is not None or self.mode == "max") and not self.weight.is_cuda:
            return Embedding.lookup_bags(self, bags, context)  # by vectors, which find the rows
        return self._joined(super().lookup_bags(self._bags_in_pieces(bags, rows), context))

    def _in_pieces(self, ids: Tensor, rows: Tensor) -> Tensor:
        """The rows of the pieces, ``[pieces * F, B]``, of ids with ``rows [F, B]``."""
        return self.piece_rows(self._tables[:, None], ids, rows).flatten(0, 1)

    def _bags_in_pieces(self, bags: Bags, rows: Tensor) -> Bags:
        """The bags of the first pieces of all tables, then those of the second ones, and so on."""
        if self.pieces == 1:
            return replace(bags, ids=rows)
        rows = self.piece_rows(bags.tables(self.num_tables), bags.ids, rows)
        end, count = bags.offsets[-1:], len(bags.ids)
        at = torch.arange(self.pieces * count, device=rows.device)  # of the padding any are taken
        piece = (at // end.clamp(min=1)).clamp(max=self.pieces - 1)
        at = (at - piece * end).clamp(max=count - 1)
        numbers = torch.arange(self.pieces, device=rows.device)[:, None]
        offsets = torch.cat([(bags.offsets[:-1] + numbers * end).flatten(), self.pieces * end])
        weights = None if bags.weights is None else bags.weights[at]
        return Bags(rows[piece, at], offsets, weights)

    def _joined(self, vectors: Tensor) -> Tensor:
        """The vectors ``[B, F, D]`` of pieces."""
        return vectors.unflatten(1, (self.pieces, -1)).transpose(1, 2).flatten(2)

    # Rows in host memory are fetched ahead of the steps that place their ids. A second index runs
    # ahead of the one in the state dict and gives ids the same rows, as it gets the same ids.

    def _placed_rows(
        self, tables: Tensor, ids: Tensor, context: LookupContext, end: Tensor | None = None
    ) -> Tensor:
        if self.cached.active and not context.rows_fetched:
            self.cached.wait()  # rows of new ids are reset, and must not be on their way
        return super()._placed_rows(tables, ids, context, end)

    def place(self, ids: Tensor) -> Tensor:
        self.cached.release()  # the other index knows nothing of these
        return super().place(ids)

    def begin_window(self, now: Sequence[Ids], coming: Sequence[Ids]) -> None:
        if now and self.cached.moves:  # all earlier steps have begun
            self.cached.wait()
            if self._ahead is None or self._ahead.device != self._num_shared.device:
                self._ahead = IndexAhead(self.index, self._num_shared)
            self._ahead.follow(self.index)
        super().begin_window(now, coming)
        if self._ahead is not None:
            self.cached.side.keep(self._ahead.tensors)

    def _rows_of(self, batches: Sequence[Ids]) -> tuple[Tensor, Tensor | None] | None:
        return super()._rows_of([self._place_ahead(ids) for ids in batches])

    def _place_ahead(self, ids: Ids) -> Ids:
        """The rows within their tables that the ids of a batch will have in their step."""
        assert self._ahead is not None
        if self.padding_idx is not None:
            bags = ids if isinstance(ids, Bags) else Bags.one_each(ids)
            ids = bags.without(self.padding_idx)
        if isinstance(ids, Tensor):
            return self._in_pieces(ids, self._ahead.place(self._tables[:, None], ids))
        return self._bags_in_pieces(ids, self._ahead.place_bags(ids, self.num_tables))

    def set_clock(self, value: int | Tensor) -> None:
        if self.on_host:
            raise ValueError(
                "rows in host memory are fetched before the clock of their step is known: leave "
                "out set_clock or --dynamic.cache_share"
            )
        super().set_clock(value)

    def footprint(self) -> list[dict[str, int]]:
        tables = super().footprint()
        if self.cached.moves:  # the index that runs ahead
            ahead = split_by_rows(sum(getattr(self.index, n).nbytes for n in STATE), self.num_slots)
            for table, size in zip(tables, ahead, strict=True):
                table["index"] += size
        return tables

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        raise AssertionError("load_dense places ids itself")

    @classmethod
    def for_budget(
        cls,
        budget: Budget,
        *,
        shared: int | None = None,
        admit: int = 1,
        chance: float = 1.0,
        pieces: int | None = None,
    ) -> list[dict[str, Any] | None]:
        """The largest ``rows`` that fit: room for the ids that occur most, of whatever table. If
        counts are unknown, it is the same for all tables, except those of which few ids have
        occurred. If fewer than 3% of the ids have room, the others share most of the bytes, in four
        ``pieces``, and an id gets a row with a low ``chance``: rows change hands less often, and
        shared ones are trained.
        """
        several = 1 if budget.dtype == "int4" else gcd(4, budget.embedding_dim)
        found, share = _Division(budget, admit > 1, shared, pieces or 1).largest(cls.kind())
        if scarce := share < SCARCE:  # rows that change hands all the time learn nothing
            division = _Division(budget, admit > 1, shared, pieces or several, scarce)
            found, _ = division.largest(cls.kind())
            chance, pieces = chance if chance < 1 else SCARCE_CHANCE, division.pieces
        chosen = ({} if chance == 1 else {"chance": chance}) | {"pieces": pieces or 1}
        return [
            {"rows": found[table].rows, "shared": found[table].shared, **chosen}
            if table in found
            else None
            for table in range(len(budget.num_embeddings))
        ]


class _Size(NamedTuple):
    """A table of a budget."""

    rows: int
    shared: int
    bytes: int


@dataclass
class _Division:
    """A budget that is divided among tables."""

    budget: Budget
    counted: bool
    """Whether ids wait until they occurred several times, which a sketch counts."""
    shared: int | None
    pieces: int
    scarce: bool = False
    """Whether most rows are shared, unless ``shared`` is given."""

    def __post_init__(self) -> None:
        tables, values = self.budget.num_embeddings, self.budget.values
        self._expected = [
            known if known < MANY_IDS else GROWTH * (seen or MANY_IDS)
            for known, seen in zip(tables, values or [None] * len(tables), strict=True)
        ]
        dim, self._rest = self.budget.embedding_dim, self.scarce and self.shared is None
        self._row_bytes = self.pieces * row_bytes(dim // self.pieces, self.budget.dtype)
        self._places = self.budget.counts and _places(self.budget.counts)

    def rows(self, table: int, level: int) -> int:
        """Ids of a table with a row at a level: how many of all tables that have occurred have one
        or, if it is not known how often they occur, the most of one table.
        """
        expected = self._expected[table]
        if self._places is None:
            return max(min(level, expected), level // LEAST)

        # First the ids that have occurred, if bytes are not scarce with half as many new ones that
        # may be as frequent; then as many others as are expected of each table.
        seen = [len(places) for places in self._places]
        more = [max(every - own, 0) for every, own in zip(self._expected, seen, strict=True)]
        others = max(level - sum(seen), 0) * more[table] // max(sum(more), 1)
        found = int(np.searchsorted(self._places[table], level))
        return found + (0 if self.scarce else found // 2) + others

    def size(self, table: int, level: int) -> _Size:
        """The size of a table at a level."""
        known = self.budget.num_embeddings[table]
        rows = max(ceil(min(self.rows(table, level), known) / LOAD), 1)
        (slots,) = slots_of([known], rows)
        others = shared_rows(slots, self.shared)
        own = (slots + others) * self._row_bytes + index_bytes(slots) + FIXED_BYTES
        own += index_bytes(slots) // 3 if self.counted else 0  # at most, of the sketch
        return _Size(rows, others, own)

    def largest(self, kind: str) -> tuple[dict[int, _Size], float]:
        """The sizes of the tables that are not dense, and the share of their ids with a row."""
        dense = [own * self.budget.row_bytes for own in self.budget.num_embeddings]

        def cost(level: int) -> int:
            return sum(min(own, self.size(t, level).bytes) for t, own in enumerate(dense))

        # Rows of ids, and of small tables that stay dense; the rest is shared.
        most = self.budget.size
        if self._rest:
            most = max(int(SCARCE_SHARE * most), min(cost(0), most))
        highest = min(MANY_IDS, ceil(sum(self.budget.num_embeddings) / LOAD))
        level = highest_level(cost, highest, most, kind)
        sizes = ((t, self.size(t, level)) for t in range(len(dense)))
        found = {t: own for t, own in sizes if dense[t] > own.bytes}
        if self._rest and found:
            more = (self.budget.size - cost(level)) // (self._row_bytes * len(found))
            found = {t: own._replace(shared=own.shared + more) for t, own in found.items()}
        wanted = sum(self._expected[t] for t in found)
        rows = sum(own.rows for own in found.values())
        return found, rows / wanted if 0 < wanted < MANY_IDS else 1.0


def _places(counts: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """The places of the ids of each table among those of all tables, the most frequent first; of
    equally frequent ones those of tables that have few.
    """
    each = [-np.sort(-own[own > 0].numpy()) for own in counts]
    table = np.repeat(np.arange(len(each)), [len(own) for own in each])
    rank = np.concatenate([np.arange(len(own)) for own in each])
    order = table[np.lexsort((rank, -np.concatenate(each)))]
    return [np.flatnonzero(order == number) for number in range(len(each))]

"""Tables for any ids of 64 bits: a row belongs to an id as long as that is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.budget import Budget, split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.dynamic_budget import CHANCE, SCARCE, Sizes, common_sizes, own_sizes
from dlrm.embeddings.common.dynamic_tables import STATE, DynamicTables, RowPart
from dlrm.embeddings.common.host_rows import HostRows
from dlrm.embeddings.common.index_ahead import IndexAhead
from dlrm.embeddings.common.row_caches import Ids
from dlrm.kernels.lookup.tables import TableRows
from dlrm.utils.bags import Bags


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
        rows: ids of a table that have a row at a time; tables that share rows have the sum of
            theirs. In code it may be a list with one number for each table. Default: room for all
            ids, if their number is known.
        shared: rows of a table that all other ids share. Default: 1 for 32 others.
        evict: which id loses its row. lfu: the least frequently used one, by the number of steps
            that used it, which halves every ``half_life`` steps; an id that comes takes on the
            number of the one that leaves, so ids that fade leave sooner where more come; lru: the
            least recently used one; age: the same, but only if unused for ``age`` steps; score: the
            one with the lowest score, which code sets with set_clock.
        half_life: steps in which the frequency of an unused id halves.
        age: steps for which an unused id keeps its row under ``--dynamic.evict age``.
        admit: occurrence from which on an id gets a row; occurrences are counted roughly, a little
            too high at times, and the counts of ids without a row halve every ``half_life`` steps.
        chance: probability with which an id that could get a row gets it, in each step. Default: 1,
            or as a budget needs.
        pieces: tables of the group share all rows, and each shared row is made of so many pieces, a
            divisor of the embedding dim. Each piece is shared with other ids: hardly two ids share
            all of theirs. A row of an id's own is a copy of its shared one, with the optimizer
            state, from the step on that follows the one in which the id gets it. 0: each table has
            rows of its own. Default: 0, or as a budget needs.
        cache_share: rows are in host memory with their optimizer state, and this share of them is
            cached on the GPU. Default: all rows are in GPU memory.

    Reference:
        HierarchicalKV (Merlin), 2022, and dynamicemb in NVIDIA recsys-examples, for the interface.
        Two choices: Azar et al., "Balanced Allocations", SIAM J. Comput. 1999. Counts that stay:
        Metwally et al., "Efficient Computation of Frequent and Top-k Elements in Data Streams",
        ICDT 2005.
    """

    of_speed = frozenset({"cache_share"})
    budget_by_counts = True
    _ahead: IndexAhead | None = None

    @property
    def row_parts(self) -> list[RowPart]:
        if self.pieces:
            return [RowPart(self.weight, TableRows(self._first))]  # 0 for all
        return [RowPart(self.weight, self._table_rows)]

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = self._placed_rows(self._tables[:, None], ids, context)
        if not self.pieces:
            return super().lookup(rows, context)
        pieces = super().lookup(self._in_pieces(ids, rows), context)
        return pieces.view(*ids.t().shape, self.embedding_dim)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        bags = bags.filled() if context.padded and not self.weight.is_cuda else bags
        end = bags.offsets[-1:] if context.padded else None
        tables = bags.tables(self.num_tables)
        by_vectors = (self.dtype is not None or self.mode == "max") and not self.weight.is_cuda
        if by_vectors and self.pieces:  # which find the rows, here before new ids get theirs
            vectors = Embedding.lookup_bags(self, bags, context)
            self._placed_rows(tables, bags.ids, context, end)
            return vectors
        rows = self._placed_rows(tables, bags.ids, context, end)
        if by_vectors:
            return Embedding.lookup_bags(self, bags, context)
        if not self.pieces:
            return super().lookup_bags(replace(bags, ids=rows), context)
        vectors = super().lookup_bags(self._bags_in_pieces(bags, tables, rows), context)
        return (
            vectors.view(self.pieces, self.num_tables, -1, vectors.shape[2])
            .permute(2, 1, 0, 3)
            .flatten(2)
        )

    def _in_pieces(self, ids: Tensor, rows: Tensor) -> Tensor:
        """The pieces of ids ``[F, B]`` with these rows, sample by sample, as ids of one table."""
        return self.piece_rows(self._tables, ids.t(), rows.t()).reshape(1, -1)

    def _bags_in_pieces(self, bags: Bags, tables: Tensor, rows: Tensor) -> Bags:
        """The bags of the first pieces of all tables, then those of the second ones, and so on, as
        bags of one table.
        """
        rows = self.piece_rows(tables, bags.ids, rows)
        end, count = bags.offsets[-1:], len(bags.ids)
        at = torch.arange(self.pieces * count, device=rows.device)  # of the padding any are taken
        piece = (at // end.clamp(min=1)).clamp(max=self.pieces - 1)
        at = (at - piece * end).clamp(max=count - 1)
        numbers = torch.arange(self.pieces, device=rows.device)[:, None]
        offsets = torch.cat([(bags.offsets[:-1] + numbers * end).flatten(), self.pieces * end])
        weights = None if bags.weights is None else bags.weights[at]
        return Bags(rows[at, piece], offsets, weights)

    def _wide_rows(self) -> tuple[int, ...] | None:
        wide = super()._wide_rows()
        if wide is None or not self.pieces:
            return wide
        return (self.pieces * self.num_slots[0],)  # those of ids, which come first

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
        """The rows within their tables that the ids of a batch will have in their step; or pieces,
        with those of rows that new ids get in it.
        """
        assert self._ahead is not None
        if self.padding_idx is not None:
            bags = ids if isinstance(ids, Bags) else Bags.one_each(ids)
            ids = bags.without(self.padding_idx)
        if isinstance(ids, Tensor):
            found = self._ahead.place(self._tables[:, None], ids)
            if not self.pieces:
                return found[0]
            return torch.cat([self._in_pieces(ids, rows) for rows in found], 1)
        tables = ids.tables(self.num_tables)
        found = self._ahead.place_bags(tables, ids.ids, ids.offsets[-1:])
        if not self.pieces:
            return replace(ids, ids=found[0])
        return torch.cat([self.piece_rows(tables, ids.ids, rows).view(1, -1) for rows in found], 1)

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
            ahead = split_by_rows(sum(getattr(self.index, n).nbytes for n in STATE), self.split)
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
        chance: float | None = None,
        pieces: int | None = None,
    ) -> list[dict[str, Any] | None]:
        """The largest ``rows`` that fit: room for the ids that occur most, of whatever table. If
        fewer than 3% of the ids have room, tables share all rows, in four ``pieces``, and an id
        gets its own with a low ``chance``: rows change hands less often, and shared ones are
        trained.
        """
        given = {} if chance is None else {"chance": chance}
        counted, share = admit > 1, 0.0
        sizes: Sizes = []
        if not pieces:
            sizes, share = own_sizes(budget, counted=counted, shared=shared)
        if pieces == 0 and not sizes:
            raise ValueError(
                f"a budget of {budget.size} bytes is too small for --emb dynamic with a row of its "
                "own in each table: raise the budget, or leave out --dynamic.pieces 0"
            )
        if pieces or (pieces is None and share < SCARCE):  # rows that change hands learn nothing
            pieces = pieces or gcd(4, budget.embedding_dim)
            given = {"pieces": pieces, "chance": CHANCE, **given}
            sizes = common_sizes(budget, pieces, cls.kind(), counted=counted, shared=shared)
        return [own and {"rows": own[0], "shared": own[1], **given} for own in sizes]

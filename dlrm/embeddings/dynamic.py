"""Tables for any ids of 64 bits: a row belongs to an id as long as that is used."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from torch import Tensor, nn

from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.budget import MANY_IDS, Budget, highest_level
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.dynamic_tables import (
    LOAD,
    SLOT_BYTES,
    DynamicTables,
    shared_rows,
    slots_of,
)
from dlrm.embeddings.shared_rows import SharedRows
from dlrm.kernels.lookup.tables import TableRows
from dlrm.utils.bags import Bags

FIXED_BYTES = 80  # time, counts, seed and the smallest sketch


class Dynamic(DynamicTables, SharedRows):
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

    Reference:
        HierarchicalKV (Merlin), 2022, and dynamicemb in NVIDIA recsys-examples, for the interface.
        Two choices: Azar et al., "Balanced Allocations", SIAM J. Comput. 1999.
    """

    @property
    def row_parts(self) -> list[tuple[nn.Parameter, TableRows]]:
        return [(self.weight, self._table_rows)]

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = self._placed_rows(self._tables[:, None], ids, context)
        return super().lookup(rows, context)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        bags = bags.filled() if context.padded and not self.weight.is_cuda else bags
        end = bags.offsets[-1:] if context.padded else None
        rows = self._placed_rows(bags.tables(self.num_tables), bags.ids, context, end)
        if (self.dtype is not None or self.mode == "max") and not self.weight.is_cuda:
            return Embedding.lookup_bags(self, bags, context)  # by vectors, which find the rows
        return super().lookup_bags(replace(bags, ids=rows), context)

    def fitted_rows(self, table: int, weight: Tensor) -> Tensor:
        raise AssertionError("load_dense places ids itself")

    @classmethod
    def for_budget(
        cls, budget: Budget, *, shared: int | None = None, admit: int = 1
    ) -> list[dict[str, Any] | None]:
        """The largest ``rows``, the same for all tables, that fits."""
        tables, row = budget.num_embeddings, budget.row_bytes
        slot_bytes = SLOT_BYTES + 4 * (admit > 1)  # at most, with the sketch

        def size(table: int, rows: int) -> int:
            (slots,) = slots_of([table], max(rows, 1))
            return (slots + shared_rows(slots, shared)) * row + slots * slot_bytes + FIXED_BYTES

        def cost(rows: int) -> int:
            return sum(min(table * row, size(table, rows)) for table in tables)

        highest = min(MANY_IDS, ceil(max(tables) / LOAD))
        rows = highest_level(cost, highest, budget.size, cls.kind())
        return [
            None if table * row <= size(table, rows) else {"rows": max(rows, 1)} for table in tables
        ]

"""What a training step knows of the look-ups of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dlrm.kernels.lookup.peer import SortedLookups
from dlrm.kernels.update.in_backward import FusedUpdates
from dlrm.kernels.update.row_sort import RowSorter


@dataclass(frozen=True, kw_only=True)
class LookupContext:
    """What a training step knows of the look-ups of its batch, passed down from it to the ops.

    Every look-up gives the same vectors and gradients without it.
    """

    sorter: RowSorter | None = None
    """Sorts the rows that will have a gradient while forward and backward run."""
    updates: FusedUpdates | None = None
    """Of parameters that the backward pass may update itself."""
    rows_fetched: bool = False
    """The rows in host memory have been fetched ahead: they are those of the prefetch window."""
    lookups: Sequence[SortedLookups] = ()
    """The look-ups of sharded tables at peers, sorted ahead: one for each sharding; else empty."""
    equal_sizes: bool = False
    """Every process has as many look-ups, one for each sample: no sizes need be exchanged."""
    grouped: bool = False
    """The ids of a model are in the order of its groups of tables, not in that of the features."""
    gather_ids: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Adds to the tables and ids of this process's batch those of the others."""


NO_CONTEXT = LookupContext()
"""Of a look-up outside of a training step."""

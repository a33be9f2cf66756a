"""What a training step prepared for the look-ups of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.kernels.lookup.bags import BagContext
from dlrm.kernels.lookup.peer import SortedLookups
from dlrm.kernels.update.in_backward import FusedUpdates
from dlrm.kernels.update.row_sort import RowSorter


@dataclass(frozen=True, kw_only=True)
class LookupContext:
    """What a training step prepared for the look-ups of its batch, passed down to the ops.

    Without it, look-ups return the same vectors and gradients.
    """

    sorter: RowSorter | None = None
    """Sorts the rows that will have a gradient while forward and backward run."""
    updates: FusedUpdates | None = None
    """Updates that the backward pass may apply itself."""
    rows_fetched: bool = False
    """Rows in host memory were fetched ahead, with their prefetch window."""
    lookups: Sequence[SortedLookups] = ()
    """Look-ups at peers that were sorted ahead, one for each sharding; or empty."""
    padded: bool = False
    """There are more ids than the last offset says, so that one shape serves several batches."""
    dtype: torch.dtype | None = None
    """Type in which pooled vectors may be returned, which are summed in fp32; None: that of the
    rows."""
    equal_sizes: bool = False
    """Every process has the same number of samples and ids, so sizes need not be exchanged."""
    bag_sizes: Sequence[int] | None = None
    """Length of all bags of each table, if it is fixed and the tables are sharded."""
    grouped: bool = False
    """The ids are in the order of the groups of tables, not in that of the features."""
    gather_ids: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Gathers the tables and ids of the batches of all processes."""

    @property
    def of_bags(self) -> BagContext:
        """What the look-up of bags in one weight needs."""
        return BagContext(
            sorter=self.sorter, updates=self.updates, padded=self.padded, dtype=self.dtype
        )


NO_CONTEXT = LookupContext()
"""For look-ups outside a training step."""

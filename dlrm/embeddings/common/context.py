"""Preparations of a training step for the look-ups of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.kernels.lookup.tables import RowContext


@dataclass(frozen=True, kw_only=True)
class LookupContext(RowContext):
    """Preparations of a training step for the look-ups of its batch, passed down to the ops.

    Without it, look-ups return the same vectors and gradients.
    """

    rows_fetched: bool = False
    """Rows in host memory were fetched ahead, with their prefetch window."""
    equal_sizes: bool = False
    """Every process has the same number of samples and ids, so sizes need not be exchanged."""
    bag_sizes: Sequence[int] | None = None
    """Length of all bags of each table, if it is fixed and the tables are sharded."""
    grouped: bool = False
    """The ids are in the order of the groups of tables, not in that of the features."""
    gather_ids: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, slice | None]] | None = None
    """Gathers the tables and ids of the batches of all processes; also returns the columns of this
    one, if there are any."""
    later: list[tuple[torch.cuda.Stream, Callable[[], object]]] | None = None
    """Work of look-ups that only their gradients wait for, and its stream, for the model to begin
    after the look-ups; None: it is done at once."""

    def do_later(self, work: Callable[[], object]) -> None:
        """Do what only the gradients of a look-up wait for."""
        if self.later is None:
            work()
        else:
            self.later.append((torch.cuda.current_stream(), work))


NO_CONTEXT = LookupContext()
"""For look-ups outside a training step."""

"""Optimizer updates that are applied in the backward pass, which then returns no gradient.

A gradient that one kernel computes need not be written and read again. The training step passes
the updates of its optimizers down to the look-ups, and an op that can apply one takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dlrm.kernels.update.cached_slots import CachedSlots
from dlrm.kernels.update.packed import packed_rows
from dlrm.kernels.update.row_sort import RowSorter, sort_rows
from dlrm.kernels.update.rules import Rule
from dlrm.kernels.update.sparse import update_rows


@dataclass(kw_only=True)
class FusedUpdate:
    """One optimizer step of one parameter, for a backward pass to apply.

    Args:
        rule: the rule.
        lr: learning rate, a 0-d tensor on the parameter's device.
        states: the state of the optimizer, in the order of ``rule.states``.
        seed: of stochastic rounding, a 0-d tensor on the parameter's device; None for none.
        cached: the cached rows of the parameter and its states, if these are in host memory.
    """

    rule: Rule
    lr: Tensor
    states: Sequence[Tensor]
    seed: Tensor | None = None
    cached: CachedSlots | None = None
    takers: int = 0  # forward passes that read the parameter and took its update
    applied: bool = False

    @property
    def due(self) -> bool:
        """Whether the backward pass may apply it: no other pass needs the parameter unchanged."""
        return self.takers == 1

    def apply(
        self,
        parameter: Tensor,
        rows: Tensor,
        grads: Tensor,
        sorter: RowSorter | None,
        owners: Tensor | None = None,
    ) -> None:
        """Update the rows of a table on a GPU; autograd then refuses to go back through older
        look-ups.

        Args:
            parameter: the table, or packed rows.
            rows: row of each look-up, ``[n]``.
            grads: the gradient of each look-up, ``[n, D]``, or of each owner.
            sorter: that of the look-ups, to which ``rows`` may have been submitted.
            owners: the gradient of each look-up, ``[n]``, where several share one, as in a bag.
        """
        found = None if sorter is None else sorter.result(parameter, rows)
        if found is None:
            found = sort_rows(rows, len(parameter))
            found = found if owners is None else found.of_owners(owners)
        table = parameter if packed_rows(parameter) is not None else parameter.detach()
        update_rows(
            self.rule, table, rows, grads, self.states,
            lr=self.lr, sorted_rows=found, cached=self.cached, seed=self.seed, impl="triton",
        )  # fmt: skip
        self.applied = True
        increment_version(parameter)


class FusedUpdates:
    """The updates of a step that its backward pass may apply, passed down to the look-ups.

    They can be taken inside ``with``, in one forward and one backward pass. A parameter whose
    update was not applied by the end of the block has a gradient.

    Args:
        updates: parameters of the model, and the update of each.
    """

    def __init__(self, updates: Iterable[tuple[Tensor, FusedUpdate]]) -> None:
        self._updates = dict(updates)  # parameters are equal only to themselves
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        for update in self._updates.values():
            update.takers = 0

    def take(self, parameter: Tensor) -> FusedUpdate | None:
        """The update of a parameter that a forward pass reads; the backward pass applies it if due.

        Raises:
            ValueError: it was already applied.
        """
        update = self._updates.get(parameter) if self._open else None
        if update is None or not (parameter.requires_grad and torch.is_grad_enabled()):
            return None
        if update.applied:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is looked up again after the "
                "backward pass that updated it: use one apply_in_backward block for each forward "
                "and backward pass"
            )
        update.takers += 1
        return update

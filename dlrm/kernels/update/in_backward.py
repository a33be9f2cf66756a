"""Optimizer updates that are applied in the backward pass, instead of returning a gradient.

A gradient that is computed in one place, all at once, need not be written and read again: whoever
has the optimizer passes its updates down to the look-ups, and an op that can apply one takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.autograd.graph import increment_version

from dlrm.kernels.update.rules import Rule


@dataclass(kw_only=True)
class FusedUpdate:
    """One optimizer step of one parameter, for a backward pass to apply.

    Args:
        rule: the rule.
        lr: learning rate, a 0-d tensor on the parameter's device.
        states: what the rule keeps, in the order of ``rule.states``.
    """

    rule: Rule
    lr: Tensor
    states: Sequence[Tensor]
    takers: int = 0  # forward passes that read the parameter, and took this
    applied: bool = False

    @property
    def due(self) -> bool:
        """Whether the one who took it may apply it: others would read what has moved."""
        return self.takers == 1

    def done(self, parameter: Tensor) -> None:
        """Note that it was applied; autograd then refuses to go back through older look-ups."""
        self.applied = True
        increment_version(parameter)


class FusedUpdates:
    """The updates of a step that its backward pass may apply, passed down to the look-ups.

    They are on offer inside ``with``, for one forward and one backward pass. An update that was not
    applied by the end of the block is void, and the parameter has a gradient.

    Args:
        parameters: of the model.
        updates: that of each.
    """

    def __init__(self, parameters: Sequence[Tensor], updates: Sequence[FusedUpdate]) -> None:
        self._updates = {id(p): update for p, update in zip(parameters, updates, strict=True)}
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        for update in self._updates.values():
            update.takers = 0

    def take(self, parameter: Tensor) -> FusedUpdate | None:
        """The update of a parameter that a forward pass reads, to apply in the backward pass if
        due.

        Raises:
            ValueError: it was applied already.
        """
        update = self._updates.get(id(parameter)) if self._open else None
        if update is None or not parameter.requires_grad:
            return None
        if update.applied:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is looked up again after the "
                "backward pass that updated it: give each forward and backward pass a block of "
                "its own"
            )
        update.takers += 1
        return update

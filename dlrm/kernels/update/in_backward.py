"""Updates that a backward pass applies by itself, in place of giving a gradient out.

A gradient that forms in one place, all at once, need be neither written nor read again: whoever
has the optimizer offers its update ahead of the forward pass, and an op that can apply it takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

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


_offered: ContextVar[Mapping[int, FusedUpdate] | None] = ContextVar("offered", default=None)


@contextmanager
def offer(parameters: Sequence[Tensor], updates: Sequence[FusedUpdate]) -> Iterator[None]:
    """Offer each parameter's update to the look-ups in this block, which holds one backward pass.

    An update that was not applied by its end is void, and the parameter has a gradient.
    """
    by_id = {id(p): update for p, update in zip(parameters, updates, strict=True)}
    token = _offered.set(by_id)
    try:
        yield
    finally:
        _offered.reset(token)
        for update in updates:
            update.takers = 0


def take(parameter: Tensor) -> FusedUpdate | None:
    """The update of a parameter that a forward pass reads, to apply in the backward pass if due.

    Raises:
        ValueError: it was applied already.
    """
    update = (_offered.get() or {}).get(id(parameter))
    if update is None or not parameter.requires_grad:
        return None
    if update.applied:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is looked up again after the backward "
            "pass that updated it: give each forward and backward pass a block of its own"
        )
    update.takers += 1
    return update

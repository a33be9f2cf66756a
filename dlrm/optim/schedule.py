"""The learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlrm.optim.row_optimizer import rate_of

OTHERS = 4
"""Power of the factor for fine-tuning on the rates of what is no embedding. The MLPs know the rows,
and a second epoch at higher rates overfits, while tables that lost something can still learn."""


class Schedule:
    """Linear warm-up, a plateau, then polynomial decay of the learning rates.

    Args:
        optimizers: their current rates are the peak rates.
        warmup: steps over which the rate rises linearly.
        decay_start: step at which the decay begins; None for never.
        decay_steps: steps over which the rate falls to zero.
        power: of the decay (2 in the reference recipe for large batches).

    Attributes:
        fine_tune: factor f on the rates of the last optimizer, that of the embeddings; the rates of
            the others are multiplied by ``f ** OTHERS``.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        warmup: int = 0,
        decay_start: int | None = None,
        decay_steps: int = 1,
        power: float = 2.0,
    ) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._peaks = [float(group["lr"]) for group in self._groups]
        last = {id(group) for group in optimizers[-1].param_groups}
        self._powers = [1 if id(group) in last else OTHERS for group in self._groups]
        self.fine_tune = 1.0
        self._warmup, self._power = warmup, power
        self._decay_start, self._decay_steps = decay_start, decay_steps
        self._last: tuple[float, float] | None = None  # factors that are set

    def factor(self, step: int) -> float:
        """The share of the peak rate at ``step``, counted from 0."""
        if step < self._warmup:
            return (step + 1) / self._warmup
        if self._decay_start is None or step < self._decay_start:
            return 1.0
        left = 1 - (step - self._decay_start) / self._decay_steps
        return max(left, 0.0) ** self._power

    def rates(self) -> dict[str, float]:
        """The current rates of the dense part and of the embeddings."""
        first, last = rate_of(self._groups[0]), rate_of(self._groups[-1])
        return {"lr/dense": float(first), "lr/embeddings": float(last)}

    def set(self, step: int) -> None:
        """Set the rate of every optimizer for ``step``, if it changes: setting takes a launch."""
        factor = self.factor(step)
        if (factor, self.fine_tune) == self._last:
            return
        self._last = factor, self.fine_tune
        for group, peak, power in zip(self._groups, self._peaks, self._powers, strict=True):
            rate_of(group).fill_(peak * factor * self.fine_tune**power)

"""When a run validates its model, which state is its result, and when it stops early."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dlrm.training.checkpoint.manifest import Progress


class Validations:
    """The steps of a run that a validation follows, and its last step.

    Args:
        every: steps between validations.
        patience: validations without a better state after which training ends; 0: it never does.
        last_step: of the run, as planned.
        by_loss: the best state has the lowest log loss, and not the highest AUC.

    Attributes:
        last_step: after which training ends.
    """

    def __init__(self, every: int, patience: int, last_step: int, by_loss: bool = False) -> None:
        self._every, self._limit = every, every * patience or math.inf
        self.last_step = last_step
        self._by_loss = by_loss

    def due(self, step: int) -> bool:
        """Whether a validation follows a step. The last step has one of its own: shortly before it
        there is none.
        """
        left = self.last_step - step
        return step > 0 and step % self._every == 0 and not 0 < left < self._every / 10

    def note(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        loss: float = math.nan,
        *,
        latest: bool = False,
    ) -> None:
        """Note the metrics of a validation, which may have found the best state so far.

        Args:
            progress: at the step that was validated.
            metrics: on validation rows; empty without such rows.
            loss: on these rows, comparable between states.
            latest: this state is not the best: the latest one is the result, or it has diverged.
        """
        progress.validated = progress.steps, dict(metrics)
        if latest or not metrics:
            return
        quality = -loss if self._by_loss else metrics["auc"]
        if quality > progress.best:
            progress.best = quality
            progress.best_step = progress.steps

    def stop_early(self, progress: Progress) -> str:
        """Let training end now if no better state has come for too long; returns a line that says
        so, or nothing.
        """
        step = progress.validated[0]
        if not 0 <= progress.best_step <= step - self._limit or step >= self.last_step:
            return ""
        self.last_step = step
        what = "log loss has not fallen" if self._by_loss else "AUC has not risen"
        return (
            f"stopped at step {step:,}: validation {what} since step {progress.best_step:,}; "
            "--patience 0 trains to the end"
        )

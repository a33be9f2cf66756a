"""Which state of a run is its result, and when to stop looking for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping


class BestModel:
    """The state with the best validation AUC so far.

    Args:
        eval_every: steps between evaluations.
        patience: evaluations without a better state after which training ends; 0: it never does.

    Attributes:
        auc: its validation AUC; -inf if there was none.
        step: its step; -1 if there was none.
    """

    def __init__(self, eval_every: int, patience: int) -> None:
        self._limit = eval_every * patience or math.inf
        self.auc, self.step = -math.inf, -1

    def offer(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the state of a step is better, and now the best one.

        Args:
            step: of the state.
            metrics: its validation metrics; empty without validation rows.
        """
        better = metrics.get("auc", -math.inf) > self.auc
        if better:
            self.auc, self.step = metrics["auc"], step
        return better

    def last_step(self, step: int, planned: int, *, silent: bool = False) -> int:
        """The last step of the run: this one if no better state has come for too long.

        Args:
            step: of the last evaluation.
            planned: the last step until now.
            silent: print nothing.
        """
        if not 0 <= self.step <= step - self._limit or step >= planned:
            return planned
        if not silent:
            print(
                f"stopped at step {step:,}: validation AUC has not risen since step {self.step:,}; "
                "--patience 0 trains to the end"
            )
        return step

"""When to save a checkpoint between evaluations."""

from __future__ import annotations

import time

from dlrm.distributed.world import World

UNITS = {"s": 1, "m": 60, "h": 3600}


class CheckpointTimer:
    """Says at which steps a checkpoint is due, the same ones in all processes.

    Args:
        every: steps, as ``"1000"``, or time, as ``"90s"``, ``"10m"`` or ``"2h"``; None for never.
        world: the processes. The clock of the first one counts.
        step: from which the run starts.
    """

    def __init__(self, every: str | None, world: World, step: int = 0) -> None:
        self._world = world
        unit = UNITS.get(every[-1]) if every else None
        self._steps = int(every) if every and not unit else None
        self._seconds = int(every[:-1]) * unit if every and unit else None
        self._began = self._saved = time.monotonic()
        self._first = self._next = step

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        if self._steps is not None:
            return step % self._steps == 0
        if self._seconds is None or step < self._next:
            return False
        due, self._next = self._world.from_first(lambda: self._plan(step))
        return due

    def _plan(self, step: int) -> tuple[bool, int]:
        """Whether one is due, and at which step to ask again: when it will be due, by the speed so
        far, so that the processes rarely have to agree.
        """
        now = time.monotonic()
        left = (self._seconds or 0) - (now - self._saved)
        if due := left <= 0:
            self._saved, left = now, self._seconds or 0
        speed = (step - self._first) / max(now - self._began, 1e-3)
        return due, step + max(1, int(min(left, 60) * speed))

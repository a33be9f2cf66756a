"""Ends a run in all processes at the same step when a signal reaches one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from dlrm.distributed.world import World
from dlrm.utils import signals

T = TypeVar("T")
PERIOD = 0.25  # seconds between two exchanges, about; the answer comes with the next one


class Interruption:
    """Raises :class:`~dlrm.utils.signals.Interrupted` in all processes at the same step.

    From the first :meth:`check` on, signals are only noted. At intervals of checks the processes
    exchange what they noted. The exchange runs in the background and is read at the next one, so no
    step waits for it. A single process exchanges nothing.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._checks, self._due = 0, 1
        self._last = time.perf_counter(), 0  # when the last exchange began, and at which check
        self._slower = False  # whether the checks to come may be further apart
        self._noted = torch.zeros(2, dtype=torch.long)  # signal, and checks until the next exchange
        self._work: dist.Work | None = None

    def check(self, stop: Callable[[], object]) -> None:
        """Call this where the run may end, in all processes the same number of times.

        Args:
            stop: called before the exception is raised, for example to save a checkpoint.

        Raises:
            Interrupted: a signal reached one of the processes.
        """
        signals.defer()
        self._checks += 1
        if self.world.size == 1:
            number = signals.pending()
        elif self._checks >= self._due:
            number = self._exchange()
        else:
            return
        if number:
            stop()
            raise signals.Interrupted(number)

    def between(self, items: Iterable[T], stop: Callable[[], object]) -> Iterator[T]:
        """Yield the items, with a :meth:`check` after each. They may take longer than steps."""
        self._due, self._slower = self._checks + 1, True
        for item in items:
            yield item
            self.check(stop)

    def _exchange(self) -> int:
        """Begin an exchange, and return the signal that the last one brought."""
        number, wait = 0, 1
        if self._work is not None:
            self._work.wait()
            number, wait = self._noted.abs().tolist()
        if number:
            return number
        before, at = self._last
        now = time.perf_counter()
        rate = (self._checks - at) / max(now - before, 1e-6)
        wanted = 1 if self._slower else max(int(rate * PERIOD), 1)
        self._due = self._checks + (1 if self._slower else wait)
        self._last, self._slower = (now, self._checks), False
        # The process that asks for the shortest wait decides.
        self._noted = torch.tensor([signals.pending(), -wanted])
        self._work = dist.all_reduce(self._noted, dist.ReduceOp.MAX, async_op=True)
        return 0

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
PERIOD = 0.25  # approximate seconds between two exchanges


class Interruption:
    """Raises :class:`~dlrm.utils.signals.Interrupted` in all processes at the same step.

    From the first :meth:`check` on, signals are only recorded. From time to time the processes
    exchange their signals. The exchange runs in the background, and the next one reads its result,
    so no step waits for it. A single process exchanges nothing.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._checks = 0
        self._due = 1  # the check with the next exchange
        self._last = time.perf_counter(), 0  # time and check of the last exchange
        self._slower = False  # the next checks may be further apart
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
        self._due = self._checks + 1
        self._slower = True
        for item in items:
            yield item
            self.check(stop)

    def _exchange(self) -> int:
        """Start an exchange, and return the signal from the last one, or 0."""
        number, wait = 0, 1
        if self._work is not None:
            self._work.wait()
            number, wait = self._noted.abs().tolist()
        if number:
            return number

        # The number of checks until the next exchange, from the time that the last ones took.
        before, at = self._last
        now = time.perf_counter()
        rate = (self._checks - at) / max(now - before, 1e-6)
        wanted = 1 if self._slower else max(int(rate * PERIOD), 1)
        self._due = self._checks + (1 if self._slower else wait)
        self._last = now, self._checks
        self._slower = False

        # The maximum of the negative numbers is the shortest wait of all processes.
        self._noted = torch.tensor([signals.pending(), -wanted])
        self._work = dist.all_reduce(self._noted, dist.ReduceOp.MAX, async_op=True)
        return 0

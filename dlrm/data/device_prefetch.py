"""Batches that are gathered while the ones before them are in use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import TypeVar

import torch

from dlrm.data.batch import Batch

QUEUED = 8  # runs whose work may be queued on the GPU

Run = Sequence[tuple[Batch, int]]
"""Consecutive batches, each with a position, that were made together."""

Queued = tuple[Run, torch.cuda.Event]
Made = TypeVar("Made")


def make_ahead(
    runs: Iterator[Made],
    thread: ThreadPoolExecutor,
    most: int,
    waited: Callable[[float], None],
) -> Iterator[Made]:
    """Yield runs that one other ``thread`` makes, so many ahead of the consumer at ``most``.

    Making them calls PyTorch and CUDA many times, and each call may wait for the interpreter's lock
    while row groups are decoded: the consumer would not launch its steps in time. How many seconds
    it has ``waited`` for a run is reported.
    """
    thread.submit(use_one_core).result()
    pending: deque[Future[Made | None]] = deque()
    while True:
        while len(pending) <= most:
            pending.append(thread.submit(next, runs, None))
        began = time.perf_counter()
        run = pending.popleft().result()
        waited(time.perf_counter() - began)
        if run is None:
            return
        yield run


def queue_on(stream: torch.cuda.Stream, runs: Iterator[Run]) -> Iterator[Queued]:
    """Queue runs of batches of a CUDA device, at least one each, on a stream of their own. With
    each comes an event after its work, which may not have begun."""
    while True:
        with torch.cuda.stream(stream):
            run = next(runs, None)
            if run is None:
                return
            queued = run, stream.record_event()
        yield queued


def receive(runs: Iterator[Queued], device: torch.device) -> Iterator[Run]:
    """Yield the runs of :func:`queue_on`, ready for the current stream of the consumer."""
    used: deque[torch.cuda.Event] = deque()
    for run, made in runs:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(made)
        for batch, _ in run:
            batch.record_stream(stream)
        yield run

        # By now the work on that run is queued. Wait for earlier work: this bounds memory, and
        # keeps the time spent waiting for data apart from that spent waiting for the GPU.
        used.append(torch.cuda.current_stream(device).record_event())
        if len(used) > QUEUED:
            used.popleft().synchronize()


def use_one_core() -> None:
    """Let PyTorch's operations in this thread use no other threads, which spin after their work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Other threads that start later take over the last number that was set: let this be theirs.
    setter = Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()

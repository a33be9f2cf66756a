"""Batches that are gathered while the ones before them are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from threading import Thread

import torch

from dlrm.data.batch import Batch
from dlrm.utils.streams import stream_of

QUEUED = 8  # runs whose work may be queued on the GPU

Run = Sequence[tuple[Batch, int]]
"""Consecutive batches, each with a position, that were made together."""


def prefetch_to_device(runs: Iterator[Run], device: torch.device) -> Iterator[Run]:
    """Yield runs of batches of a CUDA device, one run ahead of the consumer.

    They are made on a stream of their own, and are ready for the current stream of the consumer
    when they are yielded. What a run costs the CPU is shared by its batches, of which it has at
    least one.
    """
    stream = stream_of(device, "loads")
    made: deque[tuple[Run, torch.cuda.Event]] = deque()
    queued: deque[torch.cuda.Event] = deque()
    while True:
        with torch.cuda.stream(stream):
            run = next(runs, None)
            if run is None:
                break
            made.append((run, stream.record_event()))
        if len(made) > 1:
            yield _received(*made.popleft())
            # By now the work on that run is queued. Wait for earlier work: this bounds memory, and
            # keeps the time spent waiting for data apart from that spent waiting for the GPU.
            queued.append(torch.cuda.current_stream(device).record_event())
            if len(queued) > QUEUED:
                queued.popleft().synchronize()
    while made:
        yield _received(*made.popleft())


def _received(run: Run, copied: torch.cuda.Event) -> Run:
    """The run, for whose copy the current stream waits, and whose memory it keeps in use."""
    stream = torch.cuda.current_stream(run[0][0].labels.device)
    stream.wait_event(copied)
    for batch, _ in run:
        batch.record_stream(stream)
    return run


def use_one_core() -> None:
    """Let PyTorch's operations in this thread use no other threads, which spin after their work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Other threads that start later take over the last number that was set: let this be theirs.
    setter = Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()

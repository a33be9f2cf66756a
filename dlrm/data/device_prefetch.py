"""Batches on the GPU, each gathered there while the one before it is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from dlrm.data.batch import Batch
from dlrm.utils.streams import stream_of

QUEUED = 8  # batches whose work may be queued on the GPU


def prefetch_to_device(
    batches: Iterator[tuple[Batch, int]], device: torch.device
) -> Iterator[tuple[Batch, int]]:
    """Yield ``batches`` of a CUDA device, each with a position, one batch ahead of the consumer.

    Batches are made on a stream of their own, and are ready for the current stream of
    the consumer when they are yielded.
    """
    stream = stream_of(device, "loads")
    made: deque[tuple[Batch, int, torch.cuda.Event]] = deque()
    queued: deque[torch.cuda.Event] = deque()
    while True:
        with torch.cuda.stream(stream):
            batch, position = next(batches, (None, 0))
            if batch is None:
                break
            made.append((batch, position, stream.record_event()))
        if len(made) > 1:
            yield _received(*made.popleft())
            # By now the work on that batch is queued. Wait for earlier work: this bounds memory,
            # and keeps the time spent waiting for data apart from that spent waiting for the GPU.
            queued.append(torch.cuda.current_stream(device).record_event())
            if len(queued) > QUEUED:
                queued.popleft().synchronize()
    while made:
        yield _received(*made.popleft())


def _received(batch: Batch, position: int, copied: torch.cuda.Event) -> tuple[Batch, int]:
    """The batch, for whose copy the current stream waits, and whose memory it keeps in use."""
    stream = torch.cuda.current_stream(batch.labels.device)
    stream.wait_event(copied)
    batch.record_stream(stream)
    return batch, position

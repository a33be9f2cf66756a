"""Further streams of a GPU, for work in parallel with the current one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class SideStream:
    """A stream for work in parallel with the current one; on a CPU it runs at once.

    ::

        side = side_stream_of(device)
        start = side.record_event()
        bottom = mlp(dense)
        with side.fork(after=start):  # may use everything computed before the event
            embedded = look_up(ids)  # in parallel with the MLP
        side.join()  # what follows may use both

    Autograd runs a backward pass on the stream of its forward pass, so the two run in parallel
    there as well, and a CUDA graph keeps the fork.

    Memory that is allocated in a fork must be freed there, or between the join and the next fork:
    it returns to the pool of the side stream, which waits for all users of it at the next fork.

    Args:
        stream: the second stream; None if there is no GPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the current stream, for :meth:`fork`."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def fork(self, *, wait: bool = True, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run a block on the side stream.

        Args:
            wait: wait for all work of the current stream so far; if False, only for earlier work of
                the side stream itself.
            after: wait for the work before this event only.
        """
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        elif wait:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors, even if they are freed, until the work so far is done."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


PURPOSES = {
    "loads": 0,  # batches are copied to the GPU
    "steps": 0,  # steps warm up and are captured
    "sorts": 0,  # rows are sorted for the update
    "saves": 0,  # checkpoints are copied to the host
    "weights": 0,  # gradients of weights, on which no other gradient depends
    "biases": 0,  # those of biases
    "lookups": 0,  # ids of coming batches get their rows; no step waits for it
    # Many small kernels, which go first where both streams have one ready:
    "parallel": -1,  # look-ups and their update, next to the MLPs
    "tables 1": -1,  # those of further groups of tables, next to the first one
    "tables 2": -1,
    "tables 3": -1,
    "exchange": -1,  # vectors and gradients of sharded tables
    "exchange 1": -1,  # those of further groups of tables, next to the first one
    "exchange 2": -1,
    "gradients": -2,  # of replicated parameters are summed: one process keeps all waiting
    "arrival": -1,  # rows from peers that will have gradients
    "rows": -1,  # rows of tables in host memory
}
"""Purposes of the streams of a GPU, with their priorities; the current stream has priority 0, and
lower numbers go first."""


@cache
def _streams(index: int) -> dict[str, torch.cuda.Stream]:
    """Create one stream for each purpose, all together, so that no two are the same."""
    return {
        purpose: torch.cuda.Stream(index, priority=priority)
        for purpose, priority in PURPOSES.items()
    }


def stream_of(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the stream of a GPU for one of :data:`PURPOSES`, the same one for every caller.

    PyTorch has a pool of 32 streams for each priority and hands them out in turn. If every model or
    epoch took new ones, two purposes would at some point share a stream. Memory that one of them
    frees could then be overwritten by the other while kernels on a third stream still read it, and
    a capture would record kernels that are not part of the step.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _streams(index)[purpose]


@cache
def side_stream_of(device: torch.device, purpose: str = "parallel") -> SideStream:
    """Return the side stream of a device for a purpose, the same one for every caller."""
    return SideStream(stream_of(device, purpose) if device.type == "cuda" else None)

"""A second stream of a GPU, for work in parallel with the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


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
        device: the device; there are no streams if it is not a GPU.
        priority: 0 is that of the current stream, -1 a higher one.
    """

    def __init__(self, device: torch.device, priority: int = -1) -> None:
        # Its kernels are many and small; they go first where both streams have one ready.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=priority) if on_gpu else None

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

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


_PURPOSES = ("steps", "sorts")


@cache
def _streams(index: int) -> dict[str, torch.cuda.Stream]:
    """One stream for each purpose, all made together, so that no two are the same."""
    return {purpose: torch.cuda.Stream(index) for purpose in _PURPOSES}


def stream_of(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a GPU for ``steps`` or ``sorts``, the same one for every caller.

    PyTorch has a pool of 32 streams and hands them out in turn. If every model took new ones, two
    of them would in time be the same, and a CUDA graph would run in sequence what was meant to run
    in parallel.
    """
    return _streams(torch.cuda.current_device() if device.index is None else device.index)[purpose]


@cache
def side_stream_of(device: torch.device, number: int = 0) -> SideStream:
    """A side stream of a device, the same one for every caller with this number."""
    return SideStream(device)

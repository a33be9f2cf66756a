"""A second stream of a GPU, for work beside that of the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class SideStream:
    """Work beside the current stream; on a CPU, work in its place.

    ::

        branch = branch_of(device)
        begin = branch.mark()
        bottom = mlp(dense)
        with branch.fork(behind=begin):  # may use all that was computed before the mark
            embedded = look_up(ids)  # at the same time
        branch.join()  # what follows may use both

    Autograd runs a backward pass on the stream of its forward pass, so the two lie beside each
    other there as well, and a CUDA graph keeps the fork.

    What the branch allocates must be freed between its join and its next fork or by itself: the
    memory goes back to the branch, which begins again only behind what then used it.

    Args:
        device: without streams, if it is no GPU.
        priority: of the branch, 0 being that of the current stream and -1 a higher one.
    """

    def __init__(self, device: torch.device, priority: int = -1) -> None:
        # Many small kernels: where both streams have one ready, the branch's had better go first.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=priority) if on_gpu else None

    def mark(self) -> torch.cuda.Event | None:
        """Here in the work of the current stream, for :meth:`fork`."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def fork(self, *, wait: bool = True, behind: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run a block on the branch.

        Args:
            wait: begin behind all that the current stream has been given so far; without, behind
                what the branch itself has.
            behind: of the current stream's work wait for that before this mark only.
        """
        if self._stream is None:
            yield
            return
        if behind is not None:
            self._stream.wait_event(behind)
        elif wait:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for the branch."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


_PURPOSES = ("steps", "sorts")


@cache
def _streams(index: int) -> dict[str, torch.cuda.Stream]:
    """One for each purpose, taken at once: neighbours are never the same."""
    return {purpose: torch.cuda.Stream(index) for purpose in _PURPOSES}


def stream_of(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a GPU for ``steps`` or ``sorts``, the same one whoever asks.

    PyTorch has 32 streams and hands them out in turn. If every model took new ones, in time two of
    them would be the same, and a CUDA graph keep one behind the other what was to lie side by side.
    """
    return _streams(torch.cuda.current_device() if device.index is None else device.index)[purpose]


@cache
def side_stream_of(device: torch.device, number: int = 0) -> SideStream:
    """A branch of a device, the same one whoever asks for this number."""
    return SideStream(device)

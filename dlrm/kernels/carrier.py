"""Move rows between host memory and a GPU's cache by the copy engine, beside a training step.

Kernels that read a gigabyte of host memory at random slow down all that computes beside them
(:mod:`dlrm.kernels.row_moves`); the copy engine, which moves rows that lie behind one another, does
not. So kernels only list the rows and gather those that leave; a thread of the host gathers those
that come, and stores those that left.

Why nobody meets a row on its way. Round t is under way, a move brings the rows of round t + 1.

- The lists are made behind the last step of round t - 1. Rows that round t uses, in a slot or in
  host memory, are on neither list, those of round t + 1 do not leave. So round t neither reads nor
  updates a row that the thread reads or writes; it may share a cache line with it, no more.
- What rounds before t updated in host memory is there: the thread waits for the lists. What they
  updated in a slot is gathered behind them, before other rows come to the slot.
- A row that leaves and is used again is read from host memory at the earliest by the next move or,
  in place, by round t + 2. Either begins when :meth:`Carrier.join` has seen the thread done.

Bytes over the link: each row and its state once each way, and 16 for the lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dlrm.kernels import use_triton
from dlrm.kernels.branch import Branch
from dlrm.kernels.host import on_host
from dlrm.kernels.row_moves import Moves, Slots, list_moves, move_rows_torch


class Carrier:
    """A stream and a thread that fetch the rows of the next round; in PyTorch, all in its place.

    Args:
        device: of the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._branch = Branch(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._ids: Tensor | None = None  # of the move under way
        self._done: Future[None] | None = None

    def begin(
        self,
        index: Slots,
        tensors: Sequence[tuple[Tensor, Tensor]],
        ids: Tensor,
        starts: Tensor | None,
        *,
        impl: str | None = None,
    ) -> None:
        """Begin to move the rows of the next round; the last move must have been joined.

        Args:
            index, tensors, ids, starts, impl: as of :func:`dlrm.kernels.row_moves.move_rows`; the
                ids must stay as they are until :meth:`join`.
        """
        assert self._done is None, "the last move was not joined"
        if not ids.numel():
            return
        if not use_triton(ids, impl):
            move_rows_torch(index, tensors, ids, starts, ahead=True)
            return
        with self._branch.fork():
            moves = list_moves(index, ids, starts, ahead=True)
        self._ids = ids
        self._done = self._thread.submit(_carry, self._branch, tensors, moves)

    def join(self) -> None:
        """Wait until the thread is done, and let the current stream wait for the copies.

        Raises:
            Exception: what went wrong in the thread; again whenever this is called, since the cache
                has slots whose rows never came.
        """
        if self._done is not None:
            self._done.result()
            self._branch.join()
            self._ids = self._done = None


@torch.no_grad()
def _carry(branch: Branch, tensors: Sequence[tuple[Tensor, Tensor]], moves: Moves) -> None:
    """Exchange the rows of all tensors; both directions of the link and the host work at a time."""
    with branch.fork(wait=False):
        count = moves.count()
        if not count:
            return
        slots = moves.targets[:count].long()
        lists = torch.stack([moves.missing[:count], moves.leaving[:count]]).long()
        missing, leaving = lists.to("cpu", non_blocking=True)
        listed = branch.mark()
        old = [cache.index_select(0, slots).to("cpu", non_blocking=True) for _, cache in tensors]
        gathered = branch.mark()

        _wait(listed)
        for host, cache in tensors:
            new = torch.empty(count, host.shape[1], dtype=host.dtype, pin_memory=cache.is_cuda)
            torch.index_select(on_host(host), 0, missing, out=new)
            cache.index_copy_(0, slots, new.to(cache.device, non_blocking=True))
        _wait(gathered)
        free = int((leaving < 0).sum())  # sorted, they come first
        for (host, _), rows in zip(tensors, old, strict=True):
            on_host(host).index_copy_(0, leaving[free:], rows[free:])


def _wait(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        mark.synchronize()

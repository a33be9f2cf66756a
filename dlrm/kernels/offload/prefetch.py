"""Move rows between host memory and a GPU's cache by the copy engine, beside a training step.

Kernels that read or write host memory slow down all that computes beside them, those that walk
through gigabytes most (:mod:`dlrm.kernels.offload.admission`), but also those that copy rows one
behind
another: by 0.05 ms of a step of 0.48 on an H100. The copy engine does not. So kernels list the rows
and take those that leave out of the cache; a thread of the host gathers those that come, then
stores those that left; kernels put what came into the slots.

Why nobody meets a row on its way. Round t is under way, a move brings the rows of round t + 1. They
are gathered during round t; those that leave for them are stored then or during round t + 1.

- The lists are made behind the last step of round t - 1. Rows that round t uses, in a slot or in
  host memory, are on neither list, those of round t + 1 do not leave. So round t neither reads nor
  updates a row that is gathered or stored, nor does round t + 1 one that is stored; it may share a
  cache line with it, no more.
- What rounds before t updated in host memory is there: the thread waits for the lists. What they
  updated in a slot is taken out behind them, before other rows come to the slot.
- Round t + 1 begins when :meth:`AsyncRowTransfer.arrive` has seen its rows gathered, behind their
copies. - A row that leaves and is used again is read from host memory at the earliest by the next
move or, in place, by round t + 2. The thread gathers rows of the next move when those of this one
are stored, and round t + 2 begins when they have arrived. - All else that reads or writes the
table, and a round that was not announced, begins with :meth:`AsyncRowTransfer.join`, which waits
for the stores as well.

Bytes over the link: each row and its state once each way, and 8 for the lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.kernels import use_triton
from dlrm.kernels.offload.admission import CacheIndex, list_moves, move_rows_torch
from dlrm.kernels.offload.pinned_memory import on_host
from dlrm.kernels.offload.transfer import RowMoves, put_rows, take_rows
from dlrm.kernels.streams import SideStream

Tensors = Sequence[tuple[Tensor, Tensor]]  # in host memory, in the cache


class AsyncRowTransfer:
    """A stream and a thread that fetch the rows of the next round; in PyTorch, all in its place.

    Args:
        device: of the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._branch = SideStream(device)
        # The thread shares its work among most cores. With all it waits for others: a step of Adam
        # took 1.2 ms with 16 of 16, 0.87 with 12, 1.1 with 8.
        cores = max(torch.get_num_threads() * 3 // 4, 1)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="rows", initializer=torch.set_num_threads, initargs=(cores,)
        )
        self._coming: tuple[_Move, Future[_Rows]] | None = None
        self._stored: Future[None] | None = None

    def begin(
        self,
        index: CacheIndex,
        tensors: Tensors,
        ids: Tensor,
        starts: Tensor | None,
        *,
        impl: str | None = None,
    ) -> None:
        """Begin to move the rows of the next round; those of the last one must have arrived.

        Args:
            index, tensors, ids, starts, impl: as of
                :func:`dlrm.kernels.offload.admission.move_rows`; the ids must stay as they are
                until :meth:`arrive`.
        """
        assert self._coming is None, "the rows of the last round have not arrived"
        if not ids.numel():
            return
        if not use_triton(ids, impl):
            move_rows_torch(index, tensors, ids, starts, ahead=True)
            return
        with self._branch.fork():
            moves = list_moves(index, ids, starts, ahead=True)
            lists = [_to_host(each) for each in (moves.missing, moves.leaving, moves.counters)]
            listed = self._branch.mark()
            old = take_rows([cache for _, cache in tensors], moves)
        move = _Move(self._branch, ids, tensors, moves, lists, listed, old)
        gathered = self._thread.submit(_gather, move, self._stored)
        self._stored = self._thread.submit(_store, move, gathered)
        self._coming = move, gathered

    def arrive(self) -> None:
        """Wait until the rows of the next round are gathered, and let the current stream wait for
        the kernels that put them into their slots.

        Raises:
            Exception: what went wrong in the thread; again whenever this is called, since there
                are slots whose rows never came, or rows that were not stored.
        """
        if self._coming is not None:
            move, gathered = self._coming
            new = gathered.result().new
            with self._branch.fork(wait=False):
                put_rows([cache for _, cache in move.tensors], new, move.moves)
            self._branch.join()
            self._coming = None

    def join(self) -> None:
        """:meth:`arrive`, and wait until the rows that left are stored.

        Raises:
            Exception: as of :meth:`arrive`.
        """
        self.arrive()
        if self._stored is not None:
            self._stored.result()


@dataclass(frozen=True)
class _Move:
    """A move under way; kept until its rows have arrived and those that left are stored."""

    branch: SideStream
    ids: Tensor
    tensors: Tensors
    moves: RowMoves
    lists: list[Tensor]  # rows that come, rows that leave, and the counters, in host memory
    listed: torch.cuda.Event | None  # when they are there
    old: list[Tensor]  # rows that leave, on the GPU


@dataclass(frozen=True)
class _Rows:
    """Of each tensor the rows of a move, ``[n, columns]``."""

    new: list[Tensor]  # that come, on the GPU
    old: list[Tensor]  # that leave, in host memory
    copied: torch.cuda.Event | None  # when these are there


@torch.no_grad()
def _gather(move: _Move, before: Future[None] | None) -> _Rows:
    """Copy the rows that leave to the host, and those that come to the GPU."""
    if before is not None:
        before.result()  # done by now, or what went wrong
    _wait(move.listed)
    missing, _, (_, taken, wanted, _) = move.lists
    count = min(int(taken), int(wanted))
    new = []
    with move.branch.fork(wait=False):
        old = [_to_host(rows, count) for rows in move.old]
        copied = move.branch.mark()
        for host, cache in move.tensors:
            rows = _pinned(cache, len(missing))[:count]
            torch.index_select(on_host(host), 0, missing[:count], out=rows)
            new.append(rows.to(cache.device, non_blocking=True))
    return _Rows(new, old, copied)


@torch.no_grad()
def _store(move: _Move, gathered: Future[_Rows]) -> None:
    """Write the rows that left to their places."""
    old, copied = gathered.result().old, gathered.result().copied
    _wait(copied)
    rows = move.lists[1][: len(old[0])].long()
    if move.lists[2][3] < len(rows):  # some slots were free
        leaves = rows >= 0
        rows, old = rows[leaves], [each[leaves] for each in old]
    for (host, _), values in zip(move.tensors, old, strict=True):
        on_host(host).index_copy_(0, rows, values)


def _pinned(like: Tensor, length: int) -> Tensor:
    """Room in host memory. Of each tensor it is always asked for as much, so that the same memory
    is found again rather than other memory pinned, which takes milliseconds.
    """
    return torch.empty(length, *like.shape[1:], dtype=like.dtype, pin_memory=like.is_cuda)


def _to_host(tensor: Tensor, count: int | None = None) -> Tensor:
    """A copy of the first rows, or all, in host memory, there once the stream has made it."""
    return _pinned(tensor, len(tensor))[:count].copy_(tensor[:count], non_blocking=True)


def _wait(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        mark.synchronize()

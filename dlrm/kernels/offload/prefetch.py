"""Transfer rows between host memory and a GPU's cache with the copy engine, during a step.

Kernels that access host memory slow down everything that computes at the same time: random access
in gigabytes most (:mod:`dlrm.kernels.offload.admission`), but copies of contiguous rows too, by
0.05 ms of a step of 0.48 on an H100. The copy engine does not. So the work is shared:

1. Kernels list the rows, and copy the evicted ones from their slots to a buffer.
2. A thread of the host gathers the rows to fetch. Later it stores the evicted ones.
3. Kernels put the fetched rows into their slots.

No row is used during its transfer. Let window t be the current one. The rows of window t + 1 are
gathered during window t, and the rows evicted for them are stored during window t or t + 1.

- The lists are made after the last step of window t - 1. They contain no row that window t uses, in
  a slot or in host memory, and no row of window t + 1 is evicted. So no row of window t is gathered
  or stored, and no row of window t + 1 is stored; at most they share a cache line with such rows.
- Updates by windows before t are complete: the thread waits for the lists, and rows in slots are
  copied after the lists are made, before their slots get other rows.
- Window t + 1 begins after :meth:`AsyncRowTransfer.wait`, when its rows are in their slots.
- A row that is evicted and used again is read from host memory by the next transfer or by window
  t + 2, not earlier. The thread starts the next transfer after storing the rows of this one, and
  window t + 2 begins after that transfer.
- Everything else that accesses the table, and a window that was not prefetched, begins with
  :meth:`AsyncRowTransfer.wait_all`, which also waits until evicted rows are stored.

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
from dlrm.kernels.offload.transfer import RowMoves, copy_rows
from dlrm.utils.streams import SideStream, side_stream_of

Tensors = Sequence[tuple[Tensor, Tensor]]  # in host memory, in the cache


class AsyncRowTransfer:
    """A stream and a thread that fetch the rows of the next window; immediate without Triton.

    Args:
        device: the device of the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._side_stream = side_stream_of(device, "rows")
        # The thread uses most cores. With all of them it waits for other threads: a step of Adam
        # took 1.2 ms with 16 of 16 cores, 0.87 with 12, and 1.1 with 8.
        cores = max(torch.get_num_threads() * 3 // 4, 1)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="rows", initializer=torch.set_num_threads, initargs=(cores,)
        )
        self._coming: tuple[_Transfer, Future[_Rows]] | None = None
        self._stored: Future[None] | None = None

    def start(
        self,
        index: CacheIndex,
        tensors: Tensors,
        ids: Tensor,
        starts: Tensor | None,
        *,
        impl: str | None = None,
    ) -> None:
        """Start to fetch the rows of the next window. Call :meth:`wait` before the next start.

        Args:
            index, tensors, ids, starts, impl: as in
                :func:`dlrm.kernels.offload.admission.move_rows`; the ids must not change until
                :meth:`wait`.
        """
        assert self._coming is None, "the rows of the last window have not arrived"
        if not ids.numel():
            return
        if not use_triton(ids, impl):
            move_rows_torch(index, tensors, ids, starts, ahead=True)
            return

        with self._side_stream.fork():
            moves = list_moves(index, ids, starts, ahead=True)
            lists = [_to_host(each) for each in (moves.missing, moves.leaving, moves.counters)]
            listed = self._side_stream.record_event()
            caches = [cache for _, cache in tensors]
            evicted = [cache.new_empty(len(moves.targets), cache.shape[1]) for cache in caches]
            copy_rows(caches, evicted, moves, out=True)

        transfer = _Transfer(self._side_stream, ids, tensors, moves, lists, listed, evicted)
        gathered = self._thread.submit(_gather, transfer, self._stored)
        self._stored = self._thread.submit(_store, transfer, gathered)
        self._coming = transfer, gathered

    def wait(self) -> None:
        """Wait until the rows of the next window are gathered. The current stream then waits until
        they are in their slots.

        Raises:
            Exception: an error of the thread. Later calls raise it again, as rows are missing.
        """
        if self._coming is None:
            return
        transfer, gathered = self._coming
        fetched = gathered.result().fetched
        with self._side_stream.fork(wait=False):
            caches = [cache for _, cache in transfer.tensors]
            copy_rows(caches, fetched, transfer.moves, out=False)
        self._side_stream.join()
        self._coming = None

    def wait_all(self) -> None:
        """Like :meth:`wait`, but also wait until the evicted rows are stored.

        Raises:
            Exception: as in :meth:`wait`.
        """
        self.wait()
        if self._stored is not None:
            self._stored.result()


@dataclass(frozen=True)
class _Transfer:
    """A transfer in progress, kept until its rows have arrived and the evicted ones are stored."""

    side_stream: SideStream
    ids: Tensor
    tensors: Tensors
    moves: RowMoves
    lists: list[Tensor]  # rows to fetch, evicted rows, and the counters, in host memory
    listed: torch.cuda.Event | None  # after the copy of the lists
    evicted: list[Tensor]  # the evicted rows, on the GPU


@dataclass(frozen=True)
class _Rows:
    """The rows of a transfer, ``[n, columns]`` for each tensor."""

    fetched: list[Tensor]  # on the GPU
    evicted: list[Tensor]  # in host memory
    copied: torch.cuda.Event | None  # after the copy of the evicted rows


@torch.no_grad()
def _gather(transfer: _Transfer, before: Future[None] | None) -> _Rows:
    """Copy the evicted rows to the host, and the fetched ones to the GPU."""
    if before is not None:
        before.result()  # it is done; this raises its error
    _wait(transfer.listed)
    missing, _, (_, taken, wanted, _) = transfer.lists
    count = min(int(taken), int(wanted))

    fetched = []
    with transfer.side_stream.fork(wait=False):
        evicted = [_to_host(rows, count) for rows in transfer.evicted]
        copied = transfer.side_stream.record_event()
        for host, cache in transfer.tensors:
            rows = _pinned(cache, len(missing))[:count]
            torch.index_select(on_host(host), 0, missing[:count], out=rows)
            fetched.append(rows.to(cache.device, non_blocking=True))
    return _Rows(fetched, evicted, copied)


@torch.no_grad()
def _store(transfer: _Transfer, gathered: Future[_Rows]) -> None:
    """Write the evicted rows to host memory."""
    evicted, copied = gathered.result().evicted, gathered.result().copied
    _wait(copied)
    rows = transfer.lists[1][: len(evicted[0])].long()
    if transfer.lists[2][3] < len(rows):  # some slots were free
        used = rows >= 0
        rows, evicted = rows[used], [each[used] for each in evicted]
    for (host, _), values in zip(transfer.tensors, evicted, strict=True):
        on_host(host).index_copy_(0, rows, values)


def _pinned(like: Tensor, length: int) -> Tensor:
    """A buffer in host memory. All transfers use the same sizes, so PyTorch's caching allocator can
    reuse the memory: pinning new memory takes milliseconds.
    """
    return torch.empty(length, *like.shape[1:], dtype=like.dtype, pin_memory=like.is_cuda)


def _to_host(tensor: Tensor, count: int | None = None) -> Tensor:
    """Copy the first ``count`` rows, by default all, to host memory asynchronously."""
    return _pinned(tensor, len(tensor))[:count].copy_(tensor[:count], non_blocking=True)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()

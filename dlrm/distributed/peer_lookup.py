"""Look-ups in the memory of other processes of the host, which write gradients there as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.distributed.peer_memory import SymmetricTensor
from dlrm.distributed.world import World
from dlrm.kernels.lookup.peer import SortedLookups, read_rows, send_rows
from dlrm.kernels.lookup.tables import row_gradient
from dlrm.kernels.streams import SideStream, side_stream_of
from dlrm.kernels.update.row_sort import RowSorter, sort_rows

ARRIVAL = 2  # the side stream on which a process learns which of its rows have gradients


class PeerLookup:
    """Look-ups of rows that lie with peers, without collectives (:mod:`dlrm.kernels.lookup.peer`).

    A look-up is asked for by its key: row r of the weight of number p of ``World.ring`` has the key
    ``p * height + r``. Gradients arrive in memory that batches of a size share, so those of a
    look-up must be applied before the next one. Every process has memory for as many rows and
    gradients as the one that needs the most.

    Args:
        world: the processes, all on one host.
        height: rows of the largest weight of all processes.
        width: length of a row.
        asked: look-ups of a sample that each rank may have to serve.
        comm_dtype: type in which gradients arrive; if None fp32, or that of the rows if wider.
    """

    def __init__(
        self,
        world: World,
        height: int,
        width: int,
        asked: Sequence[int],
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.world, self.height, self.width, self.asked = world, height, width, asked
        self.comm_dtype = comm_dtype
        self._rows: SymmetricTensor | None = None
        self._recv_buffers: dict[
            int, _RecvBuffer
        ] = {}  # by batch size; captured graphs know their addresses

    def key_of(self, rank: int, row: int) -> int:
        """The key of a row of the weight of a rank."""
        return self.world.ring.index(rank) * self.height + row

    @property
    def key_type(self) -> torch.dtype:
        """Of keys: int32, if it holds them."""
        return torch.int32 if self.world.size * self.height < 2**31 else torch.int64

    def new_weight(self, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Zeros ``[rows, width]``: where peers can read them, if it is the device of the run.

        All processes must call it at once.
        """
        self._rows = None
        self._recv_buffers.clear()
        if device.type != self.world.device.type:
            return torch.zeros(rows, self.width, device=device, dtype=dtype)
        self._rows = SymmetricTensor(self.world, (self.height, self.width), dtype, device)
        bounds = [step * self.height for step in range(self.world.size)]
        self._bounds = torch.tensor(bounds, device=device, dtype=self.key_type)
        shares = [self.world.rank * self.asked[rank] for rank in self.world.ring]
        self._shares = torch.tensor(shares, device=device)
        return self._rows.local[:rows]

    @property
    def ready(self) -> bool:
        """Whether there is a weight that peers can read."""
        return self._rows is not None

    def serves(self, weight: Tensor) -> bool:
        """Whether peers can read this weight."""
        return self._rows is not None and self._rows.local.data_ptr() == weight.data_ptr()

    def sort(self, keys: Tensor) -> SortedLookups:
        """Sort the look-ups ``keys [B, S]``; it needs nothing of the rows, and no other process."""
        found = sort_rows(keys.view(-1), self.world.size * self.height)
        places = torch.searchsorted(found.rows, self._bounds)
        return SortedLookups(found, self._shares * len(keys) - places)

    def __call__(
        self, weight: Tensor, lookups: SortedLookups, batch: int, sorter: RowSorter | None = None
    ) -> Tensor:
        """The rows ``[B, S, width]`` of sorted look-ups; all processes must ask at once, for as
        many.
        """
        found: Tensor = _LookupAtPeers.apply(weight, lookups, batch, self, sorter)
        return found.view(batch, -1, self.width)

    def recv_buffer(self, batch: int, like: Tensor) -> _RecvBuffer:
        """Where the keys and gradients of a batch of this size arrive."""
        if batch not in self._recv_buffers:
            self._recv_buffers[batch] = _RecvBuffer(self, batch, like)
        return self._recv_buffers[batch]

    @property
    def rows(self) -> SymmetricTensor:
        """The memory of the weight."""
        assert self._rows is not None
        return self._rows


class _RecvBuffer:
    """Where peers write the rows and gradients of their look-ups: a section for each of them."""

    def __init__(self, peers: PeerLookup, batch: int, like: Tensor) -> None:
        world, asked = peers.world, peers.asked
        slots = world.size * batch * max(asked)
        self.used = world.size * batch * asked[world.rank]
        self.keys = SymmetricTensor(world, (slots,), torch.int32, like.device, fill=-1)
        comm_dtype = peers.comm_dtype or torch.promote_types(like.dtype, torch.float32)
        self.gradients = SymmetricTensor(world, (slots, peers.width), comm_dtype, like.device)

    def take(self) -> Tensor:
        """Row of every slot, -1 where there is none, ``[used]``; the slots are free again."""
        rows = self.keys.local[: self.used].long()
        self.keys.local.fill_(-1)
        return rows


@dataclass(frozen=True)
class _Sent:
    """What the backward pass of a look-up needs to know of it."""

    lookups: SortedLookups
    buffer: _RecvBuffer
    rows: Tensor
    arrival: SideStream


class _LookupAtPeers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        lookups: SortedLookups,
        batch: int,
        peers: PeerLookup,
        sorter: RowSorter | None,
    ) -> Tensor:
        found, shift = lookups.sorted_rows, lookups.shift
        out = weight.new_empty(len(found.rows), peers.width)
        peers.rows.barrier()  # all have updated their rows
        if not ctx.needs_input_grad[0]:
            read_rows(peers.rows.block, found, out)
            return out
        buffer = peers.recv_buffer(batch, weight)
        read_rows(peers.rows.block, found, out, recv_buffer=buffer.keys.block, shift=shift)
        arrival = side_stream_of(weight.device, ARRIVAL)
        with arrival.fork():
            buffer.keys.barrier()  # all have said which rows they look up
            rows = buffer.take()
            if sorter is not None:
                sorter.submit(rows, len(weight))
        ctx.save_for_backward(weight)
        ctx.peers = peers
        ctx.sent = _Sent(lookups, buffer, rows, arrival)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, peers = ctx.sent, ctx.peers
        (weight,) = ctx.saved_tensors
        grads = grad.reshape(-1, peers.width)
        arrived = sent.buffer.gradients
        found, shift = sent.lookups.sorted_rows, sent.lookups.shift
        send_rows(grads, peers.height, found, arrived.block, shift)
        sent.arrival.join()
        arrived.barrier()  # all gradients are here
        values = arrived.local[: sent.buffer.used]
        return row_gradient(weight, sent.rows, values, True), None, None, None, None

"""Look-ups in the memory of other processes of the host, and gradients written there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.distributed.peer_memory import SymmetricTensor
from dlrm.distributed.world import World
from dlrm.kernels.lookup.peer import PeerKeys, announce_rows, read_rows, send_rows
from dlrm.kernels.lookup.source import row_gradient
from dlrm.kernels.update.packed import storage
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.utils.streams import side_stream_of


class PeerLookup:
    """Look-ups of rows in the memory of peers, without collectives.

    See :mod:`dlrm.kernels.lookup.peer`. Each row has a key: ``p * height + r`` for row r of the
    weight of peer p of ``World.ring``. Batches of the same size share a receive buffer for
    gradients, which must be applied before the next look-up. Every process allocates as much as the
    one that needs the most. A buffer has a section for each shard that this process holds and each
    process whose look-ups find their rows there.

    Args:
        world: the processes, all on one host.
        height: number of rows of the largest weight of all processes.
        width: length of a row.
        lookups_per_sample: the largest number of look-ups that each rank may have to serve.
        comm_dtype: type of the gradients that are received; None: that of the rows, at least fp32.
        columns: length of a row in memory, if it is packed.
    """

    def __init__(
        self,
        world: World,
        height: int,
        width: int,
        lookups_per_sample: Sequence[int],
        comm_dtype: torch.dtype | None = None,
        columns: int | None = None,
    ) -> None:
        self.world = world
        self._columns = columns or width
        self.height = height
        self.width = width
        self.lookups_per_sample = lookups_per_sample
        self.comm_dtype = comm_dtype
        self._rows: SymmetricTensor | None = None
        # By batch size. They are never moved, as captured graphs have their addresses.
        self._recv_buffers: dict[int, _RecvBuffer] = {}

    def key_of(self, rank: int, row: int) -> int:
        """The key of a row in the weight of a rank."""
        return self.world.ring.index(rank) * self.height + row

    def new_weight(self, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Zeros ``[rows, columns]``, in symmetric memory if ``device`` has the type of the run's.

        All processes must call it at the same time.
        """
        self._rows = None
        self._recv_buffers.clear()
        if device.type != self.world.device.type:
            return torch.zeros(rows, self._columns, device=device, dtype=dtype)

        self._rows = SymmetricTensor(self.world, (self.height, self._columns), dtype, device)
        return self._rows.local[:rows]

    def serves(self, weight: Tensor) -> bool:
        """True if peers can read this weight."""
        memory = storage(weight)[0]
        return self._rows is not None and self._rows.local.data_ptr() == memory.data_ptr()

    def __call__(
        self, weight: Tensor, lookups: PeerKeys, batch: int, sorter: RowSorter | None
    ) -> Tensor:
        """The rows ``[B, S, width]`` of look-ups.

        All processes must call it at the same time, with the same batch size.

        Args:
            weight: the rows of this process.
            lookups: of this process's samples.
            batch: B.
            sorter: sorts the rows that arrive.
        """
        found: Tensor = _PeerLookup.apply(weight, lookups, batch, self, sorter)
        return found

    def recv_buffer(self, batch: int, like: Tensor) -> _RecvBuffer:
        """The receive buffer for the keys and gradients of a batch of this size."""
        if batch not in self._recv_buffers:
            self._recv_buffers[batch] = _RecvBuffer(self, batch, like)
        return self._recv_buffers[batch]

    @property
    def rows(self) -> SymmetricTensor:
        """The memory of the weight."""
        assert self._rows is not None
        return self._rows


class _RecvBuffer:
    """Memory with a section for each peer, to write the rows and gradients of its look-ups to."""

    def __init__(self, peers: PeerLookup, batch: int, like: Tensor) -> None:
        world, most = peers.world, peers.lookups_per_sample
        slots = world.size * batch * max(most)
        self.used = world.size * batch * most[world.rank]
        self.keys = SymmetricTensor(world, (slots,), torch.int32, like.device, fill=-1)
        comm_dtype = peers.comm_dtype or torch.promote_types(like.dtype, torch.float32)
        self.gradients = SymmetricTensor(world, (slots, peers.width), comm_dtype, like.device)

    def take(self) -> Tensor:
        """The row of every slot, ``[used]``, -1 for empty ones. The slots are empty afterwards."""
        rows = self.keys.local[: self.used].long()
        self.keys.local.fill_(-1)
        return rows


class _PeerLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        lookups: PeerKeys,
        batch: int,
        peers: PeerLookup,
        sorter: RowSorter | None,
    ) -> Tensor:
        peers.rows.barrier()  # all processes have updated their rows
        if ctx.needs_input_grad[0]:
            buffer = peers.recv_buffer(batch, weight)
            arrival = side_stream_of(weight.device, "arrival")
            with arrival.fork():
                announce_rows(lookups, peers.width, buffer.keys.peers)
                buffer.keys.barrier()  # all have sent the numbers of the rows that they look up
                rows = buffer.take()
                if sorter is not None:
                    sorter.submit(weight, rows)
            ctx.save_for_backward(weight)
            ctx.lookups, ctx.buffer, ctx.rows, ctx.arrival = lookups, buffer, rows, arrival

        out = weight.new_empty(batch, len(lookups.keys) // max(batch, 1), peers.width)
        read_rows(peers.rows.peers, lookups, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        buffer, received = ctx.buffer, ctx.buffer.gradients
        ctx.arrival.join()
        send_rows(grad, ctx.lookups, received.peers)
        received.barrier()  # all have sent their gradients
        values = received.local[: buffer.used]
        return row_gradient(weight, ctx.rows, values, True), *[None] * 4

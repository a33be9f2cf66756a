"""Exchange of ids, vectors and gradients between processes of a host, in each other's memory.

Copy engines of the GPUs do the work, so that products keep all multiprocessors, and faster than the
collective does. Sums of up to a few MB are computed by a kernel that reads those of all: the
collective takes as long for less, in programs that stay until all processes have come. All
processes send the same batch size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.distributed.peer_memory import SymmetricTensor
from dlrm.distributed.world import World
from dlrm.kernels.peer_sum import sum_peers
from dlrm.utils.streams import side_stream_of


class PeerExchange:
    """Exchanges in memory that stays where it is, as captured graphs have its addresses.

    What is received must be used before the next exchange but one of the same kind begins: every
    process takes part in an exchange of each kind in between. A sum of a name must not begin again
    before another exchange has.

    Args:
        world: the processes, all on one host.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._received: dict[tuple[Hashable, torch.dtype, int], SymmetricTensor] = {}

    def ids(self, ids: Tensor, give: Sequence[int]) -> Tensor:
        """Send ids to every rank; returns those of all ranks, rank after rank.

        Args:
            ids: one part for each rank.
            give: length of each part, the same on every rank.
        """
        return self._to_holders("ids", ids.split(list(give)), give)

    def columns(self, own: Tensor) -> Tensor:
        """Send columns ``[F, B]`` to every rank; returns those of all side by side."""
        ranks = self._world.size
        received = self._to_holders("columns", [own] * ranks, [own.numel()] * ranks)
        return received.view(ranks, *own.shape).transpose(0, 1).flatten(1)

    def vectors(self, found: Tensor, give: Sequence[int], get: Sequence[int]) -> list[Tensor]:
        """Send vectors to every rank, and receive a part from each; differentiable.

        Args:
            found: ``[n]``, one part for each rank.
            give: length of each part, all equal.
            get: length of the part of each rank, the same on every rank.
        """
        return list(_Vectors.apply(found, self, list(give), list(get)))

    def sums(self, name: Hashable, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of fp32 tensors, in the order of the ranks, so that all get the same bits.

        Args:
            name: of this exchange, with the same sizes every time.
            tensors: of the same shapes on every rank.
        """
        sizes = [tensor.numel() for tensor in tensors]
        memory = self._memory(name, tensors[0], sum(sizes))
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=memory.local)
        memory.barrier()  # all have written theirs
        out = torch.empty_like(memory.local)
        sum_peers(memory.peers, self._world.rank, out)
        return [part.view_as(t) for part, t in zip(out.split(sizes), tensors, strict=True)]

    def _memory(self, name: Hashable, like: Tensor, room: int) -> SymmetricTensor:
        if (key := (name, like.dtype, room)) not in self._received:
            memory = SymmetricTensor(self._world, (room,), like.dtype, like.device)
            self._received[key] = memory
        return self._received[key]

    def _to_holders(self, name: str, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Send each rank the part that it holds, of which every rank has as much."""
        rank, ranks = self._world.rank, self._world.size
        received = self._send(name, parts, [rank * size for size in sizes], ranks * max(sizes))
        return received[: ranks * sizes[rank]]

    def _to_samples(self, parts: Sequence[Tensor], get: Sequence[int]) -> Tensor:
        """Send each rank the part of its samples."""
        begin = sum(get[: self._world.rank])
        return self._send("vectors", parts, [begin] * len(parts), sum(get))[: sum(get)]

    def _send(self, name: str, parts: Sequence[Tensor], starts: Sequence[int], room: int) -> Tensor:
        """Copy a part to each rank, from an element of its memory on; returns what all sent.

        Args:
            name: the memory.
            parts: by rank.
            starts: the element in the memory of each rank.
            room: elements of the memory at least, the same on every rank.
        """
        like = parts[0]
        room = 1 << max(room - 1, 0).bit_length()  # few sizes, whatever the last batches are
        received = self._memory(name, like, room)

        # The copy to this process runs next to those over links.
        own = side_stream_of(like.device, "arrival")
        for rank, there in zip(self._world.ring, received.peers.tensors, strict=True):
            part = parts[rank].reshape(-1)
            with own.fork() if rank == self._world.rank else nullcontext():
                there[starts[rank] : starts[rank] + len(part)].copy_(part)
        own.join()
        received.barrier()
        return received.local


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, found: Tensor, link: PeerExchange, give: list[int], get: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.get = link, get
        return link._to_samples(found.split(give), get).split(get)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.link._to_holders("gradients", grads, ctx.get), None, None, None

"""Memory that every process of a host can address, so that kernels read and write it directly."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from dlrm.distributed.world import World
from dlrm.kernels.lookup.peer import PeerTensor


def one_host(world: World) -> bool:
    """Whether all processes run on this host."""
    return world.size in (1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def in_reach(world: World) -> bool:
    """Whether all processes have GPUs of one host that can read and write each other's memory."""
    if not (world.size > 1 and one_host(world) and torch.cuda.is_available()):
        return False
    gpus = range(world.size)
    return torch.cuda.device_count() >= world.size and all(
        torch.cuda.can_device_access_peer(here, there)
        for here in gpus
        for there in gpus
        if here != there
    )


def bytes_held(device: torch.device) -> int:
    """Bytes of this process's tensors in peer memory on a device, which its allocator knows not."""
    return sum(memory.local.nbytes for memory in _held if memory.local.device == device)


class SymmetricTensor:
    """A tensor of the same shape on every process of a host, which all of them can address.

    On GPUs it lies in ``torch.distributed``'s symmetric memory, on CPUs in shared files that have
    no name any more. All processes must make it at once.

    Args:
        world: the processes; the process group must have been joined.
        shape: of the tensor of each.
        dtype: of it.
        device: of this process.
        fill: what it holds at first.

    Attributes:
        local: the tensor of this process.
        block: those of all, in the order of ``World.ring``.
    """

    def __init__(
        self,
        world: World,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        fill: int = 0,
    ) -> None:
        tensors: list[Tensor] = []
        self._handle = None
        if device.type == "cuda":
            assert dist.group.WORLD is not None
            device = torch.device("cuda", torch.cuda.current_device())
            self.local = symmetric_memory.empty(*shape, dtype=dtype, device=device)
            torch.cuda.synchronize(device)  # it is zeroed on a stream that others don't wait for
            self._handle = symmetric_memory.rendezvous(self.local, dist.group.WORLD)
            # So are, by some versions, the addresses copied there by which a barrier finds peers.
            torch.cuda.synchronize(device)
            bases = self._handle.buffer_ptrs
            within = self.local.data_ptr() - bases[world.rank]
            places = [bases[rank] + within for rank in world.ring]
        else:
            parts = _shared(world, shape, dtype)
            tensors = [parts[rank] for rank in world.ring]
            self.local = tensors[0]
            places = [tensor.data_ptr() for tensor in tensors]
        addresses = torch.tensor(places, device=device)
        self.block = PeerTensor(local=self.local, addresses=addresses, tensors=tensors)
        self.local.fill_(fill)
        self.barrier()  # nobody writes before it is filled
        _held.add(self)

    def barrier(self) -> None:
        """Hold what is queued behind it until all processes are here; a CUDA graph can hold it."""
        if self._handle is not None:
            self._handle.barrier()
        else:
            dist.barrier()


_held: WeakSet[SymmetricTensor] = WeakSet()


def _shared(world: World, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Shared mappings by rank; the files are gone when this returns."""
    folder = Path(world.from_first(lambda: mkdtemp(prefix="dlrm-")))
    size = math.prod(shape)
    parts = [
        torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=dtype).view(*shape)
        for rank in range(world.size)
    ]
    world.wait()
    if world.first:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return parts

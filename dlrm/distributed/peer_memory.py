"""Tensors that every process of a host can address, for kernels that access them directly."""

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


def on_one_host(world: World) -> bool:
    """True if all processes run on this host."""
    return world.size in (1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def peers_accessible(world: World) -> bool:
    """True if all processes have GPUs of one host that can access each other's memory."""
    if not (world.size > 1 and on_one_host(world) and torch.cuda.is_available()):
        return False
    gpus = range(world.size)
    return torch.cuda.device_count() >= world.size and all(
        torch.cuda.can_device_access_peer(here, there)
        for here in gpus
        for there in gpus
        if here != there
    )


def is_linked(world: World, exchange: str) -> bool:
    """Whether processes address each other's memory: see ``make_sharding_plan``."""
    return exchange == "peers" or (exchange == "auto" and peers_accessible(world))


def bytes_held(device: torch.device) -> int:
    """Bytes of symmetric tensors on a device, which PyTorch's allocator does not report."""
    return sum(memory.local.nbytes for memory in _held if memory.local.device == device)


class SymmetricTensor:
    """A tensor of the same shape in every process of a host, which all of them can address.

    GPUs use PyTorch's symmetric memory, CPUs unlinked shared files. All processes must create it at
    the same time.

    Args:
        world: the processes, which have joined a process group.
        shape: shape of each process's tensor.
        dtype: type of the tensors.
        device: device of this process.
        fill: initial value of every element.

    Attributes:
        local: the tensor of this process.
        peers: the tensors of all processes, in the order of ``World.ring``.
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
            # Other streams clear the memory and, in some versions, copy the addresses for barriers.
            self.local = symmetric_memory.empty(*shape, dtype=dtype, device=device)
            torch.cuda.synchronize(device)
            self._handle = symmetric_memory.rendezvous(self.local, dist.group.WORLD)
            torch.cuda.synchronize(device)

            bases = self._handle.buffer_ptrs
            offset = self.local.data_ptr() - bases[world.rank]
            pointers = [bases[rank] + offset for rank in world.ring]
            first = offset // self.local.itemsize
            tensors = [
                self._handle.get_buffer(rank, list(shape), dtype, first) for rank in world.ring
            ]
        else:
            by_rank = _shared(world, shape, dtype)
            tensors = [by_rank[rank] for rank in world.ring]
            self.local = tensors[0]
            pointers = [tensor.data_ptr() for tensor in tensors]

        addresses = torch.tensor(pointers, device=device)
        self.peers = PeerTensor(local=self.local, addresses=addresses, tensors=tensors)
        self.local.fill_(fill)
        self.barrier()  # no process writes to another one before all are filled
        _held.add(self)

    def barrier(self) -> None:
        """Make later work wait for all processes; can be captured in a CUDA graph."""
        if self._handle is not None:
            self._handle.barrier()
        else:
            dist.barrier()


_held: WeakSet[SymmetricTensor] = WeakSet()


def _shared(world: World, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Shared memory mappings by rank; their files are unlinked when this returns."""
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

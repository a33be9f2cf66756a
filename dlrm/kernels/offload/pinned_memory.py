"""Host memory that a GPU reads and writes at its own address, as a tensor of that GPU.

Under unified addressing a kernel follows the address of a pinned host page as it follows one of
its own memory, at the speed of the link. A tensor of the GPU over such memory has gradients,
optimizers and kernels like any other, and takes no GPU memory.

Seen on an H100, rows of 512 bytes: at random in up to 1 GB, 92% of the link's 55 GB/s; at random in
4 GB 37%, since the GPU's translations of addresses reach no further, but 91% in ascending order.
However the memory is allocated (registered with huge pages or small ones, ``cudaHostAlloc``,
``cuMemCreate``), they reach as far. What computes beside waits for them too: see
:mod:`dlrm.kernels.offload.admission`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
HUGE = 1 << 21  # bytes of a huge page: fewer translations, and pinned at 4 GB/s


_stretches: dict[int, Tensor] = {}
"""What is pinned now, as bytes of the CPU, by address."""


class _Registered:
    """A stretch of anonymous memory, pinned and known to the GPU while this object lives."""

    def __init__(self, size: int) -> None:
        self.address = 0
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as failure:
            raise ValueError(f"{size:,} bytes of host memory can't be had: {failure}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(self.address, size, _PORTABLE_AND_MAPPED)
        if int(error):
            raise ValueError(
                f"{size:,} bytes of host memory can't be pinned (CUDA error {int(error)}): free "
                "some, or raise the limit of locked memory (ulimit -l)"
            )
        _stretches[self.address] = self.bytes
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if _stretches.pop(self.address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def mapped_tensor(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor]:
    """Pin host memory and give it to a GPU.

    Args:
        shape: of the tensors; their contents are zeros.
        dtype: of the tensors.
        device: the GPU.

    Returns:
        The memory as a tensor of the CPU and as one of the GPU. Either keeps it alive; pinned it
        stays as long as the GPU's does. What is written to one is read from the other once the
        streams that write have finished.

    Raises:
        ValueError: the system does not let so much memory be pinned.
    """
    size = prod(shape) * dtype.itemsize
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # there is a context to register with
        held = _Registered(max(-(-size // HUGE), 1) * HUGE)
        on_gpu = torch.as_tensor(held, device=device)
    assert on_gpu.data_ptr() == held.address, "the memory was copied"
    cpu, gpu = (t[:size].view(dtype).view(*shape) for t in (held.bytes, on_gpu))
    return cpu, gpu


def in_host_memory(tensor: Tensor) -> bool:
    """Whether a tensor of a GPU is one of :func:`mapped_tensor`, or a part of one."""
    return _place(tensor) is not None


def on_host(tensor: Tensor) -> Tensor:
    """The CPU's view of a contiguous :func:`mapped_tensor`; other tensors as they are."""
    if not tensor.is_cuda:
        return tensor
    place = _place(tensor)
    assert place is not None, "the tensor is in the memory of the GPU"
    return place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _place(tensor: Tensor) -> Tensor | None:
    """What is pinned from the tensor's address on, as bytes of the CPU; None if nothing is."""
    at = tensor.data_ptr()
    for begin, stretch in list(_stretches.items()):  # others may come and go meanwhile
        if begin <= at < begin + len(stretch):
            return stretch[at - begin :]
    return None


def empty_on_host(like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Host memory as a tensor of the device and type of ``like``, and by default of its shape."""
    shape = tuple(like.shape if shape is None else shape)
    if like.is_cuda:
        return mapped_tensor(shape, like.dtype, like.device)[1]
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def zeros_beside(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in the same kind of memory as ``tensor``: an optimizer's state lies with its rows."""
    if tensor.is_cuda and in_host_memory(tensor):
        return mapped_tensor(shape, dtype, tensor.device)[1]
    return tensor.new_zeros(tuple(shape), dtype=dtype)

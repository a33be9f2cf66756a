"""Mapped pinned (zero-copy) memory: host memory as a tensor of the GPU.

Under unified addressing, a kernel accesses pinned host memory by its address, like GPU memory, at
the speed of the link. A GPU tensor over such memory works with autograd, optimizers and kernels
like any other, and takes no GPU memory.

Measured on an H100 with rows of 512 bytes: 92% of the link's 55 GB/s for random rows in up to 1 GB.
In 4 GB, beyond the reach of the GPU's address translation, 37% for random rows and 91% in ascending
order. The way of allocation makes no difference (registered with huge or small pages,
``cudaHostAlloc``, ``cuMemCreate``). Kernels that run at the same time wait for the translation too:
see :mod:`dlrm.kernels.offload.admission`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
HUGE = 1 << 21  # bytes of a huge page: fewer translations, and memory is pinned at 4 GB/s


_regions: dict[int, Tensor] = {}
"""The memory that is pinned now, as CPU tensors of bytes, by address."""


class _Registered:
    """A region of anonymous memory, pinned and mapped while this object lives."""

    def __init__(self, size: int) -> None:
        self.address = 0
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as failure:
            raise ValueError(
                f"{size:,} bytes of host memory can't be allocated ({failure}): free some"
            ) from None
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
        _regions[self.address] = self.bytes

        # PyTorch makes a GPU tensor of the memory by this protocol.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if _regions.pop(self.address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def mapped_tensor(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> tuple[Tensor, Tensor]:
    """Zeros in pinned host memory that a GPU can address.

    Args:
        shape: shape of the tensors.
        dtype: type of the tensors.
        device: the GPU.

    Returns:
        The memory as a CPU tensor and as a GPU tensor. Either keeps it alive; it stays pinned as
        long as the GPU tensor exists. Once the stream that writes to one of them has finished, the
        other one has the new values.

    Raises:
        ValueError: the system can't pin so much memory.
    """
    size = prod(shape) * dtype.itemsize
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # creates the context to register with
        held = _Registered(max(-(-size // HUGE), 1) * HUGE)
        on_gpu = torch.as_tensor(held, device=device)
    assert on_gpu.data_ptr() == held.address, "the memory was copied"
    cpu, gpu = (t[:size].view(dtype).view(*shape) for t in (held.bytes, on_gpu))
    return cpu, gpu


def in_host_memory(tensor: Tensor) -> bool:
    """True for a GPU tensor from :func:`mapped_tensor`, or a part of one."""
    return _region_from(tensor) is not None


def on_host(tensor: Tensor) -> Tensor:
    """The CPU tensor of a contiguous :func:`mapped_tensor`; a CPU tensor is returned as it is."""
    if not tensor.is_cuda:
        return tensor
    region = _region_from(tensor)
    assert region is not None, "the tensor is in GPU memory"
    return region[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _region_from(tensor: Tensor) -> Tensor | None:
    """The bytes of pinned memory from a tensor's address on; None for other memory."""
    at = tensor.data_ptr()
    for begin, region in list(_regions.items()):  # a copy, as other threads may change it
        if begin <= at < begin + len(region):
            return region[at - begin :]
    return None


def empty_on_host(like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Host memory as a tensor with the device, type and, by default, shape of ``like``."""
    shape = tuple(like.shape if shape is None else shape)
    if like.is_cuda:
        return mapped_tensor(shape, like.dtype, like.device)[1]
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def zeros_in_same_memory(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in the same kind of memory as ``tensor``, for the state of an optimizer."""
    if tensor.is_cuda and in_host_memory(tensor):
        return mapped_tensor(shape, dtype, tensor.device)[1]
    return tensor.new_zeros(tuple(shape), dtype=dtype)

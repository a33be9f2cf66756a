"""GPU kernels, one file per op: Triton kernels, an autograd.Function, ``op()`` and ``op_torch()``.

``op()`` has an argument ``impl``: None runs Triton on a GPU and PyTorch elsewhere; ``"triton"`` and
``"torch"`` choose one of the two, so that tests can run the kernels in Triton's interpreter. The
kernels of tensor trains are a package, :mod:`dlrm.kernels.tt`.

Triton is imported here alone, as ``triton`` and ``tl``. Where there is none, as on macOS and
Windows, all ops run in PyTorch.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # kernels can be defined, but not run
    triton = SimpleNamespace(jit=lambda kernel: kernel, constexpr_function=lambda helper: helper)
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))

INTEGERS = (torch.int32, torch.int64)  # arithmetic on narrower ones would overflow


def hash_triton() -> None:
    """Compute the digest of Triton, with which the keys of all cached kernels begin.

    That takes 0.4 s in each process, which a thread spends while the program does other things.
    """
    if not isinstance(triton, SimpleNamespace):
        triton.runtime.cache.triton_key()


def use_triton(tensor: Tensor, impl: str | None) -> bool:
    """Whether an op on ``tensor`` runs as a Triton kernel.

    Raises:
        ValueError: there is no such ``impl``, or it needs Triton, which is not installed.
    """
    if impl not in (None, "triton", "torch"):
        raise ValueError(f"impl is {impl!r}, it must be None, 'triton' or 'torch'")
    if impl == "triton" and isinstance(triton, SimpleNamespace):
        raise ValueError("impl is 'triton', which is not installed: install it or give 'torch'")
    return tensor.is_cuda if impl is None else impl == "triton"


def require_integers(weight: Tensor, **named: Tensor) -> None:
    """Check that all of ``named`` are int32 or int64 tensors on the device of ``weight``.

    Raises:
        ValueError: one is not; a kernel would misread it.
    """
    for name, tensor in named.items():
        if tensor.dtype not in INTEGERS:
            raise ValueError(
                f"{name} must be integers, got {tensor.dtype}: cast them to int32 or int64"
            )
        if tensor.device != weight.device:
            raise ValueError(
                f"{name} are on {tensor.device} and the weights on {weight.device}, they must be "
                "on one device"
            )


def require_contiguous(**named: Tensor | None) -> None:
    """Check that all of ``named`` are contiguous.

    Raises:
        ValueError: one is not; a kernel would read other elements.
    """
    for name, tensor in named.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, it must be "
                f"contiguous: give {name}.contiguous()"
            )

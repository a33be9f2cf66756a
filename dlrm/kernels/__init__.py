"""GPU kernels, one file an op: Triton kernels, an autograd.Function, ``op()`` and ``op_torch()``.

``op()`` takes ``impl``: None runs Triton on a GPU and PyTorch elsewhere; ``"triton"`` or
``"torch"`` names one of the two, so that tests can run the kernels through Triton's interpreter.
"""

from __future__ import annotations

from torch import Tensor


def use_triton(tensor: Tensor, impl: str | None) -> bool:
    """Whether an op on ``tensor`` runs as a Triton kernel."""
    if impl not in (None, "triton", "torch"):
        raise ValueError(f"impl is {impl!r}, it must be None, 'triton' or 'torch'")
    return tensor.is_cuda if impl is None else impl == "triton"

"""A hash of 64 bits: the same on every device, and different for different ids."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm.kernels import tl, triton

# The finalizer of MurmurHash3, by Austin Appleby. Signed, since PyTorch multiplies only int64.
FIRST = tl.constexpr(0xFF51AFD7ED558CCD - 2**64)
SECOND = tl.constexpr(0xC4CEB9FE1A85EC53 - 2**64)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
"""An odd number whose multiples are far apart."""
LOW = tl.constexpr(0xFFFFFFFF)


def shift(value: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it had no sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix(value: Tensor) -> Tensor:
    """Hash int64 to int64, one to one."""
    value = (value ^ shift(value, 33)) * FIRST.value
    value = (value ^ shift(value, 33)) * SECOND.value
    return value ^ shift(value, 33)


def scale(bits: Tensor, size: Tensor | int) -> Tensor:
    """Map the low 32 bits of a hash evenly to ``[0, size)``; ``size`` is below 2^31."""
    return ((bits & LOW.value) * size) >> 32


def uniform(key: Tensor, dim: int) -> Tensor:
    """Numbers in [-1, 1) of 24 bits, ``[n, dim]`` fp32, for hashed keys ``[n]``."""
    column = torch.arange(1, dim + 1, device=key.device) * GOLDEN.value
    bits = shift(mix(key[:, None] + column), 40)
    return (bits - (1 << 23)).float() * 2.0**-23  # exact


@triton.jit
def mix_triton(value):
    """:func:`mix` in a kernel."""
    value = (value ^ ((value >> 33) & 0x7FFFFFFF)) * FIRST
    value = (value ^ ((value >> 33) & 0x7FFFFFFF)) * SECOND
    return value ^ ((value >> 33) & 0x7FFFFFFF)


@triton.jit
def scale_triton(bits, size):
    """:func:`scale` in a kernel."""
    return ((bits & LOW) * size) >> 32

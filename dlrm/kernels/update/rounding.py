"""Stochastic rounding of fp32 to bf16, in PyTorch and in Triton.

Steps that are too small to change a bf16 number count on average: it is rounded up or down at
random, with the probabilities that make the mean exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm.kernels import tl, triton


def round_stochastic(value: Tensor) -> Tensor:
    """Round fp32 to bf16; draws from PyTorch's generator."""
    chance = torch.randint_like(value, 1 << 16, dtype=torch.int32)
    rounded = ((value.view(torch.int32) + chance) & -65536).view(torch.float32)
    return rounded.where(value == value, value).bfloat16()  # adding to a NaN's bits may overflow


@triton.jit
def round_to_bf16(value, element, seed):
    """Round fp32 stochastically to a number that bf16 has; ``element`` numbers the values."""
    random = tl.randint(tl.load(seed), element.to(tl.int32)).to(tl.int32) & 0xFFFF
    bits = (value.to(tl.int32, bitcast=True) + random) & -65536  # the upper half is the bf16
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


@triton.jit
def store_rounded(pointer, element, value, mask, seed, ROUND: tl.constexpr):
    """Store fp32 in the type of ``pointer``; with ROUND, bf16 by stochastic rounding."""
    if ROUND:
        value = round_to_bf16(value, element, seed)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)

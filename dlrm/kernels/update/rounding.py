"""Stochastic rounding of fp32 to bf16, in PyTorch and in Triton.

Steps that are too small to change a bf16 number count on average: it is rounded up or down at
random, with the probabilities that make the mean exact.

Kernels hash the number of an element and of the step. Philox, which ``tl.rand`` computes, takes ten
times the instructions, and its registers were spilled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlrm.kernels import tl, triton


@contextmanager
def seeded(seed: Tensor | None) -> Iterator[None]:
    """Have PyTorch draw from a seed on a CPU; None: leave all as it is.

    So processes with equal seeds round alike, whatever else each of them draws.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        yield


def round_stochastic(value: Tensor) -> Tensor:
    """Round fp32 to bf16; draws from PyTorch's generator."""
    chance = torch.randint_like(value, 1 << 16, dtype=torch.int32)
    rounded = ((value.view(torch.int32) + chance) & -65536).view(torch.float32)
    return rounded.where(value == value, value).bfloat16()  # adding to a NaN's bits may overflow


@triton.jit
def _mix(x):
    """Hash uint32: the high bits of the result are random."""
    x = (x ^ (x >> 16)) * 0x7FEB352D  # of Chris Wellons' lowbias32
    return (x ^ (x >> 15)) * 0x846CA68B


@triton.jit
def random_bits(element, seed):
    """Random int32, one for each ``element`` (its low 32 bits) and number at ``seed``; the high
    bits are the better ones.
    """
    step = _mix(tl.load(seed).to(tl.uint32) * 0x9E3779B1)
    return _mix(element.to(tl.uint32) * 0x9E3779B1 + step).to(tl.int32, bitcast=True)


@triton.jit
def round_to_bf16(value, element, seed):
    """Round fp32 stochastically to a number that bf16 has; ``element`` numbers the values."""
    random = (random_bits(element, seed) >> 16) & 0xFFFF
    bits = (value.to(tl.int32, bitcast=True) + random) & -65536  # the upper half is the bf16
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


@triton.jit
def store_rounded(pointer, element, value, mask, seed, ROUND: tl.constexpr):
    """Store fp32 in the type of ``pointer``; with ROUND, bf16 by stochastic rounding."""
    if ROUND:
        value = round_to_bf16(value, element, seed)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)

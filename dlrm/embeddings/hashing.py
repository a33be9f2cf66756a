"""A hash of integers in PyTorch arithmetic, the same on every device and in every process."""

from __future__ import annotations

from torch import Tensor

_MULTIPLIER = 0x45D9F3B  # of the 32-bit finalizer; products of 32 bits stay below 2^63
_LOW = 0xFFFFFFFF


def scramble(keys: Tensor) -> Tensor:
    """Keys that look random: integers ``[...]`` to int64 in ``[0, 2^32)``.

    Different keys below ``2^32`` stay different.
    """
    keys = keys.long()
    keys = (keys ^ (keys >> 32)) & _LOW
    for _ in range(2):
        keys = ((keys ^ (keys >> 16)) * _MULTIPLIER) & _LOW
    return keys ^ (keys >> 16)

"""A hash of integers in PyTorch arithmetic, the same on every device and in every process."""

from __future__ import annotations

import torch
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


def scatter(first: Tensor, ids: Tensor, pieces: int, size: int, *, block: int = 1) -> Tensor:
    """Where the pieces of rows lie in an array that all tables share.

    A table, written row after row and piece after piece, is cut into blocks. The first begins at a
    place of the table's own, each later one at a random distance from there, a hash of its number;
    the array is a circle. So the same block of two tables is never at the same place.

    Args:
        first: where the tables begin, broadcasting against ``ids``.
        ids: ``[...]``.
        pieces: of a row.
        size: pieces of the array.
        block: pieces of a block.

    Returns:
        The places, int64 ``[..., pieces]``.
    """
    piece = ids[..., None].long() * pieces + torch.arange(pieces, device=ids.device)
    return (first[..., None] + scramble(piece // block) + piece % block) % size

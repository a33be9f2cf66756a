"""Where the pieces of rows lie in an array that tables share, by a hash of their numbers.

The hash is integer arithmetic: the same on every device and in every process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm.kernels import use_triton

MULTIPLIER = 0x45D9F3B  # of the 32-bit finalizer; products with 32 bits stay below 2^63
LOW = 0xFFFFFFFF
BLOCK = 1024  # pieces of a program


def scramble(keys: Tensor) -> Tensor:
    """Keys that look random: integers ``[...]`` to int64 in ``[0, 2^32)``.

    Different keys below ``2^32`` stay different.
    """
    keys = keys.long()
    keys = (keys ^ (keys >> 32)) & LOW
    for _ in range(2):
        keys = ((keys ^ (keys >> 16)) * MULTIPLIER) & LOW
    return keys ^ (keys >> 16)


@triton.jit
def _scatter(
    first, ids, out, n, repeat, size, block,
    PIECES: tl.constexpr, MULTIPLIER: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of one piece per element; ``first`` has one entry for every ``repeat`` ids."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    at = k // PIECES
    piece = tl.load(ids + at, mask=inside, other=0).to(tl.int64) * PIECES + k % PIECES
    begin = tl.load(first + at // repeat, mask=inside, other=0)
    number = piece // block
    key = (number ^ (number >> 32)) & LOW
    key = ((key ^ (key >> 16)) * MULTIPLIER) & LOW
    key = ((key ^ (key >> 16)) * MULTIPLIER) & LOW
    key = key ^ (key >> 16)
    tl.store(out + k, (begin + key + piece % block) % size, mask=inside)


def scatter(
    first: Tensor, ids: Tensor, pieces: int, size: int, *, block: int = 1, impl: str | None = None
) -> Tensor:
    """Where the pieces of rows lie in an array that all tables share.

    A table, written row after row and piece after piece, is cut into blocks. The first begins at a
    place of the table's own, each later one at a random distance from there, a hash of its number;
    the array is a circle. So the same block of two tables is never at the same place.

    Args:
        first: where the table of each id begins, int64; of the shape of ``ids``, or of theirs but
            for last dimensions of 1, or missing first ones.
        ids: ``[...]``, int32 or int64.
        pieces: of a row.
        size: pieces of the array.
        block: pieces of a block.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        The places, int64 ``[..., pieces]``.
    """
    shape = torch.broadcast_shapes(first.shape, ids.shape)
    by_stretches = first.numel() in (1, ids.numel()) or first.shape == (*ids.shape[:-1], 1)
    if not use_triton(ids, impl) or ids.shape != shape or not by_stretches:
        return scatter_torch(first, ids, pieces, size, block=block)
    out = torch.empty(*shape, pieces, dtype=torch.int64, device=ids.device)
    if out.numel():
        _scatter[triton.cdiv(out.numel(), BLOCK),](
            first.contiguous(), ids.contiguous(), out, out.numel(), ids.numel() // first.numel(),
            size, block, PIECES=pieces, MULTIPLIER=MULTIPLIER, LOW=LOW, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def scatter_torch(first: Tensor, ids: Tensor, pieces: int, size: int, *, block: int = 1) -> Tensor:
    """:func:`scatter` in PyTorch, for all shapes that broadcast."""
    piece = ids[..., None].long() * pieces + torch.arange(pieces, device=ids.device)
    return (first[..., None] + scramble(piece // block) + piece % block) % size

"""Hashed offsets into an array that all tables share.

The hash is integer arithmetic, so it is the same on every device and in every process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton

MULTIPLIER = tl.constexpr(0x45D9F3B)  # of a 32-bit finalizer; times 32 bits it is below 2^63
MASK = tl.constexpr(0xFFFFFFFF)
BLOCK = 1024  # pieces of a program


def hash32(keys: Tensor) -> Tensor:
    """Hash integers to int64 in ``[0, 2^32)``; different keys below 2^32 stay different."""
    keys = keys.long()
    keys = (keys ^ (keys >> 32)) & MASK.value
    for _ in range(2):
        keys = ((keys ^ (keys >> 16)) * MULTIPLIER.value) & MASK.value
    return keys ^ (keys >> 16)


@triton.jit
def _hashed_offsets(
    first, ids, out, n, count, repeat, size, block, PIECES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The offset of one piece per element; ``first`` has ``count`` entries, each for ``repeat`` ids
    one after another, in turn.
    """
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    at = k // PIECES
    piece = tl.load(ids + at, mask=inside, other=0).to(tl.int64) * PIECES + k % PIECES
    begin = tl.load(first + at // repeat % count, mask=inside, other=0)
    key = piece // block
    key = (key ^ (key >> 32)) & MASK
    key = ((key ^ (key >> 16)) * MULTIPLIER) & MASK
    key = ((key ^ (key >> 16)) * MULTIPLIER) & MASK
    key = key ^ (key >> 16)
    tl.store(out + k, (begin + key + piece % block) % size, mask=inside)


def hashed_offsets(
    first: Tensor, ids: Tensor, pieces: int, size: int, *, block: int = 1, impl: str | None = None
) -> Tensor:
    """Offsets of the pieces of rows in an array that all tables share.

    A table, flattened row by row, is divided into blocks. Block ``b`` begins ``hash32(b)`` pieces
    after the ``first`` offset of the table, and the array wraps around. So the same block of two
    tables is never at the same offset.

    Args:
        first: first offset of the table of each id, int64; of the shape of ``ids``, or one that
            broadcasts to it.
        ids: ``[...]``, int32 or int64.
        pieces: pieces of a row.
        size: pieces of the array.
        block: pieces of a block.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        The offsets, int64 ``[..., pieces]``.
    """
    shape = torch.broadcast_shapes(first.shape, ids.shape)
    of_runs = first.shape == (*ids.shape[:-1], 1)
    regular = of_runs or first.numel() in (1, ids.numel()) or first.shape == ids.shape[-1:]
    if not use_triton(ids, impl) or ids.shape != shape or not regular:
        return hashed_offsets_torch(first, ids, pieces, size, block=block)
    out = torch.empty(*shape, pieces, dtype=torch.int64, device=ids.device)
    if out.numel():
        _hashed_offsets[triton.cdiv(out.numel(), BLOCK),](
            first.contiguous(), ids.contiguous(), out, out.numel(), first.numel(),
            ids.shape[-1] if of_runs else 1, size, block, PIECES=pieces, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def hashed_offsets_torch(
    first: Tensor, ids: Tensor, pieces: int, size: int, *, block: int = 1
) -> Tensor:
    """:func:`hashed_offsets` in PyTorch, for all shapes that broadcast."""
    piece = ids[..., None].long() * pieces + torch.arange(pieces, device=ids.device)
    return (first[..., None] + hash32(piece // block) + piece % block) % size

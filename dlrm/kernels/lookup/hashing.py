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
def hash32_triton(key):
    """:func:`hash32` in a kernel."""
    key = (key ^ (key >> 32)) & MASK
    key = ((key ^ (key >> 16)) * MULTIPLIER) & MASK
    key = ((key ^ (key >> 16)) * MULTIPLIER) & MASK
    return key ^ (key >> 16)


@triton.jit
def _hashed_offsets(
    first, ids, rows, out, n, count, repeat, size, block, start, few, width, strides,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The offset of one piece per element; ``first`` has ``count`` entries, each for ``repeat`` ids
    one after another, in turn. Ids and rows are in lines of ``width`` with ``strides``.
    """
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    at = k // PIECES
    place = at // width * strides[0] + at % width * strides[1]
    piece = tl.load(ids + place, mask=inside, other=0).to(tl.int64) * PIECES + k % PIECES
    begin = tl.load(first + at // repeat % count, mask=inside, other=0)
    offset = start + (begin + hash32_triton(piece // block) + piece % block) % size
    if rows is not None:
        own = tl.load(rows + place, mask=inside, other=0) - few
        offset = tl.where(own >= 0, own * PIECES + k % PIECES, offset)
    tl.store(out + k, offset, mask=inside)


def hashed_offsets(
    first: Tensor,
    ids: Tensor,
    pieces: int,
    size: int,
    *,
    block: int = 1,
    start: int = 0,
    rows: Tensor | None = None,
    few: int = 0,
    impl: str | None = None,
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
        start: number of pieces before the array.
        rows: of the shape of ``ids``: those from ``few`` on are rows that ids have for themselves,
            whose pieces come first, before the array.
        few: see ``rows``.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        The offsets, int64 ``[..., pieces]``.
    """
    shape = torch.broadcast_shapes(first.shape, ids.shape)
    of_runs = first.shape == (*ids.shape[:-1], 1)
    regular = of_runs or first.numel() in (1, ids.numel()) or first.shape == ids.shape[-1:]
    if not use_triton(ids, impl) or ids.shape != shape or not regular:
        return hashed_offsets_torch(
            first, ids, pieces, size, block=block, start=start, rows=rows, few=few
        )
    out = torch.empty(*shape, pieces, dtype=torch.int64, device=ids.device)
    if out.numel():
        if ids.dim() != 2 or (rows is not None and rows.stride() != ids.stride()):
            ids, rows = ids.reshape(1, -1), None if rows is None else rows.reshape(1, -1)
        width, strides = ids.shape[1], ids.stride()
        _hashed_offsets[triton.cdiv(out.numel(), BLOCK),](
            first.contiguous(), ids, rows, out, out.numel(), first.numel(),
            ids.shape[-1] if of_runs else 1, size, block, start, few, width, strides,
            PIECES=pieces, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def hashed_offsets_torch(
    first: Tensor,
    ids: Tensor,
    pieces: int,
    size: int,
    *,
    block: int = 1,
    start: int = 0,
    rows: Tensor | None = None,
    few: int = 0,
) -> Tensor:
    """:func:`hashed_offsets` in PyTorch, for all shapes that broadcast."""
    number = torch.arange(pieces, device=ids.device)
    piece = ids[..., None].long() * pieces + number
    offsets = start + (first[..., None] + hash32(piece // block) + piece % block) % size
    if rows is None:
        return offsets
    own = rows[..., None] - few
    return torch.where(own >= 0, own * pieces + number, offsets)

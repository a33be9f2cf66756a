"""Copy the rows that change places: between a cache and host memory, or out of it and into it.

Bytes that must be moved: each row once each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # that a program has under way, fewer of more than 64 columns
MOVERS = 64  # programs that exchange a tensor's rows
STAGERS = 256  # programs that copy them within the memory of the GPU


@triton.jit
def _fetch(host, missing, k, moves, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows ``k`` of those that come."""
    column = tl.arange(0, BLOCK_D)[None, :]
    row = tl.load(missing + k, mask=k < moves, other=0).to(tl.int64)
    mask = (k < moves)[:, None] & (column < D)
    return tl.load(host + row[:, None] * D + column, mask=mask, other=0.0)


@triton.jit
def _exchange(
    host, cache, missing, leaving, targets, counters,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Move the rows of one tensor: those that leave to the host, the missing ones to the slots."""
    moves = tl.minimum(tl.load(counters + 1), tl.load(counters + 2))
    step = tl.num_programs(0) * BLOCK
    column = tl.arange(0, BLOCK_D)[None, :]
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    coming = _fetch(host, missing, k, moves, D, BLOCK_D)
    for _ in range(tl.program_id(0) * BLOCK, moves, step):
        new = coming
        coming = _fetch(host, missing, k + step, moves, D, BLOCK_D)  # under way meanwhile
        inside = k < moves
        old = tl.load(leaving + k, mask=inside, other=-1).to(tl.int64)
        slot = tl.load(targets + k, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (column < D)
        at = slot[:, None] * D + column
        leaves = tl.load(cache + at, mask=mask, other=0.0)
        tl.store(host + old[:, None] * D + column, leaves, mask=mask & (old >= 0)[:, None])
        tl.debug_barrier()
        tl.store(cache + at, new, mask=mask)
        k += step


@triton.jit
def _stage(
    cache, staging, targets, counters,
    OUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the slots that change owners out of a cache, one behind another, or in."""
    moves = tl.minimum(tl.load(counters + 1), tl.load(counters + 2))
    column = tl.arange(0, BLOCK_D)[None, :]
    for start in range(tl.program_id(0) * BLOCK, moves, tl.num_programs(0) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (k < moves)[:, None] & (column < D)
        slot = tl.load(targets + k, mask=k < moves, other=0).to(tl.int64)
        here = cache + slot[:, None] * D + column
        there = staging + k.to(tl.int64)[:, None] * D + column
        if OUT:
            tl.store(there, tl.load(here, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(here, tl.load(there, mask=mask, other=0.0), mask=mask)


@dataclass(frozen=True, kw_only=True)
class RowMoves:
    """Which rows change places, of ``most`` that may."""

    missing: Tensor
    """Rows that come, ``[most]`` int32; ascending unless they are listed ahead."""
    leaving: Tensor
    """Rows that leave for them, ``[most]`` int32, -1 where the slot was free; likewise."""
    targets: Tensor
    """The slots where they meet, ``[most]`` int32."""
    counters: Tensor
    """Rows without a slot, slots taken, slots wanted, and rows that leave, ``[4]`` int32."""


def exchange_rows(tensors: Sequence[tuple[Tensor, Tensor]], moves: RowMoves) -> None:
    """Move rows to their places at once.

    Args:
        tensors: what moves, each ``[V, columns]`` in host memory and ``[C, columns]`` in the cache.
        moves: which rows, and where to.
    """
    lists = moves.missing, moves.leaving, moves.targets, moves.counters
    for host, cache in tensors:
        programs, sizes = _blocks(host.shape[1], len(moves.missing), MOVERS)
        _exchange[programs,](host, cache, *lists, **sizes)


def take_rows(caches: Sequence[Tensor], moves: RowMoves) -> list[Tensor]:
    """The rows in the slots that change owners, one behind another.

    Args:
        caches: of each tensor, ``[C, columns]``.
        moves: of which only the targets count.

    Returns:
        Of each tensor ``[most, columns]``.
    """
    staged = [cache.new_empty(len(moves.targets), cache.shape[1]) for cache in caches]
    _stage_all(caches, staged, moves, out=True)
    return staged


def put_rows(caches: Sequence[Tensor], rows: Sequence[Tensor], moves: RowMoves) -> None:
    """Put rows that lie as :func:`take_rows` gives them, as many as move, into the slots."""
    _stage_all(caches, rows, moves, out=False)


def _stage_all(
    caches: Sequence[Tensor], staged: Sequence[Tensor], moves: RowMoves, *, out: bool
) -> None:
    for cache, rows in zip(caches, staged, strict=True):
        programs, sizes = _blocks(cache.shape[1], len(moves.targets), STAGERS)
        _stage[programs,](cache, rows, moves.targets, moves.counters, OUT=out, **sizes)


def _blocks(dim: int, most: int, programs: int) -> tuple[int, dict[str, int]]:
    """How many programs copy rows of so many columns, of up to so many, and their sizes."""
    block_d = triton.next_power_of_2(dim)
    block = max(4, min(ROWS, 64 * ROWS // block_d))
    warps = max(1, min(16, block * block_d // 512))
    sizes = {"D": dim, "BLOCK": block, "BLOCK_D": block_d, "num_warps": warps}
    return min(programs, triton.cdiv(most, block)), sizes

"""Copy fetched and evicted rows between a cache and host memory, or between a cache and a buffer.

Bytes to move: each row once each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton

ROWS = 128  # rows that a program copies at a time; fewer if they have more than 64 columns
MOVERS = 64  # programs that exchange the rows of a tensor
STAGERS = 256  # programs that copy them within GPU memory


class RowMoves(NamedTuple):
    """The rows to fetch and the rows to evict, at most ``most`` of each."""

    missing: Tensor
    """Rows to fetch, ``[most]`` int32; ascending unless they are listed ahead."""
    leaving: Tensor
    """Rows to evict for them, ``[most]`` int32, in the same order; -1 if the slot is free."""
    targets: Tensor
    """Their slots, ``[most]`` int32."""
    counters: Tensor
    """Rows without a slot, slots taken, slots wanted, and evicted rows, ``[4]`` int32."""


@triton.jit
def _fetch(host, missing, k, moves, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the missing rows ``k`` from the host."""
    column = tl.arange(0, BLOCK_D)[None, :]
    row = tl.load(missing + k, mask=k < moves, other=0).to(tl.int64)
    mask = (k < moves)[:, None] & (column < D)
    return tl.load(host + row[:, None] * D + column, mask=mask, other=0.0)


@triton.jit
def _exchange(
    host, cache, lists, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Move the rows of one tensor: evicted rows to the host, missing rows to their slots."""
    moves = tl.minimum(tl.load(lists.counters + 1), tl.load(lists.counters + 2))
    step = tl.num_programs(0) * BLOCK
    column = tl.arange(0, BLOCK_D)[None, :]
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    coming = _fetch(host, lists.missing, k, moves, D, BLOCK_D)
    for _ in range(tl.program_id(0) * BLOCK, moves, step):
        new = coming
        coming = _fetch(host, lists.missing, k + step, moves, D, BLOCK_D)  # ahead of its use
        inside = k < moves
        old = tl.load(lists.leaving + k, mask=inside, other=-1).to(tl.int64)
        slot = tl.load(lists.targets + k, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & (column < D)
        at = slot[:, None] * D + column
        evicted = tl.load(cache + at, mask=mask, other=0.0)
        tl.store(host + old[:, None] * D + column, evicted, mask=mask & (old >= 0)[:, None])
        tl.debug_barrier()
        tl.store(cache + at, new, mask=mask)
        k += step


@triton.jit
def _stage(
    cache, buffer, lists,
    OUT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the rows of the reassigned slots from a cache to a contiguous buffer, or back."""
    moves = tl.minimum(tl.load(lists.counters + 1), tl.load(lists.counters + 2))
    column = tl.arange(0, BLOCK_D)[None, :]
    for start in range(tl.program_id(0) * BLOCK, moves, tl.num_programs(0) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (k < moves)[:, None] & (column < D)
        slot = tl.load(lists.targets + k, mask=k < moves, other=0).to(tl.int64)
        here = cache + slot[:, None] * D + column
        there = buffer + k.to(tl.int64)[:, None] * D + column
        if OUT:
            tl.store(there, tl.load(here, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(here, tl.load(there, mask=mask, other=0.0), mask=mask)


def exchange_rows(tensors: Sequence[tuple[Tensor, Tensor]], moves: RowMoves) -> None:
    """Move rows between the host and the cache now.

    Args:
        tensors: what is moved: ``[V, columns]`` in host memory and ``[C, columns]`` in the cache.
        moves: the rows and their slots.
    """
    for host, cache in tensors:
        programs, sizes = _blocks(host.shape[1], len(moves.missing), MOVERS)
        _exchange[programs,](host, cache, moves, **sizes)


def copy_rows(
    caches: Sequence[Tensor], buffers: Sequence[Tensor], moves: RowMoves, *, out: bool
) -> None:
    """Copy the rows of the reassigned slots to contiguous buffers, or back.

    Args:
        caches: the cache of each tensor, ``[C, columns]``.
        buffers: the buffer of each tensor, ``[most, columns]``, or with fewer rows to copy back.
        moves: has the slots.
        out: copy to the buffers; otherwise from them.
    """
    for cache, buffer in zip(caches, buffers, strict=True):
        programs, sizes = _blocks(cache.shape[1], len(moves.targets), STAGERS)
        _stage[programs,](cache, buffer, moves, OUT=out, **sizes)


def _blocks(dim: int, most: int, programs: int) -> tuple[int, dict[str, int]]:
    """Number of programs that copy up to ``most`` rows of ``dim`` columns, and their sizes."""
    block_d = triton.next_power_of_2(dim)
    block = max(4, min(ROWS, 64 * ROWS // block_d))
    warps = max(1, min(16, block * block_d // 512))
    sizes = {"D": dim, "BLOCK": block, "BLOCK_D": block_d, "num_warps": warps}
    return min(programs, triton.cdiv(most, block)), sizes

"""Exchange fetched and evicted rows between host memory and a cache on the GPU.

A kernel reads and writes host memory by its address; the processors of the host do nothing. Bytes
to move: each row and its state once each way. Arrays of rows and of their states move side by side,
so that the time of a round trip to the host passes once and not for each.

Measured on one H100's host with rows of 512 bytes, 300 MB each way: both directions together have
62 GB/s, and 54 by the copy engines, one of them as much as both. Programs that only read or only
write changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton

ELEMENTS = 16384  # that a program exchanges at a time
VECTOR = 4  # elements that a thread moves together; of rows of other lengths, half as many fit
ROWS = 1024  # at most
MOVERS = 64  # programs, while a step waits for the rows
BYTES_PER_MOVER = 32  # of the longest row or state; a program beside a step for each of them,
FEWEST, MOST = 2, 16  # within these; half of them if there are several states
# The counters of a window: rows without a slot; slots that programs took, which may be more than
# are wanted; and evicted rows.
ABSENT, TAKEN, WANTED, EVICTED = (tl.constexpr(at) for at in range(4))


class RowMoves(NamedTuple):
    """The rows to fetch and the rows to evict, at most ``most`` of each."""

    missing: Tensor
    """Rows to fetch, ``[most]`` int32."""
    leaving: Tensor
    """Rows to evict for them, ``[most]`` int32; -1 if the slot is free."""
    targets: Tensor
    """Their slots, ``[most]`` int32."""
    counters: Tensor
    """How many there are, ``[4]`` int32: see ``ABSENT`` and on."""


@triton.jit
def number_of_moves(counters):
    """The first so many rows and slots of the lists belong together."""
    return tl.minimum(tl.load(counters + TAKEN), tl.load(counters + WANTED))


@triton.jit
def _fetch(host, missing, k, moves, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the missing rows ``k`` from the host."""
    column = tl.arange(0, BLOCK_D)[None, :]
    row = tl.load(missing + k, mask=k < moves, other=0).to(tl.int64)
    mask = (k < moves)[:, None] & (column < D)
    return tl.load(host + row[:, None] * D + column, mask=mask, other=0.0)


@triton.jit
def _exchange(tensors, lists, SHAPES: tl.constexpr):
    """Move the rows of every tensor, each by programs of its own."""
    for index in tl.static_range(len(tensors)):
        if tl.program_id(1) == index:
            host, cache = tensors[index]
            _exchange_one(host, cache, lists, SHAPES[index][0], SHAPES[index][1], SHAPES[index][2])


@triton.jit
def _exchange_one(
    host, cache, lists, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Move the rows of one tensor: evicted rows to the host, missing rows to their slots."""
    moves = number_of_moves(lists.counters)
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


def exchange_rows(
    tensors: Sequence[tuple[Tensor, Tensor]], moves: RowMoves, *, background: bool
) -> None:
    """Move rows between the host and the cache.

    Args:
        tensors: what is moved: ``[V, columns]`` in host memory and ``[C, columns]`` in the cache.
        moves: the rows and their slots.
        background: leave nearly the whole GPU to a step that runs at the same time.
    """
    shapes = []
    for host, _ in tensors:
        dim = host.shape[1]
        block_d = triton.next_power_of_2(dim)
        elements = ELEMENTS // 2 if dim % VECTOR else ELEMENTS
        shapes.append((dim, max(4, min(ROWS, elements // block_d)), block_d))

    programs = MOVERS
    if background:
        row_bytes = max(host.shape[1] * host.element_size() for host, _ in tensors)
        programs = max(FEWEST, min(row_bytes // BYTES_PER_MOVER, MOST))
        if tensors[0][0].shape[1] % VECTOR:
            programs *= 2
        if len(tensors) > 2:
            programs //= 2
    rounds = triton.cdiv(len(moves.missing), min(block for _, block, _ in shapes))

    warps = max(1, min(16, max(block * block_d for _, block, block_d in shapes) // 512))
    grid = min(programs, rounds), len(tensors)
    _exchange[grid](tuple(tensors), moves, SHAPES=tuple(shapes), num_warps=warps)

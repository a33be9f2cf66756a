"""Exchange fetched and evicted rows between host memory and a cache on the GPU.

A kernel reads and writes host memory by its address; the processors of the host do nothing. Bytes
to move: each row and its state once each way.

A row and its states are one record, so that one visit brings all of them: what costs time is to
visit a place in host memory (:mod:`dlrm.kernels.offload.admission`). A thread moves 16 bytes at
once. A GPU accesses its memory by sectors of 32 bytes: records with states are multiples of these,
so that rows in the cache begin at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dlrm.kernels import tl, triton

UNIT = tl.constexpr(4)  # words of 4 bytes that a thread moves at once
UNITS = 4096  # that a program exchanges at a time
MOVERS = 64  # programs, while a step waits for the rows
BYTES_PER_MOVER = 32  # of a row with its state; a program beside a step for each of them,
FEWEST, MOST = 2, 16  # within these


class RecordLayout(NamedTuple):
    """Where a row and its states are in their record."""

    columns: tuple[tuple[int, int, torch.dtype], ...]
    """First element, number of elements and type of the row, and of each state."""
    words: int
    """Words of 4 bytes in a record."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, torch.dtype]]) -> Self:
        """The layout of parts with these numbers of elements and types."""
        columns, end = [], 0
        for count, dtype in parts:
            begin = -(-end // dtype.itemsize)
            columns.append((begin, count, dtype))
            end = (begin + count) * dtype.itemsize
        words = UNIT.value if len(parts) == 1 else 2 * UNIT.value
        return cls(tuple(columns), -(-end // (4 * words)) * words)

    def parts(self, records: Tensor) -> list[Tensor]:
        """The parts of records ``[n, words]`` int32, as views ``[n, elements]``."""
        return [
            records.view(dtype)[:, begin : begin + count] for begin, count, dtype in self.columns
        ]


class RowMoves(NamedTuple):
    """The rows to fetch and the rows to evict, at most ``most`` of each."""

    missing: Tensor
    """Rows to fetch, ``[most]`` int32."""
    leaving: Tensor
    """Rows to evict for them, ``[most]`` int32; -1 if the slot is free."""
    targets: Tensor
    """Their slots, ``[most]`` int32."""
    counters: Tensor
    """Rows without a slot, slots taken, slots wanted, and evicted rows, ``[4]`` int32."""


@triton.jit
def _fetch(host, missing, unit, moves, RECORD: tl.constexpr):
    """Load units of the missing records from the host."""
    inside = unit < moves * RECORD
    row = tl.load(missing + unit // RECORD, mask=inside, other=0).to(tl.int64)
    at = ((row * RECORD + unit % RECORD) * UNIT)[:, None] + tl.arange(0, UNIT)[None, :]
    return tl.load(host + at, mask=inside[:, None], other=0)


@triton.jit
def _exchange(host, cache, lists, RECORD: tl.constexpr, BLOCK: tl.constexpr):
    """Move records: evicted ones to the host, missing ones to their slots."""
    moves = tl.minimum(tl.load(lists.counters + 1), tl.load(lists.counters + 2))
    step = tl.num_programs(0) * BLOCK
    word = tl.arange(0, UNIT)[None, :]
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    coming = _fetch(host, lists.missing, unit, moves, RECORD)
    for _ in range(tl.program_id(0) * BLOCK, moves * RECORD, step):
        new = coming
        coming = _fetch(host, lists.missing, unit + step, moves, RECORD)  # ahead of its use

        inside = unit < moves * RECORD
        old = tl.load(lists.leaving + unit // RECORD, mask=inside, other=-1).to(tl.int64)
        slot = tl.load(lists.targets + unit // RECORD, mask=inside, other=0).to(tl.int64)
        to = ((old * RECORD + unit % RECORD) * UNIT)[:, None] + word
        at = ((slot * RECORD + unit % RECORD) * UNIT)[:, None] + word

        evicted = tl.load(cache + at, mask=inside[:, None], other=0)
        tl.store(host + to, evicted, mask=(inside & (old >= 0))[:, None])
        tl.debug_barrier()
        tl.store(cache + at, new, mask=inside[:, None])
        unit += step


def exchange_rows(host: Tensor, cache: Tensor, moves: RowMoves, *, background: bool) -> None:
    """Move records between the host and the cache.

    Args:
        host: all records in host memory, ``[V, words]`` int32.
        cache: those in the cache, ``[C, words]``.
        moves: the rows and their slots.
        background: leave nearly the whole GPU to a step that runs at the same time.
    """
    units = host.shape[1] // UNIT.value
    programs = MOVERS
    if background:
        programs = max(FEWEST, min(4 * host.shape[1] // BYTES_PER_MOVER, MOST))
    grid = (min(programs, triton.cdiv(len(moves.missing) * units, UNITS)),)
    warps = max(1, min(16, UNITS // 128))
    _exchange[grid](host, cache, moves, RECORD=units, BLOCK=UNITS, num_warps=warps)

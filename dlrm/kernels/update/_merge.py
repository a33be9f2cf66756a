"""The kernels of :mod:`dlrm.kernels.update.sparse`: sum sorted gradients by row, and update rows.

The gradients are sorted by row, and split into tiles of equal length, one for each program. So
10,000 gradients of one row cost no more than one gradient of each of 10,000 rows.

:func:`merge` sums equal rows of a tile and updates the rows that are entirely inside it. A row that
crosses a tile boundary is only summed: its *spilled* sums, at most two per tile, go to ``partials
[tiles, 2, D]``, the first for a row that began in an earlier tile, the second for one that
continues in the next. :func:`finish` then adds them up in order and updates these rows.
:func:`merge_runs` does the same as :func:`merge`, faster where there are many wide rows.

Words: an *entry* is one gradient with its row; a *run* is the entries of one row. Entries of
negative rows are skipped: -1 if they are in front of all others, -2 elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton
from dlrm.kernels.update._packed import load_packed, store_packed
from dlrm.kernels.update.cached_slots import place_of
from dlrm.kernels.update.rounding import round_to_bf16, store_rounded
from dlrm.kernels.update.rules import (
    Hyper,
    decay_step,
    row_step,
    rule_step,
    store_after_all_read,
)

LONG = tl.constexpr(4)  # chunks of a run beyond which it is summed on its own


class Entries(NamedTuple):
    """The sorted gradients: entry k is gradient ``order[k] - first``, of row ``rows[k] - base``."""

    rows: Tensor
    order: Tensor
    base: int
    first: int
    n: int


class Table(NamedTuple):
    """The tensors to update, and the cache of their rows, if there is one."""

    tensors: tuple[Tensor, ...]
    """The weight, then its states."""
    slots: Tensor | None
    """Slot of each row in the cache, negative for none; None without a cache."""
    to_cache: tuple[int, ...]
    """The row of each tensor at which its cache would begin, see ``CachedSlots``."""
    wide: int = 0
    """Number of packed rows with 8 bits, see :func:`~dlrm.kernels.update.packed.storage`."""


class Step(NamedTuple):
    """The arguments of the update of every row."""

    lr: Tensor
    hyper: Hyper
    seed: Tensor | None


@triton.jit
def add_equal(sum_a, row_a, sum_b, row_b):
    """Combine function of a segmented scan: sums restart where the row changes."""
    return tl.where(row_a == row_b, sum_a + sum_b, sum_b), row_b


@triton.jit
def _row_at(entries, k, mask):
    """The row of entries ``k``; -1 where there is none."""
    return tl.where(mask, tl.load(entries.rows + k, mask=mask, other=0) - entries.base, -1)


@triton.jit
def _slot_of(row, table, live):
    """The slots of rows in the cache, if there is one."""
    slot = row
    if table.slots is not None:
        slot = tl.load(table.slots + row, mask=live, other=-1)
    return slot


@triton.jit
def _place(row, slot, table, INDEX: tl.constexpr):
    """Where rows of a tensor of the table are."""
    if table.slots is not None:
        row = place_of(row, slot, table.to_cache[INDEX])
    return row


@triton.jit
def _pointer(row, slot, table, INDEX: tl.constexpr, WIDTH: tl.constexpr):
    """Where rows of a tensor of the table begin."""
    return table.tensors[INDEX] + _place(row, slot, table, INDEX) * WIDTH


@triton.jit
def _read(
    row, slot, live, table, D: tl.constexpr, BLOCK_D: tl.constexpr, RULE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Read rows ``[K]`` where ``live [K]``, with their states.

    Returns:
        The weights, of packed rows the integers; the scale of packed rows; the first and second
        state of each weight; the state of the row; the momentum. Unused ones are placeholders.
    """
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None] & (column < D)

    # The weights.
    scale = row
    if FORMAT == 0:
        at = _pointer(row, slot, table, 0, D)[:, None] + column
        value = tl.load(at, mask=mask, other=0.0)
    else:
        place = _place(row, slot, table, 0)
        value, scale = load_packed(table.tensors[0], place, table.wide, live, column, D, FORMAT)

    # Their states; what the rule does not have is a placeholder.
    first, second, momentum, row_state = value, value, value, row
    if RULE.weight_states > 0:
        at = _pointer(row, slot, table, 1, D)[:, None] + column
        first = tl.load(at, mask=mask, other=0.0)
    if RULE.weight_states > 1:
        at = _pointer(row, slot, table, 2, D)[:, None] + column
        second = tl.load(at, mask=mask, other=0.0)

    if RULE.row_state is not None:
        at_row = _pointer(row, slot, table, RULE.weight_states + 1, 1)
        row_state = tl.load(at_row, mask=live, other=0)
    if RULE.momentum:
        at = _pointer(row, slot, table, len(table.tensors) - 1, D)[:, None] + column
        momentum = tl.load(at, mask=mask, other=0.0)
    return value, scale, first, second, row_state, momentum


@triton.jit
def _update(
    row, slot, old, grad, live, table, step, D: tl.constexpr, RULE: tl.constexpr,
    ROUND: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Apply the rule to rows ``[K]`` where ``live [K]``.

    Args:
        old: the result of :func:`_read`.
        grad: the summed gradients, ``[K, BLOCK_D]``.
    """
    steps, scale, first, second, row_state, momentum = old
    value = steps.to(tl.float32)
    if FORMAT > 0:
        value = steps * scale[:, None]

    row = row.to(tl.int64)
    column = tl.arange(0, grad.shape[1])[None, :]
    mask = live[:, None] & (column < D)
    lr = tl.load(step.lr)
    value, grad = decay_step(value, grad, lr, step.hyper, RULE)

    # The states, rounded where they are bf16.
    if RULE.row_state is not None:
        NARROW: tl.constexpr = row_state.dtype == tl.bfloat16
        if NARROW:
            row_state = row_state.to(tl.float32)
        row_state = row_step(row_state, tl.sum(grad * grad, 1) / D, RULE)
        kept = row_state
        if NARROW and ROUND:
            kept = round_to_bf16(row_state, ~row, step.seed)  # weights have numbers from 0 on
        at_row = _pointer(row, slot, table, RULE.weight_states + 1, 1)
        store_after_all_read(at_row, kept.to(at_row.dtype.element_ty), live)

    first, second, move = rule_step(first, second, row_state, grad, step.hyper, RULE)
    if RULE.weight_states > 1:
        tl.store(_pointer(row, slot, table, 2, D)[:, None] + column, second, mask=mask)
    if RULE.weight_states > 0:
        tl.store(_pointer(row, slot, table, 1, D)[:, None] + column, first, mask=mask)
    if RULE.momentum:
        move += step.hyper.momentum * momentum
        at = _pointer(row, slot, table, len(table.tensors) - 1, D)[:, None] + column
        tl.store(at, move, mask=mask)

    if FORMAT == 0:
        element = row[:, None] * D + column
        weight = _pointer(row, slot, table, 0, D)[:, None] + column
        store_rounded(weight, element, value - lr * move, mask, step.seed, ROUND)
    else:
        place = _place(row, slot, table, 0)
        store_packed(
            table.tensors[0], row, place, table.wide, live, steps, scale, value - lr * move,
            step.seed, D, FORMAT, ROUND,
        )  # fmt: skip


@triton.jit
def merge(
    entries, grads, partials, table, step,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    RULE: tl.constexpr, ROUND: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Sum a tile of sorted gradients by row; update rows inside it, spill those that cross it.

    Weights and states are read when the sums are done. Read ahead, they took so many registers
    that fewer warps ran: on an H200 row-wise Adagrad took 1.12 times as long, Adam 1.5 times.
    """
    tile = tl.program_id(0)
    begin = tile * BLOCK * PARTS
    before = _row_at(entries, begin - 1, tile > 0)
    column = tl.arange(0, BLOCK_D)[None, :]
    last_row = before  # of the part before, and its sum so far
    last_sum = tl.zeros((1, BLOCK_D), tl.float32)

    # A tile of nothing but skipped entries in front of all others has nothing to do.
    last = tl.minimum(begin + BLOCK * PARTS, entries.n) - 1
    highest = tl.load(entries.rows + last) - entries.base

    at = tl.arange(0, BLOCK)
    for part in range(tl.where(highest == -1, PARTS, 0), PARTS):
        k = begin + part * BLOCK + at
        inside = k < entries.n
        row = _row_at(entries, k, inside)
        following = _row_at(entries, k + 1, k + 1 < entries.n)
        entry = tl.load(entries.order + k, mask=inside, other=0).to(tl.int64) - entries.first

        ends = inside & (row != following)
        late = row == before  # it began in an earlier tile
        live = ends & ~late & (row >= 0)
        slot = _slot_of(row, table, row >= 0)  # in flight while the sums are computed

        # Sum the entries of each row up to every entry: its last one has the whole sum.
        mask = (row >= 0)[:, None] & (column < D)  # the gradient of a skipped entry is not read
        grad = tl.load(grads + entry[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
        keys = tl.broadcast_to(row[:, None], (BLOCK, BLOCK_D))
        total, _ = tl.associative_scan((grad, keys), 0, add_equal)
        total += tl.where((row == last_row)[:, None], last_sum, 0.0)
        if tl.max(live.to(tl.int32), 0) > 0:  # half of Kaggle's parts are inside a single run
            old = _read(row, slot, live, table, D, BLOCK_D, RULE, FORMAT)
            _update(row, slot, old, total, live, table, step, D, RULE, ROUND, FORMAT)

        # Spill the sums of rows that cross a boundary of the tile, and pass on that of the part.
        end_of_part = at == BLOCK - 1
        crosses = end_of_part & inside & ~ends & (part == PARTS - 1)  # into the next tile
        spill = ((ends & late) | crosses)[:, None] & (column < D)
        to = tile.to(tl.int64) * 2 + tl.where(late, 0, 1)
        tl.store(partials + to[:, None] * D + column, total, mask=spill)
        last_row = tl.sum(tl.where(end_of_part, row, 0), 0)
        last_sum = tl.sum(tl.where(end_of_part[:, None], total, 0.0), 0)[None, :]


@triton.jit
def merge_runs(
    entries, grads, partials, begins, table, step,
    D: tl.constexpr, LENGTH: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, RULE: tl.constexpr, ROUND: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """:func:`merge` for many wide rows: list the runs of a tile, then sum each.

    This takes half the registers, and applies the rule once per row, not once per entry. But loads
    wait for the list. ``begins`` has room for an index per entry.
    """
    # List the entry at which each run begins.
    tile = tl.program_id(0)
    first = tile * LENGTH
    last = tl.minimum(first + LENGTH, entries.n)
    k = first + tl.arange(0, LENGTH)
    row = _row_at(entries, k, k < last)
    previous = _row_at(entries, k - 1, (k > first) & (k < last))
    begin = (row != -1) & (row != previous)  # of skipped entries between others too
    count = tl.sum(begin.to(tl.int32), 0)
    tl.store(begins + first + tl.cumsum(begin.to(tl.int32), 0) - 1, k, mask=begin)
    tl.debug_barrier()  # other threads read them

    # The first run may have begun in an earlier tile; the last one may continue in the next.
    edge = _row_at(entries, first + tl.arange(0, 1), True)
    late = _row_at(entries, first - 1 + tl.arange(0, 1), tile > 0) == edge
    edge = _row_at(entries, last - 1 + tl.arange(0, 1), True)
    crosses = _row_at(entries, last + tl.arange(0, 1), last < entries.n) == edge

    # Sum several short runs together. Long ones go one by one, with as many gradients in flight.
    for group in range(0, count, RUNS):
        run = group + tl.arange(0, RUNS)
        start, end = _bounds(run, begins, first, last, count)
        if tl.max(end - start, 0) <= LONG * CHUNK:
            _update_runs(
                tile, first, last, late, crosses, start, end, entries, grads, partials, table, step,
                D, RUNS, CHUNK, BLOCK_D, RULE, ROUND, FORMAT,
            )  # fmt: skip
        else:
            for one in range(group, tl.minimum(group + RUNS, count)):
                own_start, own_end = _bounds(one + tl.arange(0, 1), begins, first, last, count)
                _update_runs(
                    tile, first, last, late, crosses, own_start, own_end, entries, grads, partials,
                    table, step,
                    D, 1, RUNS * CHUNK, BLOCK_D, RULE, ROUND, FORMAT,
                )  # fmt: skip


@triton.jit
def _bounds(run, begins, first, last, count):
    """The entries ``[start, end)`` of each run of a tile; empty beyond the last run."""
    start = tl.load(begins + first + run, mask=run < count, other=0)
    end = tl.load(begins + first + run + 1, mask=run + 1 < count, other=0)
    return tl.where(run < count, start, last), tl.where(run + 1 < count, end, last)


@triton.jit
def _update_runs(
    tile, first, last, late, crosses, start, end, entries, grads, partials, table, step,
    D: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
    RULE: tl.constexpr, ROUND: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Sum each run, ``CHUNK`` gradients of each at a time, and update its row, or spill the sum."""
    there = start < end
    row = _row_at(entries, start, there)
    late, crosses = late & there & (start == first), crosses & there & (end == last)
    live = there & ~late & ~crosses & (row >= 0)
    slot = _slot_of(row, table, live)  # in flight while the sums are computed

    column = tl.arange(0, BLOCK_D)
    same = tl.max_contiguous(tl.arange(0, BLOCK_D), 4)
    total = tl.zeros((RUNS, BLOCK_D), tl.float32)
    for done in range(0, tl.max(end - start, 0), CHUNK):
        k = start[:, None] + done + tl.arange(0, CHUNK)[None, :]
        inside = k < end[:, None]
        entry = tl.load(entries.order + k, mask=inside, other=0).to(tl.int64) - entries.first
        mask = inside[:, :, None] & (column < D)[None, None, :]
        at = entry[:, :, None] * D + same[None, None, :]
        total += tl.sum(tl.load(grads + at, mask=mask, other=0.0).to(tl.float32), 1)

    old = _read(row, slot, live, table, D, BLOCK_D, RULE, FORMAT)
    _update(row, slot, old, total, live, table, step, D, RULE, ROUND, FORMAT)
    to = tile.to(tl.int64) * 2 + tl.where(late, 0, 1)
    spill = (late | crosses)[:, None] & (column < D)[None, :]
    tl.store(partials + to[:, None] * D + column[None, :], total, mask=spill)


@triton.jit
def finish(
    entries, partials, table, step,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
    RULE: tl.constexpr, ROUND: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Update the row that begins in this tile and crosses into the next, if there is one."""
    tile = tl.program_id(0)
    end = (tile + 1) * BLOCK
    row = tl.load(entries.rows + end - 1) - entries.base
    before = _row_at(entries, tile * BLOCK - 1, tile > 0)

    if (tl.load(entries.rows + end) - entries.base == row) & (before != row):
        column = tl.arange(0, BLOCK_D)
        inside = column < D
        own = partials + (tile.to(tl.int64) * 2 + 1) * D
        total = tl.load(own + column, mask=inside, other=0.0)[None, :]

        # Add the first sums of the following tiles, as many as are of this row.
        more = True
        while more:
            part = tile + 1 + tl.arange(0, WIDTH)
            same = _row_at(entries, part * BLOCK, part * BLOCK < entries.n) == row
            at = part.to(tl.int64)[:, None] * (2 * D) + column[None, :]
            mask = same[:, None] & inside[None, :]
            total += tl.sum(tl.load(partials + at, mask=mask, other=0.0), 0)[None, :]
            more = tl.sum(same.to(tl.int32), 0) == WIDTH
            tile += WIDTH

        rows = row + tl.zeros((1,), row.dtype)
        live = rows >= 0
        slot = _slot_of(rows, table, live)
        old = _read(rows, slot, live, table, D, BLOCK_D, RULE, FORMAT)
        _update(rows, slot, old, total, live, table, step, D, RULE, ROUND, FORMAT)

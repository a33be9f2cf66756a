"""Update the rows of a table from the gradients of its look-ups, in one pass.

``n`` look-ups have ``n`` gradient rows, many of them for the same row of the table. They are
sorted by row (:mod:`dlrm.kernels.update.row_sort`: this needs only the ids and can run ahead of
time) and summed per row, and the rule is applied once to each row that was used. There is no dense
gradient, no coalesced copy, no count of unique rows on the host, and the result is deterministic.

Bytes an update must move: every gradient row and its row number once, every unique row of the
weight and its state twice.

The sorted gradients are split into tiles of equal length, so that 10,000 gradients of one row cost
no more than one gradient of 10,000 rows. A tile sums equal rows by a segmented scan, one part after
another, and updates the rows that are entirely inside it. The partial sums of a row that crosses a
tile boundary (at most two per tile) go to a buffer, and a second, small kernel adds them up in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.kernels import require_integers, tl, triton, use_triton
from dlrm.kernels.update.cached_slots import CachedSlots
from dlrm.kernels.update.packed import (
    load_packed,
    packed_rows,
    storage,
    store_packed,
    update_packed_torch,
)
from dlrm.kernels.update.rounding import round_stochastic, round_to_bf16, store_rounded
from dlrm.kernels.update.row_sort import SortedRows, merge_rows_torch, sort_rows
from dlrm.kernels.update.rules import (
    Hyper,
    Rule,
    decay_step,
    foreach_update,
    hyper,
    make_rule,
    row_step,
    rule_step,
    store_after_all_read,
)

TILE = 2048  # elements that a warp sums at a time
MANY = 6000  # tiles that fill a GPU; beyond that, tiles have several parts
LONGEST = 8 * TILE  # elements of a tile of many parts


class _Entries(NamedTuple):
    """The sorted gradients: entry k is gradient ``order[k] - first``, of row ``rows[k] - base``."""

    rows: Tensor
    order: Tensor
    base: int
    first: int
    n: int


class _Table(NamedTuple):
    """What is updated: the weight, then its states; ``offsets`` as of :class:`CachedSlots`."""

    tensors: tuple[Tensor, ...]
    slots: Tensor | None
    offsets: tuple[int, ...]
    wide: int = 0  # of packed rows, see :func:`~dlrm.kernels.update.packed.storage`


class _Step(NamedTuple):
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
def _pointer(row, slot, table, INDEX: tl.constexpr, WIDTH: tl.constexpr):
    """Where rows of a tensor of the table, or their cached copies, begin."""
    at = row * WIDTH
    if table.slots is not None:
        at = tl.where(slot >= 0, slot.to(tl.int64) * WIDTH + table.offsets[INDEX], at)
    return table.tensors[INDEX] + at


@triton.jit
def _update(
    row, slot, grad, live, table, step, D: tl.constexpr, RULE: tl.constexpr, ROUND: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Apply the rule to ``row [K]`` where ``live [K]``, given the summed ``grad [K, BLOCK_D]``."""
    WEIGHTS: tl.constexpr = RULE.weight_states
    row = row.to(tl.int64)
    column = tl.arange(0, grad.shape[1])[None, :]
    mask = live[:, None] & (column < D)
    lr = tl.load(step.lr)
    if FORMAT == 0:
        weight = _pointer(row, slot, table, 0, D)[:, None] + column
        value = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    else:
        value, scale = load_packed(table.tensors[0], row, table.wide, live, column, D, FORMAT)
    value, grad = decay_step(value, grad, lr, step.hyper, RULE)
    first, second = grad, grad
    row_state = row
    if WEIGHTS > 0:
        at_first = _pointer(row, slot, table, 1, D)[:, None] + column
        first = tl.load(at_first, mask=mask, other=0.0)
    if WEIGHTS > 1:
        at_second = _pointer(row, slot, table, 2, D)[:, None] + column
        second = tl.load(at_second, mask=mask, other=0.0)
    if RULE.row_state is not None:
        at_row = _pointer(row, slot, table, WEIGHTS + 1, 1)
        old = tl.load(at_row, mask=live, other=0)
        NARROW: tl.constexpr = old.dtype == tl.bfloat16
        if NARROW:
            old = old.to(tl.float32)
        row_state = row_step(old, tl.sum(grad * grad, 1) / D, RULE)
        kept = row_state
        if NARROW and ROUND:
            kept = round_to_bf16(row_state, ~row, step.seed)  # no number of a weight
        store_after_all_read(at_row, kept.to(at_row.dtype.element_ty), live)
    first, second, move = rule_step(first, second, row_state, grad, step.hyper, RULE)
    if WEIGHTS > 1:
        tl.store(at_second, second, mask=mask)
    if WEIGHTS > 0:
        tl.store(at_first, first, mask=mask)
    if RULE.momentum:
        at_buffer = _pointer(row, slot, table, len(table.tensors) - 1, D)[:, None] + column
        move += step.hyper.momentum * tl.load(at_buffer, mask=mask, other=0.0)
        tl.store(at_buffer, move, mask=mask)
    if FORMAT == 0:
        element = row[:, None] * D + column
        store_rounded(weight, element, value - lr * move, mask, step.seed, ROUND)
    else:
        store_packed(
            table.tensors[0], row, table.wide, live, value - lr * move, scale, step.seed,
            D, FORMAT, ROUND,
        )  # fmt: skip


@triton.jit
def _merge(
    entries, grads, partials, table, step,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    RULE: tl.constexpr, ROUND: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Sum a tile of sorted gradients by row; update rows inside it, spill those that cross it."""
    tile = tl.program_id(0)
    begin = tile * BLOCK * PARTS
    before = _row_at(entries, begin - 1, tile > 0)
    column = tl.arange(0, BLOCK_D)[None, :]
    last_row = before
    last_sum = tl.zeros((1, BLOCK_D), tl.float32)
    # Skipped entries are sorted to the front. A tile of nothing else has no more to do.
    last = tl.minimum(begin + BLOCK * PARTS, entries.n) - 1
    highest = tl.load(entries.rows + last) - entries.base
    for part in range(tl.where(highest < 0, PARTS, 0), PARTS):
        at = tl.arange(0, BLOCK)
        k = begin + part * BLOCK + at
        inside = k < entries.n
        row = _row_at(entries, k, inside)
        following = _row_at(entries, k + 1, k + 1 < entries.n)
        entry = tl.load(entries.order + k, mask=inside, other=0).to(tl.int64) - entries.first
        slot = _slot_of(row, table, row >= 0)  # in flight while the sums are computed
        mask = (row >= 0)[:, None] & (column < D)  # the gradient of a skipped entry is not read
        grad = tl.load(grads + entry[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
        keys = tl.broadcast_to(row[:, None], (BLOCK, BLOCK_D))
        total, _ = tl.associative_scan((grad, keys), 0, add_equal)
        total += tl.where((row == last_row)[:, None], last_sum, 0.0)

        ends = inside & (row != following)
        late = row == before  # it began in an earlier tile
        _update(row, slot, total, ends & ~late, table, step, D, RULE, ROUND, FORMAT)
        end_of_part = at == BLOCK - 1
        crosses = end_of_part & inside & ~ends & (part == PARTS - 1)  # into the next tile
        spill = ((ends & late) | crosses)[:, None] & (column < D)
        to = tile.to(tl.int64) * 2 + tl.where(late, 0, 1)
        tl.store(partials + to[:, None] * D + column, total, mask=spill)
        last_row = tl.sum(tl.where(end_of_part, row, 0), 0)
        last_sum = tl.sum(tl.where(end_of_part[:, None], total, 0.0), 0)[None, :]


@triton.jit
def _finish(
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
        _update(rows, slot, total, live, table, step, D, RULE, ROUND, FORMAT)


def update_rows(
    rule: str | Rule,
    weight: Tensor,
    rows: Tensor,
    grads: Tensor,
    states: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    sorted_rows: SortedRows | None = None,
    cached: CachedSlots | None = None,
    seed: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Apply one optimizer step, in place, to the rows of a row gradient.

    Gradients of equal rows are summed first. Nothing is read back by the host and no shape depends
    on the ids, so a CUDA graph can capture the call.

    Args:
        rule: a rule of :func:`~dlrm.kernels.update.rules.make_rule`, or the name of one with its
            default options.
        weight: the table, ``[V, D]`` contiguous, fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`.
        rows: row of each gradient, ``[n]``; those with row -1 are skipped.
        grads: ``[n, D]``, fp32 or bf16; with ``sorted_rows`` of another length, if their ``order``
            says which gradient each row has, as where a bag of rows has one.
        states: state of the table, in the order of ``rule.states``, zeros at first: ``[V, D]``, or
            ``[V]`` or ``[V, 1]`` where it is one number per row; fp32, steps also int32, sums also
            bf16, which are rounded as bf16 rows are.
        lr: learning rate, a 0-d fp32 tensor.
        sorted_rows: ``sort_rows(rows, V)`` if that was computed ahead; the kernels then read it in
            place of ``rows``.
        cached: the cached rows of ``weight`` and ``states``, if these are in host memory.
        seed: a 0-d int64 tensor. With it bf16 and packed rows are rounded stochastically, without
            bias, and the seed increases by one; without it they are rounded to nearest.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: unknown rule, states or shapes that do not fit, or rows that are not integers or
            on another device.
    """
    rule = make_rule(rule) if isinstance(rule, str) else rule
    _check(rule, weight, grads, states)
    if sorted_rows is None:
        require_integers(weight, rows=rows)
        if rows.shape != grads.shape[:1]:
            raise ValueError(
                f"rows have shape {tuple(rows.shape)}, they must be [{len(grads)}]: one a gradient"
            )
    if not use_triton(weight, impl):
        update_rows_torch(rule, weight, rows, grads, states, lr=lr, cached=cached, seed=seed)
        return
    sorted_rows = sorted_rows or sort_rows(rows, len(weight))
    if len(sorted_rows.rows):
        data, wide, packing = storage(weight)
        table = _Table((data, *states), None, (), wide)
        if cached is not None:
            table = _Table((data, *states), cached.slots, cached.offsets((data, *states)))
        step = _Step(lr, hyper(rule), seed)
        _launch(rule, sorted_rows, grads.contiguous(), table, step, packing)
    if seed is not None:  # without gradients too, so that every process rounds replicas alike
        seed.add_(1)


def _launch(
    rule: Rule, sorted_rows: SortedRows, grads: Tensor, table: _Table, step: _Step, packing: int
) -> None:
    n, dim = len(sorted_rows.rows), grads.shape[1]
    block_d = max(2 if packing else 1, triton.next_power_of_2(dim))
    block, warps = _tile(block_d, rule.kind.weight_states + rule.kind.momentum)
    longest = max(8, LONGEST // (block * block_d))
    parts = min(longest, triton.next_power_of_2(max(1, n // (MANY * block))))
    tiles = triton.cdiv(n, block * parts)
    partials = torch.empty(tiles, 2, dim, device=grads.device)
    entries = _Entries(sorted_rows.rows, sorted_rows.order, sorted_rows.base, sorted_rows.first, n)
    options = {
        "D": dim,
        "BLOCK_D": block_d,
        "RULE": rule.kind,
        "ROUND": step.seed is not None
        and (packing > 0 or table.tensors[0].dtype == torch.bfloat16),
        "FORMAT": packing,
    }
    _merge[tiles,](
        entries, grads, partials, table, step,
        BLOCK=block, PARTS=parts, num_warps=warps, **options,
    )  # fmt: skip
    if tiles > 1:
        _finish[tiles - 1,](
            entries, partials, table, step,
            BLOCK=block * parts, WIDTH=max(16, min(64, 4096 // block_d)), num_warps=1, **options,
        )  # fmt: skip


def _tile(block_d: int, states: int) -> tuple[int, int]:
    """Rows of a part of a tile, and its warps.

    A warp holds the gradient, the weight and each state of its elements in registers, and their
    addresses. With 64 elements a thread Adam spilled 5 kB a thread: ten times the time.
    """
    elements = max(32, TILE >> min(states, 2))
    block = max(8, min(256, elements // block_d))
    return block, min(4, max(1, block * block_d // elements))


def _check(rule: Rule, weight: Tensor, grads: Tensor, states: Sequence[Tensor]) -> None:
    rows, dim = weight.shape
    sizes = [rows if per_row else rows * dim for per_row in rule.states.values()]
    if [state.numel() for state in states] != sizes:
        raise ValueError(
            f"{rule.name} on a table {(rows, dim)} needs states of {sizes} elements, "
            f"got {[tuple(state.shape) for state in states]}"
        )
    if grads.dim() != 2 or grads.shape[1] != dim:
        raise ValueError(f"grads have shape {tuple(grads.shape)}, they must be [n, {dim}]")
    if not all(tensor.is_contiguous() for tensor in (storage(weight)[0], *states)):
        raise ValueError("weight and states must be contiguous, they are updated in place")


@torch.no_grad()
def update_rows_torch(
    rule: str | Rule,
    weight: Tensor,
    rows: Tensor,
    grads: Tensor,
    states: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    cached: CachedSlots | None = None,
    seed: Tensor | None = None,
) -> None:
    """:func:`update_rows` in PyTorch, which draws from PyTorch's generator, not ``seed``."""
    if not len(rows):
        return
    rule = make_rule(rule) if isinstance(rule, str) else rule
    rows, grad = merge_rows_torch(rows.long(), grads)
    packed = packed_rows(weight)
    if packed is not None:
        update_packed_torch(rule, packed, rows, grad, states, lr, seed)
        return
    tensors = [tensor.view(len(weight), -1) for tensor in (weight, *states)]
    if cached is None:
        value, *state = [tensor.index_select(0, rows) for tensor in tensors]
    else:
        value, *state = [cached.read(tensor, i, rows) for i, tensor in enumerate(tensors)]
    value = value.to(grad.dtype)
    foreach_update(rule, [value], [grad], [state], lr)
    if seed is not None and weight.dtype == torch.bfloat16:
        value = round_stochastic(value)
    for index, (tensor, new) in enumerate(zip(tensors, (value, *state), strict=True)):
        if cached is None:
            tensor.index_copy_(0, rows, new.to(tensor.dtype))
        else:
            cached.write(tensor, index, rows, new.to(tensor.dtype))

"""Update the rows of a table from an uncoalesced row gradient, in one pass.

A look-up of ``n`` ids yields ``n`` gradient rows, many for the same row of the table. They are
sorted by row (:mod:`dlrm.kernels.update.row_sort`: that needs the ids alone and can run ahead),
summed per row, and the optimizer's rule is applied to each touched row once: no dense gradient, no
coalesced copy, no count of distinct rows on the host, and the same bits every time.

Bytes an update must move: every gradient row once, with its number, and every distinct row of the
weight and the state twice.

The sorted entries are cut into tiles of equal length, so that a row with tens of thousands of
entries costs no more than as many rows with one. A tile sums its rows by segmented scans, part
after part, and updates those that lie wholly inside it. The sums of a row that crosses into other
tiles (at most two per tile) go to a buffer, and a second, small kernel adds them up in order.

Rows of a table in host memory may have a copy on the GPU, with their state
(:mod:`dlrm.kernels.offload.row_cache`): then the copy is updated, and without one the row in its
place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from dlrm.kernels import require_integers, use_triton
from dlrm.kernels.offload.row_cache import CachedRows
from dlrm.kernels.update.row_sort import SortedRows, sort_rows
from dlrm.kernels.update.rules import (
    Rule,
    foreach_update,
    hyper,
    make_rule,
    round_stochastic,
    rule_step,
    store_of_all,
    store_rounded,
)

TILE = 2048  # elements of a tile's part
MANY = 6000  # tiles that fill a GPU; with more entries, tiles have up to 8 parts


@triton.jit
def add_equal(sum_a, row_a, sum_b, row_b):
    """Of a scan along sorted rows: the sum of what came so far of the same row."""
    return tl.where(row_a == row_b, sum_a + sum_b, sum_b), row_b


@triton.jit
def _slot_of(row, slots, live):
    """The slots of rows in the cache, if there is one."""
    slot = row
    if slots is not None:
        slot = tl.load(slots + row, mask=live, other=-1)
    return slot


@triton.jit
def _begin(row, slots, slot, gaps, TENSOR: tl.constexpr, WIDTH: tl.constexpr):
    """Where the rows of a tensor begin, in elements: in their slots, if they have one."""
    at = row * WIDTH
    if slots is not None:
        at = tl.where(slot >= 0, slot.to(tl.int64) * WIDTH + gaps[TENSOR], at)
    return at


@triton.jit
def _apply(
    row, slot, grad, live, weight, states, slots, gaps, lr, hyper, seed,
    D: tl.constexpr, RULE: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Apply the rule to ``row [K]`` where ``live [K]``, given the summed ``grad [K, BLOCK_D]``."""
    eps, decay, momentum, _, _, _, _, _, _, _, _ = hyper
    row = row.to(tl.int64)
    column = tl.arange(0, grad.shape[1])[None, :]
    mask = live[:, None] & (column < D)
    rate = tl.load(lr)
    at = _begin(row, slots, slot, gaps, 0, D)[:, None] + column
    value = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if DECAY and RULE == "adamw":
        value = value * (1 - rate * decay)
    elif DECAY:
        grad = grad + decay * value
    if RULE == "rowwise_adagrad":
        at_sum = _begin(row, slots, slot, gaps, 1, 1)
        total = tl.load(states[0] + at_sum, mask=live, other=0.0) + tl.sum(grad * grad, 1) / D
        store_of_all(states[0] + at_sum, total, live)
        step = grad / (tl.sqrt_rn(total) + eps)[:, None]
    elif RULE == "sgd":
        step = grad
    else:
        at_first = _begin(row, slots, slot, gaps, 1, D)[:, None] + column
        first = tl.load(states[0] + at_first, mask=mask, other=0.0)
        second, count = first, row  # what has neither looks at neither
        if RULE != "adagrad" and RULE != "rmsprop":
            at_second = _begin(row, slots, slot, gaps, 2, D)[:, None] + column
            second = tl.load(states[1] + at_second, mask=mask, other=0.0)
            if RULE != "adadelta":
                at_steps = _begin(row, slots, slot, gaps, 3, 1)
                count = tl.load(states[2] + at_steps, mask=live, other=0) + 1
                store_of_all(states[2] + at_steps, count, live)
        first, second, step = rule_step(first, second, grad, count, hyper, RULE)
        if RULE != "adagrad" and RULE != "rmsprop":
            tl.store(states[1] + at_second, second, mask=mask)
        tl.store(states[0] + at_first, first, mask=mask)
    if MOMENTUM:  # kept behind the rule's other states
        buffer = states[len(states) - 1]
        at_buffer = _begin(row, slots, slot, gaps, len(states), D)[:, None] + column
        step += momentum * tl.load(buffer + at_buffer, mask=mask, other=0.0)
        tl.store(buffer + at_buffer, step, mask=mask)
    store_rounded(weight, at, row[:, None] * D + column, value - rate * step, mask, seed, ROUND)


@triton.jit
def _row_at(rows, k, mask, base):
    """The rows of entries of a plan; -1 where there is none."""
    return tl.where(mask, tl.load(rows + k, mask=mask, other=0) - base, -1)


@triton.jit
def _merge(
    rows, order, base, first, grads, partials, n, weight, states, slots, gaps, lr, hyper, seed,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    RULE: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Sum a tile of sorted entries by row; update rows inside it, spill those that cross it."""
    tile = tl.program_id(0)
    begin = tile * BLOCK * PARTS
    before = _row_at(rows, begin - 1, tile > 0, base)
    column = tl.arange(0, BLOCK_D)[None, :]
    last_row = before
    last_sum = tl.zeros((1, BLOCK_D), tl.float32)
    # Entries left out come first: of a list with room to spare they fill tiles, which end here.
    highest = tl.load(rows + tl.minimum(begin + BLOCK * PARTS, n) - 1) - base
    for part in range(tl.where(highest < 0, PARTS, 0), PARTS):
        at = tl.arange(0, BLOCK)
        k = begin + part * BLOCK + at
        inside = k < n
        row = _row_at(rows, k, inside, base)
        following = _row_at(rows, k + 1, k + 1 < n, base)
        entry = tl.load(order + k, mask=inside, other=0) - first
        slot = _slot_of(row, slots, row >= 0)  # on its way while the sums are made
        mask = (row >= 0)[:, None] & (column < D)  # entries left out have no gradient to be read
        grad = tl.load(grads + entry[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
        keys = tl.broadcast_to(row[:, None], (BLOCK, BLOCK_D))
        total, _ = tl.associative_scan((grad, keys), 0, add_equal)
        total += tl.where((row == last_row)[:, None], last_sum, 0.0)

        end = inside & (row != following)
        late = row == before  # it began in an earlier tile
        _apply(
            row, slot, total, end & ~late, weight, states, slots, gaps, lr, hyper, seed,
            D, RULE, MOMENTUM, DECAY, ROUND,
        )  # fmt: skip
        last = at == BLOCK - 1
        cut = last & inside & ~end & (part == PARTS - 1)  # it goes on in the next
        slot = tile.to(tl.int64) * 2 + tl.where(late, 0, 1)
        spill = ((end & late) | cut)[:, None] & (column < D)
        tl.store(partials + slot[:, None] * D + column, total, mask=spill)
        last_row = tl.sum(tl.where(last, row, 0), 0)
        last_sum = tl.sum(tl.where(last[:, None], total, 0.0), 0)[None, :]


@triton.jit
def _finish(
    rows, base, partials, n, weight, states, slots, gaps, lr, hyper, seed,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
    RULE: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Update the row that begins in this tile and goes on in the next, if there is one."""
    tile = tl.program_id(0)
    end = (tile + 1) * BLOCK
    row = tl.load(rows + end - 1) - base
    before = _row_at(rows, tile * BLOCK - 1, tile > 0, base)
    if (tl.load(rows + end) - base == row) & (before != row):
        column = tl.arange(0, BLOCK_D)
        inside = column < D
        slot = partials + (tile.to(tl.int64) * 2 + 1) * D
        total = tl.load(slot + column, mask=inside, other=0.0)[None, :]
        more = True
        while more:
            part = tile + 1 + tl.arange(0, WIDTH)
            same = _row_at(rows, part * BLOCK, part * BLOCK < n, base) == row
            at = part.to(tl.int64)[:, None] * (2 * D) + column[None, :]
            mask = same[:, None] & inside[None, :]
            total += tl.sum(tl.load(partials + at, mask=mask, other=0.0), 0)[None, :]
            more = tl.sum(same.to(tl.int32), 0) == WIDTH
            tile += WIDTH
        rows_ = row + tl.zeros((1,), row.dtype)
        live = rows_ >= 0
        _apply(
            rows_, _slot_of(rows_, slots, live), total, live, weight, states, slots, gaps, lr,
            hyper, seed, D, RULE, MOMENTUM, DECAY, ROUND,
        )  # fmt: skip


def update_rows(
    rule: str | Rule,
    weight: Tensor,
    rows: Tensor,
    grads: Tensor,
    states: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    plan: SortedRows | None = None,
    cached: CachedRows | None = None,
    seed: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Apply one optimizer step, in place, to the rows that a row gradient touches.

    Entries of equal rows are summed first. Nothing is read back by the host and no shape depends
    on the ids, so a CUDA graph can hold the call.

    Args:
        rule: one of ``dlrm.kernels.update.rules.RULES`` with its default options, or what
        ``make_rule`` gives.
        weight: the table, ``[V, D]`` contiguous, fp32 or bf16.
        rows: row of each entry, ``[n]``; entries with row -1 are left out.
        grads: gradient of each entry, ``[n, D]``, fp32 or bf16.
        states: what the rule keeps, in the order of ``rule.states``, zeros at first: ``[V, D]``
            or, where it is one number a row, ``[V]`` or ``[V, 1]``; fp32, steps also int32.
        lr: learning rate, a 0-d fp32 tensor.
        plan: ``sort_rows(rows, V)``, if it was made ahead: Triton then reads that in place of rows.
        cached: which rows have a copy that stands for them, if ``weight`` and ``states`` lie in
            host memory and it knows them, in this order.
        seed: a 0-d int64 tensor: bf16 rows are then rounded up or down by chance, without bias,
            and the seed moves on by one. Without it they are rounded to nearest.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: unknown rule, states or shapes that do not fit, or rows that are no integers or
            on another device.
    """
    rule = make_rule(rule) if isinstance(rule, str) else rule
    _check(rule, weight, grads, states)
    if plan is None:
        require_integers(weight, rows=rows)
        if rows.shape != grads.shape[:1]:
            raise ValueError(
                f"rows have shape {tuple(rows.shape)}, they must be [{len(grads)}]: one a gradient"
            )
    if not use_triton(weight, impl):
        update_rows_torch(rule, weight, rows, grads, states, lr=lr, cached=cached, seed=seed)
        return
    n, dim = grads.shape
    if n == 0:
        if seed is not None:  # of a process that holds no rows: all round their replicas alike
            seed.add_(1)
        return
    grads = grads.contiguous()
    plan = plan or sort_rows(rows, len(weight))
    block_d = triton.next_power_of_2(dim)
    block = max(16, min(256, TILE // block_d))
    parts = min(8, triton.next_power_of_2(max(1, n // (MANY * block))))
    tiles = triton.cdiv(n, block * parts)
    partials = torch.empty(tiles, 2, dim, device=grads.device)
    slots, gaps = (None, ()) if cached is None else (cached.slots, cached.gaps)
    rest = (n, weight, tuple(states), slots, gaps, lr, hyper(rule), seed)
    options = {
        "D": dim,
        "BLOCK_D": block_d,
        "RULE": rule.name,
        "MOMENTUM": rule.momentum > 0,
        "DECAY": rule.weight_decay > 0,
        "ROUND": seed is not None and weight.dtype == torch.bfloat16,
    }
    _merge[tiles,](
        plan.rows, plan.order, plan.base, plan.first, grads, partials, *rest,
        BLOCK=block, PARTS=parts, num_warps=max(1, block * block_d // 2048), **options,
    )  # fmt: skip
    if tiles > 1:
        width = max(16, min(64, 4096 // block_d))
        _finish[tiles - 1,](
            plan.rows, plan.base, partials, *rest,
            BLOCK=block * parts, WIDTH=width, num_warps=1, **options,
        )  # fmt: skip
    if seed is not None:
        seed.add_(1)


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
    if not all(tensor.is_contiguous() for tensor in (weight, *states)):
        raise ValueError("weight and states must be contiguous, they are updated in place")


def merge_rows_torch(rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the entries of equal rows.

    Args:
        rows: row of each entry, ``[n]``; entries below 0 are left out.
        grads: gradient of each entry, ``[n, D]``.

    Returns:
        The distinct rows, ascending, and their sums in fp32 or wider.
    """
    rows, order = rows.sort(stable=True)
    rows, counts = rows.unique_consecutive(return_counts=True)
    grads = grads.to(torch.promote_types(grads.dtype, torch.float32))
    sums = functional.embedding_bag(order, grads, counts.cumsum(0) - counts, mode="sum")
    live = int((rows < 0).sum())
    return rows[live:], sums[live:]


@torch.no_grad()
def update_rows_torch(
    rule: str | Rule,
    weight: Tensor,
    rows: Tensor,
    grads: Tensor,
    states: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    cached: CachedRows | None = None,
    seed: Tensor | None = None,
) -> None:
    """:func:`update_rows` in PyTorch; its bf16 rows draw from torch's generator, not ``seed``."""
    if not len(rows):
        return
    rule = make_rule(rule) if isinstance(rule, str) else rule
    rows, grad = merge_rows_torch(rows.long(), grads)
    tensors = [tensor.view(len(weight), -1) for tensor in (weight, *states)]
    if cached is None:
        value, *kept = [tensor.index_select(0, rows) for tensor in tensors]
    else:
        value, *kept = [cached.read(index, rows) for index in range(len(tensors))]
    value = value.to(grad.dtype)
    foreach_update(rule, [value], [grad], [kept], lr)
    if seed is not None and weight.dtype == torch.bfloat16:
        value = round_stochastic(value)
    for index, new in enumerate((value.to(weight.dtype), *kept)):
        if cached is None:
            tensors[index].index_copy_(0, rows, new)
        else:
            cached.write(index, rows, new)

"""Triton kernels that multiply out pairs of slices; see :mod:`dlrm.kernels.tt`.

A pair is a slice ``[Q, R]`` of the small (outer) core and one ``[R, N]`` of the big core beside it;
their product is ``[Q, N]``. Pairs that a batch uses have a *slot* each: the slots of one big slice
lie together, those in ``spans``, in the order of their pairs. ``S*``, ``B*`` and ``O*`` are the
strides of the small core, the big one and the product; ``R2`` is ``R`` rounded up to a power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlrm.kernels.update.rules import rule_step, store_after_all_read


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """``x @ y``, added to ``total`` if that is given; both become bf16 if one of them is."""
    if PRECISION == "bf16" or x.dtype == tl.bfloat16 or y.dtype == tl.bfloat16:
        product = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), total)
    else:
        product = tl.dot(x, y, total, input_precision=PRECISION)
    return product


@triton.jit
def slot_of(slot, at, COPIES: tl.constexpr):
    """The slot of look-ups ``at``, from what :func:`rank_pairs` noted for their pairs.

    Where ids are numbered by how frequent they are, as is usual, the first pair of a table is a
    third of a batch, and additions to one place wait for one another: it has ``COPIES`` slots
    behind one another, of which -2 less the first is noted.
    """
    return tl.where(slot < -1, -2 - slot + at % COPIES, slot)


@triton.jit
def rank_pairs(
    flags, pair_start, small_start, total, slots, members, spans,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give slots to the pairs in use of one big slice, and note the small slice of each.

    The first pair of a table has ``COPIES``: see :func:`slot_of`. Which slice comes first is open,
    and no result depends on it.
    """
    big = tl.program_id(0)
    begin = tl.load(pair_start + big)
    end = tl.load(pair_start + big + 1)
    small = tl.load(small_start + big)
    more = 0  # slots of the first pair, beyond one
    if COPIES > 1:
        first_slice = (big == 0) | (small != tl.load(small_start + tl.maximum(big - 1, 0)))
        more = tl.where(first_slice, tl.load(flags + begin), 0) * (COPIES - 1)
    count = more
    for first in range(begin, end, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        count += tl.sum(tl.load(flags + pair, mask=pair < end, other=0), 0)
    slot = tl.atomic_add(total, count, sem="relaxed")
    tl.store(spans + 2 * big, slot)
    tl.store(spans + 2 * big + 1, slot + count)
    if more > 0:
        tl.store(members + slot + tl.arange(0, COPIES), tl.zeros((COPIES,), tl.int32) + small)
    for first in range(begin, end, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        flag = tl.load(flags + pair, mask=pair < end, other=0)
        at = slot + tl.cumsum(flag, 0) - 1
        several = (more > 0) & (pair == begin)
        at += tl.where(several, 0, more)
        tl.store(slots + pair, tl.where(several, -2 - at, at), mask=flag != 0)
        tl.store(members + at, small + pair - begin, mask=flag != 0)
        slot += tl.sum(flag, 0)


@triton.jit
def pair_products(
    small, big, out, cleared, spans, members,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SJ: tl.constexpr, SR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    OJ: tl.constexpr, OC: tl.constexpr,
    R2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[slot] = small slice [Q, R] @ big slice [R, N]``, for tiles of (slot, Q) rows.

    Where the gradient of ``out`` will be summed, ``cleared`` gets zeros.
    """
    at = tl.program_id(0)
    begin, end = tl.load(spans + 2 * at), tl.load(spans + 2 * at + 1)
    for first in range(tl.program_id(1) * BM, (end - begin) * Q, tl.num_programs(1) * BM):
        m = first + tl.arange(0, BM)
        row = m < (end - begin) * Q
        slot, j = begin + m // Q, m % Q
        member = tl.load(members + slot, mask=row, other=0).to(tl.int64)
        r = tl.arange(0, R2)
        x = tl.load(
            small + (member * (Q * R) + j * SJ)[:, None] + r[None, :] * SR,
            mask=row[:, None] & (r < R)[None, :], other=0.0,
        )  # fmt: skip
        for n in range(0, N, BN):
            c = n + tl.arange(0, BN)
            y = tl.load(
                big + at.to(tl.int64) * (R * N) + r[:, None] * BR + c[None, :] * BC,
                mask=(r < R)[:, None] & (c < N)[None, :], other=0.0,
            )  # fmt: skip
            product = multiply(x, y, None, PRECISION)
            to = (slot.to(tl.int64) * (Q * N) + j * OJ)[:, None] + c[None, :] * OC
            mask = row[:, None] & (c < N)[None, :]
            tl.store(out + to, product.to(out.dtype.element_ty), mask=mask)
            if cleared is not None:
                tl.store(cleared + to, tl.zeros((BM, BN), tl.float32), mask=mask)


@triton.jit
def _apply(big, to, inside, grad, state, at, lr, hyper, length, RULE: tl.constexpr):
    """Update a tile of slice ``at``; under a row-wise rule it is all of the slice."""
    if RULE.name == "adagrad":
        kept = tl.load(state + to, mask=inside, other=0.0)
        kept, _, grad = rule_step(kept, kept, 0, grad, hyper, RULE)
        tl.store(state + to, kept, mask=inside)
    elif RULE.name == "rowwise_adagrad":
        mean = tl.load(state + at) + tl.sum(grad * grad) / length
        store_after_all_read(state + at, mean, None)
        grad /= tl.sqrt_rn(mean) + hyper.eps
    value = tl.load(big + to, mask=inside, other=0.0)
    tl.store(big + to, value - tl.load(lr) * grad, mask=inside)


@triton.jit
def big_gradient(
    small, big, grad, out, d_small, spans, members,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SJ: tl.constexpr, SR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    OJ: tl.constexpr, OC: tl.constexpr,
    R2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    state=None, lr=None, hyper=None, RULE: tl.constexpr = None,
):  # fmt: skip
    """Gradient of a big slice, ``N`` in tiles: the sum over its slots of ``small' @ grad``.

    Each slot's ``grad @ big'`` is added to ``d_small``, if that is given, atomically. With a rule
    the gradient updates ``big``, of which no other program reads this tile, and is not stored.
    """
    at = tl.program_id(0)
    begin, end = tl.load(spans + 2 * at), tl.load(spans + 2 * at + 1)
    r = tl.arange(0, R2)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (r < R)[:, None] & (c < N)[None, :]
    to = at.to(tl.int64) * (R * N) + r[:, None] * BR + c[None, :] * BC
    if d_small is not None:
        y = tl.trans(tl.load(big + to, mask=inside, other=0.0))
    total = tl.zeros((R2, BN), tl.float32)
    for first in range(0, (end - begin) * Q, BM):
        m = first + tl.arange(0, BM)
        row = m < (end - begin) * Q
        slot, j = begin + m // Q, m % Q
        member = tl.load(members + slot, mask=row, other=0).to(tl.int64)
        x = tl.load(
            small + (member * (Q * R) + j * SJ)[None, :] + r[:, None] * SR,
            mask=row[None, :] & (r < R)[:, None], other=0.0,
        )  # fmt: skip
        g = tl.load(
            grad + (slot.to(tl.int64) * (Q * N) + j * OJ)[:, None] + c[None, :] * OC,
            mask=row[:, None] & (c < N)[None, :], other=0.0,
        )  # fmt: skip
        total = multiply(x, g, total, PRECISION)
        if d_small is not None:
            part = multiply(g, y, None, PRECISION)
            tl.atomic_add(
                d_small + (member * (Q * R) + j * SJ)[:, None] + r[None, :] * SR, part,
                mask=row[:, None] & (r < R)[None, :], sem="relaxed",
            )  # fmt: skip
    if RULE is None:
        tl.store(out + to, total, mask=inside)
    elif end > begin:  # under these rules nothing happens to a slice without gradient
        _apply(big, to, inside, total, state, at, lr, hyper, R * N, RULE)


@triton.jit
def small_gradient(
    big, grad, out, spans,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SJ: tl.constexpr, SR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    OJ: tl.constexpr, OC: tl.constexpr,
    R2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each slot adds to the gradient of its small slice: ``grad @ big'``."""
    at = tl.program_id(0)
    begin, end = tl.load(spans + 2 * at), tl.load(spans + 2 * at + 1)
    for first in range(tl.program_id(1) * BM, (end - begin) * Q, tl.num_programs(1) * BM):
        m = first + tl.arange(0, BM)
        row = m < (end - begin) * Q
        slot, j = (begin + m // Q).to(tl.int64), m % Q
        r = tl.arange(0, R2)
        total = tl.zeros((BM, R2), tl.float32)
        for n in range(0, N, BN):
            c = n + tl.arange(0, BN)
            g = tl.load(
                grad + (slot * (Q * N) + j * OJ)[:, None] + c[None, :] * OC,
                mask=row[:, None] & (c < N)[None, :], other=0.0,
            )  # fmt: skip
            y = tl.load(
                big + at.to(tl.int64) * (R * N) + r[None, :] * BR + c[:, None] * BC,
                mask=(r < R)[None, :] & (c < N)[:, None], other=0.0,
            )  # fmt: skip
            total = multiply(g, y, total, PRECISION)
        to = (slot * (Q * R) + j * SJ)[:, None] + r[None, :] * SR
        tl.store(out + to, total, mask=row[:, None] & (r < R)[None, :])


@triton.jit
def sum_small(
    parts, flags, slots, first_pair, step, count, out,
    LENGTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the parts of one small slice over the big slices it is paired with."""
    at = tl.program_id(0)
    first, stride, many = tl.load(first_pair + at), tl.load(step + at), tl.load(count + at)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, many, TILE):
        i = begin + tl.arange(0, TILE)
        pair = first + i * stride
        used = tl.load(flags + pair, mask=i < many, other=0) != 0
        slot = tl.load(slots + pair, mask=used, other=0).to(tl.int64)
        mask = used[:, None] & (column < LENGTH)[None, :]
        total += tl.sum(
            tl.load(parts + slot[:, None] * LENGTH + column[None, :], mask=mask, other=0.0), 0
        )
    tl.store(out + at.to(tl.int64) * LENGTH + column, total, mask=column < LENGTH)

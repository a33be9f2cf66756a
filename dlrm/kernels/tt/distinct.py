"""Triton kernels for the distinct ids of a TT look-up; see :mod:`dlrm.kernels.tt.lookup`.

The ids are in an order in which those of one right factor lie together, so a tile of them has few
right factors, mostly one, and multiplies by each on the tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlrm.kernels.tt.pairs import multiply


@triton.jit
def _tile(
    u, factors, left_slots, first, count,
    A: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows ``(id, A)`` of a tile: their ids, where their left factors lie and what these are."""
    m = tl.arange(0, BM)
    at = first + m // A
    row = (m < BM // A * A) & (at < count)
    both = tl.load(factors + at, mask=row, other=0x7FFFFFFF00000000)
    a = (both & 0xFFFFFFFF).to(tl.int32)
    if left_slots is not None:
        a = tl.load(left_slots + a, mask=row, other=0)
    start = a.to(tl.int64) * (A * R) + m % A * R
    r = tl.arange(0, R2)
    x = tl.load(u + start[:, None] + r[None, :], mask=row[:, None] & (r < R)[None, :], other=0.0)
    return at, row, start, x, (both >> 32).to(tl.int32)


@triton.jit
def distinct_rows(
    u, w, factors, left_slots, right_slots, total, out, cleared,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The row of every distinct id; ``cleared`` gets zeros where its gradient will be summed."""
    count, ids = tl.load(total), BM // A
    for first in range(tl.program_id(0) * ids, count, tl.num_programs(0) * ids):
        at, row, _, x, b = _tile(u, factors, left_slots, first, count, A, R, R2, BM)
        r, c = tl.arange(0, R2), tl.arange(0, C2)
        mask = (r < R)[:, None] & (c < C)[None, :]
        result = tl.zeros((BM, C2), tl.float32)
        now = tl.min(b, 0)
        while now < 2147483647:
            y_row = now.to(tl.int64)
            if right_slots is not None:
                y_row = tl.load(right_slots + now).to(tl.int64)
            y = tl.load(w + y_row * (R * C) + r[:, None] * C + c[None, :], mask=mask, other=0.0)
            product = multiply(x, y, None, PRECISION)
            result = tl.where((b == now)[:, None], product, result)
            now = tl.min(tl.where(b > now, b, 2147483647), 0)
        to = (at.to(tl.int64) * A + tl.arange(0, BM) % A)[:, None] * C + c[None, :]
        mask = row[:, None] & (c < C)[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=mask)
        if cleared is not None:
            tl.store(cleared + to, tl.zeros((BM, C2), tl.float32), mask=mask)


@triton.jit
def distinct_gradient(
    u, w, factors, left_slots, right_slots, total, grad, d_left, d_right,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the factors from those of the distinct rows."""
    count, ids = tl.load(total), BM // A
    for first in range(tl.program_id(0) * ids, count, tl.num_programs(0) * ids):
        at, row, start, x, b = _tile(u, factors, left_slots, first, count, A, R, R2, BM)
        r, c = tl.arange(0, R2), tl.arange(0, C2)
        mask = (r < R)[:, None] & (c < C)[None, :]
        to = (at.to(tl.int64) * A + tl.arange(0, BM) % A)[:, None] * C + c[None, :]
        g_all = tl.load(grad + to, mask=row[:, None] & (c < C)[None, :], other=0.0)
        dx = tl.zeros((BM, R2), tl.float32)
        now = tl.min(b, 0)
        while now < 2147483647:
            y_row = now.to(tl.int64)
            if right_slots is not None:
                y_row = tl.load(right_slots + now).to(tl.int64)
            y_at = y_row * (R * C) + r[:, None] * C + c[None, :]
            y = tl.load(w + y_at, mask=mask, other=0.0)
            g = tl.where((b == now)[:, None], g_all, 0.0)
            dx = multiply(g, tl.trans(y), dx, PRECISION)
            dy = multiply(tl.trans(x), g, None, PRECISION)
            tl.atomic_add(d_right + y_at, dy, mask=mask, sem="relaxed")
            now = tl.min(tl.where(b > now, b, 2147483647), 0)
        tl.atomic_add(
            d_left + start[:, None] + r[None, :], dx,
            mask=row[:, None] & (r < R)[None, :], sem="relaxed",
        )  # fmt: skip


@triton.jit
def spread_rows(
    values, which, offsets, scale, out, n, inner, outer,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of the distinct ids to where they are asked for, one each or summed by bag."""
    column = tl.arange(0, BLOCK_D)
    pid = tl.program_id(0)
    if offsets is None:
        begin = pid * BLOCK
        end = begin + 1
        behind = n
    else:
        begin = tl.load(offsets + pid)
        end = tl.load(offsets + pid + 1)
        behind = end
        total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < behind
        row = tl.load(which + at, mask=mask, other=-1).to(tl.int64)
        inside = mask[:, None] & (column < DIM)[None, :]
        known = inside & (row >= 0)[:, None]
        value = tl.load(values + row[:, None] * DIM + column[None, :], mask=known, other=0.0)
        if offsets is None:
            to = ((at % inner).to(tl.int64) * outer + at // inner) * DIM
            tl.store(out + to[:, None] + column[None, :], value, mask=inside)
        else:
            value = value.to(tl.float32)
            if scale is not None:
                value *= tl.load(scale + at, mask=mask, other=0.0)[:, None]
            total += tl.sum(value, 0)
    if offsets is not None:
        to = ((pid % inner).to(tl.int64) * outer + pid // inner) * DIM
        tl.store(out + to + column, total.to(out.dtype.element_ty), mask=column < DIM)


@triton.jit
def merge_gradients(
    grad, which, bag_of, scale, out, n, inner, outer,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of equal ids."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(which + at, mask=at < n, other=-1).to(tl.int64)
    mask = row >= 0
    result = at
    if bag_of is not None:
        result = tl.load(bag_of + at, mask=mask, other=0)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = mask[:, None] & (column < DIM)
    g_row = (result % inner).to(tl.int64) * outer + result // inner
    g = tl.load(grad + g_row[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale + at, mask=mask, other=0.0)[:, None]
    tl.atomic_add(out + row[:, None] * DIM + column, g, mask=inside, sem="relaxed")

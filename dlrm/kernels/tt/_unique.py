"""Triton kernels for the distinct ids of a TT look-up; see :mod:`dlrm.kernels.tt.lookup`.

The ids of one span (:class:`~dlrm.kernels.tt.layout.Spans`), which share a right factor, lie behind
one another: a program has some of one span, and multiplies tiles of them by that factor on the
tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlrm.kernels.tt._pairs import multiply


@triton.jit
def _part(spans, span_right, right_slots, IDS: tl.constexpr):
    """The ids of a program, which are a part of a span, their right factor and its row.

    The ids of a part are neighbours, and so are their left factors: programs that run at the same
    time find them in the cache.
    """
    span = tl.program_id(0)
    begin, end = tl.load(spans + 2 * span), tl.load(spans + 2 * span + 1)
    many = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), IDS) * IDS
    begin += tl.program_id(1) * many
    end = tl.minimum(begin + many, end)
    right = tl.load(span_right + span)
    row = right
    if right_slots is not None:  # without ids it has none
        row = tl.load(right_slots + right, mask=begin < end, other=0)
    return begin, end, right, row.to(tl.int64)


@triton.jit
def _hot(copy, right, n, rights):
    """Row of a copy of the gradient of a hot id, behind those of ``n`` distinct ids.

    Why there are several: see :func:`~dlrm.kernels.tt._pairs.slot_of`.
    """
    return n + (copy * rights + right).to(tl.int64)


@triton.jit
def _hot_tile(
    copy, right, n, rights,
    A: tl.constexpr, C: tl.constexpr, C2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Where the numbers of that row are."""
    m, c = tl.arange(0, BM)[:, None], tl.arange(0, C2)[None, :]
    return _hot(copy, right, n, rights) * (A * C) + m * C + c, (m < A) & (c < C)


@triton.jit
def _begins(span_right, right, begin, end):
    """Whether a program has the first ids of a right factor."""
    span = tl.program_id(0)
    before = tl.load(span_right + tl.maximum(span - 1, 0))
    return (tl.program_id(1) == 0) & (begin < end) & ((span == 0) | (before != right))


@triton.jit
def _tile(
    u, lefts, first, end,
    A: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows ``(id, A)`` of a tile: their ids, where their left factors lie and what these are."""
    m, r = tl.arange(0, BM), tl.arange(0, R2)
    at = first + m // A
    row = (m < BM // A * A) & (at < end)
    start = tl.load(lefts + at, mask=row, other=0).to(tl.int64) * (A * R) + m % A * R
    x = tl.load(u + start[:, None] + r[None, :], mask=row[:, None] & (r < R)[None, :], other=0.0)
    return at.to(tl.int64) * A + m % A, row, start, x


@triton.jit
def distinct_rows(
    u, w, lefts, spans, span_right, right_slots, out, cleared, n, rights,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The row of every distinct id; ``cleared`` gets zeros where its gradient will be summed."""
    begin, end, right, y_row = _part(spans, span_right, right_slots, BM // A)
    r, c = tl.arange(0, R2), tl.arange(0, C2)
    if cleared is not None:  # noqa: SIM102 -- known when the kernel is compiled, the other is not
        if _begins(span_right, right, begin, end):
            for copy in range(COPIES):
                to, mask = _hot_tile(copy, right, n, rights, A, C, C2, BM)
                tl.store(cleared + to, tl.zeros((BM, C2), tl.float32), mask=mask)
    y_at = y_row * (R * C) + r[:, None] * C + c[None, :]
    y = tl.load(w + y_at, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0)
    for first in range(begin, end, BM // A):
        to, row, _, x = _tile(u, lefts, first, end, A, R, R2, BM)
        to = to[:, None] * C + c[None, :]
        mask = row[:, None] & (c < C)[None, :]
        tl.store(out + to, multiply(x, y, None, PRECISION).to(out.dtype.element_ty), mask=mask)
        if cleared is not None:
            tl.store(cleared + to, tl.zeros((BM, C2), tl.float32), mask=mask)


@triton.jit
def distinct_gradient(
    u, w, lefts, spans, span_right, right_slots, grad, d_left, d_right, n, rights,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Gradients of the factors from those of the distinct rows."""
    begin, end, right, y_row = _part(spans, span_right, right_slots, BM // A)
    r, c = tl.arange(0, R2), tl.arange(0, C2)
    hot = tl.zeros((BM, C2), tl.float32)  # of the first id: of another they are zeros
    if _begins(span_right, right, begin, end):
        for copy in range(COPIES):
            at, mask = _hot_tile(copy, right, n, rights, A, C, C2, BM)
            hot += tl.load(grad + at, mask=mask, other=0.0)
    y_at = y_row * (R * C) + r[:, None] * C + c[None, :]
    inside = (r < R)[:, None] & (c < C)[None, :]
    y = tl.trans(tl.load(w + y_at, mask=inside, other=0.0))
    dy = tl.zeros((R2, C2), tl.float32)
    for first in range(begin, end, BM // A):
        to, row, start, x = _tile(u, lefts, first, end, A, R, R2, BM)
        mask = row[:, None] & (c < C)[None, :]
        g = tl.load(grad + to[:, None] * C + c[None, :], mask=mask, other=0.0)
        g += tl.where(first == begin, hot, 0.0)
        dy = multiply(tl.trans(x), g, dy, PRECISION)
        tl.atomic_add(
            d_left + start[:, None] + r[None, :], multiply(g, y, None, PRECISION),
            mask=row[:, None] & (r < R)[None, :], sem="relaxed",
        )  # fmt: skip
    tl.atomic_add(d_right + y_at, dy, mask=inside & (begin < end), sem="relaxed")


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
    grad, which, right, bag_of, scale, out, n, rights, inner, outer,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of equal ids, those of hot ones in several copies: see :func:`_hot`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(which + at, mask=at < n, other=-1).to(tl.int64)
    mask = row >= 0
    hot = tl.load(right + at, mask=mask, other=-1)
    row = tl.where(hot < 0, row, _hot(at % COPIES, hot, n, rights))
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

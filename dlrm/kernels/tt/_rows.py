"""Triton kernels that multiply left and right factors; see :mod:`dlrm.kernels.tt`.

A left factor is ``[A, R]``, a right one ``[R, C]`` and a row of a table their product. ``X2`` is
``X`` rounded up to a power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlrm.kernels.tt._pairs import slot_of


@triton.jit
def _place(index, slots, at, COPIES: tl.constexpr = 1):
    """Row of a factor in its buffer, a slot of a pair or the slice itself; -1 for none.

    Without masks, and so below wherever ``at`` can be kept in bounds: Triton 3.6 and 3.7 fail to
    compile some masks that serve loads of one and of more dimensions in a loop.
    """
    row = tl.load(index + at)
    if slots is not None:
        row = tl.where(row >= 0, tl.load(slots + tl.maximum(row, 0)), -1)
        row = slot_of(row, at, COPIES)
    return row.to(tl.int64)


@triton.jit
def rows(
    u, w, left, right, left_slots, right_slots, offsets, scale, out, n, inner, outer,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    A2: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``left [A, R] @ right [R, C]``, for ``BLOCK`` look-ups or summed over one bag.

    Result ``k`` goes to row ``(k % inner) * outer + k // inner`` of ``out``: whoever asks table
    after table gets the rows sample after sample.
    """
    a, r, c = tl.arange(0, A2), tl.arange(0, R2), tl.arange(0, C2)
    pid = tl.program_id(0)
    if offsets is None:
        begin = pid * BLOCK
        end = begin + 1
        behind = n
    else:
        begin = tl.load(offsets + pid)
        end = tl.load(offsets + pid + 1)
        behind = end
        total = tl.zeros((A2, C2), tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < behind
        inner_at = tl.minimum(at, behind - 1)
        x_row = _place(left, left_slots, inner_at, COPIES)
        y_row = _place(right, right_slots, inner_at)
        known = mask & (x_row >= 0)
        x = tl.load(
            u + (x_row * (A * R))[:, None, None] + (a * R)[None, :, None] + r[None, None, :],
            mask=known[:, None, None] & (a < A)[None, :, None] & (r < R)[None, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if scale is not None:
            x = x * tl.load(scale + inner_at)[:, None, None]
        result = tl.zeros((BLOCK, A2, C2), tl.float32)
        for k in tl.static_range(C):
            y = tl.load(
                w + (y_row * (R * C))[:, None] + (r * C)[None, :] + k,
                mask=known[:, None] & (r < R)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            entry = tl.sum(x * y[:, None, :], 2)
            result += tl.where((c == k)[None, None, :], entry[:, :, None], 0.0)
        if offsets is None:
            to = ((at % inner).to(tl.int64) * outer + at // inner) * (A * C)
            to = to[:, None, None] + (a * C)[None, :, None] + c[None, None, :]
            mask_to = mask[:, None, None] & (a < A)[None, :, None] & (c < C)[None, None, :]
            tl.store(out + to, result.to(out.dtype.element_ty), mask=mask_to)
        else:
            total += tl.sum(result, 0)
    if offsets is not None:
        to = ((pid % inner).to(tl.int64) * outer + pid // inner) * (A * C)
        mask_to = (a < A)[:, None] & (c < C)[None, :]
        tl.store(
            out + to + (a * C)[:, None] + c[None, :], total.to(out.dtype.element_ty), mask=mask_to
        )


@triton.jit
def factor_gradients(
    u, w, left, right, left_slots, right_slots, grad, bag_of, scale, d_left, d_right,
    n, inner, outer,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    A2: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``grad [A, C] @ right' [C, R]`` and ``left' [R, A] @ grad`` to those of the factors."""
    a, r, c = tl.arange(0, A2), tl.arange(0, R2), tl.arange(0, C2)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.minimum(at, n - 1)
    x_row, y_row = _place(left, left_slots, where, COPIES), _place(right, right_slots, where)
    live = (at < n) & (x_row >= 0)
    row = where
    if bag_of is not None:
        row = tl.maximum(tl.load(bag_of + where), 0)
    g_row = ((row % inner).to(tl.int64) * outer + row // inner) * (A * C)
    x_at = (x_row * (A * R))[:, None, None] + (a * R)[None, :, None] + r[None, None, :]
    x_mask = live[:, None, None] & (a < A)[None, :, None] & (r < R)[None, None, :]
    x = tl.load(u + x_at, mask=x_mask, other=0.0).to(tl.float32)
    dx = tl.zeros((BLOCK, A2, R2), tl.float32)
    dy = tl.zeros((BLOCK, R2, C2), tl.float32)
    for k in tl.static_range(C):
        g = tl.load(
            grad + g_row[:, None] + (a * C)[None, :] + k,
            mask=live[:, None] & (a < A)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if scale is not None:
            g *= tl.load(scale + where)[:, None]
        y = tl.load(
            w + (y_row * (R * C))[:, None] + (r * C)[None, :] + k,
            mask=live[:, None] & (r < R)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        dx += g[:, :, None] * y[:, None, :]
        part = tl.sum(x * g[:, :, None], 1)
        dy += tl.where((c == k)[None, None, :], part[:, :, None], 0.0)
    tl.atomic_add(d_left + x_at, dx, mask=x_mask, sem="relaxed")
    y_at = (y_row * (R * C))[:, None, None] + (r * C)[None, :, None] + c[None, None, :]
    y_mask = live[:, None, None] & (r < R)[None, :, None] & (c < C)[None, None, :]
    tl.atomic_add(d_right + y_at, dy, mask=y_mask, sem="relaxed")


@triton.jit
def ordered_gradient(
    other, grad, index, slots, other_index, other_slots, bag_of, scale, order,
    out, rows_out, n, inner, outer,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    A2: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    LEFT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the left factors, ``grad [A, C] @ right' [C, R]``, or of the right ones.

    Each of ``BLOCK`` chunks of a program walks over ``STEPS`` look-ups in ``order`` and sums runs
    of the same factor. A run is stored by the chunk in which it begins; what later chunks have of
    it goes to a row of their own behind the ``rows_out`` rows, for :func:`carry_runs`.
    """
    a, r, c = tl.arange(0, A2), tl.arange(0, R2), tl.arange(0, C2)
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LEFT:
        total = tl.zeros((BLOCK, A2, R2), tl.float32)
        cell = (a * R)[:, None] + r[None, :]
        inside = (a < A)[:, None] & (r < R)[None, :]
    else:
        total = tl.zeros((BLOCK, R2, C2), tl.float32)
        cell = (r * C)[:, None] + c[None, :]
        inside = (r < R)[:, None] & (c < C)[None, :]
    LENGTH: tl.constexpr = A * R if LEFT else R * C
    at = chunk * STEPS
    where = tl.load(order + tl.minimum(at, n - 1))
    run = _place(index, slots, where)
    before = tl.load(order + tl.minimum(tl.maximum(at - 1, 0), n - 1))
    owned = ((at == 0) | (_place(index, slots, before) != run)).to(tl.int32)
    for step in range(STEPS):
        live = (at < n) & (run >= 0)
        row = where
        if bag_of is not None:
            row = tl.load(bag_of + where)
        g_row = ((row % inner).to(tl.int64) * outer + row // inner) * (A * C)
        o_row = _place(other_index, other_slots, where)
        factor = tl.full((BLOCK,), 1.0, tl.float32)
        if scale is not None:
            factor = tl.load(scale + where)
        if LEFT:
            for k in tl.static_range(C):
                g = tl.load(
                    grad + g_row[:, None] + (a * C)[None, :] + k,
                    mask=live[:, None] & (a < A)[None, :], other=0.0,
                ).to(tl.float32) * factor[:, None]  # fmt: skip
                y = tl.load(
                    other + (o_row * (R * C))[:, None] + (r * C)[None, :] + k,
                    mask=live[:, None] & (r < R)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                total += g[:, :, None] * y[:, None, :]
        else:
            for k in range(A):
                x = tl.load(
                    other + (o_row * (A * R))[:, None] + k * R + r[None, :],
                    mask=live[:, None] & (r < R)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                g = tl.load(
                    grad + g_row[:, None] + k * C + c[None, :],
                    mask=live[:, None] & (c < C)[None, :], other=0.0,
                ).to(tl.float32) * factor[:, None]  # fmt: skip
                total += x[:, :, None] * g[:, None, :]
        at += 1
        where = tl.load(order + tl.minimum(at, n - 1))
        following = _place(index, slots, where)
        changes = (following != run) | (at >= n)
        ends = live & (changes | (step == STEPS - 1))
        target = tl.where(owned == 1, run, rows_out + chunk)
        owned = tl.where(changes, 1, owned)
        to = out + (target * LENGTH)[:, None, None] + cell[None, :, :]
        to_mask = ends[:, None, None] & inside[None, :, :]
        tl.store(to, total, mask=to_mask)
        total = tl.where(ends[:, None, None], 0.0, total)
        run = following


@triton.jit
def carry_runs(
    index, slots, order, out, rows_out, n,
    LENGTH: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to a run that began in this program's chunk what the chunks behind have of it."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = chunk * STEPS
    behind = first + STEPS
    if behind < n:
        run = _place(index, slots, tl.load(order + behind - 1))
        before = _place(index, slots, tl.load(order + tl.maximum(first - 1, 0)))
        begun = (first == 0) | (before != run)
        begun = begun | (_place(index, slots, tl.load(order + first)) != run)
        goes_on = _place(index, slots, tl.load(order + behind)) == run
        if begun & goes_on & (run >= 0):
            total = tl.load(out + run * LENGTH + column, mask=column < LENGTH, other=0.0)
            k = chunk + 1 + tl.arange(0, TILE)
            full = 1
            while full == 1:
                mask = k * STEPS < n
                at = tl.load(order + tl.minimum(k * STEPS, n - 1))
                same = mask & (_place(index, slots, at) == run)
                to = (rows_out + k).to(tl.int64) * LENGTH
                total += tl.sum(
                    tl.load(
                        out + to[:, None] + column[None, :],
                        mask=same[:, None] & (column < LENGTH)[None, :], other=0.0,
                    ), 0,
                )  # fmt: skip
                full = tl.min(same.to(tl.int32), 0)
                k += TILE
            tl.store(out + run * LENGTH + column, total, mask=column < LENGTH)

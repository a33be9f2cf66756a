"""Triton kernels for the unique ids of a TT look-up; see :mod:`dlrm.kernels.tt.lookup`.

The ids of one segment (:class:`~dlrm.kernels.tt.layout.Segments`) are adjacent and share a right
factor. A program has a part of one segment, and multiplies tiles of its ids by that factor on the
tensor cores. A tile has ``BM`` rows ``(id, A)``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton
from dlrm.kernels.tt._pairs import multiply
from dlrm.kernels.tt._rows import add_to, look_ups_of_program, result_row
from dlrm.kernels.tt.layout import padded


class UniqueIds(NamedTuple):
    """The factors of the unique ids, and the range of ids of each segment."""

    left: Tensor  # [slots or slices, A * R]
    right: Tensor  # [slots or slices, R * C]
    left_row: Tensor  # [unique ids] row of the left factor of each
    segments: Tensor  # [segments, 2] the ids of each
    segment_right: Tensor  # [segments] the right factor of each
    right_slots: Tensor | None  # [pairs] None for slices


@triton.jit
def _part(ids, IDS: tl.constexpr):
    """The ids of a program, which are a part of a segment, and the row of their right factor.

    The ids of a part are neighbors, as are their left factors, so programs that run at the same
    time find them in the cache.
    """
    segment = tl.program_id(0)
    begin, end = tl.load(ids.segments + 2 * segment), tl.load(ids.segments + 2 * segment + 1)
    count = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), IDS) * IDS
    begin += tl.program_id(1) * count
    end = tl.minimum(begin + count, end)
    row = tl.load(ids.segment_right + segment)
    if ids.right_slots is not None:  # a segment without ids has no slot
        row = tl.load(ids.right_slots + row, mask=begin < end, other=0)
    return begin, end, row.to(tl.int64)


@triton.jit
def _tile(ids, first, end, A: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """Rows ``(id, A)`` of a tile: index, mask, offsets of their left factors, and these."""
    m, r = tl.arange(0, BM), tl.arange(0, padded(R, 16))
    at = first + m // A
    row = (m < BM // A * A) & (at < end)
    start = tl.load(ids.left_row + at, mask=row, other=0).to(tl.int64) * (A * R) + m % A * R
    x_mask = row[:, None] & (r < R)[None, :]
    x = tl.load(ids.left + start[:, None] + r[None, :], mask=x_mask, other=0.0)
    return at.to(tl.int64) * A + m % A, row, start, x


@triton.jit
def unique_rows(
    ids, out, cleared,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the row of every unique id, and clear the place for its gradient."""
    begin, end, y_row = _part(ids, BM // A)
    r, c = tl.arange(0, padded(R, 16)), tl.arange(0, padded(C, 16))
    y_at = y_row * (R * C) + r[:, None] * C + c[None, :]
    y = tl.load(ids.right + y_at, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0)
    for first in range(begin, end, BM // A):
        to, row, _, x = _tile(ids, first, end, A, R, BM)
        to = to[:, None] * C + c[None, :]
        mask = row[:, None] & (c < C)[None, :]
        tl.store(out + to, multiply(x, y, None, PRECISION).to(out.dtype.element_ty), mask=mask)
        if cleared is not None:
            tl.store(cleared + to, tl.zeros((BM, padded(C, 16)), tl.float32), mask=mask)


@triton.jit
def unique_gradients(
    ids, grad, d_left, d_right,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the factors from those of the rows of the unique ids."""
    begin, end, y_row = _part(ids, BM // A)
    r, c = tl.arange(0, padded(R, 16)), tl.arange(0, padded(C, 16))
    y_at = y_row * (R * C) + r[:, None] * C + c[None, :]
    inside = (r < R)[:, None] & (c < C)[None, :]
    y = tl.trans(tl.load(ids.right + y_at, mask=inside, other=0.0))
    dy = tl.zeros((padded(R, 16), padded(C, 16)), tl.float32)
    for first in range(begin, end, BM // A):
        to, row, start, x = _tile(ids, first, end, A, R, BM)
        mask = row[:, None] & (c < C)[None, :]
        g = tl.load(grad + to[:, None] * C + c[None, :], mask=mask, other=0.0)
        dy = multiply(tl.trans(x), g, dy, PRECISION)
        x_mask = row[:, None] & (r < R)[None, :]
        add_to(d_left, start[:, None] + r[None, :], multiply(g, y, None, PRECISION), x_mask)
    add_to(d_right, y_at, dy, inside & (begin < end))


@triton.jit
def gather_rows(
    values, unique_of, offsets, results, out, n,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the row of every look-up from those of the unique ids, or sum the rows of each bag."""
    column = tl.arange(0, BLOCK_D)
    begin, end, last = look_ups_of_program(offsets, n, BLOCK)
    if offsets is not None:
        total = tl.zeros((BLOCK_D,), tl.float32)

    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < last
        row = tl.load(unique_of + at, mask=mask, other=-1).to(tl.int64)
        inside = mask[:, None] & (column < DIM)[None, :]
        live = inside & (row >= 0)[:, None]
        value = tl.load(values + row[:, None] * DIM + column[None, :], mask=live, other=0.0)

        if offsets is None:
            to = result_row(at, results) * DIM
            tl.store(out + to[:, None] + column[None, :], value, mask=inside)
        else:
            value = value.to(tl.float32)
            if results.scale is not None:
                value *= tl.load(results.scale + at, mask=mask, other=0.0)[:, None]
            total += tl.sum(value, 0)

    if offsets is not None:
        to = result_row(tl.program_id(0), results) * DIM
        tl.store(out + to + column, total.to(out.dtype.element_ty), mask=column < DIM)


@triton.jit
def sum_gradients(
    grad, unique_of, results, out, n,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of equal ids."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(unique_of + at, mask=at < n, other=-1).to(tl.int64)
    mask = row >= 0
    result = at
    if results.bag is not None:
        result = tl.load(results.bag + at, mask=mask, other=0)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = mask[:, None] & (column < DIM)
    g_row = result_row(result, results)
    g = tl.load(grad + g_row[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
    if results.scale is not None:
        g *= tl.load(results.scale + at, mask=mask, other=0.0)[:, None]
    add_to(out, row[:, None] * DIM + column, g, inside)

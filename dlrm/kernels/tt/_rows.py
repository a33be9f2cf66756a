"""Triton kernels that multiply left and right factors; see :mod:`dlrm.kernels.tt`.

A left factor is ``[A, R]``, a right one ``[R, C]`` and a row of a table their product.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton
from dlrm.kernels.tt.layout import padded


class FactorOfLookups(NamedTuple):
    """The left or the right factor of every look-up."""

    data: Tensor  # [slots or slices, A * R or R * C]
    pair: Tensor | None  # [n] pair or slice of each look-up, -1 for none
    slots: Tensor | None  # [pairs] None for slices


class ResultOfLookups(NamedTuple):
    """The result that every look-up belongs to.

    Results are numbered table by table and stored sample by sample: result ``k`` is row
    ``(k % batch) * tables + k // batch``.
    """

    bag: Tensor | None  # [n] None: look-up k alone is result k
    scale: Tensor | None  # [n] the weight of each row
    batch: int
    tables: int


class Sums(NamedTuple):
    """Numbers that programs add to atomically, in whatever order."""

    data: Tensor  # fp32; or int64, whose sums do not depend on the order
    scale: Tensor | None = None  # 0-d, what one is in int64


@triton.jit
def add_to(sums, at, value, mask):
    """Add ``value`` to elements ``at``."""
    if sums.scale is not None:
        value = (value * tl.load(sums.scale)).to(tl.int64)
    tl.atomic_add(sums.data + at, value, mask=mask, sem="relaxed")


@triton.jit
def result_row(result, results):
    """The row of a result."""
    return (result % results.batch).to(tl.int64) * results.tables + result // results.batch


@triton.jit
def row_of_factor(factor, at):
    """Row of the factor of look-ups ``at`` in its buffer; -1 for none.

    ``at`` is within bounds, so there is no mask: Triton 3.6 and 3.7 fail to compile some masks that
    are used for loads of one and of more dimensions in a loop.
    """
    row = tl.load(factor.pair + at)
    if factor.slots is not None:
        row = tl.where(row >= 0, tl.load(factor.slots + tl.maximum(row, 0)), -1)
    return row.to(tl.int64)


@triton.jit
def look_ups_of_program(offsets, n, BLOCK: tl.constexpr):
    """A program has ``BLOCK`` look-ups, or one bag: begin and end of its loop, end of look-ups."""
    pid = tl.program_id(0)
    if offsets is None:
        begin = pid * BLOCK
        end = begin + 1
        last = n
    else:
        begin = tl.load(offsets + pid)
        end = tl.load(offsets + pid + 1)
        last = end
    return begin, end, last


@triton.jit
def rows(
    left, right, offsets, results, out, n,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``left [A, R] @ right [R, C]`` of ``BLOCK`` look-ups, or summed over one bag."""
    a, r, c = tl.arange(0, padded(A, 2)), tl.arange(0, padded(R, 2)), tl.arange(0, padded(C, 2))
    begin, end, last = look_ups_of_program(offsets, n, BLOCK)
    if offsets is not None:
        total = tl.zeros((padded(A, 2), padded(C, 2)), tl.float32)

    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < last
        inner_at = tl.minimum(at, last - 1)
        x_row, y_row = row_of_factor(left, inner_at), row_of_factor(right, inner_at)
        live = mask & (x_row >= 0)
        x = tl.load(
            left.data + (x_row * (A * R))[:, None, None] + (a * R)[None, :, None]
            + r[None, None, :],
            mask=live[:, None, None] & (a < A)[None, :, None] & (r < R)[None, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if results.scale is not None:
            x = x * tl.load(results.scale + inner_at)[:, None, None]

        # One column of the products at a time.
        product = tl.zeros((BLOCK, padded(A, 2), padded(C, 2)), tl.float32)
        for k in tl.static_range(C):
            y = tl.load(
                right.data + (y_row * (R * C))[:, None] + (r * C)[None, :] + k,
                mask=live[:, None] & (r < R)[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            entry = tl.sum(x * y[:, None, :], 2)
            product += tl.where((c == k)[None, None, :], entry[:, :, None], 0.0)

        if offsets is None:
            to = (result_row(at, results) * (A * C))[:, None, None]
            to = to + (a * C)[None, :, None] + c[None, None, :]
            inside = mask[:, None, None] & (a < A)[None, :, None] & (c < C)[None, None, :]
            tl.store(out + to, product.to(out.dtype.element_ty), mask=inside)
        else:
            total += tl.sum(product, 0)

    if offsets is not None:
        to = result_row(tl.program_id(0), results) * (A * C) + (a * C)[:, None] + c[None, :]
        inside = (a < A)[:, None] & (c < C)[None, :]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def factor_gradients(
    left, right, grad, results, d_left, d_right, n,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``grad [A, C] @ right' [C, R]`` and ``left' [R, A] @ grad`` to the factors' gradients."""
    a, r, c = tl.arange(0, padded(A, 2)), tl.arange(0, padded(R, 2)), tl.arange(0, padded(C, 2))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    where = tl.minimum(at, n - 1)
    x_row, y_row = row_of_factor(left, where), row_of_factor(right, where)
    live = (at < n) & (x_row >= 0)
    result = where
    if results.bag is not None:
        result = tl.maximum(tl.load(results.bag + where), 0)
    g_row = result_row(result, results) * (A * C)

    x_at = (x_row * (A * R))[:, None, None] + (a * R)[None, :, None] + r[None, None, :]
    x_mask = live[:, None, None] & (a < A)[None, :, None] & (r < R)[None, None, :]
    x = tl.load(left.data + x_at, mask=x_mask, other=0.0).to(tl.float32)

    # One column of the gradient and of the right factors at a time.
    dx = tl.zeros((BLOCK, padded(A, 2), padded(R, 2)), tl.float32)
    dy = tl.zeros((BLOCK, padded(R, 2), padded(C, 2)), tl.float32)
    for k in tl.static_range(C):
        g = tl.load(
            grad + g_row[:, None] + (a * C)[None, :] + k,
            mask=live[:, None] & (a < A)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if results.scale is not None:
            g *= tl.load(results.scale + where)[:, None]
        y = tl.load(
            right.data + (y_row * (R * C))[:, None] + (r * C)[None, :] + k,
            mask=live[:, None] & (r < R)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        dx += g[:, :, None] * y[:, None, :]
        part = tl.sum(x * g[:, :, None], 1)
        dy += tl.where((c == k)[None, None, :], part[:, :, None], 0.0)

    add_to(d_left, x_at, dx, x_mask)
    y_at = (y_row * (R * C))[:, None, None] + (r * C)[None, :, None] + c[None, None, :]
    y_mask = live[:, None, None] & (r < R)[None, :, None] & (c < C)[None, None, :]
    add_to(d_right, y_at, dy, y_mask)

"""Triton kernels that sum gradients deterministically, in a fixed order of the look-ups.

See :mod:`dlrm.kernels.tt.lookup`. A *segment* is the look-ups of one factor, which are adjacent in
``order``; a *chunk* is the ``STEPS`` look-ups that one row of a program loops over.
"""

from __future__ import annotations

from dlrm.kernels import tl, triton
from dlrm.kernels.tt._pairs import big_at, multiply, product_at, small_at
from dlrm.kernels.tt._rows import result_row, row_of_factor
from dlrm.kernels.tt.layout import padded


@triton.jit
def segment_gradients(
    factor, other, grad, results, order, out, num_rows, n,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    LEFT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the left factors, ``grad [A, C] @ right' [C, R]``, or of the right ones.

    Each of the ``BLOCK`` chunks of a program sums segment by segment. The chunk in which a segment
    begins stores its sum. Later chunks store their parts after the ``num_rows`` rows of ``out``,
    one row per chunk, for :func:`add_partial_sums`.
    """
    a, r, c = tl.arange(0, padded(A, 2)), tl.arange(0, padded(R, 2)), tl.arange(0, padded(C, 2))
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LEFT:
        total = tl.zeros((BLOCK, padded(A, 2), padded(R, 2)), tl.float32)
        cell = (a * R)[:, None] + r[None, :]
        inside = (a < A)[:, None] & (r < R)[None, :]
    else:
        total = tl.zeros((BLOCK, padded(R, 2), padded(C, 2)), tl.float32)
        cell = (r * C)[:, None] + c[None, :]
        inside = (r < R)[:, None] & (c < C)[None, :]
    LENGTH: tl.constexpr = A * R if LEFT else R * C

    # The first look-up of each chunk, and whether its segment begins there.
    at = chunk * STEPS
    where = tl.load(order + tl.minimum(at, n - 1))
    row = row_of_factor(factor, where)
    before = tl.load(order + tl.minimum(tl.maximum(at - 1, 0), n - 1))
    begins = ((at == 0) | (row_of_factor(factor, before) != row)).to(tl.int32)

    for step in range(STEPS):
        # The row of the gradient, and that of the other factor.
        live = (at < n) & (row >= 0)
        result = where
        if results.bag is not None:
            result = tl.load(results.bag + where)
        g_row = result_row(result, results) * (A * C)
        o_row = row_of_factor(other, where)
        scale = tl.full((BLOCK,), 1.0, tl.float32)
        if results.scale is not None:  # undefined for ids after the last bag
            scale = tl.where(live, tl.load(results.scale + where), 0.0)

        # Add the outer products, one column or one row at a time.
        if LEFT:
            for k in tl.static_range(C):
                g = tl.load(
                    grad + g_row[:, None] + (a * C)[None, :] + k,
                    mask=live[:, None] & (a < A)[None, :], other=0.0,
                ).to(tl.float32) * scale[:, None]  # fmt: skip
                y = tl.load(
                    other.data + (o_row * (R * C))[:, None] + (r * C)[None, :] + k,
                    mask=live[:, None] & (r < R)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                total += g[:, :, None] * y[:, None, :]
        else:
            for k in range(A):
                x = tl.load(
                    other.data + (o_row * (A * R))[:, None] + k * R + r[None, :],
                    mask=live[:, None] & (r < R)[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                g = tl.load(
                    grad + g_row[:, None] + k * C + c[None, :],
                    mask=live[:, None] & (c < C)[None, :], other=0.0,
                ).to(tl.float32) * scale[:, None]  # fmt: skip
                total += x[:, :, None] * g[:, None, :]

        # Store the sum where a segment or the chunk ends.
        at += 1
        where = tl.load(order + tl.minimum(at, n - 1))
        next_row = row_of_factor(factor, where)
        changes = (next_row != row) | (at >= n)
        ends = live & (changes | (step == STEPS - 1))
        target = tl.where(begins == 1, row, num_rows + chunk)
        begins = tl.where(changes, 1, begins)
        to = out + (target * LENGTH)[:, None, None] + cell[None, :, :]
        to_mask = ends[:, None, None] & inside[None, :, :]
        tl.store(to, total, mask=to_mask)
        total = tl.where(ends[:, None, None], 0.0, total)
        row = next_row


@triton.jit
def add_partial_sums(
    factor, order, out, num_rows, n,
    LENGTH: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Complete the segment that begins in a chunk and continues: add the parts of later chunks."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = chunk * STEPS
    end = first + STEPS
    if end < n:
        # The segment of the last look-up: does it begin in this chunk and continue in the next?
        row = row_of_factor(factor, tl.load(order + end - 1))
        before = row_of_factor(factor, tl.load(order + tl.maximum(first - 1, 0)))
        begins = (first == 0) | (before != row)
        begins = begins | (row_of_factor(factor, tl.load(order + first)) != row)
        continues = row_of_factor(factor, tl.load(order + end)) == row

        if begins & continues & (row >= 0):
            total = tl.load(out + row * LENGTH + column, mask=column < LENGTH, other=0.0)
            # The parts of the next chunks, until one starts with another segment.
            k = chunk + 1 + tl.arange(0, TILE)
            full = 1
            while full == 1:
                mask = k * STEPS < n
                at = tl.load(order + tl.minimum(k * STEPS, n - 1))
                same = mask & (row_of_factor(factor, at) == row)
                part_at = (num_rows + k).to(tl.int64)[:, None] * LENGTH + column[None, :]
                part_mask = same[:, None] & (column < LENGTH)[None, :]
                total += tl.sum(tl.load(out + part_at, mask=part_mask, other=0.0), 0)
                full = tl.min(same.to(tl.int32), 0)
                k += TILE
            tl.store(out + row * LENGTH + column, total, mask=column < LENGTH)


@triton.jit
def small_gradient_parts(
    big, grad, out, segments,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of each slot in the gradient of its small slice: ``grad @ big'``."""
    at = tl.program_id(0)
    begin, end = tl.load(segments + 2 * at), tl.load(segments + 2 * at + 1)
    for first in range(tl.program_id(1) * BM, (end - begin) * Q, tl.num_programs(1) * BM):
        m = first + tl.arange(0, BM)
        row = m < (end - begin) * Q
        slot, j = (begin + m // Q).to(tl.int64), m % Q
        r = tl.arange(0, padded(R, 16))
        total = tl.zeros((BM, padded(R, 16)), tl.float32)
        for n in range(0, N, BN):
            c = n + tl.arange(0, BN)
            g_at = product_at(slot[:, None], j[:, None], c[None, :], Q, N, LEFT)
            g = tl.load(grad + g_at, mask=row[:, None] & (c < N)[None, :], other=0.0)
            y_at = big_at(at.to(tl.int64), r[None, :], c[:, None], R, N, LEFT)
            y = tl.load(big + y_at, mask=(r < R)[None, :] & (c < N)[:, None], other=0.0)
            total = multiply(g, y, total, PRECISION)
        to = small_at(slot[:, None], j[:, None], r[None, :], Q, R, LEFT)
        tl.store(out + to, total, mask=row[:, None] & (r < R)[None, :])


@triton.jit
def sum_small_gradient(
    parts, flags, slots, first_pair, step, count, out,
    LENGTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the parts of one small slice over the big slices with which it forms pairs."""
    at = tl.program_id(0)
    first, stride, many = tl.load(first_pair + at), tl.load(step + at), tl.load(count + at)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, many, TILE):
        i = begin + tl.arange(0, TILE)
        pair = first + i * stride
        used = tl.load(flags + pair, mask=i < many, other=0) != 0
        slot = tl.load(slots + pair, mask=used, other=0).to(tl.int64)
        part_at = slot[:, None] * LENGTH + column[None, :]
        mask = used[:, None] & (column < LENGTH)[None, :]
        total += tl.sum(tl.load(parts + part_at, mask=mask, other=0.0), 0)
    tl.store(out + at.to(tl.int64) * LENGTH + column, total, mask=column < LENGTH)

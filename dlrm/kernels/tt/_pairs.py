"""Triton kernels that multiply out pairs of slices; see :mod:`dlrm.kernels.tt`.

A pair is a slice ``[Q, R]`` of the small (outer) core and one ``[R, N]`` of the big core next to
it; their product is ``[Q, N]``. The slots of one big slice are adjacent, in the order of their
pairs; ``segments`` has their range. ``LEFT``: the product is a left factor, and all three are
row-major; for a right factor they are column-major.
"""

from __future__ import annotations

from dlrm.kernels import tl, triton
from dlrm.kernels.tt._rows import add_to
from dlrm.kernels.tt.layout import padded


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """``x @ y``, added to ``total`` unless it is None; both are cast to bf16 if one is bf16."""
    if PRECISION == "bf16" or x.dtype == tl.bfloat16 or y.dtype == tl.bfloat16:
        product = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), total)
    else:
        product = tl.dot(x, y, total, input_precision=PRECISION)
    return product


@triton.jit
def small_at(member, j, r, Q: tl.constexpr, R: tl.constexpr, LEFT: tl.constexpr):
    """Offset of element ``(j, r)`` of a slice of the small core."""
    return member * (Q * R) + j * R + r if LEFT else member * (Q * R) + j + r * Q


@triton.jit
def big_at(at, r, c, R: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr):
    """Offset of element ``(r, c)`` of a slice of the big core."""
    return at * (R * N) + r * N + c if LEFT else at * (R * N) + r + c * R


@triton.jit
def product_at(slot, j, c, Q: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr):
    """Offset of element ``(j, c)`` of a product."""
    return slot * (Q * N) + j * N + c if LEFT else slot * (Q * N) + j + c * Q


@triton.jit
def rank_pairs(
    flags, pair_start, small_start, total, slots, members, segments, BLOCK: tl.constexpr
):
    """Assign slots to the pairs in use of one big slice, and store the small slice of each.

    The order of the big slices varies from run to run, but no result depends on it.
    """
    big = tl.program_id(0)
    begin = tl.load(pair_start + big)
    end = tl.load(pair_start + big + 1)
    small = tl.load(small_start + big)

    # Count the pairs in use, and reserve as many slots.
    count = 0
    for first in range(begin, end, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        count += tl.sum(tl.load(flags + pair, mask=pair < end, other=0), 0)
    slot = tl.atomic_add(total, count, sem="relaxed")
    tl.store(segments + 2 * big, slot)
    tl.store(segments + 2 * big + 1, slot + count)

    for first in range(begin, end, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        flag = tl.load(flags + pair, mask=pair < end, other=0)
        at = slot + tl.cumsum(flag, 0) - 1
        tl.store(slots + pair, at, mask=flag != 0)
        tl.store(members + at, small + pair - begin, mask=flag != 0)
        slot += tl.sum(flag, 0)


@triton.jit
def pair_products(
    small, big, out, cleared, segments, members,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[slot] = small slice [Q, R] @ big slice [R, N]``, for tiles of (slot, Q) rows.

    ``cleared``, where the gradient of ``out`` will be summed, is filled with zeros.
    """
    at = tl.program_id(0)
    begin, end = tl.load(segments + 2 * at), tl.load(segments + 2 * at + 1)
    for first in range(tl.program_id(1) * BM, (end - begin) * Q, tl.num_programs(1) * BM):
        # Rows of small slices.
        m = first + tl.arange(0, BM)
        row = m < (end - begin) * Q
        slot, j = begin + m // Q, m % Q
        member = tl.load(members + slot, mask=row, other=0).to(tl.int64)
        r = tl.arange(0, padded(R, 16))
        x_at = small_at(member[:, None], j[:, None], r[None, :], Q, R, LEFT)
        x = tl.load(small + x_at, mask=row[:, None] & (r < R)[None, :], other=0.0)

        for n in range(0, N, BN):
            c = n + tl.arange(0, BN)
            y_at = big_at(at.to(tl.int64), r[:, None], c[None, :], R, N, LEFT)
            y = tl.load(big + y_at, mask=(r < R)[:, None] & (c < N)[None, :], other=0.0)
            product = multiply(x, y, None, PRECISION)
            to = product_at(slot.to(tl.int64)[:, None], j[:, None], c[None, :], Q, N, LEFT)
            mask = row[:, None] & (c < N)[None, :]
            tl.store(out + to, product.to(out.dtype.element_ty), mask=mask)
            if cleared is not None:
                tl.store(cleared + to, tl.zeros((BM, BN), tl.float32), mask=mask)


@triton.jit
def big_gradient(
    small, big, grad, d_big, d_small, segments, members,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a big slice, in tiles of ``N``: the sum of ``small' @ grad`` over its slots.

    ``grad @ big'`` of each slot is added to ``d_small`` atomically.
    """
    at = tl.program_id(0)
    begin, end = tl.load(segments + 2 * at), tl.load(segments + 2 * at + 1)
    r = tl.arange(0, padded(R, 16))
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (r < R)[:, None] & (c < N)[None, :]
    to = big_at(at.to(tl.int64), r[:, None], c[None, :], R, N, LEFT)
    y = tl.trans(tl.load(big + to, mask=inside, other=0.0))

    total = tl.zeros((padded(R, 16), BN), tl.float32)
    for first in range(0, (end - begin) * Q, BM):
        m = first + tl.arange(0, BM)
        row = m < (end - begin) * Q
        slot, j = begin + m // Q, m % Q
        member = tl.load(members + slot, mask=row, other=0).to(tl.int64)
        x_at = small_at(member[None, :], j[None, :], r[:, None], Q, R, LEFT)
        x = tl.load(small + x_at, mask=row[None, :] & (r < R)[:, None], other=0.0)
        g_at = product_at(slot.to(tl.int64)[:, None], j[:, None], c[None, :], Q, N, LEFT)
        g = tl.load(grad + g_at, mask=row[:, None] & (c < N)[None, :], other=0.0)

        total = multiply(x, g, total, PRECISION)
        part = multiply(g, y, None, PRECISION)
        part_at = small_at(member[:, None], j[:, None], r[None, :], Q, R, LEFT)
        add_to(d_small, part_at, part, row[:, None] & (r < R)[None, :])

    tl.store(d_big + to, total, mask=inside)

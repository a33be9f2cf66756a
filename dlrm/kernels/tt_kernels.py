"""Triton kernels behind :mod:`dlrm.kernels.tt`, which says what each is for.

Names: a *pair* is a slice of the ``small`` core (the first or the last) together with one of the
``big`` core beside it. Pairs are numbered table by table, by their big slice first. Those that a
batch uses have a *slot*, their rank among the pairs in use, so that the slots of one big slice lie
together: ``scan`` is the running sum of the flags of the pairs, and the slot of a pair in use is
its entry less 1. Sizes in upper case are compile-time constants; ``X2`` is ``X`` rounded up to a
power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Finding what a look-up multiplies ------------------------------------------------------------


@triton.jit
def _factors(ids, table, p, starts, left_base, right_base, CORES: tl.constexpr):
    """Left and right factor of a row: a slice of the first or last core, or a pair of slices."""
    last_p = tl.load(p + table * CORES + CORES - 1)
    last = ids % last_p
    rest = ids // last_p
    if CORES == 4:
        third_p = tl.load(p + table * CORES + 2)
        right = tl.load(right_base + table) + rest % third_p * last_p + last
        rest = rest // third_p
    else:
        right = tl.load(starts + table * CORES + CORES - 1) + last
    first_p = tl.load(p + table * CORES)
    if CORES > 2:
        second_p = tl.load(p + table * CORES + 1)
        first = rest // second_p % first_p
        left = tl.load(left_base + table) + rest % second_p * first_p + first
    else:
        left = tl.load(starts + table * CORES) + rest % first_p
    return left.to(tl.int32), right.to(tl.int32)


@triton.jit
def _ones(bits):
    """Number of bits set in each 32-bit word."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _note(
    ids, at, mask, table, p, starts, left_base, right_base,
    left, right, left_flags, right_flags, key_base, keys, bitmap,
    CORES: tl.constexpr,
):  # fmt: skip
    """Write the factors of look-ups ``at``, flag the pairs in use and, for merging, the ids.

    The key of an id counts its right factor first, so that ids in order of their keys have runs of
    the same right factor.
    """
    row = tl.load(ids + at, mask=mask, other=0).to(tl.int64)
    a, b = _factors(row, table, p, starts, left_base, right_base, CORES)
    tl.store(left + at, a, mask=mask)
    tl.store(right + at, b, mask=mask)
    if left_flags is not None:
        tl.store(left_flags + a, 1, mask=mask)
    if right_flags is not None:
        tl.store(right_flags + b, 1, mask=mask)
    if bitmap is not None:
        lefts = tl.load(key_base + table * 3 + 1)
        key = tl.load(key_base + table * 3) + b * lefts + (a - tl.load(key_base + table * 3 + 2))
        tl.store(keys + at, key, mask=mask)
        bit = (tl.zeros_like(a) + 1) << (key & 31).to(tl.int32)
        word = tl.load(bitmap + (key >> 5), mask=mask, other=0)
        tl.atomic_or(bitmap + (key >> 5), bit, mask=mask & ((word & bit) == 0), sem="relaxed")


@triton.jit
def index_ids(
    ids, tables, per_table, p, starts, left_base, right_base,
    left, right, left_flags, right_flags, key_base, keys, bitmap, n,
    CORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find what every look-up multiplies."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    table = tl.load(tables + at // per_table, mask=mask, other=0).to(tl.int64)
    _note(
        ids, at, mask, table, p, starts, left_base, right_base,
        left, right, left_flags, right_flags, key_base, keys, bitmap, CORES,
    )  # fmt: skip


@triton.jit
def index_bags(
    ids, offsets, weights, batch, p, starts, left_base, right_base,
    left, right, left_flags, right_flags, key_base, keys, bitmap, bag_of, scale,
    CORES: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for one bag a program; also the bag of every look-up, from 1 on, and its factor."""
    bag = tl.program_id(0)
    table = (bag // batch).to(tl.int64)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < end
        _note(
            ids, at, mask, table, p, starts, left_base, right_base,
            left, right, left_flags, right_flags, key_base, keys, bitmap, CORES,
        )  # fmt: skip
        tl.store(bag_of + at, tl.zeros((BLOCK,), tl.int32) + bag + 1, mask=mask)
        if weights is not None:
            tl.store(scale + at, tl.load(weights + at, mask=mask, other=0.0), mask=mask)
        if MEAN:
            factor = 1.0 / (end - begin).to(tl.float32)
            tl.store(scale + at, tl.zeros((BLOCK,), tl.float32) + factor, mask=mask)


@triton.jit
def count_ids(bitmap, counts, words, BLOCK: tl.constexpr):
    """Number of ids flagged in each word."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < words
    tl.store(counts + at, _ones(tl.load(bitmap + at, mask=mask, other=0)), mask=mask)


@triton.jit
def number_ids(
    keys, bitmap, scan, bag_of, left, right, which, left_once, right_once, n, BLOCK: tl.constexpr
):
    """Rank of the id of every look-up among the distinct ids, and the factors of those."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if bag_of is not None:
        mask = mask & (tl.load(bag_of + at, mask=mask, other=0) > 0)
    key = tl.load(keys + at, mask=mask, other=0)
    word = tl.load(bitmap + (key >> 5), mask=mask, other=0).to(tl.uint32, bitcast=True)
    from_here = _ones((word >> (key & 31).to(tl.uint32)).to(tl.int32, bitcast=True))
    rank = tl.load(scan + (key >> 5), mask=mask, other=0) - from_here
    tl.store(which + at, rank, mask=mask)
    tl.store(left_once + rank, tl.load(left + at, mask=mask, other=0), mask=mask)
    tl.store(right_once + rank, tl.load(right + at, mask=mask, other=0), mask=mask)


@triton.jit
def list_members(flags, scan, pair_start, small_start, members, BLOCK: tl.constexpr):
    """Write the small slice of every slot; one program a big slice."""
    big = tl.program_id(0)
    begin = tl.load(pair_start + big)
    end = tl.load(pair_start + big + 1)
    small = tl.load(small_start + big)
    for first in range(begin, end, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        used = tl.load(flags + pair, mask=pair < end, other=0) != 0
        slot = tl.load(scan + pair, mask=used, other=1) - 1
        tl.store(members + slot, small + pair - begin, mask=used)


@triton.jit
def _place(index, scan, at, mask):
    """Row of a factor in its buffer: the slot of a pair, or the slice itself."""
    row = tl.load(index + at, mask=mask, other=0)
    if scan is not None:
        row = tl.load(scan + row, mask=mask, other=1) - 1
    return row.to(tl.int64)


# Products of pairs: a small GEMM per big slice ----------------------------------------------------


@triton.jit
def _slots(scan, pair_start, big):
    """Slots of a big slice: the first, and the first behind them."""
    first = tl.load(pair_start + big)
    behind = tl.load(pair_start + big + 1)
    begin = tl.load(scan + first - 1, mask=first > 0, other=0)
    return begin, tl.load(scan + behind - 1, mask=behind > 0, other=0)


@triton.jit
def pair_products(
    small, big, out, scan, pair_start, members,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SJ: tl.constexpr, SR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    OJ: tl.constexpr, OC: tl.constexpr,
    R2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[slot] = small slice [Q, R] @ big slice [R, N]``, for a tile of (slot, Q) rows."""
    at = tl.program_id(0)
    begin, end = _slots(scan, pair_start, at)
    first = tl.program_id(1) * BM
    if first < (end - begin) * Q:
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
            product = tl.dot(x, y, input_precision=PRECISION)
            to = (slot.to(tl.int64) * (Q * N) + j * OJ)[:, None] + c[None, :] * OC
            mask = row[:, None] & (c < N)[None, :]
            tl.store(out + to, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def big_gradient(
    small, grad, out, scan, pair_start, members,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SJ: tl.constexpr, SR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    OJ: tl.constexpr, OC: tl.constexpr,
    R2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a big slice, ``N`` in tiles: the sum over its slots of ``small' @ grad``."""
    at = tl.program_id(0)
    begin, end = _slots(scan, pair_start, at)
    r = tl.arange(0, R2)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
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
        total = tl.dot(x, g.to(x.dtype), total, input_precision=PRECISION)
    to = at.to(tl.int64) * (R * N) + r[:, None] * BR + c[None, :] * BC
    tl.store(out + to, total, mask=(r < R)[:, None] & (c < N)[None, :])


@triton.jit
def small_gradient(
    big, grad, out, scan, pair_start,
    Q: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    SJ: tl.constexpr, SR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    OJ: tl.constexpr, OC: tl.constexpr,
    R2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each slot adds to the gradient of its small slice: ``grad @ big'``."""
    at = tl.program_id(0)
    begin, end = _slots(scan, pair_start, at)
    first = tl.program_id(1) * BM
    if first < (end - begin) * Q:
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
            total = tl.dot(g.to(y.dtype), y, total, input_precision=PRECISION)
        to = (slot * (Q * R) + j * SJ)[:, None] + r[None, :] * SR
        tl.store(out + to, total, mask=row[:, None] & (r < R)[None, :])


@triton.jit
def sum_small(
    parts, flags, scan, first_pair, step, count, out,
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
        slot = (tl.load(scan + pair, mask=used, other=1) - 1).to(tl.int64)
        mask = used[:, None] & (column < LENGTH)[None, :]
        total += tl.sum(
            tl.load(parts + slot[:, None] * LENGTH + column[None, :], mask=mask, other=0.0), 0
        )
    tl.store(out + at.to(tl.int64) * LENGTH + column, total, mask=column < LENGTH)


# Left times right: the rows themselves ------------------------------------------------------------


@triton.jit
def rows(
    u, w, left, right, left_scan, right_scan, offsets, scale, out, n, inner, outer,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    A2: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr, BLOCK: tl.constexpr,
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
        x_row = _place(left, left_scan, at, mask)
        y_row = _place(right, right_scan, at, mask)
        known = mask & (x_row >= 0) & (y_row >= 0)
        x = tl.load(
            u + (x_row * (A * R))[:, None, None] + (a * R)[None, :, None] + r[None, None, :],
            mask=known[:, None, None] & (a < A)[None, :, None] & (r < R)[None, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if scale is not None:
            x = x * tl.load(scale + at, mask=mask, other=0.0)[:, None, None]
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
def factor_gradient(
    other, grad, index, scan, other_index, other_scan, bag_of, scale, order,
    out, rows_out, n, inner, outer,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    A2: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    LEFT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, EXCLUSIVE: tl.constexpr,
):  # fmt: skip
    """Gradient of the left factors, ``grad [A, C] @ right' [C, R]``, or of the right ones.

    Each of ``BLOCK`` chunks of a program walks over ``STEPS`` look-ups in ``order`` and sums runs
    of the same factor. A run ends in an atomic addition or, if ``EXCLUSIVE``, in a store by the
    chunk in which it begins; what later chunks have of it goes to a row of their own behind the
    ``rows_out`` rows, for :func:`carry_runs`.
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
    mask = at < n
    where = at if order is None else tl.load(order + at, mask=mask, other=0)
    run = _place(index, scan, where, mask)
    if EXCLUSIVE:
        before = tl.load(order + at - 1, mask=mask & (at > 0), other=0)
        owned = (at == 0) | (_place(index, scan, before, mask) != run)
    for step in range(STEPS):
        row = where
        if bag_of is not None:
            row = tl.load(bag_of + where, mask=mask, other=0) - 1
        live = mask & (row >= 0)
        g_row = ((row % inner).to(tl.int64) * outer + row // inner) * (A * C)
        o_row = _place(other_index, other_scan, where, live)
        factor = tl.full((BLOCK,), 1.0, tl.float32)
        if scale is not None:
            factor = tl.load(scale + where, mask=live, other=0.0)
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
        more = mask & (at < n)
        where = at if order is None else tl.load(order + at, mask=more, other=0)
        following = _place(index, scan, where, more)
        ends = mask & (run >= 0) & ((step == STEPS - 1) | (at >= n) | (following != run))
        target = run
        if EXCLUSIVE:
            target = tl.where(owned, run, rows_out + chunk)
            owned = owned | (following != run)
        to = out + (target * LENGTH)[:, None, None] + cell[None, :, :]
        to_mask = ends[:, None, None] & inside[None, :, :]
        if EXCLUSIVE:
            tl.store(to, total, mask=to_mask)
        else:
            tl.atomic_add(to, total, mask=to_mask, sem="relaxed")
        total = tl.where(ends[:, None, None], 0.0, total)
        run, mask = following, more


@triton.jit
def carry_runs(
    index, scan, order, out, rows_out, n,
    LENGTH: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to a run that began in this program's chunk what the chunks behind have of it."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = chunk * STEPS
    behind = first + STEPS
    if behind < n:
        run = _place(index, scan, tl.load(order + behind - 1), True)
        before = _place(index, scan, tl.load(order + tl.maximum(first - 1, 0)), True)
        begun = (first == 0) | (before != run)
        begun = begun | (_place(index, scan, tl.load(order + first), True) != run)
        goes_on = _place(index, scan, tl.load(order + behind), True) == run
        if begun & goes_on & (run >= 0):
            total = tl.load(out + run * LENGTH + column, mask=column < LENGTH, other=0.0)
            k = chunk + 1 + tl.arange(0, TILE)
            full = 1
            while full == 1:
                mask = k * STEPS < n
                at = tl.load(order + k * STEPS, mask=mask, other=0)
                same = mask & (_place(index, scan, at, mask) == run)
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


# Each id once: tiles of ids in order of their right factors ---------------------------------------


@triton.jit
def _tile(
    u, left, right, left_scan, total, words,
    A: tl.constexpr, R: tl.constexpr, R2: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows ``(id, A)`` of a tile: their ids, where their left factors lie and what these are."""
    count = tl.load(total + words - 1)
    m = tl.arange(0, BM)
    at = tl.program_id(0) * (BM // A) + m // A
    row = (m < BM // A * A) & (at < count)
    place = _place(left, left_scan, at, row) * (A * R) + m % A * R
    r = tl.arange(0, R2)
    x = tl.load(u + place[:, None] + r[None, :], mask=row[:, None] & (r < R)[None, :], other=0.0)
    return at, row, place, x, tl.load(right + at, mask=row, other=2147483647)


@triton.jit
def distinct_rows(
    u, w, left, right, left_scan, right_scan, total, words, out,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The row of every distinct id."""
    if tl.program_id(0) * (BM // A) < tl.load(total + words - 1):
        at, row, _, x, b = _tile(u, left, right, left_scan, total, words, A, R, R2, BM)
        r, c = tl.arange(0, R2), tl.arange(0, C2)
        mask = (r < R)[:, None] & (c < C)[None, :]
        result = tl.zeros((BM, C2), tl.float32)
        now = tl.min(b, 0)
        while now < 2147483647:
            y_row = now.to(tl.int64)
            if right_scan is not None:
                y_row = (tl.load(right_scan + now) - 1).to(tl.int64)
            y = tl.load(w + y_row * (R * C) + r[:, None] * C + c[None, :], mask=mask, other=0.0)
            product = tl.dot(x, y, input_precision=PRECISION)
            result = tl.where((b == now)[:, None], product, result)
            now = tl.min(tl.where(b > now, b, 2147483647), 0)
        to = (at.to(tl.int64) * A + tl.arange(0, BM) % A)[:, None] * C + c[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=row[:, None] & (c < C)[None, :])


@triton.jit
def distinct_gradient(
    u, w, left, right, left_scan, right_scan, total, words, grad, d_left, d_right,
    A: tl.constexpr, R: tl.constexpr, C: tl.constexpr, R2: tl.constexpr, C2: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the factors from those of the distinct rows."""
    if tl.program_id(0) * (BM // A) < tl.load(total + words - 1):
        at, row, place, x, b = _tile(u, left, right, left_scan, total, words, A, R, R2, BM)
        r, c = tl.arange(0, R2), tl.arange(0, C2)
        mask = (r < R)[:, None] & (c < C)[None, :]
        to = (at.to(tl.int64) * A + tl.arange(0, BM) % A)[:, None] * C + c[None, :]
        g_all = tl.load(grad + to, mask=row[:, None] & (c < C)[None, :], other=0.0)
        dx = tl.zeros((BM, R2), tl.float32)
        now = tl.min(b, 0)
        while now < 2147483647:
            y_row = now.to(tl.int64)
            if right_scan is not None:
                y_row = (tl.load(right_scan + now) - 1).to(tl.int64)
            y_at = y_row * (R * C) + r[:, None] * C + c[None, :]
            y = tl.load(w + y_at, mask=mask, other=0.0)
            g = tl.where((b == now)[:, None], g_all, 0.0).to(x.dtype)
            dx = tl.dot(g, tl.trans(y), dx, input_precision=PRECISION)
            dy = tl.dot(tl.trans(x), g, input_precision=PRECISION)
            tl.atomic_add(d_right + y_at, dy, mask=mask, sem="relaxed")
            now = tl.min(tl.where(b > now, b, 2147483647), 0)
        tl.atomic_add(
            d_left + place[:, None] + r[None, :], dx,
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
        row = tl.load(which + at, mask=mask, other=0).to(tl.int64)
        inside = mask[:, None] & (column < DIM)[None, :]
        value = tl.load(values + row[:, None] * DIM + column[None, :], mask=inside, other=0.0)
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
    mask = at < n
    result = at
    if bag_of is not None:
        result = tl.load(bag_of + at, mask=mask, other=0) - 1
        mask = mask & (result >= 0)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = mask[:, None] & (column < DIM)
    g_row = (result % inner).to(tl.int64) * outer + result // inner
    g = tl.load(grad + g_row[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale + at, mask=mask, other=0.0)[:, None]
    row = tl.load(which + at, mask=mask, other=0).to(tl.int64)
    tl.atomic_add(out + row[:, None] * DIM + column, g, mask=inside, sem="relaxed")


# The optimizer ------------------------------------------------------------------------------------


@triton.jit
def _update_row(
    core, grad, state, row, lr, eps,
    LENGTH: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a slice, or with a rule that needs no sum over the slice one block of it."""
    start = row.to(tl.int64) * LENGTH
    if RULE == "rowwise_adagrad":
        square = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, LENGTH, BLOCK):
            at = first + tl.arange(0, BLOCK)
            g = tl.load(grad + start + at, mask=at < LENGTH, other=0.0).to(tl.float32)
            square += g * g
        moment = tl.load(state + row) + tl.sum(square, 0) / LENGTH
        tl.store(state + row, moment)
        lr = lr / (tl.sqrt(moment) + eps)
    for first in range(tl.program_id(1) * BLOCK, LENGTH, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < LENGTH
        g = tl.load(grad + start + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(core + start + at, mask=mask, other=0.0).to(tl.float32)
        if RULE == "adagrad":
            moment = tl.load(state + start + at, mask=mask, other=0.0) + g * g
            tl.store(state + start + at, moment, mask=mask)
            g = g / (tl.sqrt(moment) + eps)
        tl.store(core + start + at, (value - lr * g).to(core.dtype.element_ty), mask=mask)


@triton.jit
def update_cores(
    core0, core1, core2, core3, grad0, grad1, grad2, grad3, state0, state1, state2, state3,
    lr, eps, rows0, rows1, rows2,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update all cores in one launch."""
    row = tl.program_id(0)
    rate = tl.load(lr).to(tl.float32)
    if row < rows0:
        _update_row(core0, grad0, state0, row, rate, eps, L0, RULE, BLOCK)
    elif row < rows0 + rows1:
        _update_row(core1, grad1, state1, row - rows0, rate, eps, L1, RULE, BLOCK)
    elif row < rows0 + rows1 + rows2:
        if L2 > 0:
            _update_row(core2, grad2, state2, row - rows0 - rows1, rate, eps, L2, RULE, BLOCK)
    else:
        if L3 > 0:
            behind = row - rows0 - rows1 - rows2
            _update_row(core3, grad3, state3, behind, rate, eps, L3, RULE, BLOCK)

"""Triton kernels that find what a TT look-up multiplies; see :mod:`dlrm.kernels.tt`.

A row has a left and a right factor: a slice of the first or last core, or a *pair* of slices of the
two cores there, numbered table by table, by the slice of the big (inner) core first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlrm.kernels.tt._pairs import slot_of


@triton.jit
def _factors(ids, table, p, starts, left_base, right_base, CORES: tl.constexpr):
    """Left and right factor of a row: a slice of the first or last core, or a pair of slices."""
    last_p = tl.load(p + table * CORES + CORES - 1).to(ids.dtype)
    last = ids % last_p
    rest = ids // last_p
    if CORES == 4:
        third_p = tl.load(p + table * CORES + 2).to(ids.dtype)
        right = tl.load(right_base + table) + rest % third_p * last_p + last
        rest = rest // third_p
    else:
        right = tl.load(starts + table * CORES + CORES - 1) + last
    first_p = tl.load(p + table * CORES).to(ids.dtype)
    if CORES > 2:
        second_p = tl.load(p + table * CORES + 1).to(ids.dtype)
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
    ids, skip, at, mask, table, p, starts, left_base, right_base,
    left, right, left_flags, right_flags, key_base, keys, bitmap,
    CORES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the factors of look-ups ``at``, flag the pairs in use and, for merging, the ids.

    The key of an id counts its right factor first: see :class:`~dlrm.kernels.tt.layout.Chain`. One
    look-up of each id has the key itself, the others -2 less the key; what is skipped has factors
    and key -1. For merging, only *hot* look-ups have a right factor, those with the first left
    factor of their table: see :func:`~dlrm.kernels.tt._unique.merge_gradients`.
    """
    # Division of 64 bits costs several times that of 32.
    row = tl.load(ids + at, mask=mask, other=0).to(tl.int64 if WIDE else tl.int32)
    a, b = _factors(row, table, p, starts, left_base, right_base, CORES)
    live = mask
    if skip is not None:
        live = mask & (tl.load(skip + at, mask=mask, other=1) == 0)
    tl.store(left + at, tl.where(live, a, -1), mask=mask)
    named = live
    if bitmap is not None:
        local = a - tl.load(key_base + table * 3 + 2)
        named = live & (local == 0)
    tl.store(right + at, tl.where(named, b, -1), mask=mask)
    if left_flags is not None:
        tl.store(left_flags + a, 1, mask=live)
    if right_flags is not None:
        tl.store(right_flags + b, 1, mask=live)
    if bitmap is not None:
        many = tl.load(key_base + table * 3 + 1)
        key = tl.load(key_base + table * 3) + b * many + local
        bit = (tl.zeros_like(a) + 1) << (key & 31).to(tl.int32)
        word = tl.load(bitmap + (key >> 5), mask=live, other=0)
        # Most ids of a batch are there already; reading first spares them the atomic.
        new = live & ((word & bit) == 0)
        word = tl.atomic_or(bitmap + (key >> 5), bit, mask=new, sem="relaxed")
        key = tl.where(new & ((word & bit) == 0), key, -2 - key)
        tl.store(keys + at, tl.where(live, key, -1), mask=mask)


@triton.jit
def index_ids(
    ids, skip, tables, per_table, p, starts, left_base, right_base,
    left, right, left_flags, right_flags, key_base, keys, bitmap, n,
    CORES: tl.constexpr, WIDE: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find what every look-up multiplies; of runs of one table each, a program is in one."""
    pid = tl.program_id(0)
    if RUNS:
        blocks = tl.cdiv(per_table, BLOCK)
        at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = at < per_table
        at += pid // blocks * per_table
        table = tl.load(tables + pid // blocks).to(tl.int64)
    else:
        at = pid * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        table = tl.load(tables + at, mask=mask, other=0).to(tl.int64)
    _note(
        ids, skip, at, mask, table, p, starts, left_base, right_base,
        left, right, left_flags, right_flags, key_base, keys, bitmap, CORES, WIDE,
    )  # fmt: skip


@triton.jit
def index_bags(
    ids, skip, offsets, weights, batch, p, starts, left_base, right_base,
    left, right, left_flags, right_flags, key_base, keys, bitmap, bag_of, scale,
    CORES: tl.constexpr, WIDE: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for one bag a program; also the bag of every look-up and its factor."""
    bag = tl.program_id(0)
    table = (bag // batch).to(tl.int64)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < end
        _note(
            ids, skip, at, mask, table, p, starts, left_base, right_base,
            left, right, left_flags, right_flags, key_base, keys, bitmap, CORES, WIDE,
        )  # fmt: skip
        tl.store(bag_of + at, tl.zeros((BLOCK,), tl.int32) + bag, mask=mask)
        if weights is not None:
            tl.store(scale + at, tl.load(weights + at, mask=mask, other=0.0), mask=mask)
        if MEAN:
            factor = 1.0 / (end - begin).to(tl.float32)
            tl.store(scale + at, tl.zeros((BLOCK,), tl.float32) + factor, mask=mask)


@triton.jit
def rank_ids(bitmap, span_start, total, scan, spans, BLOCK: tl.constexpr):
    """Number the ids in use of one span: how many there are up to the end of each of its words.

    Which span comes first is open, and no result depends on it.
    """
    span = tl.program_id(0)
    begin = tl.load(span_start + span)
    at = begin + tl.arange(0, BLOCK)
    mask = at < tl.load(span_start + span + 1)
    ones = _ones(tl.load(bitmap + at, mask=mask, other=0))
    count = tl.sum(ones, 0)
    first = 0
    if count > 0:
        first = tl.atomic_add(total, count, sem="relaxed")
        tl.store(scan + at, first + tl.cumsum(ones, 0), mask=mask)
    tl.store(spans + 2 * span, first)
    tl.store(spans + 2 * span + 1, first + count)


@triton.jit
def number_ids(
    keys, bitmap, scan, left, left_slots, which, lefts, n,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank of the id of every look-up among the distinct ids, and where their left factors are."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    key = tl.load(keys + at, mask=mask, other=-1)
    live, first = key != -1, key >= 0
    key = tl.where(first, key, -2 - key)
    word = tl.load(bitmap + (key >> 5), mask=live, other=0).to(tl.uint32, bitcast=True)
    from_here = _ones((word >> (key & 31).to(tl.uint32)).to(tl.int32, bitcast=True))
    rank = tl.load(scan + (key >> 5), mask=live, other=0) - from_here
    tl.store(which + at, tl.where(live, rank, -1), mask=mask)
    a = tl.load(left + at, mask=first, other=0)
    if left_slots is not None:
        a = slot_of(tl.load(left_slots + a, mask=first, other=0), rank, COPIES)
    tl.store(lefts + rank, a, mask=first)

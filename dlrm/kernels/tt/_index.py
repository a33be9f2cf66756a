"""Triton kernels that find the factors of ids, and the unique ones; see :mod:`dlrm.kernels.tt`.

A factor is a slice of the first or last core, or a *pair* of slices of the two cores there. The
kernels get a row of :attr:`~dlrm.kernels.tt.layout.FactorLayout.tables` for each table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm.kernels import tl, triton


class IndexOutputs(NamedTuple):
    """The outputs for all look-ups; None for those that are not needed."""

    left: Tensor | None  # [n] left factor, -1 for none
    right: Tensor | None  # [n] right factor
    left_flags: Tensor | None  # [pairs] 1 for those in use
    right_flags: Tensor | None
    keys: Tensor | None  # [n]
    bitmap: Tensor | None  # [words] a bit for each id in use


@triton.jit
def _factors(ids, table, CORES: tl.constexpr):
    """Left and right factor of ids."""
    last_p = tl.load(table + CORES - 1).to(ids.dtype)
    right = ids % last_p
    rest = ids // last_p
    if CORES == 4:
        third_p = tl.load(table + 2).to(ids.dtype)
        right += rest % third_p * last_p
        rest = rest // third_p
    first_p = tl.load(table).to(ids.dtype)
    if CORES > 2:
        second_p = tl.load(table + 1).to(ids.dtype)
        left = rest % second_p * first_p + rest // second_p % first_p
    else:
        left = rest % first_p
    return left.to(tl.int32), right.to(tl.int32)


@triton.jit
def _bits_set(words):
    """Number of bits set in each 32-bit word."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _index(ids, skip, at, mask, table, out, CORES: tl.constexpr, WIDE: tl.constexpr):
    """Store the factors of look-ups ``at``, the pairs in use and, with a bitmap, the ids in use.

    The key of an id numbers its right factor first: see
    :class:`~dlrm.kernels.tt.layout.FactorLayout`. One look-up of each id gets the key itself, the
    others ``-2 - key``. Skipped look-ups have factors and a key of -1.
    """
    # Dividing 64-bit integers costs several times as much as dividing 32-bit ones.
    row = tl.load(ids + at, mask=mask, other=0).to(tl.int64 if WIDE else tl.int32)
    local_left, local_right = _factors(row, table, CORES)
    left = local_left + tl.load(table + CORES).to(tl.int32)
    right = local_right + tl.load(table + CORES + 1).to(tl.int32)
    live = mask
    if skip is not None:
        live = mask & (tl.load(skip + at, mask=mask, other=1) == 0)

    tl.store(out.left + at, tl.where(live, left, -1), mask=mask)
    if out.right is not None:
        tl.store(out.right + at, tl.where(live, right, -1), mask=mask)
    if out.left_flags is not None:
        tl.store(out.left_flags + left, 1, mask=live)
    if out.right_flags is not None:
        tl.store(out.right_flags + right, 1, mask=live)

    if out.bitmap is not None:
        key = tl.load(table + CORES + 2) + right * tl.load(table + CORES + 3) + local_left
        bit = (tl.zeros_like(left) + 1) << (key & 31).to(tl.int32)
        word = tl.load(out.bitmap + (key >> 5), mask=live, other=0)
        # Most ids of a batch have their bit already, and need no atomic operation.
        new = live & ((word & bit) == 0)
        word = tl.atomic_or(out.bitmap + (key >> 5), bit, mask=new, sem="relaxed")
        key = tl.where(new & ((word & bit) == 0), key, -2 - key)
        tl.store(out.keys + at, tl.where(live, key, -1), mask=mask)


@triton.jit
def index_ids(
    ids, skip, table_of, per_table, tables, out, n,
    CORES: tl.constexpr, WIDE: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Index every look-up; if they are in runs of one table each, a program has one run only."""
    pid = tl.program_id(0)
    if RUNS:
        blocks = tl.cdiv(per_table, BLOCK)
        at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = at < per_table
        at += pid // blocks * per_table
        table = tl.load(table_of + pid // blocks).to(tl.int64)
    else:
        at = pid * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        table = tl.load(table_of + at, mask=mask, other=0).to(tl.int64)
    _index(ids, skip, at, mask, tables + table * (CORES + 4), out, CORES, WIDE)


@triton.jit
def index_bags(
    ids, offsets, batch, tables, out, bag_of, mean_scale,
    CORES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Index the look-ups of one bag; also store the bag of each and, for a mean, its scale."""
    bag = tl.program_id(0)
    table = tables + (bag // batch).to(tl.int64) * (CORES + 4)
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < end
        _index(ids, None, at, mask, table, out, CORES, WIDE)
        tl.store(bag_of + at, tl.zeros((BLOCK,), tl.int32) + bag, mask=mask)
        if mean_scale is not None:
            scale = 1.0 / (end - begin).to(tl.float32)
            tl.store(mean_scale + at, tl.zeros((BLOCK,), tl.float32) + scale, mask=mask)


@triton.jit
def rank_ids(bitmap, segment_start, total, scan, segments, BLOCK: tl.constexpr):
    """Number the unique ids of one segment: store their count up to the end of each of its words.

    The order of the segments varies from run to run, but no result depends on it.
    """
    segment = tl.program_id(0)
    begin = tl.load(segment_start + segment)
    at = begin + tl.arange(0, BLOCK)
    mask = at < tl.load(segment_start + segment + 1)
    bits = _bits_set(tl.load(bitmap + at, mask=mask, other=0))
    count = tl.sum(bits, 0)
    first = 0
    if count > 0:
        first = tl.atomic_add(total, count, sem="relaxed")
        tl.store(scan + at, first + tl.cumsum(bits, 0), mask=mask)
    tl.store(segments + 2 * segment, first)
    tl.store(segments + 2 * segment + 1, first + count)


@triton.jit
def number_ids(
    keys, bitmap, scan, left, left_slots, unique_of, unique_left, n, BLOCK: tl.constexpr
):
    """Rank of the id of every look-up among the unique ids, and row of their left factors."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    key = tl.load(keys + at, mask=mask, other=-1)
    live, first = key != -1, key >= 0
    key = tl.where(first, key, -2 - key)
    word = tl.load(bitmap + (key >> 5), mask=live, other=0).to(tl.uint32, bitcast=True)
    from_here = _bits_set((word >> (key & 31).to(tl.uint32)).to(tl.int32, bitcast=True))
    rank = tl.load(scan + (key >> 5), mask=live, other=0) - from_here
    tl.store(unique_of + at, tl.where(live, rank, -1), mask=mask)
    a = tl.load(left + at, mask=first, other=0)
    if left_slots is not None:
        a = tl.load(left_slots + a, mask=first, other=0)
    tl.store(unique_left + rank, a, mask=first)

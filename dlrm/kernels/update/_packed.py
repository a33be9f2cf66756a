"""Loads and stores of packed rows (:mod:`dlrm.kernels.update.packed`) in kernels."""

from __future__ import annotations

from dlrm.kernels import tl, triton
from dlrm.kernels.update.rounding import random_bits


@triton.jit
def _record(row, wide, D: tl.constexpr, FORMAT: tl.constexpr):
    """The bytes at which the records of rows begin, and those of their scales."""
    VALUES8: tl.constexpr = (D + 1) // 2 * 2
    VALUES4: tl.constexpr = (D + 3) // 4 * 2
    if FORMAT == 8:
        begin = row * (VALUES8 + 2)
        scale = begin + VALUES8
    elif FORMAT == 4:
        begin = row * (VALUES4 + 2)
        scale = begin + VALUES4
    else:
        begin = row * (VALUES4 + 2) + tl.minimum(row, wide) * (VALUES8 - VALUES4)
        scale = begin + tl.where(row < wide, VALUES8, VALUES4)
    return begin, scale


@triton.jit
def load_packed(data, row, wide, live, column, D: tl.constexpr, FORMAT: tl.constexpr):
    """The integers of packed rows ``[K]``, ``[K, B]`` fp32, and their scales, ``[K]``.

    In 8 bits ``data`` may be where each record begins, ``[K]``, and ``row`` 0.
    """
    begin, scale_at = _record(row, wide, D, FORMAT)
    mask = live[:, None] & (column < D)
    scale = tl.load((data + scale_at).to(tl.pointer_type(tl.bfloat16)), mask=live, other=0.0)
    if FORMAT == 8:
        byte = tl.load((data + begin)[:, None] + column, mask=mask, other=128)
        value = byte.to(tl.float32) - 128.0
    else:  # two bytes at a time, of which Triton sees that columns share them
        if FORMAT == 4:
            at, shift, few, zero = column // 4 * 2, column % 4 * 4, 15, 8
        else:
            is_wide = (row < wide)[:, None]
            at = tl.where(is_wide, column // 2, column // 4) * 2
            shift = tl.where(is_wide, column % 2 * 8, column % 4 * 4)
            few, zero = tl.where(is_wide, 255, 15), tl.where(is_wide, 128, 8)
        word = (data + begin[:, None] + at).to(tl.pointer_type(tl.uint16))
        value = ((tl.load(word, mask=mask, other=0).to(tl.int32) >> shift) & few) - zero
        value = tl.where(mask, value.to(tl.float32), 0.0)
    return value, scale.to(tl.float32)


@triton.jit
def store_packed(
    data, row, place, wide, live, steps, scale, value, seed, D: tl.constexpr,
    FORMAT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Store updated rows ``[K, B]``, B even, as
    :meth:`~dlrm.kernels.update.packed.PackedRows.update` does.

    Args:
        row: the numbers of the rows, for rounding.
        place: where their records are, as numbers of rows; those of a cache only in 8 bits.
        steps: the integers of the rows before the update.
        scale: their scales, ``[K]``.
        value: the weights after it.
    """
    K: tl.constexpr = value.shape[0]
    B: tl.constexpr = value.shape[1]
    column = tl.arange(0, B)[None, :]
    mask = live[:, None] & (column < D)
    if FORMAT == 12:
        is_wide = row < wide
        highest = tl.where(row < wide, 127.0, 7.0)
        inverse = tl.where(is_wide, 1 / 127, 1 / 7)
    elif FORMAT == 8:
        highest = tl.full((K,), 127.0, tl.float32)
        inverse = 1 / 127
    else:
        highest = tl.full((K,), 7.0, tl.float32)
        inverse = 1 / 7

    # The largest weight. Bits compare as integers: infinity is above all numbers, and NaN above it.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.max(tl.where(column < D, bits, 0), 1)
    broken = bits >= 0x7F800000
    largest = bits.to(tl.float32, bitcast=True)

    # The scale it needs, rounded up to bf16. A row keeps its own while that fits.
    need = largest * inverse
    bits = (need.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    fitted = tl.where(need > 1e-30, bits.to(tl.float32, bitcast=True), 0.0)
    reach = scale * highest  # exact, which a quotient is not
    kept = (reach >= largest) & (reach <= 3.0 * largest)

    # The change in steps of the scale; with a new scale all of the value is a change.
    keep = tl.where(kept, 1.0, 0.0)[:, None]
    change = value - steps * tl.where(kept, scale, 0.0)[:, None]
    scale = tl.where(kept, scale, fitted)
    change *= tl.where(scale > 0, 1.0 / scale, 0.0)[:, None]
    if ROUND:
        random = random_bits(row[:, None] * D + column, seed)
        change += random.to(tl.float32) * 2.0**-32  # from -0.5 to 0.5

    # From 2^23 to 2^24, fp32 has only integers: adding rounds, and the low bits are the sum.
    zero = 12582912.0 + (highest + 1)[:, None]
    steps = steps * keep + (change + zero)
    steps = tl.minimum(tl.maximum(steps, zero - highest[:, None]), zero + highest[:, None])
    steps = steps.to(tl.int32, bitcast=True)
    scale = tl.where(broken, float("nan"), scale)

    begin, scale_at = _record(place, wide, D, FORMAT)
    tl.debug_barrier()  # other warps may still read the record: see store_after_all_read
    if FORMAT != 4:
        mask8 = mask if FORMAT == 8 else mask & is_wide[:, None]
        tl.store(data + begin[:, None] + column, steps.to(tl.uint8), mask=mask8)
    if FORMAT != 8:
        low, high = tl.split(tl.reshape(steps & 15, (K, B // 2, 2)))
        half = tl.arange(0, B // 2)[None, :]
        mask4 = live[:, None] & (half < (D + 1) // 2)
        if FORMAT == 12:
            mask4 = mask4 & ~is_wide[:, None]
        tl.store(data + begin[:, None] + half, (low | (high << 4)).to(tl.uint8), mask=mask4)
    tl.store((data + scale_at).to(tl.pointer_type(tl.bfloat16)), scale.to(tl.bfloat16), mask=live)

"""Values of up to 8 hex digits as integer keys: parsed, counted and looked up many at a time.

Criteo's columns have hundreds of millions of such values. As int64 they take a third of the memory
of texts, and they are sorted 20 times as fast.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MISSING = -1
"""Key of a missing value; the key of any other value is the value itself, 0 .. 2**32 - 1."""
POSITION_BITS = 31


def hex_keys(values: pa.Array) -> NDArray[np.int64]:
    """Keys of hex strings: their value, or ``MISSING`` for an empty string.

    Args:
        values: binary, each with up to 8 hex digits in lower or upper case.

    Raises:
        ValueError: a value is not hexadecimal or too long.
    """
    lengths = pc.binary_length(values).to_numpy()
    present = lengths > 0
    if not (lengths[present] == 8).all():
        values = pc.utf8_lpad(values.filter(pa.array(present)).cast(pa.string()), 8, "0")
        lengths = pc.binary_length(values).to_numpy()
        if (lengths > 8).any():
            raise ValueError("more than 8 hex digits")
    _, offsets, data = values.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[values.offset, values.offset + len(values)]]
    text = np.frombuffer(data or b"", np.uint8)[first:last].view(np.uint64)
    keys = np.full(len(present), MISSING, np.int64)
    keys[present] = _from_hex(text)
    return keys


def hex_strings(keys: NDArray[np.int64], null: int | None = None) -> pa.Array:
    """Keys as strings of 8 lower-case hex digits; ``MISSING`` becomes an empty string.

    Args:
        keys: ``[n]``.
        null: the position of a key that becomes a null, if there is one; it must be ``MISSING``.
    """
    assert len(keys) < 1 << 28  # 32-bit offsets; the largest column of Terabyte has 228 M values
    present = keys != MISSING
    data = keys[present].astype(">u4").tobytes().hex().encode()
    offsets = np.zeros(len(keys) + 1, np.int32)
    np.cumsum(np.where(present, 8, 0), out=offsets[1:])

    valid = None
    if null is not None:
        bits = np.ones(len(keys), bool)
        bits[null] = False
        valid = pa.py_buffer(np.packbits(bits, bitorder="little"))
    return pa.StringArray.from_buffers(
        len(keys), pa.py_buffer(offsets), pa.py_buffer(data), valid, -1 if null is None else 1
    )


def modulo(keys: NDArray[np.int64], cap: int | None) -> NDArray[np.int64]:
    """The keys modulo ``cap``, if there is one; a missing value stays one."""
    return keys if cap is None else np.where(keys == MISSING, MISSING, keys % min(cap, 2**32))


def sum_counts(
    keys: NDArray[np.int64], counts: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct ``keys [n]`` in rising order, and for each the sum of its ``counts [n]``."""
    ordered, position = sort_keys(keys)
    starts = _starts(ordered)
    return ordered[starts], np.add.reduceat(counts[position], starts, dtype=np.int64)


def look_up(
    keys: NDArray[np.int64], ids: NDArray[np.int32], wanted: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The id of each of the ``wanted`` keys, all of which are in ``keys``.

    Args:
        keys: ``[n]`` distinct, in rising order.
        ids: ``[n]`` their ids.
        wanted: ``[m]`` in any order.
    """
    ordered, position = sort_keys(wanted)  # sorted keys are found with few cache misses
    starts = _starts(ordered)
    found = ids[np.searchsorted(keys, ordered[starts])]
    result = np.empty(len(wanted), np.int32)
    result[position] = np.repeat(found, np.diff(starts, append=len(wanted)))
    return result


def sort_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sorted keys, and the previous position of each.

    Key and position are sorted as one integer. This sort is vectorised and in place, about 20 times
    as fast as an argsort.
    """
    assert len(keys) < 1 << POSITION_BITS
    packed = (keys - MISSING).view(np.uint64)
    packed <<= np.uint64(POSITION_BITS)
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    position = (packed & np.uint64((1 << POSITION_BITS) - 1)).view(np.int64)
    packed >>= np.uint64(POSITION_BITS)
    ordered = packed.view(np.int64)
    ordered += MISSING
    return ordered, position


def _starts(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of the first occurrence of each distinct key."""
    return np.flatnonzero(np.diff(ordered, prepend=MISSING - 1))


def _from_hex(text: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The value of eight ASCII digits per element, the first digit in the lowest byte.

    All bytes of an element are processed at once: digits are joined to pairs, fours and eights.
    """
    letter = text >> np.uint64(6) & _bytes(0x01)
    digit = (text & _bytes(0x0F)) + letter * np.uint64(9)
    above_9 = (digit + _bytes(6)) >> np.uint64(4) & _bytes(0x01)
    lower_case = digit + _bytes(0x30) + above_9 * np.uint64(39)
    if (lower_case != text | letter << np.uint64(5)).any() or (digit & _bytes(0xF0)).any():
        raise ValueError("not hex digits")
    pairs = (digit << np.uint64(4) | digit >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs << np.uint64(8) | pairs >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (fours << np.uint64(16) | fours >> np.uint64(32)) & np.uint64(0xFFFFFFFF)


def _bytes(value: int) -> np.uint64:
    """``value`` in each of the 8 bytes."""
    return np.uint64(value * 0x0101010101010101)

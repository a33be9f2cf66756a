"""The distinct values of a column, merged from the dictionaries of its blocks, with their counts;
integer keys of hex digits, and hashes of texts, which are the same on every machine.

Values are texts, merged by hashing, or integer keys of up to 8 hex digits, merged by sorting:
Criteo's columns have hundreds of millions of such values, which take a third of the memory of
texts, and are sorted 20 times as fast. Both keep no more in memory than the distinct values and the
dictionaries of one chunk of blocks.
"""

from __future__ import annotations

from binascii import hexlify, unhexlify
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..schema import HASHED

MISSING = -1
"""Key of a missing value; the key of any other value is the value itself, 0 .. 2**32 - 1."""
POSITION_BITS = 31


def count_values(
    chunks: Iterable[tuple[Iterable[pa.Array], Iterable[NDArray[np.int64]]]], kind: pa.DataType
) -> tuple[pa.Array, NDArray[np.int64]]:
    """The distinct values ``[n]`` of dictionaries in rising order, and the count ``[n]`` of each.

    Args:
        chunks: the dictionaries of some blocks at a time, and how often each entry occurs.
        kind: of the values: large strings, or int64 for keys of hex digits.
    """
    merge = _merge_keys if pa.types.is_integer(kind) else _merge_texts
    values, counts = pa.array([], kind), np.empty(0, np.int64)
    for entries, added in chunks:
        every = pa.concat_arrays([values, *(part.cast(kind) for part in entries)])
        values, counts = merge(every, np.concatenate([counts, *added]))

    if merge is _merge_keys:
        return values, counts
    order = pc.sort_indices(values)
    return values.take(order), counts[order.to_numpy()]


def _merge_keys(values: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """The distinct keys in rising order, and the sum of the counts of each."""
    ordered, position = sort_keys(values.to_numpy())
    starts = np.flatnonzero(np.diff(ordered, prepend=MISSING - 1))
    return pa.array(ordered[starts]), np.add.reduceat(counts[position], starts, dtype=np.int64)


def _merge_texts(values: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """The distinct texts in the order in which they first occur, and the sum of the counts."""
    encoded = values.dictionary_encode()
    # In float64, which is exact up to 2**53 rows.
    sums = np.bincount(encoded.indices.to_numpy(), counts, minlength=len(encoded.dictionary))
    return encoded.dictionary, sums.astype(np.int64)


def hex_keys(values: pa.Array) -> NDArray[np.int64]:
    """Keys of binary values of up to 8 hex digits: their value, or ``MISSING`` for an empty one.

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
    keys = np.full(len(present), MISSING, np.int64)
    keys[present] = np.frombuffer(unhexlify(memoryview(data or b"")[first:last]), ">u4")
    return keys


def hex_strings(keys: NDArray[np.int64]) -> pa.StringArray:
    """Keys as strings of 8 lower-case hex digits; ``MISSING`` becomes an empty string."""
    assert len(keys) < 1 << 28  # 32-bit offsets; the largest column of Terabyte has 228 M values
    present = keys != MISSING
    data = hexlify(keys[present].astype(">u4").data)
    offsets = np.zeros(len(keys) + 1, np.int32)
    np.cumsum(np.where(present, 8, 0), out=offsets[1:])
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(data))


def modulo(keys: NDArray[np.int64], cap: int | None) -> NDArray[np.int64]:
    """The keys modulo ``cap``, if there is one; a missing value stays one."""
    return keys if cap is None else np.where(keys == MISSING, MISSING, keys % min(cap, 2**32))


def sort_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sorted keys, and the previous position of each. Both are sorted as one integer,
    vectorised and in place: about 20 times as fast as an argsort."""
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


def hash_values(values: pa.Array, buckets: int) -> pa.Array:
    """The bucket of each text, as text; a missing value, "", stays one."""
    hashed = hash_texts(values) % np.uint64(buckets)
    return pc.if_else(pc.equal(values, ""), "", pa.array(hashed).cast(pa.string()))


def hashed_ids(values: pa.Array) -> NDArray[np.int64]:
    """The id of each value where ids are hashes, in ``[0, 2^63 - 1)``: texts, or the integer keys
    of hex digits, which are hashes already."""
    if pa.types.is_integer(values.type):
        keys = values.to_numpy()
        return np.where(keys == MISSING, 1 << 32, keys)
    return (hash_texts(values.cast(pa.large_string())) % np.uint64(HASHED)).astype(np.int64)


class DistinctIds:
    """Estimates how many different ids there were, within a few per cent, in bounded memory.

    Reference:
        Bar-Yossef et al., "Counting Distinct Elements in a Data Stream", RANDOM 2002.
    """

    MOST = 4096  # hashes that are kept, the smallest ones

    def __init__(self) -> None:
        self._smallest = np.empty(0, np.uint64)

    def add(self, ids: NDArray[np.int64]) -> None:
        """Add ids, in any order."""
        hashes = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
        if len(self._smallest) == self.MOST:
            hashes = hashes[hashes < self._smallest[-1]]
        self._smallest = np.unique(np.concatenate([self._smallest, hashes]))[: self.MOST]

    @property
    def count(self) -> int:
        """The number of different ids: exact if there were few."""
        if len(self._smallest) < self.MOST:
            return len(self._smallest)
        return round((self.MOST - 1) * 2**64 / int(self._smallest[-1]))


def hash_texts(values: pa.Array) -> NDArray[np.uint64]:
    """SipHash of each text with the fixed key of :func:`pandas.util.hash_array`."""
    import pandas as pd  # which takes a third of a second, and hashing is rare

    objects = values.to_numpy(zero_copy_only=False).astype(object)
    return pd.util.hash_array(objects, categorize=False)

"""Hashes of texts, the same on every machine."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..schema import HASHED
from .keys import MISSING


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


def plain_bools(values: pa.Array) -> pa.Array:
    """Texts with bools as those of Parquet and JSON are written; pandas writes "True" to CSV."""
    if not pc.any(pc.is_in(values, pa.array(["True", "False"], values.type))).as_py():
        return values
    for text in ("True", "False"):
        values = pc.if_else(pc.equal(values, text), text.lower(), values)
    return values

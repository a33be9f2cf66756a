"""The distinct values of a column, merged from the dictionaries of its blocks, with their counts.

There are two sorts of keys. :class:`TextKeys` are texts, merged by hashing. :class:`HexKeys` are
integers, merged by sorting, which is faster and takes less memory where values are many. Both keep
no more in memory than the distinct values and the dictionaries of one chunk of blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .hex_keys import look_up, sum_counts

CHUNK_ENTRIES = 1 << 22  # of dictionaries whose ids are looked up at a time


class Keys(ABC):
    """Distinct values, their counts, and the id of each entry of all dictionaries.

    Args:
        path: the file that gets the ids of all entries, int32.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = np.empty(0, np.int64)

    @abstractmethod
    def add(self, entries: Sequence[pa.Array], counts: Sequence[NDArray[np.int64]]) -> None:
        """Add the dictionaries of the next blocks, and how often each of their entries occurs."""

    @abstractmethod
    def ordered(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """The distinct values ``[n]`` in rising order, and the count ``[n]`` of each."""

    @abstractmethod
    def write_ids(self, ids: NDArray[np.int32], chunks: Iterable[Sequence[pa.Array]]) -> None:
        """Write the id of each entry of all dictionaries.

        Args:
            ids: ``[n]`` of the values that :meth:`ordered` returned.
            chunks: the dictionaries that were added.
        """


class HexKeys(Keys):
    """Integer keys of hex digits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._keys = np.empty(0, np.int64)

    def add(self, entries: Sequence[pa.Array], counts: Sequence[NDArray[np.int64]]) -> None:
        """See :class:`Keys`."""
        keys = np.concatenate([self._keys, *(part.to_numpy() for part in entries)])
        self._keys, self._counts = sum_counts(keys, np.concatenate([self._counts, *counts]))

    def ordered(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """See :class:`Keys`."""
        return pa.array(self._keys), self._counts

    def write_ids(self, ids: NDArray[np.int32], chunks: Iterable[Sequence[pa.Array]]) -> None:
        """See :class:`Keys`."""
        with self._path.open("wb") as file:
            for chunk in chunks:
                entries = np.concatenate([part.to_numpy() for part in chunk])
                # Not with tofile, which silently drops the last bytes if the disk is full.
                file.write(look_up(self._keys, ids, entries).data)


class TextKeys(Keys):
    """Texts, in the order in which they first occur.

    Until the ids are known, the file has the position of each entry among the distinct values.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path.write_bytes(b"")  # a killed run may have left it
        self._values = pa.array([], pa.large_string())

    def add(self, entries: Sequence[pa.Array], counts: Sequence[NDArray[np.int64]]) -> None:
        """See :class:`Keys`."""
        before = len(self._values)  # these stay where they are
        parts = [self._values, *(part.cast(pa.large_string()) for part in entries)]
        encoded = pa.concat_arrays(parts).dictionary_encode()
        positions = encoded.indices.to_numpy()
        self._values = encoded.dictionary

        # In float64, which is exact up to 2**53 rows.
        weights = np.concatenate([self._counts, *counts])
        sums = np.bincount(positions, weights, minlength=len(self._values))
        self._counts = sums.astype(np.int64)
        with self._path.open("ab") as file:
            file.write(positions[before:].data)

    def ordered(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """See :class:`Keys`."""
        order = pc.sort_indices(self._values)
        self._order = order.to_numpy()
        return self._values.take(order), self._counts[self._order]

    def write_ids(self, ids: NDArray[np.int32], chunks: Iterable[Sequence[pa.Array]]) -> None:
        """See :class:`Keys`; the positions become ids in place."""
        if not self._path.stat().st_size:
            return
        of_position = np.empty(len(ids), np.int32)
        of_position[self._order] = ids
        entries = np.memmap(self._path, np.int32, "r+")
        for start in range(0, len(entries), CHUNK_ENTRIES):
            part = entries[start : start + CHUNK_ENTRIES]
            part[:] = of_position[part]

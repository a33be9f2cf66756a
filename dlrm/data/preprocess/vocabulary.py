"""Vocabularies: from the values of a column to contiguous ids in order of falling frequency."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm.data.preprocess.parser import MISSING, hex_keys, hex_strings

POSITION_BITS = 31


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What each id of a column stands for, and how often it occurs in the counted rows."""

    keys: NDArray[np.int64]  # [V]
    counts: NDArray[np.int64]  # [V]
    oov_id: int | None
    """The id of all other values (its key means nothing), if there is one."""

    def table(self) -> pa.Table:
        """The vocabulary as columns ``value`` (8 hex digits, "" for missing, null for every
        value not listed), ``id`` and ``count``; the row number is the id."""
        value = hex_strings(self.keys)
        if self.oov_id is not None:
            null = pa.nulls(1, pa.string())
            parts = value[: self.oov_id], null, value[self.oov_id + 1 :]
            value = pa.concat_arrays(parts)
        ids = np.arange(len(self.keys), dtype=np.int32)
        return pa.table({"value": value, "id": ids, "count": self.counts})


def group(
    keys: NDArray[np.int64], counts: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct ``keys [n]`` in rising order, and the sum of the ``counts [n]`` of each."""
    ordered, position = _sort(keys)
    starts = _starts(ordered)
    return ordered[starts], np.add.reduceat(counts[position], starts, dtype=np.int64)


def number(
    keys: NDArray[np.int64], counts: NDArray[np.int64], *, min_count: int = 1, oov: bool = True
) -> tuple[Vocabulary, NDArray[np.int32]]:
    """Give ids to the values of a column in order of falling count.

    Equal counts are ordered by key, so a missing value comes first. A value counted less than
    ``min_count`` times is out of vocabulary; all such values share one id, which takes its place
    by their joint count, behind others of the same count. With a ``min_count`` of 1 it is thus
    the last id, of a row that training never touches.

    Args:
        keys: ``[n]`` distinct, in rising order: ``MISSING`` or a value below 2**32.
        counts: ``[n]`` occurrences of each; 0 for one that occurs in rows not counted only.
        min_count: occurrences that a value of the vocabulary needs, at least 1.
        oov: reserve an id for unknown values. Without it every key must reach ``min_count``.

    Returns:
        The vocabulary and the id ``[n]`` of each key.
    """
    kept = np.flatnonzero(counts >= min_count)
    kept = kept[np.argsort(-counts[kept], kind="stable")]
    vocabulary_keys, vocabulary_counts = keys[kept], counts[kept]
    ids = np.arange(len(kept), dtype=np.int32)
    oov_id = None
    if oov:
        rare = counts.sum() - vocabulary_counts.sum()
        oov_id = int(np.count_nonzero(vocabulary_counts >= rare))
        ids += ids >= oov_id
        vocabulary_keys = np.insert(vocabulary_keys, oov_id, MISSING)
        vocabulary_counts = np.insert(vocabulary_counts, oov_id, rare)
    assert oov or len(kept) == len(keys)
    id_of_key = np.full(len(keys), oov_id or 0, np.int32)
    id_of_key[kept] = ids
    vocabulary = Vocabulary(keys=vocabulary_keys, counts=vocabulary_counts, oov_id=oov_id)
    return vocabulary, id_of_key


@contextmanager
def open_vocabulary(path: Path, data: object = "the data") -> Iterator[pq.ParquetFile]:
    """A vocabulary's file, and what is wrong with it told with its path.

    Args:
        path: of the file.
        data: what to prepare again if it is damaged.

    Raises:
        ValueError: it can't be read, or the block says what else is wrong with it.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(
            f"{path} can't be read as a vocabulary ({error}); prepare {data} again"
        ) from None


def ids_in(listed: pa.Table, keys: NDArray[np.int64]) -> NDArray[np.int32]:
    """The ids that a vocabulary has for keys.

    Args:
        listed: the vocabulary, as :meth:`Vocabulary.table` gives it.
        keys: ``[n]`` in rising order.

    Returns:
        ``[n]``, the id of all values not listed for those; -1 where there is none.
    """
    value = listed["value"].combine_chunks()
    rest = np.flatnonzero(value.is_null())
    own = np.delete(np.arange(len(value), dtype=np.int32), rest)
    known, position = _sort(hex_keys(value.drop_null().cast(pa.binary())))
    ids = np.full(len(keys), rest[0] if len(rest) else -1, np.int32)
    if len(known):
        at = np.searchsorted(known, keys).clip(max=len(known) - 1)
        found = known[at] == keys
        ids[found] = own[position[at[found]]]
    return ids


def look_up(
    keys: NDArray[np.int64], ids: NDArray[np.int32], wanted: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The id of each of the ``wanted`` keys, all of which are among ``keys``.

    Args:
        keys: ``[n]`` distinct, in rising order.
        ids: ``[n]`` the id of each.
        wanted: ``[m]`` in any order.
    """
    ordered, position = _sort(wanted)  # in order they are found with few cache misses
    starts = _starts(ordered)
    found = ids[np.searchsorted(keys, ordered[starts])]
    result = np.empty(len(wanted), np.int32)
    result[position] = np.repeat(found, np.diff(starts, append=len(wanted)))
    return result


def _starts(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each distinct key begins."""
    return np.flatnonzero(np.diff(ordered, prepend=MISSING - 1))


def _sort(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted keys and the position of each before.

    Key and position are sorted as one integer: vectorised and in place, it is some 20 times as
    fast as an argsort.
    """
    assert len(keys) < 1 << POSITION_BITS
    packed = (keys - MISSING).astype(np.uint64) << np.uint64(POSITION_BITS)
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    position = (packed & np.uint64((1 << POSITION_BITS) - 1)).view(np.int64)
    packed >>= np.uint64(POSITION_BITS)
    ordered = packed.view(np.int64)
    ordered += MISSING
    return ordered, position

"""Vocabularies: contiguous ids, in order of falling frequency, for the values of a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm.data.parquet import reason, whole_table
from dlrm.data.prepare.criteo_rows import MISSING, hex_keys, hex_strings
from dlrm.data.schema import META_FILE, Categorical, Meta

# zstd with dictionaries: 43 bytes a row, 9 M rows/s read by a core; lz4: 54 bytes, 14 M rows/s.
# Both are far faster than a loader needs, so take the smaller one.
# With checksums, because zstd itself accepts about half of all damaged pages.
ZSTD: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "write_page_checksum": True,
}
POSITION_BITS = 31
SCHEMA = pa.schema([("value", pa.string()), ("id", pa.int32()), ("count", pa.int64())])
UNSEEN = pa.field("unseen", pa.int32())
"""A further column, if ids were appended: in how many preparations with ``--append-new``, up to the
last one, no training row had the value."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The key of each id of a column, and how often it occurs in the counted rows."""

    keys: NDArray[np.int64]  # [V]
    counts: NDArray[np.int64]  # [V]
    oov_id: int | None
    """The id of all other values, if there is one; its key has no meaning."""

    def table(self) -> pa.Table:
        """The vocabulary as columns ``value`` (8 hex digits, "" for missing, null for all values
        that are not listed), ``id`` and ``count``; the row number is the id."""
        value = hex_strings(self.keys)
        if self.oov_id is not None:
            null = pa.nulls(1, pa.string())
            parts = value[: self.oov_id], null, value[self.oov_id + 1 :]
            value = pa.concat_arrays(parts)
        ids = np.arange(len(self.keys), dtype=np.int32)
        return pa.table({"value": value, "id": ids, "count": self.counts})


def sum_counts(
    keys: NDArray[np.int64], counts: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct ``keys [n]`` in rising order, and for each the sum of its ``counts [n]``."""
    ordered, position = _sort(keys)
    starts = _starts(ordered)
    return ordered[starts], np.add.reduceat(counts[position], starts, dtype=np.int64)


def assign_ids(
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    min_count: int = 1,
    oov: bool = True,
    most: int | None = None,
) -> tuple[Vocabulary, NDArray[np.int32]]:
    """Assign ids to the values of a column in order of falling count.

    Values with equal counts are ordered by key, so a missing value comes first. Values with a count
    below ``min_count`` are out of vocabulary. They share one id, whose position is given by their
    joint count, after other values with that count. If ``min_count`` is 1, it is therefore the last
    id, whose row training never updates.

    Args:
        keys: ``[n]`` distinct, in rising order: ``MISSING`` or a value below 2**32.
        counts: ``[n]`` occurrences of each; 0 for a key that occurs only in rows not counted.
        min_count: occurrences that a value of the vocabulary needs, at least 1.
        oov: reserve an id for unknown values. Without it, every key must reach ``min_count``.
        most: the number of values, from the most frequent on, that may have an id of their own.

    Returns:
        The vocabulary and the id ``[n]`` of each key.
    """
    kept = np.flatnonzero(counts >= min_count)
    kept = kept[np.argsort(-counts[kept], kind="stable")][:most]
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
    """Open a vocabulary file; errors in the block name its path.

    Args:
        path: the file.
        data: what to prepare again if the file is damaged.

    Raises:
        ValueError: the file cannot be read, or the block raised a ``ValueError``.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(
            f"{path} can't be read as a vocabulary ({reason(error)}); prepare {data} again"
        ) from None


def read_vocabulary(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The columns of an open vocabulary, by default all."""
    return whole_table(file.read(columns=columns), file.metadata.num_rows)


def read_known(file: pq.ParquetFile, schema: pa.Schema) -> pa.Table:
    """The columns of ``schema`` of an open vocabulary, and ``unseen`` if it has that."""
    known = schema.append(UNSEEN) if UNSEEN.name in file.schema_arrow.names else schema
    return read_vocabulary(file, known.names).cast(known)


def check_vocabularies(directory: Path, columns: Sequence[Categorical]) -> None:
    """Check that a prepared directory has the vocabularies of its columns.

    Raises:
        ValueError: a vocabulary cannot be opened, or belongs to another preparation.
    """
    for column in columns:
        with open_vocabulary(directory / Meta.vocabulary_file(column.name), directory) as file:
            if (rows := file.metadata.num_rows) != column.cardinality:
                raise ValueError(f"it has {rows} rows, {META_FILE} says {column.cardinality}")


def reuse_ids(
    directory: Path, name: str, keys: NDArray[np.int64]
) -> tuple[pa.Table, NDArray[np.int32]]:
    """The vocabulary of a column of a prepared directory, and the id of each key in it.

    Raises:
        ValueError: the vocabulary is damaged, or has no id for one of the ``keys [n]``.
    """
    with open_vocabulary(directory / Meta.vocabulary_file(name), directory) as file:
        table = read_known(file, SCHEMA)
        ids = KeyIndex.of(table).look_up(keys)
    if (ids < 0).any():
        value = hex_strings(keys[ids < 0][:1])[0].as_py()
        raise ValueError(
            f"{name}: {sum(ids < 0)} values, such as {value!r}, have no id in {directory}, which "
            "was prepared with --vocabulary all and has no out-of-vocabulary id: prepare it with "
            "--vocabulary train"
        )
    return table, ids


@dataclass(frozen=True, kw_only=True)
class KeyIndex:
    """A vocabulary from which the ids of any keys are looked up."""

    keys: NDArray[np.int64]  # in rising order
    ids: NDArray[np.int32]
    oov_id: int | None

    @classmethod
    def of(cls, table: pa.Table) -> KeyIndex:
        """The index of a vocabulary as its file holds it."""
        value = table["value"].combine_chunks()
        oov = np.flatnonzero(value.is_null())
        listed_ids = np.delete(np.arange(len(value), dtype=np.int32), oov)
        keys, position = _sort(hex_keys(value.drop_null().cast(pa.binary())))
        return cls(keys=keys, ids=listed_ids[position], oov_id=int(oov[0]) if len(oov) else None)

    def look_up(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """The id of each key: the out-of-vocabulary id if it is not listed, or -1."""
        ids = np.full(len(keys), -1 if self.oov_id is None else self.oov_id, np.int32)
        if len(self.keys):
            at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
            found = self.keys[at] == keys
            ids[found] = self.ids[at[found]]
        return ids


def look_up(
    keys: NDArray[np.int64], ids: NDArray[np.int32], wanted: NDArray[np.int64]
) -> NDArray[np.int32]:
    """The id of each of the ``wanted`` keys, all of which are in ``keys``.

    Args:
        keys: ``[n]`` distinct, in rising order.
        ids: ``[n]`` their ids.
        wanted: ``[m]`` in any order.
    """
    ordered, position = _sort(wanted)  # sorted keys are found with few cache misses
    starts = _starts(ordered)
    found = ids[np.searchsorted(keys, ordered[starts])]
    result = np.empty(len(wanted), np.int32)
    result[position] = np.repeat(found, np.diff(starts, append=len(wanted)))
    return result


def _starts(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of the first occurrence of each distinct key."""
    return np.flatnonzero(np.diff(ordered, prepend=MISSING - 1))


def _sort(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sorted keys, and the previous position of each.

    Key and position are sorted as one integer. This sort is vectorised and in place, about 20 times
    as fast as an argsort.
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

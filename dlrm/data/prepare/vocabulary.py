"""Vocabularies: contiguous ids, in order of falling frequency, for the values of a column.

Values with equal counts are in rising order, so that a missing value comes first. All values
without an id share one: its position is given by their joint count, after other values with that
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...utils.atomic import atomic_write
from ..parquet import reason, whole_table
from .keys import hash_texts, hex_keys, hex_strings, sort_keys

# zstd with dictionaries: 43 bytes a row, 9 M rows/s read by a core; lz4: 54 bytes, 14 M rows/s.
# Both are far faster than a loader needs, so take the smaller one.
# With checksums, because zstd itself accepts about half of all damaged pages.
ZSTD: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "write_page_checksum": True,
}
TEXT = pa.large_string()
HEX = pa.string()
UNSEEN, POSITIVES = FURTHER = "unseen", "positives"
"""Columns that a file may have. If ids were appended: in how many preparations with
``--append-new``, up to the last one, no training row had the value. If rows get rates: how many of
the counted rows have label 1."""
KINDS = {
    "value": TEXT, "id": pa.int64(), "count": pa.int64(), UNSEEN: pa.int32(),
    POSITIVES: pa.int64(),
}  # fmt: skip
"""The columns of a file, as they are read."""
FEW_IDS = 50_000  # vocabularies up to this size are hashed by each look-up


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The values of a categorical feature: the position of a value is its id."""

    values: pa.Array
    """``[V]`` texts: large strings, or strings of 8 hex digits; null stands for all values that are
    not listed, "" for a missing one."""
    counts: NDArray[np.int64]
    """``[V]`` occurrences in the counted rows."""
    oov_id: int | None
    """The id of all values that are not listed, if there is one."""
    unseen: NDArray[np.int32] | None = None
    """``[V]``, if it was extended: see :data:`UNSEEN`."""

    positives: NDArray[np.int64] | None = None
    """``[V]``, if rows get rates: see :data:`POSITIVES`."""

    def __len__(self) -> int:
        return len(self.values)

    def ids(self, values: pa.Array, name: str, *, often: bool = True) -> NDArray[np.int32]:
        """The id of each of the ``values [n]``, see :meth:`find`.

        Raises:
            ValueError: there is a value without an id; it names the column.
        """
        ids = self.find(values, often=often)
        if self.oov_id is not None:
            ids = np.where(ids < 0, np.int32(self.oov_id), ids)
        elif (ids < 0).any():
            raise ValueError(
                f"{name}: a value has no id, as the data was prepared with --vocabulary all; "
                "prepare it with --vocabulary train, and train again"
            )
        return ids

    def find(self, values: pa.Array, *, often: bool = True) -> NDArray[np.int32]:
        """The id of each of the ``values [n]``, -1 if it is not listed: texts without nulls, or
        integer keys of hex digits. Few of them are found faster ``often``, for which the hashes of
        all are kept."""
        if pa.types.is_integer(values.type):
            found = np.empty(len(values), np.int32)
            ordered, position = sort_keys(values.to_numpy())  # which takes few cache misses
            found[position] = self._find_hashes(ordered)
            return found

        values = values.cast(TEXT)
        if not often or len(self) <= max(FEW_IDS, 4 * len(values)):
            return pc.index_in(values, self.values).fill_null(-1).to_numpy()

        # Without a pass over the whole vocabulary each time. Few hashes of values that are not
        # listed, or of "", are those of others.
        found = self._find_hashes(hash_texts(values))
        candidates = self.values.take(pa.array(np.maximum(found, 0)))
        equal = pc.equal(candidates, values).fill_null(False).to_numpy(zero_copy_only=False)
        doubtful = np.flatnonzero((found >= 0) & ~equal)
        if len(doubtful):
            exact = pc.index_in(values.take(pa.array(doubtful)), self.values)
            found[doubtful] = exact.fill_null(-1).to_numpy()
        return found

    def _find_hashes(self, wanted: NDArray) -> NDArray[np.int32]:
        """The id of a value with each hash, -1 if there is none."""
        hashes, ids = self._hashes
        if not len(hashes):
            return np.full(len(wanted), -1, np.int32)
        position = np.searchsorted(hashes, wanted).clip(max=len(hashes) - 1)
        return np.where(hashes[position] == wanted, ids[position], -1).astype(np.int32)

    @cached_property
    def _hashes(self) -> tuple[NDArray, NDArray]:
        """The hashes of all values in rising order, and the id of each; keys are their own."""
        if self.values.type != HEX:
            hashes = hash_texts(self.values.fill_null(""))
            order = np.argsort(hashes, kind="stable")
            return hashes[order], order
        listed = np.flatnonzero(self.values.is_valid())
        keys, position = sort_keys(hex_keys(self.values.drop_null().cast(pa.binary())))
        return keys, listed[position]

    def write(self, path: Path) -> None:
        """Write the columns ``value``, ``id``, ``count`` and, if there are any, ``unseen`` and
        ``positives``; the row number is the id."""
        ids = np.arange(len(self), dtype=np.int32)
        columns = {"value": self.values, "id": ids, "count": self.counts}
        columns |= {UNSEEN: self.unseen, POSITIVES: self.positives}
        with atomic_write(path) as temporary:
            pq.write_table(
                pa.table({name: values for name, values in columns.items() if values is not None}),
                temporary,
                use_dictionary=["count", *FURTHER],
                column_encoding={"value": "PLAIN", "id": "DELTA_BINARY_PACKED"},
                **ZSTD,
            )

    @classmethod
    def read(
        cls, path: Path, *, hexadecimal: bool = False, data: object = "the data"
    ) -> Vocabulary:
        """Read what :meth:`write` wrote. If the file is damaged, the error says to prepare ``data``
        again.

        Raises:
            ValueError: the file is damaged.
        """
        columns = ["value", "id", "count", *FURTHER]
        table = read_vocabulary(path, columns, data, HEX if hexadecimal else TEXT)
        there = {name: table[name].to_numpy() for name in FURTHER if name in table.schema.names}

        values = table["value"].combine_chunks()
        oov_id = pc.index(values.is_null(), True).as_py()
        return cls(
            values=values,
            counts=table["count"].to_numpy(),
            oov_id=None if oov_id < 0 else oov_id,
            unseen=there.get(UNSEEN),
            positives=there.get(POSITIVES),
        )


def make_vocabulary(
    values: pa.Array,
    counts: NDArray[np.int64],
    *,
    min_count: int = 1,
    most: int | None = None,
    oov: bool = True,
) -> Vocabulary:
    """Assign ids to the values of a column in order of falling count.

    Values with a count below ``min_count`` are out of vocabulary. If ``min_count`` is 1, the id
    that they share is the last one, whose row training never updates.

    Args:
        values: ``[n]`` distinct texts or keys of hex digits, in rising order.
        counts: ``[n]`` occurrences of each; 0 for a value that occurs only in rows not counted.
        min_count: occurrences that a value of the vocabulary needs, at least 1.
        most: at most this many ids, that of all other values included.
        oov: reserve an id for unknown values. Without it, every value must reach ``min_count``.
    """
    kept = np.flatnonzero(counts >= min_count)
    kept = kept[np.argsort(-counts[kept], kind="stable")][: most and most - 1]
    assert oov or len(kept) == len(values)

    kept_counts = counts[kept]
    oov_id = None
    if oov:
        rare = counts.sum() - kept_counts.sum()
        oov_id = int(np.count_nonzero(kept_counts >= rare))
        kept_counts = np.insert(kept_counts, oov_id, rare)
    listed = texts_of(values.take(pa.array(kept)), oov_id)
    return Vocabulary(values=listed, counts=kept_counts, oov_id=oov_id)


def extend_ids(
    old: Vocabulary,
    values: pa.Array,
    counts: NDArray[np.int64],
    *,
    min_count: int,
    most: int | None = None,
    evict_after: int | None = None,
) -> Vocabulary:
    """Give ids to the values of later rows that have none.

    A value is evicted only when a new one needs its id. The values that were unseen the longest go
    first, and among equals those with the largest id, which are the rarest. When none is left, new
    values get the ids after the last one. So no id is without a value, a value that is kept keeps
    its id, and tables never shrink. The counts of evicted values, and of all without an id, are
    added to those of ``oov_id``, whose id is never given away; without it, no value is evicted.

    Args:
        values: ``[n]`` distinct texts or keys, in rising order.
        counts: ``[n]`` occurrences in the new training rows, perhaps 0, which are added to the
            old ones.
        min_count: occurrences that a new value needs.
        most: the number of ids that there may be.
        evict_after: preparations, at least 1, that a value must have been unseen for to be
            evicted, this one included; None to evict none.
    """
    size, oov_id, listed = len(old), old.oov_id, old.find(values, often=False)
    unseen = np.ones(size, np.int32) if old.unseen is None else old.unseen + np.int32(1)
    unseen[listed[(counts > 0) & (listed >= 0)]] = 0
    if oov_id is not None:
        unseen[oov_id] = 0

    # New values, and the ids that are free for them: those of evicted values, then further ones.
    new = np.flatnonzero((listed < 0) & (counts >= min_count))
    new = new[np.argsort(-counts[new], kind="stable")]
    free = np.flatnonzero(unseen >= evict_after)[::-1] if evict_after else np.empty(0, np.int64)
    free = free[np.argsort(-unseen[free], kind="stable")][: len(new)]
    grown = size + len(new) - len(free)
    if most is not None:
        grown = max(size, min(grown, most))
    given = np.concatenate([free, np.arange(size, grown)]).astype(np.int32)
    new = new[: len(given)]

    # What becomes of the counts and of values that have lost their ids.
    total = np.pad(old.counts, (0, grown - size))
    ids = listed.copy()
    if len(free):
        total[oov_id] += total[free].sum()
        total[free] = 0
        ids[np.isin(listed, free)] = -1  # in rows that are not for training
    ids[new] = given
    if oov_id is not None:
        ids[ids < 0] = oov_id
    np.add.at(total, ids[ids >= 0], counts[ids >= 0])
    unseen = np.pad(unseen, (0, grown - size))
    unseen[given] = 0

    # Each id has its old value, or one of the new ones, which come after all old ones.
    source = np.arange(grown)
    source[given] = size + np.arange(len(new))
    added = texts_of(values.take(pa.array(new))).cast(old.values.type)
    return Vocabulary(
        values=pa.concat_arrays([old.values, added]).take(pa.array(source)),
        counts=total,
        oov_id=oov_id,
        unseen=unseen,
        positives=None if old.positives is None else np.pad(old.positives, (0, len(new)))[source],
    )


def texts_of(values: pa.Array, null: int | None = None) -> pa.Array:
    """Values, texts or integer keys of hex digits, as a vocabulary holds them; if a position is
    given, with a ``null`` inserted there."""
    integers = pa.types.is_integer(values.type)
    texts = hex_strings(values.to_numpy()) if integers else values.cast(TEXT)
    if null is None:
        return texts
    return pa.concat_arrays([texts[:null], pa.nulls(1, texts.type), texts[null:]])


def read_vocabulary(
    path: Path, names: Sequence[str], data: object = "the data", text: pa.DataType = TEXT
) -> pa.Table:
    """Read columns of a vocabulary file: ``value``, a ``text``, and integers; of ``FURTHER`` ones
    those that it has.

    Raises:
        ValueError: the file cannot be read, or has other columns; prepare ``data`` again.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            there = set(file.schema_arrow.names)
            names = [name for name in names if name in there or name not in FURTHER]
            table = whole_table(file.read(columns=names), file.metadata.num_rows)
            kinds = KINDS | {"value": text}
            fields = [pa.field(name, kinds[name], nullable=name == "value") for name in names]
            return table.cast(pa.schema(fields))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(
            f"{path} can't be read as a vocabulary ({reason(error)}); prepare {data} again"
        ) from None

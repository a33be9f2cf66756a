"""Vocabularies of text: the counterpart of :mod:`dlrm.data.preprocess.vocabulary`.

The convention is the same. Ids are in order of falling frequency in the training rows, values of
equal frequency in alphabetical order, so that a missing value, "", comes first. All values without
an id share one: its place is given by their joint count, after other values with that count.
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

from dlrm.data.preprocess.appending import extend_ids
from dlrm.data.preprocess.vocabulary import (
    UNSEEN,
    ZSTD,
    assign_ids,
    open_vocabulary,
    read_known,
)
from dlrm.utils.atomic import atomic_write

TEXT = pa.large_string()
FEW_IDS = 50_000  # vocabularies up to this size are hashed anew by each look-up
SCHEMA = pa.schema([("value", TEXT), ("id", pa.int32()), ("count", pa.int64())])


@dataclass(frozen=True, kw_only=True)
class TextVocabulary:
    """The values of a categorical feature: the position of a value is its id."""

    values: pa.LargeStringArray
    """``[V]``; null stands for all values that are not listed."""
    counts: NDArray[np.int64]  # [V]
    oov_id: int | None
    unseen: NDArray[np.int32] | None = None
    """``[V]``, if it was extended: see :data:`dlrm.data.preprocess.vocabulary.UNSEEN`."""

    def ids(self, values: pa.Array) -> NDArray[np.int32]:
        """The id of each of the ``values [n]``, texts without nulls."""
        values = values.cast(TEXT)
        if len(self) > FEW_IDS and len(self) > 4 * len(values):
            return self._ids_by_hash(values)
        found = pc.index_in(values, self.values)
        if found.null_count:
            assert self.oov_id is not None  # else all values are listed
            found = found.fill_null(self.oov_id)
        return found.to_numpy()

    @cached_property
    def _hashed(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The hashes of all values in rising order, and the id of each."""
        hashes = hash_texts(self.values.fill_null(""))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def _ids_by_hash(self, values: pa.LargeStringArray) -> NDArray[np.int32]:
        """The same as :meth:`ids`, without a pass over the whole vocabulary each time."""
        hashes, ids = self._hashed
        wanted = hash_texts(values)
        at = np.searchsorted(hashes, wanted).clip(max=len(hashes) - 1)
        found = ids[at].astype(np.int32)
        found[hashes[at] != wanted] = self.oov_id
        # Few hashes of values that are not listed, or of "", are those of others.
        equal = pc.equal(self.values.take(pa.array(found)), values).fill_null(False)
        doubtful = np.flatnonzero((hashes[at] == wanted) & ~equal.to_numpy(zero_copy_only=False))
        if len(doubtful):
            exact = pc.index_in(values.take(pa.array(doubtful)), self.values)
            found[doubtful] = exact.fill_null(self.oov_id).to_numpy()
        return found

    def __len__(self) -> int:
        return len(self.values)

    def write(self, path: Path) -> None:
        """Write the columns ``value``, ``id``, ``count`` and, if it was extended, ``unseen``; the
        row number is the id."""
        columns: list[Any] = [self.values, np.arange(len(self), dtype=np.int32), self.counts]
        table = pa.table(columns, schema=SCHEMA)
        if self.unseen is not None:
            table = table.append_column(UNSEEN, [self.unseen])
        with atomic_write(path) as temporary:
            pq.write_table(
                table,
                temporary,
                use_dictionary=["count", UNSEEN.name],
                column_encoding={"value": "PLAIN", "id": "DELTA_BINARY_PACKED"},
                **ZSTD,
            )

    @classmethod
    def read(cls, path: Path) -> TextVocabulary:
        """Read what :meth:`write` wrote.

        Raises:
            ValueError: the file is damaged.
        """
        with open_vocabulary(path) as file:
            table = read_known(file, SCHEMA)
        values = table["value"].combine_chunks()
        oov_id = pc.index(values.is_null(), True).as_py()
        return cls(
            values=values,
            counts=table["count"].to_numpy(),
            oov_id=None if oov_id < 0 else oov_id,
            unseen=table[UNSEEN.name].to_numpy() if UNSEEN.name in table.column_names else None,
        )


def make_vocabulary(
    values: pa.Array, counts: NDArray[np.int64], *, min_count: int, cap: int | None
) -> tuple[TextVocabulary, NDArray[np.int32]]:
    """The vocabulary of a feature.

    Args:
        values: ``[n]`` distinct texts.
        counts: ``[n]`` occurrences in the training rows; 0 for a value that is only in others.
        min_count: occurrences that a value needs for an id of its own, at least 1.
        cap: at most this many ids, that of all other values included.

    Returns:
        The vocabulary, and the id ``[n]`` of each value.
    """
    order = pc.sort_indices(values)
    positions = order.to_numpy()
    values, counts = values.take(order), counts[positions]
    keys = np.arange(len(counts))
    made, id_of_key = assign_ids(keys, counts, min_count=min_count, most=cap and cap - 1)
    oov = made.oov_id
    assert oov is not None
    ids = np.empty(len(keys), np.int32)
    ids[positions] = id_of_key
    listed = values.take(pa.array(made.keys, mask=np.arange(len(made.keys)) == oov))
    return TextVocabulary(values=listed, counts=made.counts, oov_id=oov), ids


def extend_vocabulary(
    old: TextVocabulary,
    values: pa.Array,
    counts: NDArray[np.int64],
    *,
    min_count: int,
    cap: int | None,
    forget: int | None = None,
) -> TextVocabulary:
    """A vocabulary with new values: the old ones keep their ids, unless they are forgotten.

    Args:
        old: the vocabulary to extend.
        values: ``[n]`` distinct texts.
        counts: ``[n]`` occurrences in the new training rows. They are added to the old ones.
        min_count: occurrences that a new value needs for an id of its own. See
            :func:`dlrm.data.preprocess.appending.extend_ids`.
        cap: at most this many ids in all.
        forget: see there.
    """
    order = pc.sort_indices(values)
    values, counts = values.take(order), counts[order.to_numpy()]
    made = extend_ids(
        old.counts,
        old.unseen,
        old.oov_id,
        pc.index_in(values.cast(TEXT), old.values).fill_null(-1).to_numpy(),
        counts,
        min_count=min_count,
        forget=forget,
        most=cap,
    )
    return TextVocabulary(
        values=made.put(old.values, values),
        counts=made.counts,
        oov_id=old.oov_id,
        unseen=made.unseen,
    )


def merge_counts(
    values: Sequence[pa.Array], counts: Sequence[NDArray[np.int64]]
) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.int32]]:
    """The distinct ones of all values, in the order in which they first occur.

    Args:
        values: texts, in parts.
        counts: of each.

    Returns:
        The distinct values ``[n]``, the sum of the counts ``[n]`` of each, and for all values of
        the parts, one after another, their positions among the distinct ones.
    """
    encoded = pa.concat_arrays([part.cast(TEXT) for part in values]).dictionary_encode()
    distinct, weights = encoded.dictionary, np.concatenate(counts)
    # In float64, which is exact up to 2**53 rows.
    positions = encoded.indices.to_numpy()
    sums = np.bincount(positions, weights, minlength=len(distinct))
    return distinct, sums.astype(np.int64), positions


def hash_values(values: pa.Array, buckets: int) -> pa.Array:
    """The bucket of each text, as text; a missing value, "", stays one.

    The hash is that of :func:`hash_texts`: the same on every machine.
    """
    hashed = hash_texts(values) % np.uint64(buckets)
    return pc.if_else(pc.equal(values, ""), "", pa.array(hashed).cast(pa.string()))


def hash_texts(values: pa.Array) -> NDArray[np.uint64]:
    """SipHash of each text with the fixed key of :func:`pandas.util.hash_array`."""
    import pandas as pd  # which takes a third of a second, and hashing is rare

    objects = values.to_numpy(zero_copy_only=False).astype(object)
    return pd.util.hash_array(objects, categorize=False)

"""The values of the columns of a row group, checked: labels, weights, dense features, ids, bags."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .schema import META_FILE, Categorical


def read_labels(array: pa.Array, where: str) -> np.ndarray:
    """Return the labels, bool or number; raise if one is missing or outside [0, 1]."""
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise ValueError(f"{where}: row {row} is null; drop rows without a label")
    labels = array.to_numpy(zero_copy_only=False)
    if labels.dtype != bool and not (labels.min(initial=0) >= 0 and labels.max(initial=1) <= 1):
        row = np.flatnonzero(~((labels >= 0) & (labels <= 1)))[0]
        raise ValueError(f"{where}: row {row} is {labels[row]}; a label must be in [0, 1]")
    return labels


def read_weights(array: pa.Array, where: str) -> np.ndarray:
    """Return the weights of samples, float32; raise if one is missing or negative."""
    weights = array.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if not (weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf):  # false for NaN
        row = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0]
        raise ValueError(
            f"{where}: row {row} is {array[row]}; a weight must be a number of 0 or more"
        )
    return weights


def read_dense(array: pa.Array, where: str) -> np.ndarray:
    """Return the values of a dense column, float32; null and NaN (pandas' null) become 0."""
    if array.null_count:
        array = array.cast(pa.float32(), safe=False).fill_null(0.0)
    values = array.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float32, copy=False)
        if np.isfinite(values.sum()):
            return values
    infinite = np.flatnonzero(np.isinf(values))
    if infinite.size:
        raise ValueError(
            f"{where}: row {infinite[0]} is infinite or beyond float32; "
            "dense values must be finite: clip or transform the column"
        )
    return np.nan_to_num(values, nan=0.0)


def read_ids(array: pa.Array, where: str, column: Categorical, cardinality: int) -> np.ndarray:
    """Return the ids of a column; raise if one is outside ``[0, cardinality)``.

    Null becomes ``oov_id``. So does an id that is too large, if the column says so and its table
    has as many rows as the column has ids.
    """
    oov_id = column.oov_id
    if array.null_count:
        if oov_id is None:
            value = pc.index(array.is_null(), True).as_py()
            raise ValueError(
                f"{where}: value {value} is null; fill it in, or set oov_id in {META_FILE} to the "
                "id that stands for unknown values"
            )
        array = array.cast(pa.int64(), safe=False).fill_null(oov_id)

    # As unsigned integers, negative ids are at least half the range of the type: one pass, not two.
    ids = array.to_numpy()
    unsigned, limit = ids.view(f"u{ids.itemsize}"), cardinality
    if ids.dtype.kind == "i":
        limit = min(cardinality, 1 << (8 * ids.itemsize - 1))

    if ids.size and unsigned.max() >= limit:
        if column.unseen == "row" and column.cardinality == cardinality and ids.min() >= 0:
            ids = ids.copy()
            ids[unsigned >= limit] = oov_id
            return ids
        value = np.flatnonzero(unsigned >= limit)[0]
        raise ValueError(
            f"{where}: value {value} is id {ids[value]}, outside the table of {cardinality} rows; "
            f"ids must be in [0, {cardinality}): enlarge the table or correct the data (for files "
            "of a trained model: describe_parquet.py --tables-of)"
        )
    return ids


def read_bags(
    array: pa.Array, where: str, column: Categorical, cardinality: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids of a multi-hot column, and where each bag begins; a null is an empty bag.

    Bags of a fixed length are lists or, which is read twice as fast, the bytes of their ids
    (:func:`is_bytes_of_ids`).

    Returns:
        The ids ``[rows, bag_size]`` and None if the column has a ``bag_size``; otherwise the ids
        ``[nnz]`` of all rows and offsets ``[rows + 1]``, which may begin anywhere.
    """
    size, rows, offsets = column.bag_size, len(array), None
    if size is not None and is_bytes_of_ids(array.type, size):
        item = pa.int32() if array.type.byte_width == 4 * size else pa.int64()
        buffers, mask = [None, array.buffers()[1]], array.is_null() if array.null_count else None
        entries = pa.Array.from_buffers(item, rows * size, buffers, offset=array.offset * size)
        array = pa.FixedSizeListArray.from_arrays(entries, size, mask=mask)

    # The entries of all rows, and where each begins.
    fixed = pa.types.is_fixed_size_list(array.type)
    if not fixed and not array.null_count:
        offsets = array.offsets.to_numpy()
        first, last = int(offsets[0]), int(offsets[-1])
        values = array.values.slice(first, last - first)
    else:
        values = array.flatten()
        if size is None or array.null_count or array.type.list_size != size:
            offsets = np.zeros(rows + 1, np.int64)
            np.cumsum(pc.fill_null(pc.list_value_length(array), 0), out=offsets[1:])

    if size is not None and offsets is not None:
        wrong = offsets[1:] - offsets[:-1] != size
        if wrong.any():
            row = wrong.argmax()
            raise ValueError(
                f"{where}: row {row} has {offsets[row + 1] - offsets[row]} ids, {META_FILE} says "
                f"bag_size {size}; take bag_size out of {META_FILE} if bags differ in length"
            )

    ids = read_ids(values, where, column, cardinality)
    return (ids, offsets) if size is None else (ids.reshape(rows, size), None)


class Sampling(NamedTuple):
    """A random choice among the rows with label 0."""

    share: float  # that is kept
    seed: tuple[int, ...]

    def kept(self, labels: np.ndarray) -> np.ndarray:
        """Whether each row of a row group is kept, ``[rows]`` bool."""
        return (labels > 0) | (np.random.default_rng(self.seed).random(len(labels)) < self.share)

    def of(self, table: pa.Table, labels: np.ndarray) -> pa.Table:
        """The rows of a row group that are kept."""
        return table.filter(pa.array(self.kept(labels))).combine_chunks()


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    tests = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(test(kind) for test in tests)


def is_bytes_of_ids(kind: pa.DataType, bag_size: int | None) -> bool:
    """Whether a column of this type holds bags of so many ids as their bytes: int32 or int64, the
    lowest byte first."""
    if bag_size is None or not pa.types.is_fixed_size_binary(kind):
        return False
    return kind.byte_width in (4 * bag_size, 8 * bag_size)


def is_list_of_ids(kind: pa.DataType, bag_size: int | None = None) -> bool:
    """Whether a column of this type can be a multi-hot feature, with bags of this length if it is
    given."""
    of_integers = is_list(kind) and pa.types.is_integer(kind.value_type)
    return of_integers or is_bytes_of_ids(kind, bag_size)

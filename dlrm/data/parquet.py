"""Row groups of Parquet files with a label, dense and categorical columns: checked and read.

The files may come from any program. A dense feature or the label is a column of integers, floats
or bools; ids are a column of integers, or lists of integers if the feature is multi-hot. Errors
name the file, the row group and the column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dlrm.data.schema import META_FILE, Categorical, Meta
from dlrm.utils.messages import did_you_mean, listing, printable


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group of one file: the unit of reading."""

    path: Path
    index: int
    rows: int
    metadata: pq.FileMetaData = field(repr=False, compare=False)
    """The footer of the file, read once."""

    def __str__(self) -> str:
        return f"{self.path}, row group {self.index}"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a row group by column; labels and one-hot ids have the types of the file."""

    labels: np.ndarray  # [rows] bool or number
    dense: list[np.ndarray]  # [rows] float32 each
    ids: list[np.ndarray]  # [rows] integer each: the one-hot features
    bags: list[pa.LargeListArray]  # [rows] lists of int32 or int64 each: the multi-hot features
    weights: np.ndarray | None = None  # [rows] float32


class RowGroupReader:
    """Checks and reads the files of a data directory.

    Args:
        directory: the directory of ``meta.json``, to which file names are relative.
        meta: the names of the columns.
        num_embeddings: rows of each table, against which ids are checked; by default the
            cardinalities in ``meta``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        meta: Meta,
        num_embeddings: Sequence[int] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.meta = meta
        self.num_embeddings = tuple(
            meta.cardinalities if num_embeddings is None else num_embeddings
        )
        if len(self.num_embeddings) != len(meta.categorical):
            raise ValueError(
                f"num_embeddings has {len(self.num_embeddings)} entries for the "
                f"{len(meta.categorical)} categorical columns of {self.directory / META_FILE}: "
                "each column needs a table, and a trained model the columns of its training data"
            )
        largest = max(self.num_embeddings, default=0)
        self.ids_dtype = np.dtype(np.int32 if largest <= 2**31 else np.int64)
        self.columns = [meta.label, *meta.dense, *meta.tables]
        self.columns += [] if meta.weight is None else [meta.weight]

    def row_groups(self, split: str) -> list[RowGroup]:
        """All row groups of ``split`` in file order; reads the footers and checks the schemas.

        Raises:
            FileNotFoundError: a file of the split is missing.
            ValueError: the split is unknown or empty, a file is damaged, a column is missing or
                of the wrong type, or the number of rows is not that of ``meta.json``.
        """
        where = self.directory / META_FILE
        if split not in self.meta.splits:
            raise ValueError(
                f"{where} has no split {split!r}{did_you_mean(split, self.meta.splits)}"
            )
        described = self.meta.splits[split]
        files = [self.directory / name for name in described.files]
        row_groups = [row_group for file in files for row_group in self.open(file)]
        rows = sum(row_group.rows for row_group in row_groups)
        if rows != described.rows:
            raise ValueError(
                f"split {split!r} has {rows} rows in its files, {where} says {described.rows}; "
                "a file was changed or replaced: prepare or describe the data again"
            )
        if rows == 0:
            raise ValueError(f"split {split!r} of {where} is empty; choose a split that has rows")
        return row_groups

    def decoded_bytes(self, row_group: RowGroup) -> int:
        """Memory of the decoded rows of ``row_group``; from the footer, without reading them."""
        bags = tuple(f"{column.name}." for column in self.meta.categorical if column.multi_hot)
        floats = 1 + len(self.meta.dense) + (self.meta.weight is not None)
        one_hot = len(self.meta.categorical) - len(bags)
        scalars = 4 * floats + self.ids_dtype.itemsize * one_hot
        total = row_group.rows * scalars
        if bags:
            described = row_group.metadata.row_group(row_group.index)
            for index in range(described.num_columns):
                column = described.column(index)
                if column.path_in_schema.startswith(bags):  # as name.list.element
                    total += self.ids_dtype.itemsize * column.num_values + 8 * row_group.rows
        return total

    def read(self, row_group: RowGroup) -> Rows:
        """Read ``row_group`` and check its values.

        Raises:
            ValueError: the row group is damaged or holds an invalid value.
        """
        return self.convert(self.read_table(row_group), row_group)

    def convert(self, table: pa.Table, where: object) -> Rows:
        """Check the values of a table with the columns of ``meta``, of the types of its files.

        Args:
            table: the rows; without a column of labels, these are 0.
            where: what to name in errors.

        Raises:
            ValueError: a value is invalid.
        """
        labels, weights, weight = np.zeros(len(table), np.uint8), None, self.meta.weight
        if self.meta.label in table.schema.names:
            labels = self.labels(table, where)
        if weight is not None:
            weights = _weights(_only_chunk(table, weight), f"{where}, column {weight!r}")
        rows = Rows(labels=labels, dense=[], ids=[], bags=[], weights=weights)
        for name in self.meta.dense:
            rows.dense.append(_dense(_only_chunk(table, name), f"{where}, column {name!r}"))
        for column, cardinality in zip(self.meta.categorical, self.num_embeddings, strict=True):
            array, place = _only_chunk(table, column.name), f"{where}, column {column.name!r}"
            if not column.multi_hot:
                rows.ids.append(_ids(array, place, column, cardinality))
                continue
            offsets = np.zeros(len(table) + 1, np.int64)
            np.cumsum(pc.fill_null(pc.list_value_length(array), 0), out=offsets[1:])
            ids = _ids(array.flatten(), place, column, cardinality)
            ids = ids.astype(self.ids_dtype, copy=False)
            rows.bags.append(pa.LargeListArray.from_arrays(offsets, ids))
        return rows

    def labels(self, table: pa.Table, where: object) -> np.ndarray:
        """The labels in what :meth:`read_table` returned, ``[rows]`` bool or number.

        Raises:
            ValueError: a label is missing or not in [0, 1].
        """
        name = self.meta.label
        return _labels(_only_chunk(table, name), f"{where}, column {name!r}")

    def open(self, path: Path) -> list[RowGroup]:
        """The row groups of one file, whose footer and schema are checked.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged, or a column is missing or of the wrong type.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, but {self.directory / META_FILE} lists it; "
                "restore the file, or prepare or describe the data again"
            )
        metadata, schema = read_footer(path)
        self._check_schema(path, schema)
        return [
            RowGroup(path=path, index=i, rows=metadata.row_group(i).num_rows, metadata=metadata)
            for i in range(metadata.num_row_groups)
            if metadata.row_group(i).num_rows > 0
        ]

    def read_table(self, row_group: RowGroup) -> pa.Table:
        """The label, dense and categorical columns of a row group as an Arrow table.

        Raises:
            ValueError: the row group is damaged.
        """

        def read(columns: list[str]) -> pa.Table:
            with pq.ParquetFile(
                row_group.path, metadata=row_group.metadata, page_checksum_verification=True
            ) as file:
                # One thread: the readers work on several row groups at a time instead.
                table = file.read_row_group(row_group.index, columns=columns, use_threads=False)
                return whole_table(table, row_group.rows)

        try:
            return read(self.columns)
        except (pa.ArrowException, OSError) as error:
            for name in self.columns:
                try:
                    read([name])
                except (pa.ArrowException, OSError) as cause:
                    raise ValueError(
                        f"{row_group}, column {name!r} cannot be read ({reason(cause)}); "
                        "the file is damaged: write or copy it again"
                    ) from None
            raise ValueError(
                f"{row_group} cannot be read ({reason(error)}); write or copy it again"
            ) from None

    def _check_schema(self, path: Path, schema: pa.Schema) -> None:
        expected = [
            (self.meta.label, "a bool, integer or float (the label)", _is_number),
            *((name, "a bool, integer or float (dense)", _is_number) for name in self.meta.dense),
        ]
        if self.meta.weight is not None:
            expected.append((self.meta.weight, "an integer or float (weights)", _is_number))
        for column in self.meta.categorical:
            if column.multi_hot:
                expected.append((column.name, "a list of integers (multi-hot)", is_list_of_ids))
            else:
                expected.append((column.name, "an integer (categorical)", pa.types.is_integer))
        for name, wanted, fits in expected:
            found = schema.names.count(name)
            if found != 1:
                raise ValueError(
                    f"{path} has {found or 'no'} columns named {name!r}, {META_FILE} names "
                    f"one; the file has {printable(listing(schema.names, 50))}"
                )
            if not fits(schema.field(name).type):
                raise ValueError(
                    f"{path}: column {name!r} is {schema.field(name).type}, it must be {wanted}; "
                    f"convert the column, or correct {META_FILE} (scripts/describe_parquet.py)"
                )


def reason(error: BaseException) -> str:
    """The message of an error of pyarrow, which may have several lines and bytes of the file."""
    return printable(" ".join(str(error).split()))


def whole_table(table: pa.Table, rows: int) -> pa.Table:
    """``table``, whose columns must all have ``rows``: pyarrow skips pages of an unknown type.

    Raises:
        pa.ArrowInvalid: a column has more or fewer.
    """
    for column in table.columns:
        if len(column) != rows:
            raise pa.ArrowInvalid(f"{len(column)} of {rows} rows")
    return table


def read_footer(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    """The metadata and the schema of a Parquet file.

    Raises:
        ValueError: the file is damaged or not Parquet.
    """
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            if metadata.num_rows != (rows := sum(group.num_rows for group in groups)):
                raise pa.ArrowInvalid(f"{metadata.num_rows} rows, {rows} in its row groups")
            return metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a complete Parquet file ({reason(error)}); write it again"
        ) from None


def has_page_checksums(row_group: RowGroup) -> bool:
    """Whether the pages of a row group have checksums, by the header of the first one.

    Without them, a damaged value is noticed only if it can't be decoded.
    """
    column = row_group.metadata.row_group(row_group.index).column(0)
    offsets = column.dictionary_page_offset, column.data_page_offset
    with row_group.path.open("rb") as file:
        file.seek(min(offset for offset in offsets if offset))
        header = file.read(64)
    # Thrift's compact protocol: each field has a byte for its type and the distance of its number
    # from the last one, here always 1, and a number of 7 bits a byte. The first fields are type
    # and two sizes, which all pages have; the fourth is the checksum, if there is one.
    number = rb"\x15[\x80-\xff]*[\x00-\x7f]"
    return re.match(number * 4, header, re.DOTALL) is not None


def constant_columns(row_groups: Sequence[RowGroup], names: Collection[str]) -> list[str]:
    """Those of the columns that have the same value in all rows, by the statistics in the files."""
    values: dict[str, set[object]] = {}
    for row_group in row_groups:
        metadata = row_group.metadata.row_group(row_group.index)
        for index in range(metadata.num_columns):
            column = metadata.column(index)
            if (name := column.path_in_schema) in names:
                known = column.statistics is not None and column.statistics.has_min_max
                found = (column.statistics.min, column.statistics.max) if known else (0, 1)
                values.setdefault(name, set()).update(found)
    return [name for name, found in values.items() if len(found) == 1]


def is_list_of_ids(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a multi-hot feature."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _only_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _labels(array: pa.Array, where: str) -> np.ndarray:
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise ValueError(f"{where}: row {row} is null; drop rows without a label")
    labels = array.to_numpy(zero_copy_only=False)
    if labels.dtype != bool and not (labels.min(initial=0) >= 0 and labels.max(initial=1) <= 1):
        row = np.flatnonzero(~((labels >= 0) & (labels <= 1)))[0]
        raise ValueError(f"{where}: row {row} is {labels[row]}; a label must be in [0, 1]")
    return labels


def _weights(array: pa.Array, where: str) -> np.ndarray:
    """The weights of samples: float32, none missing or negative."""
    weights = array.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if not (weights.min(initial=0) >= 0 and weights.max(initial=0) < np.inf):  # false for NaN
        row = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0]
        raise ValueError(
            f"{where}: row {row} is {array[row]}; a weight must be a number of 0 or more"
        )
    return weights


def _dense(array: pa.Array, where: str) -> np.ndarray:
    """The values of a dense column; null, and NaN, which pandas writes for null, become 0."""
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


def _ids(array: pa.Array, where: str, column: Categorical, cardinality: int) -> np.ndarray:
    """The ids of a column, checked to be in ``[0, cardinality)``; null becomes ``oov_id``.

    An id beyond them becomes ``oov_id`` too if the column says so, and the table is its own.
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
    ids = array.to_numpy()
    # As unsigned integers, negative ids are at least half the range of the type: one pass, not two.
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

"""Row groups of label + dense + categorical Parquet: found, checked, and read into columns.

Files need not be this program's own: any integer, float or bool column serves as a dense feature
or label and any integer column as ids (a list of integers where the feature is multi-hot). What
cannot be read is named by file, row group and column.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dlrm.data.schema import META_FILE, Categorical, Meta
from dlrm.utils.messages import did_you_mean


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group of one file: the unit that is read at once."""

    path: Path
    index: int
    rows: int
    metadata: pq.FileMetaData = field(repr=False, compare=False)
    """The file's footer, parsed once."""

    def __str__(self) -> str:
        return f"{self.path}, row group {self.index}"


@dataclass(frozen=True, kw_only=True)
class Bags:
    """The ids of a multi-hot feature: row ``i`` has ``ids[offsets[i] : offsets[i + 1]]``."""

    ids: np.ndarray  # [nnz]
    offsets: np.ndarray  # [rows + 1] int64


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a row group, column by column, in the types of the file where these will do."""

    labels: np.ndarray  # [rows] bool or number
    dense: list[np.ndarray]  # [rows] float32 each
    ids: list[np.ndarray]  # [rows] integer each: the one-hot features
    bags: list[Bags]  # the multi-hot features


class RowGroupReader:
    """Checks and reads the files of a data directory.

    Args:
        directory: where ``meta.json`` lies; file names are relative to it.
        meta: the names of the columns.
        num_embeddings: rows of each table; ids are checked against it. Default: what ``meta`` says.
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
                "it must have a table for each, and a trained model the data's columns"
            )
        largest = max(self.num_embeddings, default=0)
        self.ids_dtype = np.dtype(np.int32 if largest <= 2**31 else np.int64)
        self.columns = [meta.label, *meta.dense, *meta.tables]

    def row_groups(self, split: str) -> list[RowGroup]:
        """All row groups of ``split`` in file order; reads the footers and checks the schemas.

        Raises:
            FileNotFoundError: a file of the split is missing.
            ValueError: the split is unknown or empty, a file is damaged, lacks a column, has one
                of a wrong type, or the rows are not as many as ``meta.json`` says.
        """
        where = self.directory / META_FILE
        if split not in self.meta.splits:
            raise ValueError(
                f"{where} has no split {split!r}{did_you_mean(split, self.meta.splits)}"
            )
        described = self.meta.splits[split]
        files = [self.directory / name for name in described.files]
        groups = [group for file in files for group in self.open(file)]
        rows = sum(group.rows for group in groups)
        if rows != described.rows:
            raise ValueError(
                f"split {split!r} has {rows} rows in its files, {where} says {described.rows}; "
                "a file was changed or replaced: prepare or describe the data again"
            )
        if rows == 0:
            raise ValueError(f"split {split!r} of {where} is empty; choose a split that has rows")
        return groups

    def read(self, group: RowGroup) -> Rows:
        """Read ``group`` and check its values.

        Raises:
            ValueError: the row group is damaged, or holds a value that cannot be used.
        """
        table = self.read_table(group)
        rows = Rows(
            labels=self.labels(table, group),
            dense=[_dense(_only_chunk(table, name), group, name) for name in self.meta.dense],
            ids=[],
            bags=[],
        )
        for column, cardinality in zip(self.meta.categorical, self.num_embeddings, strict=True):
            array = _only_chunk(table, column.name)
            if not column.multi_hot:
                rows.ids.append(_ids(array, group, column, cardinality))
                continue
            offsets = np.zeros(group.rows + 1, np.int64)
            np.cumsum(pc.fill_null(pc.list_value_length(array), 0), out=offsets[1:])
            ids = _ids(array.flatten(), group, column, cardinality)
            rows.bags.append(Bags(ids=ids.astype(self.ids_dtype, copy=False), offsets=offsets))
        return rows

    def labels(self, table: pa.Table, group: RowGroup) -> np.ndarray:
        """The labels of what :meth:`read_table` gave for ``group``, ``[rows]`` bool or number.

        Raises:
            ValueError: one is missing or not in [0, 1].
        """
        return _labels(_only_chunk(table, self.meta.label), group, self.meta.label)

    def open(self, path: Path) -> list[RowGroup]:
        """The row groups of one file, after a check of its footer and schema.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, lacks a column, or has one of a wrong type.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, but {self.directory / META_FILE} lists it; "
                "restore the file, or prepare or describe the data again"
            )
        try:
            with pq.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is not a whole Parquet file ({error}); write it again"
            ) from None
        self._check_schema(path, schema)
        return [
            RowGroup(path=path, index=i, rows=metadata.row_group(i).num_rows, metadata=metadata)
            for i in range(metadata.num_row_groups)
            if metadata.row_group(i).num_rows > 0
        ]

    def read_table(self, group: RowGroup) -> pa.Table:
        """The row group as Arrow has it: the label, the dense and the categorical columns.

        Raises:
            ValueError: it is damaged.
        """

        def read(columns: list[str]) -> pa.Table:
            with pq.ParquetFile(
                group.path, metadata=group.metadata, page_checksum_verification=True
            ) as file:
                # One thread: the readers work on several row groups at once instead.
                return file.read_row_group(group.index, columns=columns, use_threads=False)

        try:
            return read(self.columns)
        except (pa.ArrowException, OSError) as error:
            for name in self.columns:
                try:
                    read([name])
                except (pa.ArrowException, OSError) as cause:
                    raise ValueError(
                        f"{group}, column {name!r} cannot be read ({cause}); "
                        "the file is damaged: write or copy it again"
                    ) from None
            raise ValueError(f"{group} cannot be read ({error}); write or copy it again") from None

    def _check_schema(self, path: Path, schema: pa.Schema) -> None:
        expected = [
            (self.meta.label, "a bool, integer or float (the label)", _is_number),
            *((name, "a bool, integer or float (dense)", _is_number) for name in self.meta.dense),
        ]
        for column in self.meta.categorical:
            if column.multi_hot:
                expected.append((column.name, "a list of integers (multi-hot)", _is_list_of_ids))
            else:
                expected.append((column.name, "an integer (categorical)", pa.types.is_integer))
        for name, wanted, fits in expected:
            found = schema.names.count(name)
            if found != 1:
                raise ValueError(
                    f"{path} has {found or 'no'} columns named {name!r}, {META_FILE} names "
                    f"one; the file has {', '.join(schema.names)}"
                )
            if not fits(schema.field(name).type):
                raise ValueError(
                    f"{path}: column {name!r} is {schema.field(name).type}, it must be {wanted}; "
                    f"convert the column, or correct {META_FILE} (scripts/describe_parquet.py)"
                )


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_list_of_ids(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type)


def _only_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _labels(array: pa.Array, group: RowGroup, name: str) -> np.ndarray:
    if array.null_count:
        row = pc.index(array.is_null(), True).as_py()
        raise ValueError(f"{group}, column {name!r}: row {row} is null; drop rows without a label")
    labels = array.to_numpy(zero_copy_only=False)
    if labels.dtype != bool and not (labels.min(initial=0) >= 0 and labels.max(initial=1) <= 1):
        row = np.flatnonzero(~((labels >= 0) & (labels <= 1)))[0]
        raise ValueError(
            f"{group}, column {name!r}: row {row} is {labels[row]}; a label must lie in [0, 1]"
        )
    return labels


def _dense(array: pa.Array, group: RowGroup, name: str) -> np.ndarray:
    """A dense column; null and NaN, which pandas writes for the same thing, become 0."""
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
            f"{group}, column {name!r}: row {infinite[0]} is infinite or beyond float32; "
            "dense values must be finite: clip or transform the column"
        )
    return np.nan_to_num(values, nan=0.0)


def _ids(array: pa.Array, group: RowGroup, column: Categorical, rows: int) -> np.ndarray:
    """The ids of a column, each found to lie within its table of ``rows`` rows."""
    if array.null_count:
        if column.oov_id is None:
            value = pc.index(array.is_null(), True).as_py()
            raise ValueError(
                f"{group}, column {column.name!r}: value {value} is null; fill it in, or name the "
                f"id that stands for unknown values as oov_id in {META_FILE}"
            )
        array = array.cast(pa.int64(), safe=False).fill_null(column.oov_id)
    ids = array.to_numpy()
    # As unsigned, a negative id is at least half the range of its type: one pass, not two.
    unsigned, limit = ids.view(f"u{ids.itemsize}"), rows
    if ids.dtype.kind == "i":
        limit = min(rows, 1 << (8 * ids.itemsize - 1))
    if ids.size and unsigned.max() >= limit:
        value = np.flatnonzero(unsigned >= limit)[0]
        raise ValueError(
            f"{group}, column {column.name!r}: value {value} is id {ids[value]}, outside the table "
            f"of {rows} rows; ids lie in [0, {rows}): enlarge the table or correct the data"
        )
    return ids

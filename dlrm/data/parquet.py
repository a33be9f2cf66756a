"""Row groups of Parquet files with a label, dense and categorical columns: checked and read.

The files may come from any program. A dense feature or the label is a column of integers, floats
or bools; ids are a column of integers, or lists of integers if the feature is multi-hot. Errors
name the file, the row group and the column.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..utils.messages import did_you_mean, listing, printable
from .column_values import (
    Sampling,
    is_list_of_ids,
    read_bags,
    read_dense,
    read_ids,
    read_labels,
    read_weights,
)
from .schema import META_FILE, Meta


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group of one file: the unit of reading."""

    path: Path
    index: int
    rows: int
    """Those that are read: all of the file's, or those of the sampling."""
    metadata: pq.FileMetaData = field(repr=False, compare=False)
    """The footer of the file, read once."""
    version: tuple[int, int]
    """When the file was last modified, in ns, and its bytes."""
    sampling: Sampling | None = None

    def __str__(self) -> str:
        return f"{self.path}, row group {self.index}"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a row group by column; labels and ids have the types of the file."""

    labels: np.ndarray  # [rows] bool or number
    dense: list[np.ndarray]  # [rows] float32 each
    ids: list[np.ndarray]  # [rows] integer each, [rows, L] of bags of L ids, [nnz] of ragged ones
    offsets: list[np.ndarray | None]  # [rows + 1] integers each: where ragged bags begin, else None
    weights: np.ndarray | None = None  # [rows] float32


def digest_of_footers(row_groups: Sequence[RowGroup]) -> str:
    """Return a digest of the footers of the files of ``row_groups``.

    A footer has the offset, the size, the minimum and the maximum of each column, so other rows
    nearly always change it.
    """
    digest = hashlib.sha256()
    for row_group in row_groups:
        if row_group.index == 0:
            footer = io.BytesIO()
            row_group.metadata.write_metadata_file(footer)
            digest.update(footer.getbuffer())
    return digest.hexdigest()[:16]


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
                f"{self.directory / META_FILE} has {len(meta.categorical)} categorical columns, "
                f"the model tables for {len(self.num_embeddings)}: prepare the raw rows for it "
                "with dlrm prepare --ids-of RUN"
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
            remedy = "prepare rows for it, as with --split 0.8 0.1 0.1, or choose another split"
            raise ValueError(f"split {split!r} of {where} is empty; {remedy}")
        return row_groups

    def decoded_bytes(self, row_group: RowGroup) -> int:
        """Memory of the decoded rows of ``row_group``; from the footer, without reading them."""
        floats = 1 + len(self.meta.dense) + (self.meta.weight is not None)
        ragged = sum(size is None for size in self.meta.lengths)  # a start and a length for each
        ids = self.ids_dtype.itemsize * sum(self.num_ids(row_group))
        return row_group.rows * (4 * floats + 12 * ragged) + ids

    def num_ids(self, row_group: RowGroup) -> list[int]:
        """Ids of each categorical column in ``row_group``, or a little more: Parquet counts an
        empty list as one value."""
        counts = [row_group.rows * (size or 0) for size in self.meta.lengths]
        if None in self.meta.lengths:
            described = row_group.metadata.row_group(row_group.index)
            columns = [described.column(index) for index in range(described.num_columns)]
            values = {column.path_in_schema: column.num_values for column in columns}
            for index, column in enumerate(self.meta.categorical):
                if self.meta.lengths[index] is None:
                    inner = f"{column.name}."  # as name.list.element
                    counts[index] = sum(n for path, n in values.items() if path.startswith(inner))
        return counts

    def read(self, row_group: RowGroup) -> Rows:
        """Read ``row_group`` and check its values.

        Raises:
            ValueError: the row group is damaged or holds an invalid value.
        """
        table = self.read_table(row_group)
        if row_group.sampling is not None:
            table = row_group.sampling.of(table, self.labels(table, row_group))
        rows = self.convert(table, row_group)
        room = self.num_ids(row_group)
        for column, ids, most in zip(self.meta.categorical, rows.ids, room, strict=True):
            if ids.size > most:
                raise ValueError(
                    f"{row_group}, column {column.name!r} has {ids.size} ids, its footer says "
                    f"{most}; the file is damaged: write or copy it again"
                )
        return rows

    def convert(self, table: pa.Table, where: object) -> Rows:
        """Convert and check the values of an Arrow table with the columns of ``meta`` and the types
        of the files; labels that are missing become 0. Errors name the place ``where``.

        Raises:
            ValueError: a value is invalid.
        """
        column = partial(named_column, table, where)
        labels = np.zeros(len(table), np.uint8)
        if self.meta.label in table.schema.names:
            labels = self.labels(table, where)
        weight = self.meta.weight
        weights = None if weight is None else read_weights(*column(weight))

        dense = [read_dense(*column(name)) for name in self.meta.dense]
        rows = Rows(labels=labels, dense=dense, ids=[], offsets=[], weights=weights)
        for described, cardinality in zip(self.meta.categorical, self.num_embeddings, strict=True):
            if described.multi_hot:
                ids, offsets = read_bags(*column(described.name), described, cardinality)
            else:
                ids, offsets = read_ids(*column(described.name), described, cardinality), None
            rows.ids.append(ids)
            rows.offsets.append(offsets)
        return rows

    def labels(self, table: pa.Table, where: object) -> np.ndarray:
        """The labels in what :meth:`read_table` returned, ``[rows]`` bool or number in [0, 1].

        Raises:
            ValueError: a label is missing or not in [0, 1].
        """
        return read_labels(*named_column(table, where, self.meta.label))

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
        version = _version(path)
        metadata, schema = read_footer(path)
        self._check_schema(path, schema)

        rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        return [
            RowGroup(path=path, index=index, rows=count, metadata=metadata, version=version)
            for index, count in enumerate(rows)
            if count > 0
        ]

    def read_table(self, row_group: RowGroup, names: Sequence[str] = ()) -> pa.Table:
        """The label, dense and categorical columns of all rows of a row group as an Arrow table.

        Args:
            row_group: the row group.
            names: of the columns. Default: all of them.

        Raises:
            ValueError: the row group is damaged, or the file was replaced.
        """

        def read(columns: Sequence[str]) -> pa.Table:
            with pq.ParquetFile(
                row_group.path, metadata=row_group.metadata, page_checksum_verification=True
            ) as file:
                # One thread: the readers work on several row groups at a time instead.
                table = file.read_row_group(row_group.index, columns=columns, use_threads=False)
                return whole_table(table, row_group.metadata.row_group(row_group.index).num_rows)

        names = names or self.columns
        try:
            table = read(names)
            _require_same_file(row_group)  # afterwards: it may have been replaced meanwhile
            return table
        except (pa.ArrowException, OSError) as error:
            _require_same_file(row_group)

            # The column that is damaged, if it is one.
            for name in names:
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
        """Raise if a column is missing, is there twice, or has the wrong type."""
        # Name, description and test of each column.
        number, meta = "a bool, integer or float", self.meta
        expected = [(meta.label, f"{number} (the label)", _is_number)]
        expected += [(name, f"{number} (dense)", _is_number) for name in meta.dense]
        if meta.weight is not None:
            expected.append((meta.weight, "an integer or float (weights)", _is_number))
        for column in meta.categorical:
            if column.multi_hot:
                wanted = "a list of integers, or the bytes of bag_size integers (multi-hot)"
                is_bag = partial(is_list_of_ids, bag_size=column.bag_size)
                expected.append((column.name, wanted, is_bag))
            else:
                expected.append((column.name, "an integer (categorical)", pa.types.is_integer))

        # Each is there once.
        counts = Counter(schema.names)
        for name, wanted, fits in expected:
            found = counts[name]
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


def _version(path: Path) -> tuple[int, int]:
    """When a file was last modified, in ns, and its bytes."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _require_same_file(row_group: RowGroup) -> None:
    """Check that a file is still the one whose footer was read, or a copy of it."""
    if _version(row_group.path) == row_group.version:
        return
    metadata, _ = read_footer(row_group.path)
    if not metadata.equals(row_group.metadata):
        raise ValueError(
            f"{row_group.path} was replaced while it was in use, so its rows would be mixed with "
            "others: restore the file and resume the run, or start a new one"
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


def column_limits(path: Path, names: Iterable[str]) -> dict[str, set[object]]:
    """The lowest and the highest values of columns in the row groups of a file, which must have
    statistics."""
    limits: dict[str, set[object]] = {name: set() for name in names}
    file = pq.read_metadata(path)
    for group in map(file.row_group, range(file.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if (values := limits.get(column.path_in_schema)) is not None:
                values.update((column.statistics.min, column.statistics.max))
    return limits


def read_footer(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    """The metadata and the schema of a Parquet file, which must be complete.

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


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def named_column(table: pa.Table, where: object, name: str) -> tuple[pa.Array, str]:
    """A column of a table as one array, and how errors name it."""
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array, f"{where}, column {name!r}"

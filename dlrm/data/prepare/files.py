"""Files of a table: CSV, JSON lines and Parquet, as parts that are parsed on their own."""

from __future__ import annotations

import codecs
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ...utils.messages import did_you_mean, listing, print_error
from ..column_values import is_list
from ..parquet import read_footer
from .column_options import TableOptions
from .csv_layout import find_layout
from .input_paths import SUFFIXES, folder_columns, suffix
from .text_blocks import BLOCK_BYTES, BlockReader
from .text_formats import CsvLayout, CsvPart, JsonPart, PartRows, csv_row_end

PARQUET_ROWS = 1 << 16  # of a part
PLAIN_TYPES = {
    pa.string_view(): pa.string(), pa.binary_view(): pa.binary(), pa.float16(): pa.float32()
}  # fmt: skip
"""Types that many functions of Arrow lack, such as Polars writes, and those that have them."""


@dataclass(frozen=True, kw_only=True)
class ParquetPart:
    """Some rows of a Parquet file."""

    path: Path
    batch: pa.RecordBatch
    consumed: int

    @property
    def lines(self) -> int:
        """The number of rows."""
        return self.batch.num_rows

    def parse(self, types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
        """The columns with the names of ``types``, as the file has them."""
        return self.batch.select(list(types))

    def rows(self, types: Mapping[str, pa.DataType]) -> PartRows:
        """The same, row by row."""
        rows = self.parse(types)
        return PartRows(rows.num_rows, [], lambda positions: rows.take(pa.array(positions)))


FilePart = CsvPart | JsonPart | ParquetPart


@dataclass(kw_only=True)
class RawFile:
    """One file of a table."""

    path: Path
    format: str
    """csv, json or parquet."""
    names: tuple[str, ...]
    """The columns; of JSON lines, those in the first rows."""
    layout: CsvLayout | None = None
    """Of a CSV."""
    sha256: str | None = None
    """Known when all rows of a text have been read."""

    @classmethod
    def open(cls, path: Path, options: TableOptions, optional: str = "") -> RawFile:
        """Look at the beginning of a file.

        Raises:
            ValueError: it is empty, damaged or of no known format, or has two columns of one name.
        """
        kind = _format(path)
        if kind == "parquet":
            names = read_footer(path)[1].names
            folders = (name for name in folder_columns(path) if name not in names)
            found = cls(path=path, format=kind, names=(*names, *folders))
        elif kind == "json":
            if BlockReader(path).start(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
                raise ValueError(
                    f"{path} is one JSON array; write each of its entries on a line of its own, "
                    "for example with jq -c '.[]'"
                )
            found = cls(path=path, format=kind, names=())
        else:
            layout = find_layout(path, options, optional)
            found = cls(path=path, format=kind, names=tuple(layout.names), layout=layout)
        for name, count in Counter(found.names).items():
            if count > 1:
                raise ValueError(f"{path} has {count} columns named {name!r}; rename them")
        return found

    def parts(self, block_bytes: int = BLOCK_BYTES, limit: int | None = None) -> Iterator[FilePart]:
        """All rows, in parts that depend on the content only. Text is read in blocks of
        ``block_bytes``, up to ``limit`` lines.

        Raises:
            ValueError: the file is empty, truncated or damaged.
        """
        if self.format == "parquet":
            yield from self._row_groups()
            return

        file, layout = BlockReader(self.path), self.layout
        row_end = csv_row_end(layout.delimiter) if layout is not None and layout.quotes else None
        skip = 0 if layout is None else layout.rows_at
        for block in file.blocks(limit, block_bytes, row_end):
            if not block.data:
                raise ValueError(f"{self.path}: the file is empty; replace it, or leave it out")
            if layout is None:
                yield JsonPart(**vars(block))
                continue

            data = block.data.removeprefix(codecs.BOM_UTF8)
            data, skip = data[skip:], max(0, skip - len(data))
            yield CsvPart(**vars(block) | {"data": data}, layout=layout)
        self.sha256 = file.sha256()

    def _row_groups(self) -> Iterator[ParquetPart]:
        size, folders = self.path.stat().st_size, folder_columns(self.path)
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                done = 0
                for rows in map(with_plain_types, file.iter_batches(PARQUET_ROWS)):
                    done += rows.num_rows
                    for name in self.names[rows.num_columns :]:
                        values = pa.repeat(pa.scalar(folders[name]), rows.num_rows)
                        rows = rows.append_column(name, values)
                    consumed = size * done // max(1, file.metadata.num_rows)
                    yield ParquetPart(path=self.path, batch=rows, consumed=consumed)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} can't be read ({error}); write it again") from None

    def record(self) -> dict[str, Any]:
        """Name, size in bytes and SHA-256, as ``meta.json`` has them."""
        if self.sha256 is None:
            with self.path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = self.path.stat().st_size
        return {"name": self.path.name, "bytes": size, "sha256": self.sha256}


def with_plain_types(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows, with plain texts and bytes in place of views of them, and no half floats;
    UUIDs as texts, other keys of a fixed length as hexadecimal ones, and types that extend one as
    that.
    """
    columns = [_plain(column) for column in rows.columns]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _plain(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        values = _plain(column.dictionary)
        if pa.types.is_nested(values.type):  # which no file can hold
            return values.take(column.indices)
        return pa.DictionaryArray.from_arrays(column.indices, values)
    if column.type == pa.uuid():
        return _written_out(column.storage, lambda key: str(UUID(bytes=key)))
    if pa.types.is_fixed_size_binary(column.type):
        return _written_out(column, bytes.hex)
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if is_list(column.type):
        entries = values = column.type.value_type
        if pa.types.is_dictionary(entries):  # of which a list is none of texts
            values = PLAIN_TYPES.get(entries.value_type, entries.value_type)
            column = column.cast(pa.large_list(pa.dictionary(entries.index_type, values)))
        values = PLAIN_TYPES.get(values, values)
        return column if values == entries else column.cast(pa.large_list(values))
    return column.cast(PLAIN_TYPES.get(column.type, column.type))


def _written_out(keys: pa.Array, write: Callable[[bytes], str]) -> pa.Array:
    """Keys of bytes as texts."""
    coded = keys.dictionary_encode()
    texts = pa.array(map(write, coded.dictionary.to_pylist()), pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, texts)


def open_files(paths: Sequence[Path], options: TableOptions, optional: str = "") -> list[RawFile]:
    """Open the files of one table, which have one format and the same columns; see
    :func:`without_empty`. Where names are given, rows may be without an ``optional`` column.

    Raises:
        ValueError: they differ in format or columns, or one is damaged.
    """
    files = [RawFile.open(path, options, optional) for path in without_empty(paths)]
    require_one_table(files)
    if files[0].format != "parquet" and (names := folder_columns(files[0].path)):
        print_error(
            f"note: folders give files of Parquet columns, but not {files[0].path}: no column is "
            f"made of {listing(list(names))}"
        )
    if begun := [str(file.path) for file in files if file.layout and file.layout.comments]:
        print_error(f"note: comments or blank lines at the start of {listing(begun)} are left out")
    return files


def require_one_table(files: Sequence[RawFile]) -> None:
    """Check that files have one format and the same columns, in any order.

    Raises:
        ValueError: they differ.
    """
    first = files[0]
    for other in files[1:]:
        if other.format != first.format:
            raise ValueError(
                f"{first.path} is {first.format}, {other.path} is {other.format}; prepare files of "
                "one format"
            )
        for file, without in ((first, other), (other, first)):
            names = dict.fromkeys(without.names)
            missing = next((name for name in file.names if name not in names), None)
            if missing is not None:
                raise ValueError(
                    f"{without.path} has no column {missing!r}, but {file.path} has one"
                    f"{did_you_mean(missing, names)}; give all files the same columns"
                )


def without_empty(paths: Sequence[Path]) -> Sequence[Path]:
    """The files that have any content; if some have, a note names the others."""
    empty = [path for path in paths if _is_empty(path)] if len(paths) > 1 else []
    if not 0 < len(empty) < len(paths):
        return paths
    print_error(f"note: {listing(list(map(str, empty)))} has nothing in it and counts as 0 rows")
    return [path for path in paths if path not in empty]


def _is_empty(path: Path) -> bool:
    """Whether a text has no content, not even a header."""
    return _format(path) != "parquet" and not BlockReader(path).start(1).strip()


def _format(path: Path) -> str:
    """The format by the suffix, or else by the first bytes."""
    if (known := SUFFIXES.get(suffix(path))) and suffix(path) != ".txt":
        return known
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        return "parquet"
    start = BlockReader(path).start(64).removeprefix(codecs.BOM_UTF8)
    return "json" if start.lstrip()[:1] == b"{" else "csv"

"""Files of a table: CSV, JSON lines and Parquet, as parts that are parsed on their own."""

from __future__ import annotations

import codecs
import csv
import hashlib
import re
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
from .column_options import DOUBLE, TableOptions
from .input_paths import SUFFIXES, folder_columns, suffix
from .text_blocks import BLOCK_BYTES, BlockReader
from .text_formats import CsvLayout, CsvPart, JsonPart, PartRows, csv_row_end
from .values import NUMBER_MISSING

PARQUET_ROWS = 1 << 16  # of a part
DELIMITERS = (",", "\t", ";", "|")
PICKLED = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
BINARY = b"Obj\1", b"ORC\n", b"\x89HDF", b"SQLite format 3", b"\x93NUMPY"
PACKED = "; unpack it, or pack it with gzip or zstd"
OTHER_FILES: dict[bytes | tuple[bytes, ...], str] = {
    (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE): "UTF-16; convert it to UTF-8, for example with "
    "iconv -f UTF-16 -t UTF-8",
    b"PK\3\4": "a ZIP archive, as Excel workbooks are; save it as CSV, or unpack it",
    PICKLED: "a pickle, which may run code when it is read; if you trust it, load it in Python, "
    "and write it with DataFrame.to_parquet",
    b"BZh": f"packed with bzip2{PACKED}",
    b"\xfd7zXZ": f"packed with xz{PACKED}",
    b"PAR1": "a Parquet file; give it a name that ends in .parquet",
    b"ARROW1": "a Feather file; write it with DataFrame.to_parquet",
    BINARY: "a file of Avro, ORC, HDF5, SQLite or NumPy; write its rows as Parquet or CSV",
}
"""The first bytes of other files, and what these are."""
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
            found = _open_csv(path, options, optional)
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
        header = layout is not None and layout.header
        for block in file.blocks(limit, block_bytes, row_end):
            if not block.data:
                raise ValueError(f"{self.path}: the file is empty; replace it, or leave it out")
            if layout is None:
                yield JsonPart(**vars(block))
                continue

            data = block.data.removeprefix(codecs.BOM_UTF8)
            if header:
                data, header = data[_header_end(data, layout.quotes) :], False
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
    if is_list(column.type) and (entries := PLAIN_TYPES.get(column.type.value_type)):
        return column.cast(pa.large_list(entries))
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


def _open_csv(path: Path, options: TableOptions, optional: str) -> RawFile:
    """Find the delimiter and the names of a CSV, of which a column may be missing."""
    # The delimiter that the first line has most of.
    line = _first_line(path, options.quotes)
    delimiter = options.delimiter or max(DELIMITERS, key=line.count)
    if options.delimiter is None and DOUBLE in line and not any(map(line.count, DELIMITERS[:3])):
        delimiter = DOUBLE
    quotes = options.quotes and delimiter != DOUBLE  # of MovieLens, with quotes in titles

    fields = line.split(delimiter)
    if quotes:
        try:
            fields = next(csv.reader([line], delimiter=delimiter))
        except csv.Error:
            raise ValueError(
                f"{path}: lines end with a carriage return alone; convert them, for example with "
                r"tr '\r' '\n'"
            ) from None

    # The names, given or in the first line.
    names = options.names
    if names is None:
        names = tuple(name if name.strip() else f"column_{i}" for i, name in enumerate(fields, 1))
        if all(_is_number(field) for field in fields if field):
            raise ValueError(
                f"{path}: the first line holds numbers ({line[:40]}), not the names of columns; "
                "list them with names: in the YAML"
            )
    elif len(names) == len(fields) + 1 and optional in names:
        names = tuple(name for name in names if name != optional)
    elif len(names) != len(fields):
        raise ValueError(
            f"{path} has {len(fields)} columns in its first line, but names: lists {len(names)}"
        )

    layout = CsvLayout(
        names=names,
        delimiter=delimiter,
        header=options.names is None,
        quotes=quotes,
        missing=(*NUMBER_MISSING, *options.missing),
    )
    return RawFile(path=path, format="csv", names=names, layout=layout)


def _first_line(path: Path, quotes: bool) -> str:
    """The first row of a CSV.

    Raises:
        ValueError: the file is empty, or no text in UTF-8.
    """
    start = BlockReader(path).start(1 << 16)

    for beginning, what in OTHER_FILES.items():
        if start.startswith(beginning):
            raise ValueError(f"{path} is {what}")
    if b"\0" in start.split(b"\n", 1)[0]:  # such as ORC and TFRecord
        raise ValueError(f"{path} is no text, as a byte is 0; write its rows as Parquet or CSV")

    start = start.removeprefix(codecs.BOM_UTF8)
    if not start.strip():
        raise ValueError(f"{path} is empty; a table has a line with the names of its columns")

    try:
        return start[: _header_end(start, quotes)].decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = start[error.start]
        raise ValueError(
            f"{path}, first line: byte {error.start + 1} ({byte:#04x}) is not UTF-8; convert the "
            "file, for example with iconv"
        ) from None


def no_header_hint(file: RawFile) -> str:
    """The end of a message on an unknown column: a name that is a number may be of a row, and a
    single one may be all names."""
    if file.layout is None or not file.layout.header:
        return ""
    if len(file.names) == 1 and re.search(r"\w[^\w.-]+\w", file.names[0]):
        return "; if these are several columns, say what separates them with delimiter: in the YAML"
    if not any(map(_is_number, file.names)):
        return ""
    return "; if the first line is a row, list the names of the columns with names: in the YAML"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _header_end(data: bytes, quotes: bool) -> int:
    """Where the second row of a CSV begins; a name in quotes may hold line ends."""
    end = data.find(b"\n") + 1
    while quotes and end and data.count(b'"', 0, end) % 2:
        end = data.find(b"\n", end) + 1
    return end or len(data)

"""The layout of a CSV, found in its first lines."""

from __future__ import annotations

import codecs
import csv
import re
from pathlib import Path

from .column_options import DOUBLE, TableOptions
from .text_blocks import BlockReader
from .text_formats import CsvLayout
from .values import NUMBER_MISSING

DELIMITERS = (",", "\t", ";", "|")
PICKLED = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
BINARY = b"Obj\1", b"ORC\n", b"\x89HDF", b"SQLite format 3", b"\x93NUMPY"
COMMENT = re.compile(rb" *(#.*|sep=.)?[ \r]*\n")
"""A line that may come before those of a CSV: blank, a comment, or the ``sep=;`` of Excel."""
OTHER_FILES: dict[bytes | tuple[bytes, ...], str] = {
    (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE): "UTF-16; convert it to UTF-8, for example with "
    "iconv -f UTF-16 -t UTF-8",
    b"PK\3\4": "a ZIP archive, as Excel workbooks are; save it as CSV, or unpack it",
    PICKLED: "a pickle, which may run code when it is read; if you trust it, load it in Python, "
    "and write it with DataFrame.to_parquet",
    b"\xfd7zXZ": "packed with xz; unpack it, or pack it with gzip or zstd",
    b"PAR1": "a Parquet file; give it a name that ends in .parquet",
    b"ARROW1": "a Feather file; write it with DataFrame.to_parquet",
    BINARY: "a file of Avro, ORC, HDF5, SQLite or NumPy; write its rows as Parquet or CSV",
}
"""The first bytes of other files, and what these are."""


def find_layout(path: Path, options: TableOptions, optional: str = "") -> CsvLayout:
    """The layout of a CSV by its first lines. Where names are given, rows may be without an
    ``optional`` column.

    Raises:
        ValueError: it is empty, or no text of these names.
    """
    start = _start(path)
    comments = _comments(start, options)
    before = sum(map(len, comments))
    header = start[before:][: _header_end(start[before:], options.quotes)]
    line = _decoded(path, header)

    delimiter = _delimiter(line, options)
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

    return CsvLayout(
        names=names,
        delimiter=delimiter,
        comments=len(comments),
        rows_at=before + (len(header) if options.names is None else 0),
        quotes=quotes,
        missing=(*NUMBER_MISSING, *options.missing),
    )


def _start(path: Path) -> bytes:
    """The first bytes of a CSV.

    Raises:
        ValueError: the file is empty, or no text.
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
    return start


def _comments(start: bytes, options: TableOptions) -> list[bytes]:
    """The lines of a CSV before its names, or before its rows if the names are given."""
    lines = re.findall(rb"[^\n]*\n", start)
    count = next((at for at, line in enumerate(lines) if not COMMENT.fullmatch(line)), 0)

    # A line with # is none if it has as many fields as the row after it.
    row = lines[count].decode(errors="replace") if count else ""
    delimiter = _delimiter(row, options)
    fields, numbers = row.count(delimiter), map(_is_number, row.split(delimiter))
    if fields and (options.names is not None or any(numbers)):
        while count and lines[count - 1].count(delimiter.encode()) == fields:
            count -= 1
    return lines[:count]


def _delimiter(line: str, options: TableOptions) -> str:
    """The delimiter that is given, or that a line has most of."""
    if options.delimiter is None and DOUBLE in line and not any(map(line.count, DELIMITERS[:3])):
        return DOUBLE
    return options.delimiter or max(DELIMITERS, key=line.count)


def _decoded(path: Path, line: bytes) -> str:
    """The first line of a CSV as text.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ValueError(
            f"{path}, first line: byte {error.start + 1} ({byte:#04x}) is not UTF-8; convert the "
            "file, for example with iconv"
        ) from None


def no_header_hint(layout: CsvLayout | None) -> str:
    """The end of a message on an unknown column: a name that is a number may be of a row, and a
    single one may be all names."""
    if layout is None or not layout.rows_at:
        return ""
    if len(layout.names) == 1 and re.search(r"\w[^\w.-]+\w", layout.names[0]):
        return "; if these are several columns, say what separates them with delimiter: in the YAML"
    if not any(map(_is_number, layout.names)):
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

"""Rows of Criteo's logs: lines of 40 fields, parsed a block at a time, with reports on bad lines.

This is the fast way for rows whose columns are known: 13 numbers are scaled at once, and the values
of 26 categories become integer keys. :mod:`dlrm.data.prepare.table_rows` reads any other rows.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from ..schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from .bad_rows import BAD_ROWS_KEPT, BadLine, BadRows, Converted
from .column_options import ColumnOptions, TableOptions
from .columns import Column, ColumnPlan
from .hex_keys import hex_keys, modulo
from .numbers import shifted_log
from .row_source import RowSource
from .text_blocks import BlockReader, TextBlock

COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)

PIECE_BYTES = 1 << 18  # of a block with bad lines, looked at a line at a time

_NUMBER = re.compile(rb" *[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)? *")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
# Each field can match in only one way: in a bad line, all combinations of 39 would be tried.
_LINE = re.compile(
    rb"[01]"
    + rb"\t(?>%b)?+" % _NUMBER.pattern * len(CRITEO_DENSE)
    + rb"\t(?>%b)?+" % _HEX.pattern * len(CRITEO_CATEGORICAL)
)


@dataclass(kw_only=True)
class CriteoRows(RowSource):
    """The rows of Criteo's logs.

    Args:
        paths: files, in the order of time.
        transform: of the numbers, ``log`` or ``log3``.
        cap: take the values of categories modulo this.
        limit: read at most this many lines, over all files.
        scored: the rows are to be scored: the label may be missing, in all rows of a file.
    """

    paths: Sequence[Path]
    transform: str = "log"
    cap: int | None = None
    limit: int | None = None
    scored: bool = False
    _records: list[dict[str, Any]] = field(default_factory=list)

    def records(self) -> Sequence[dict[str, Any]]:
        """See :class:`RowSource`."""
        return self._records

    def parts(self, block_bytes: int) -> Iterator[TextBlock]:
        """See :class:`RowSource`."""
        left = self.limit
        for path in self.paths:
            if left == 0:
                return
            file = BlockReader(path)
            labelled = True
            for block in file.blocks(left, block_bytes):
                if self.scored and block.empty:
                    raise ValueError(f"{path}: the file is empty; give a file that has rows")
                if self.scored and block.first_line == 1:
                    labelled = block.data.partition(b"\n")[0].count(b"\t") != len(COLUMNS) - 2
                yield replace(block, labelled=labelled)
                if left is not None:
                    left -= block.lines
            size = path.stat().st_size
            self._records.append({"name": path.name, "bytes": size, "sha256": file.sha256()})

    def convert(
        self, part: TextBlock, *, skip_bad: bool
    ) -> Converted[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """See :class:`RowSource`; there are no further columns."""
        block = part if part.labelled else _with_label(part)
        rows, good, bad = parse_block(block, self.transform, self.cap)
        if block.empty:
            bad.add(BadLine(-1, "empty file", "the file is empty"), -1)
        if bad.count and not skip_bad:
            first = bad.first[0]
            how = "" if part.labelled else " (with a label of 0 put before it)"
            raise BadLine(first["line"] - 1, first["kind"], first["message"] + how)
        if not part.labelled:
            rows = rows.drop_columns(["label"])
        return Converted((rows, rows.select([])), good, bad)


def criteo_plan(options: Mapping[str, Any]) -> ColumnPlan:
    """The columns of the rows, and what becomes of them.

    Args:
        options: those of ``prepare_criteo.py``, as ``meta.json`` has them.
    """
    transform: Literal["log", "log3"] = "log3" if options["dense_transform"] == "log3" else "log"
    number = ColumnOptions(kind="number", transform=transform)
    category = ColumnOptions(kind="category", min_count=options.get("min_count", 1))
    kinds = {"label": ColumnOptions(kind="label")}
    kinds |= dict.fromkeys(CRITEO_DENSE, number) | dict.fromkeys(CRITEO_CATEGORICAL, category)
    columns = [
        Column(name=name, found="text", why="Criteo", options=own) for name, own in kinds.items()
    ]
    return ColumnPlan(
        options=TableOptions(transform=transform, ids=options.get("ids", "vocabulary")),
        columns=tuple(columns),
        hexadecimal=True,
        cap=options.get("cap"),
        vocabulary=options.get("vocabulary", "train"),
    )


def parse_block(
    block: TextBlock, transform: str = "log", cap: int | None = None
) -> tuple[pa.RecordBatch, NDArray[np.int64], BadRows]:
    """Turn the lines of a block into columns; skip and report bad lines.

    Args:
        block: lines of 40 fields: label, 13 numbers, 26 values of up to 8 hex digits. All fields
            but the label may be empty.
        transform: ``log`` or ``log3``; see :mod:`dlrm.data.prepare.numbers`. A missing number
            counts as 0.
        cap: take the values of categories modulo this.

    Returns:
        The good rows, where they are in the block, and a report on the bad ones. A categorical
        column is a dictionary array whose dictionary holds the ``int64`` keys: the value of the hex
        digits, or :data:`dlrm.data.prepare.hex_keys.MISSING`.
    """
    try:
        if block.lines * len(COLUMNS) > len(block.data):  # a row has a label and 39 tabs at least
            raise ValueError("too short lines")  # of which pyarrow would make rows of nulls
        rows = _parse(block.data, block.lines, transform, cap)
        return rows, np.arange(block.lines), BadRows()
    except ValueError:  # pyarrow's reader raises it too
        lines, positions, bad = _check(block.data)
        rows = _parse(b"\n".join(lines), len(lines), transform, cap)
        return rows, np.array(positions, np.int64), bad


def _with_label(block: TextBlock) -> TextBlock:
    """The block with a label of 0 before each line."""
    lines = block.data.removesuffix(b"\n").replace(b"\n", b"\n0\t")
    return replace(block, data=b"0\t" + lines + b"\n")


def _parse(data: bytes, lines: int, transform: str, cap: int | None) -> pa.RecordBatch:
    raw = _read_csv(data)
    if raw.num_rows != lines:  # pyarrow's reader ends a row at a carriage return within a line
        raise ValueError(f"{raw.num_rows} rows in {lines} lines")
    columns = {"label": _label(raw["label"].combine_chunks())}
    for name in CRITEO_DENSE:
        numbers = raw[name].combine_chunks().fill_null(0).to_numpy()
        if not np.isfinite(numbers).all():
            raise ValueError("infinite or not a number")
        columns[name] = pa.array(shifted_log(numbers, transform))
    for name in CRITEO_CATEGORICAL:
        values = raw[name].combine_chunks()
        keys = modulo(hex_keys(values.dictionary), cap)
        narrow = pa.from_numpy_dtype(np.min_scalar_type(len(keys)))  # halves what is spilled
        indices = values.indices.cast(narrow)
        columns[name] = pa.DictionaryArray.from_arrays(indices, pa.array(keys))
    return pa.RecordBatch.from_pydict(columns)


def _read_csv(data: bytes) -> pa.Table:
    text = pa.dictionary(pa.int32(), pa.binary())  # most values repeat
    types = dict.fromkeys(COLUMNS, text) | dict.fromkeys(CRITEO_DENSE, pa.float64())
    if not data:
        return pa.schema(list(types.items())).empty_table()
    return pyarrow.csv.read_csv(
        pa.BufferReader(data),
        pyarrow.csv.ReadOptions(column_names=COLUMNS, use_threads=False, block_size=len(data) + 1),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], check_utf8=False),
    )


def _label(column: pa.DictionaryArray) -> pa.Array:
    values = column.dictionary.to_pylist()
    if not set(values) <= {b"0", b"1"}:
        raise ValueError("label not 0 or 1")
    return pa.array([int(value) for value in values], pa.uint8()).take(column.indices)


def _check(data: bytes) -> tuple[list[bytes], list[int], BadRows]:
    """The good lines of a block, their positions, and a report on the bad ones."""
    # pyarrow's reader skips a byte order mark too.
    data = data.removeprefix(codecs.BOM_UTF8)
    good: list[bytes] = []
    positions: list[int] = []
    bad, first = BadRows(), 0
    for piece in _pieces(data):
        starts, stops, columns = _lines(piece)
        incomplete = columns != len(COLUMNS)

        # Lines of another number of columns are short, up to 16 million of them in a block: those
        # that are not reported are counted without an object for each.
        reported, counted = np.split(np.flatnonzero(incomplete), [BAD_ROWS_KEPT])
        for index in np.union1d(np.flatnonzero(~incomplete), reported).tolist():
            line = piece[starts[index] : stops[index]].removesuffix(b"\r")
            if _LINE.fullmatch(line) and _all_finite(line.split(b"\t", 14)[1:14]):
                good.append(line)
                positions.append(first + index)
            else:
                bad.add(BadLine(first + index, *_diagnose(line)), first + index)
        for few in (True, False):
            if lines := int(np.count_nonzero((columns[counted] < len(COLUMNS)) == few)):
                bad.kinds[_wrong_columns(few)] += lines
        first += len(starts)
    return good, positions, bad


def _pieces(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces of whole lines, of about ``PIECE_BYTES``."""
    start = 0
    while start < len(data):
        near = start + PIECE_BYTES
        stop = data.rfind(b"\n", start, near) + 1 or data.find(b"\n", near) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _lines(piece: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each line starts and stops, and how many columns it has."""
    text = np.frombuffer(piece, np.uint8)
    stops = np.flatnonzero(text == ord("\n"))
    if not piece.endswith(b"\n"):
        stops = np.append(stops, len(piece))
    tabs = np.searchsorted(np.flatnonzero(text == ord("\t")), stops)
    return np.append(0, stops[:-1] + 1), stops, np.diff(tabs, prepend=0) + 1


def _wrong_columns(few: bool) -> str:
    return f"too {'few' if few else 'many'} columns"


def _diagnose(line: bytes) -> tuple[str, str]:
    """The kind of a bad line, and a message that says what is wrong with it."""
    fields = line.count(b"\t") + 1
    if fields != len(COLUMNS):
        message = f"{fields} columns, a row has {len(COLUMNS)}: {_shown(line)}"
        return _wrong_columns(fields < len(COLUMNS)), message
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return "invalid UTF-8", f"byte {error.start + 1} ({line[error.start]:#04x}) is not UTF-8"

    # The fields, in their order.
    label, *values = line.split(b"\t")
    if label not in (b"0", b"1"):
        return "label not 0 or 1", f"label is {_shown(label)}, must be 0 or 1"
    for name, value in zip(CRITEO_DENSE, values, strict=False):
        if value and not _NUMBER.fullmatch(value):
            return "not a number", f"{name} is {_shown(value)}, must be a number or empty"
        if value and not math.isfinite(float(value)):
            return "not a number", f"{name} is {_shown(value)}, beyond the range of float64"
    for name, value in zip(CRITEO_CATEGORICAL, values[len(CRITEO_DENSE) :], strict=True):
        if value and not _HEX.fullmatch(value):
            return "not hex", f"{name} is {_shown(value)}, must be 1 to 8 hex digits or empty"
    raise AssertionError(f"a good line: {line!r}")


def _all_finite(numbers: Sequence[bytes]) -> bool:
    return all(math.isfinite(float(number)) for number in numbers if number)


def _shown(value: bytes) -> str:
    # The end of a cut value may be a part of a character.
    text = value[:200].decode(errors="backslashreplace")
    return repr(text if len(text) <= 40 else text[:40] + "...")

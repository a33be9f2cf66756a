"""Blocks of CSV and of JSON lines to Arrow columns, with exact reports on what doesn't fit."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
from numpy.typing import NDArray

from ..column_values import is_list
from .bad_rows import BAD_ROWS_KEPT, BadRow, BadValue, shown
from .text_blocks import TextBlock
from .values import failing, is_number, is_text, numbers

QUOTE = ord('"')
MARK = 0xF0000  # plus a byte that is not UTF-8: a character of a plane for private use
MARKED = f"[{chr(MARK + 0x80)}-{chr(MARK + 0xFF)}]"
UNIT = "\x1f"  # the "unit separator" of ASCII, in place of a delimiter of two characters


@dataclass(frozen=True)
class PartRows:
    """The rows of a part, to be converted in other selections than all of them."""

    count: int
    """All of them, with bad ones."""
    bad: Sequence[BadRow]
    """Those that are no rows of the table."""
    take: Callable[[NDArray[np.int64]], pa.RecordBatch]
    """The columns of rows at some positions. It raises :class:`BadRow` if one cannot be read."""


@dataclass(frozen=True, kw_only=True)
class CsvLayout:
    """How the fields of a CSV are written."""

    names: Sequence[str]
    delimiter: str
    comments: int = 0
    """Lines before that of the names, or before the rows."""
    rows_at: int = 0
    """Where the rows begin, in bytes after a mark of the order of bytes."""
    quotes: bool
    """Whether fields may be quoted."""
    missing: Sequence[str]
    """Texts that stand for a missing number. Fewer of them take less time."""


@dataclass(frozen=True, kw_only=True)
class CsvPart(TextBlock):
    """Whole rows of a CSV, without the header."""

    layout: CsvLayout

    def parse(self, types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
        """The columns with the names of ``types``.

        If a value does not fit its type, all columns are returned as texts, so that whoever
        converts them can say which value it is. A row with too few or too many fields, or not in
        UTF-8, is named.

        Raises:
            ValueError: a row has too few or too many fields, or is not UTF-8; the error names it.
        """
        try:
            return self._read(types)
        except pa.ArrowInvalid:
            rows = self.rows(types)
            _raise_first(rows.bad)
            return rows.take(np.arange(rows.count))

    def rows(self, types: Mapping[str, pa.DataType]) -> PartRows:
        """The same, row by row, if rows can be told apart.

        Raises:
            ValueError: there are no rows that can be told apart.
        """
        texts, positions, bad = self._texts
        texts = texts.select(list(types))

        def take(wanted: NDArray[np.int64]) -> pa.RecordBatch:
            """Numbers are parsed, so that the row of another text is named."""
            found = texts.take(pa.array(np.searchsorted(positions, wanted)))
            columns = dict(zip(types, found.columns, strict=True))
            for name in (name for name, kind in types.items() if kind == pa.float64()):
                parsed = numbers(columns[name], name, missing=self.layout.missing)
                columns[name] = pa.array(parsed, from_pandas=True)
            return pa.RecordBatch.from_pydict(columns)

        return PartRows(len(positions) + sum(len(error.rows) for error in bad), bad, take)

    def infer(
        self, *, skip_bad: bool = False, types: Mapping[str, pa.DataType] | None = None
    ) -> pa.RecordBatch:
        """All columns, with the types that pyarrow finds, or those of ``types``. Bad rows can be
        left out. Times of the day, and integers in hexadecimal, are texts."""
        handler = (lambda _: "skip") if skip_bad else None
        try:
            rows = self._read(types, handler)
            kinds = [pa.types.is_time, *([pa.types.is_integer] if b"0x" in self.data else [])]
            names = [field.name for field in rows.schema if any(of(field.type) for of in kinds)]
            texts = self._read(dict.fromkeys(names, pa.string()), handler) if names else rows
            for index, name in enumerate(rows.schema.names):
                found = texts[name] if name in names else rows[name]
                if name in names and pc.any(pc.match_substring_regex(found, "[:x]")).as_py():
                    rows = rows.set_column(index, name, found)
            return rows
        except pa.ArrowInvalid as error:
            _raise_first(self._texts[2])
            raise ValueError(f"{self.path} can't be read: {error}") from None

    def _read(
        self,
        types: Mapping[str, pa.DataType] | None,
        handler: object = None,
        data: bytes | None = None,
    ) -> pa.RecordBatch:
        """The rows of this part, or of other ``data``."""
        if not self.data.strip(b"\r\n"):
            schema = pa.schema([(name, pa.string()) for name in types or self.layout.names])
            return pa.RecordBatch.from_pylist([], schema)

        # pyarrow takes delimiters of one character.
        convert = {"column_types": types, "include_columns": list(types)} if types else {}
        data, delimiter = self.data if data is None else data, self.layout.delimiter
        if len(delimiter) > 1:
            data, delimiter = data.replace(delimiter.encode(), UNIT.encode()), UNIT

        # In one thread and one block: several parts are read at a time.
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            pyarrow.csv.ReadOptions(
                column_names=self.layout.names,
                use_threads=False,
                block_size=len(data) + 1,
            ),
            pyarrow.csv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if self.layout.quotes else False,
                newlines_in_values=self.layout.quotes,
                invalid_row_handler=handler,
            ),
            pyarrow.csv.ConvertOptions(null_values=self.layout.missing, **convert),
        )
        return _only_batch(table)

    @cached_property
    def _texts(self) -> tuple[pa.RecordBatch, NDArray[np.int64], list[BadRow]]:
        """All columns of good rows as texts, the positions of these, and the other rows: those with
        another number of fields, or not in UTF-8."""
        wrong = array("q")  # a block may have millions of short lines
        bad: list[BadRow] = []

        def collect(row: pyarrow.csv.InvalidRow) -> str:
            wrong.append(row.number - 1)
            if len(wrong) <= BAD_ROWS_KEPT:
                delimiter = self.layout.delimiter
                problem = f"{row.actual_columns} fields, a row has {row.expected_columns}: "
                text = _unmarked(row.text.replace(UNIT, delimiter))
                problem += f"{shown(text)}; correct it (is the delimiter {delimiter!r}?)"
                bad.append(BadRow([row.number - 1], problem))
            return "skip"

        types = dict.fromkeys(self.layout.names, pa.string())
        try:
            rows = self._read(types, collect, _marked(self.data))
        except pa.ArrowInvalid as error:
            raise ValueError(f"{self.path}: {error}; correct the file") from None
        if len(wrong) > BAD_ROWS_KEPT:
            bad.append(BadRow(wrong[BAD_ROWS_KEPT:], "another number of fields"))

        positions = np.delete(np.arange(rows.num_rows + len(wrong)), wrong)
        valid = np.ones(len(positions), bool)
        for index, misfit in _not_utf8(rows, positions):
            if valid[index]:
                bad.append(misfit)
            valid[index] = False
        return rows.filter(pa.array(valid)), positions[valid], bad


@dataclass(frozen=True, kw_only=True)
class JsonPart(TextBlock):
    """Whole lines of JSON."""

    def parse(self, types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
        """The columns with the names of ``types``; one that a row doesn't name is null there.

        Raises:
            ValueError: a line is not JSON, has another name, or a value of another type.
        """
        return _parse_json(self.data, types)

    def rows(self, types: Mapping[str, pa.DataType]) -> PartRows:
        """The same, row by row."""
        lines = _lines(self.data)

        def take(positions: NDArray[np.int64]) -> pa.RecordBatch:
            return _parse_json(b"".join(lines[position] for position in positions), types)

        return PartRows(len(lines), [], take)

    def infer(self, *, skip_bad: bool = False) -> pa.RecordBatch:
        """All columns, with the types that pyarrow finds; bad rows can be left out."""
        data = self.data
        while True:
            try:
                return _read_json(data, None)
            except pa.ArrowInvalid:
                lines = _lines(data)
                row, problem = _first_bad_line(lines, None)
                if not skip_bad:
                    raise BadRow([row], f"{problem}; correct the row") from None
            # The types are those of the lines before the first bad one.
            before = _read_json(b"".join(lines[:row]), None).schema if row else pa.schema([])
            bad = {row, *_misfits(lines, dict(zip(before.names, before.types, strict=True)))}
            data = b"".join(line for i, line in enumerate(lines) if i not in bad)


def _raise_first(bad: Sequence[BadRow]) -> None:
    """Raise the error of the first row, if there is one."""
    if bad:
        raise min(bad, key=lambda error: error.rows[0]) from None


def csv_row_end(delimiter: str) -> Callable[[bytearray, int], int]:
    """A function that finds where the last whole row of a buffer, which begins with a row, ends
    before a position, 0 if there is none: a field in quotes may hold line ends."""
    after = np.frombuffer(f'{delimiter}\r\n"'.encode(), np.uint8)
    field = re.compile(rb'(?:^|(?<=[%b\n\r]))"(?:[^"]|"")*(?:"|\Z)' % re.escape(delimiter.encode()))

    def row_end(buffer: bytearray, limit: int) -> int:
        end = buffer.rfind(b"\n", 0, limit) + 1
        if buffer.find(b'"', 0, end) < 0:
            return end
        with memoryview(buffer) as view:
            data = np.frombuffer(view[:end], np.uint8)
            quotes = np.flatnonzero(data == QUOTE)
            # Every second quote opens a field (or stands for a quote within one), if none is
            # part of an unquoted field.
            opening = quotes[::2]
            before = data[np.maximum(opening - 1, 0)]
            ordinary = not (np.isin(before, after) | (opening == 0)).all()
            del data
        if not ordinary:
            while len(quotes) % 2:  # the last line end is in quotes: the row begins before them
                end = buffer.rfind(b"\n", 0, int(quotes[-1])) + 1
                quotes = quotes[: np.searchsorted(quotes, end)]
            return end
        inside = [(m.start(), m.end()) for m in field.finditer(bytes(memoryview(buffer)[:end]))]
        while inside and end and inside[-1][1] >= end:
            end = buffer.rfind(b"\n", 0, inside.pop()[0]) + 1
            while inside and inside[-1][0] >= end:
                inside.pop()
        return end

    return row_end


def _read_json(data: bytes, types: Mapping[str, pa.DataType] | None) -> pa.RecordBatch:
    """The columns with the names of ``types``, in which no type stands for one that is left out."""
    wanted = _wanted(types or {})
    behaviour = "error" if types is not None and len(wanted) == len(types) else "infer"
    table = pyarrow.json.read_json(
        pa.BufferReader(data),
        pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pyarrow.json.ParseOptions(wanted or None, unexpected_field_behavior=behaviour),
    )
    if types is None:
        return _only_batch(table)
    for name in table.column_names:
        if name not in types:
            raise pa.ArrowInvalid(f"unexpected field {name!r}")
    return _only_batch(table.select(wanted.names))


def _wanted(types: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema([(name, kind) for name, kind in types.items() if kind != pa.null()])


def _parse_json(data: bytes, types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    if not data.strip():
        return pa.RecordBatch.from_pylist([], _wanted(types))
    try:
        return _read_json(data, types)
    except pa.ArrowInvalid:
        lines = _lines(data)
        row, problem = _first_bad_line(lines, types)

        def read(start: int, stop: int) -> pa.RecordBatch:
            return _read_json(b"".join(lines[start:stop]), types)

        rows = dict.fromkeys([row, *(_misfits(lines, types) or failing(len(lines), read))])
        problem += "; correct the row, or the kind of the column"
        raise BadRow(rows, problem) from None


def _misfits(lines: Sequence[bytes], types: Mapping[str, pa.DataType]) -> list[int]:
    """The lines that certainly are no JSON, or have a text for a number, a list for a text... They
    are found much faster than by reading some lines at a time with pyarrow."""
    # The classes of Python that the value of a column may have.
    classes = (is_text, (str,)), (is_number, (int, float)), (is_list, (list,))
    fitting = {name: form for name, kind in types.items() for fits, form in classes if fits(kind)}

    found = []
    for position, line in enumerate(lines):
        try:
            row = json.loads(line, strict=False)
            values = ((row.get(name), classes) for name, classes in fitting.items())
            fits = all(
                value is None or (isinstance(value, classes) and not isinstance(value, bool))
                for value, classes in values
            )
        except (ValueError, AttributeError):  # no JSON, or no object
            fits = False

        # All others are read by pyarrow, whose word is the last.
        if not fits:
            found.append(position)
    return found


def _lines(data: bytes) -> list[bytes]:
    """The lines of JSON, each with an end."""
    return [line.rstrip(b"\r\n") + b"\n" for line in data.split(b"\n") if line.strip()]


def _marked(data: bytes) -> bytes:
    """The text with a character that nobody uses for each byte that is not UTF-8."""
    text = data.decode(errors="surrogateescape")
    return re.sub(
        "[\udc80-\udcff]", lambda found: chr(ord(found[0]) - 0xDC00 + MARK), text
    ).encode()


def _unmarked(text: str) -> str:
    """The text as a message shows it."""
    return re.sub(MARKED, lambda found: f"\\x{ord(found[0]) - MARK:02x}", text)


def _not_utf8(rows: pa.RecordBatch, positions: NDArray[np.int64]) -> Iterator[tuple[int, BadValue]]:
    """Row and error of the values that are not UTF-8; ``positions`` are those of the rows."""
    for name in rows.schema.names:
        found = pc.match_substring_regex(rows[name], MARKED).to_numpy(zero_copy_only=False)
        for index in np.flatnonzero(found).tolist():
            before, mark, _ = re.split(f"({MARKED})", rows[name][index].as_py(), maxsplit=1)
            what = f"byte {len(before.encode()) + 1} ({ord(mark) - MARK:#04x}) is not UTF-8"
            problem = f"{what}; convert the file, for example with iconv"
            yield index, BadValue(name, [positions[index]], problem)


def _first_bad_line(
    lines: Sequence[bytes], types: Mapping[str, pa.DataType] | None
) -> tuple[int, str]:
    """The first line that can't be read after those before it, and why."""
    why = ""

    def read(_: int, stop: int) -> None:
        nonlocal why
        try:
            _read_json(b"".join(lines[:stop]), types)
        except pa.ArrowInvalid as error:
            why = " ".join(str(error).removeprefix("JSON parse error: ").split())
            raise

    row = next(failing(len(lines), read))
    return row, re.sub(r"\.? in row \d+$", "", why)  # of what was read at a time


def _only_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)

"""Read rows from the bodies of requests to serve.py, which may come from anybody."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
MISFITS = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
TYPES = pa.types
LISTS = (TYPES.is_list, TYPES.is_large_list, TYPES.is_fixed_size_list)
TEXTS = (TYPES.is_string, TYPES.is_large_string, TYPES.is_binary, TYPES.is_large_binary)
NUMBERS = (TYPES.is_primitive, TYPES.is_null, TYPES.is_decimal)


class Refused(Exception):
    """The answer to a request is an error."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def rows_of(
    body: bytes, kind: str, columns: Collection[str], most: int, most_bytes: int
) -> pa.Table:
    """The rows of a request.

    Args:
        body: body of the request.
        kind: its content type.
        columns: names of the columns to read; others are left out.
        most: number of rows.
        most_bytes: bytes of a column, without a dictionary.

    Raises:
        Refused: they are not rows, or too many.
    """
    if kind == ARROW:
        try:
            table, count = arrow_rows(body, columns, most, most_bytes)
        except (*MISFITS, pa.ArrowException, OSError, struct.error) as error:
            raise Refused(400, f"the body is no Arrow stream to score: {one_line(error)}") from None
    else:
        try:
            table, count = json_rows(body, columns, most)
        except (*MISFITS, pa.ArrowException) as error:
            form = 'it must be {"rows": [{"column": value, ...}, ...]}'
            raise Refused(400, f"the body does not fit: {one_line(error)}; {form}") from None

    if count > most:
        raise Refused(413, f"more than {most} rows; send them in several requests")
    if count and not table.column_names:  # such a table has no rows
        raise Refused(400, f"the rows have none of the columns {', '.join(columns)}"[:300])
    return table


def arrow_rows(
    body: bytes, columns: Collection[str], most: int, most_bytes: int
) -> tuple[pa.Table, int]:
    """The rows of an Arrow stream, and their number, of which ``most`` are read."""
    if any(is_compressed(message) for message in pa.ipc.MessageReader.open_stream(body)):
        raise ValueError("it is compressed; send it without")

    batches, count = [], 0
    with pa.ipc.open_stream(body) as stream:
        for batch in stream:
            count += batch.num_rows
            if count > most:
                break
            batch.validate(full=True)  # it may have been made to do damage
            batches.append(batch)
        table = pa.Table.from_batches(batches, stream.schema)

    table = table.select([name for name in table.column_names if name in columns])
    for name in table.column_names:
        require_small(name, table[name], most_bytes)
    return table, count


def json_rows(body: bytes, columns: Collection[str], most: int) -> tuple[pa.Table, int]:
    """The rows of a JSON text, and their number, of which ``most`` are read."""
    rows = json.loads(body, parse_constant=_no_constant)["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TypeError("rows must be a list of objects")

    # Not the names of all rows: n rows with different names would take n x n values.
    used = rows[:most]
    names = [name for name in columns if any(name in row for row in used)]
    return pa.table({name: _column([row.get(name) for row in used]) for name in names}), len(rows)


def _column(values: list[Any]) -> pa.Array:
    """The values of a column; ids that are hashes may have all 64 bits."""
    try:
        return pa.array(values)
    except OverflowError:
        return pa.array(values, pa.uint64())


def require_small(name: str, column: pa.ChunkedArray, most: int) -> None:
    """Check that a column takes little memory when it is read.

    Many rows may share a large text, in a dictionary or by views, and lists of nulls take no bytes.

    Raises:
        ValueError: it takes too much, or its type is unknown.
    """
    for array in column.chunks:
        while any(is_kind(array.type) for is_kind in LISTS):
            array = array.values
        kind, size = array.type, len(array)
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
            if any(is_kind(kind) for is_kind in TEXTS):
                lengths = pc.binary_length(array.dictionary).cast(pa.int64())
                size += pc.sum(lengths.take(array.indices)).as_py() or 0
        if not any(is_kind(kind) for is_kind in (*TEXTS, *NUMBERS)):
            raise ValueError(f"column {name!r} has the type {column.type}; send another one")
        if size > most:
            raise ValueError(f"column {name!r} takes more than {most} bytes when it is read")


def is_compressed(message: pa.ipc.Message) -> bool:
    """True if the buffers of a message are compressed: a small body may then take much memory.

    pyarrow does not report it; it is a field in the flatbuffer of a record batch (Message.fbs).
    """
    data = message.metadata

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, data, at)[0])

    def field(table: int, index: int) -> int:
        """The position of a field of a table; 0 without it."""
        layout = table - number("<i", table)
        at = 4 + 2 * index
        offset = number("<H", layout + at) if at < number("<H", layout) else 0
        return table + offset if offset else 0

    def follow(at: int) -> int:
        return at + number("<I", at)

    header = field(follow(0), 2)
    if message.type == "dictionary":
        return bool(field(follow(field(follow(header), 1)), 3))
    return message.type == "record batch" and bool(field(follow(header), 3))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def one_line(error: BaseException) -> str:
    """An error as one short line."""
    return f"{' '.join(str(error).split()):.300}"

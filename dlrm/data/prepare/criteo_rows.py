"""Lines of a raw log to columns, with reports on bad lines."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from dlrm.data.prepare.text_blocks import BAD_ROWS_KEPT, BadRow, BadRows, TextBlock
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE

MISSING = -1
"""Key of a missing value; the key of any other value is the value itself, 0 .. 2**32 - 1."""

COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)
FLOAT32_MAX = float(np.finfo(np.float32).max)

PIECE_BYTES = 1 << 18  # of a block with bad lines, looked at a line at a time

_NUMBER = re.compile(rb" *[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)? *")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
# Each field can match in only one way: in a bad line, all combinations of 39 would be tried.
_LINE = re.compile(
    rb"[01]"
    + rb"\t(?>%b)?+" % _NUMBER.pattern * len(CRITEO_DENSE)
    + rb"\t(?>%b)?+" % _HEX.pattern * len(CRITEO_CATEGORICAL)
)


def parse_block(block: TextBlock, transform: str = "log1p") -> tuple[pa.RecordBatch, BadRows]:
    """Turn the lines of a block into columns; skip and report bad lines.

    Args:
        block: lines of 40 fields: label, 13 numbers, 26 values of up to 8 hex digits. All fields
            but the label may be empty.
        transform: ``log1p`` for log(x + 1) or ``log3`` for log(x + 3), see :func:`dense`.

    Returns:
        The good rows, and a report on the bad ones. A categorical column is a dictionary array
        whose dictionary holds the ``int64`` keys: the value of the hex digits, or ``MISSING``.
    """
    try:
        if block.lines * len(COLUMNS) > len(block.data):  # a row has a label and 39 tabs at least
            raise ValueError("too short lines")  # of which pyarrow would make rows of nulls
        return _parse(block.data, block.lines, transform), BadRows()
    except ValueError:  # pyarrow's reader raises it too
        good, bad = _check(block)
        return _parse(b"\n".join(good), len(good), transform), bad


def dense(column: pa.ChunkedArray | pa.Array, transform: str) -> pa.Array:
    """Transform a column of numbers; a missing number counts as 0.

    ``log1p`` is log(max(x, 0) + 1), as in the reference; ``log3`` is log(max(x, -2) + 3), which
    distinguishes -2, -1 and 0; smaller numbers count as -2.

    Returns:
        float32, no nulls.

    Raises:
        ValueError: a number is infinite or not a number.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    x = column.fill_null(0).to_numpy()
    if not np.isfinite(x).all():
        raise ValueError("infinite or not a number")
    low, shift = (0.0, 1.0) if transform == "log1p" else (-2.0, 3.0)
    return pa.array(np.log(np.clip(x, low, FLOAT32_MAX) + shift).astype(np.float32))


def hex_keys(values: pa.Array) -> NDArray[np.int64]:
    """Keys of hex strings: their value, or ``MISSING`` for an empty string.

    Args:
        values: binary, each with up to 8 hex digits in lower or upper case.

    Raises:
        ValueError: a value is not hexadecimal or too long.
    """
    lengths = pc.binary_length(values).to_numpy()
    present = lengths > 0
    if not (lengths[present] == 8).all():
        values = pc.utf8_lpad(values.filter(pa.array(present)).cast(pa.string()), 8, "0")
        lengths = pc.binary_length(values).to_numpy()
        if (lengths > 8).any():
            raise ValueError("more than 8 hex digits")
    _, offsets, data = values.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[values.offset, values.offset + len(values)]]
    text = np.frombuffer(data or b"", np.uint8)[first:last].view(np.uint64)
    keys = np.full(len(present), MISSING, np.int64)
    keys[present] = _from_hex(text)
    return keys


def hex_strings(keys: NDArray[np.int64]) -> pa.Array:
    """Keys as strings of 8 lower-case hex digits; ``MISSING`` becomes an empty string."""
    assert len(keys) < 1 << 28  # 32-bit offsets; the largest column of Terabyte has 228 M values
    present = keys != MISSING
    data = keys[present].astype(">u4").tobytes().hex().encode()
    offsets = np.zeros(len(keys) + 1, np.int32)
    np.cumsum(np.where(present, 8, 0), out=offsets[1:])
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(data))


def _from_hex(text: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The value of eight ASCII digits per element, the first digit in the lowest byte.

    All bytes of an element are processed at once: digits are joined to pairs, fours and eights.
    """
    letter = text >> np.uint64(6) & _bytes(0x01)
    digit = (text & _bytes(0x0F)) + letter * np.uint64(9)
    above_9 = (digit + _bytes(6)) >> np.uint64(4) & _bytes(0x01)
    lower_case = digit + _bytes(0x30) + above_9 * np.uint64(39)
    if (lower_case != text | letter << np.uint64(5)).any() or (digit & _bytes(0xF0)).any():
        raise ValueError("not hex digits")
    pairs = (digit << np.uint64(4) | digit >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs << np.uint64(8) | pairs >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    return (fours << np.uint64(16) | fours >> np.uint64(32)) & np.uint64(0xFFFFFFFF)


def _bytes(value: int) -> np.uint64:
    """``value`` in each of the 8 bytes."""
    return np.uint64(value * 0x0101010101010101)


def _parse(data: bytes, lines: int, transform: str) -> pa.RecordBatch:
    raw = _read_csv(data)
    if raw.num_rows != lines:  # pyarrow's reader ends a row at a carriage return within a line
        raise ValueError(f"{raw.num_rows} rows in {lines} lines")
    columns = {"label": _label(raw["label"].combine_chunks())}
    columns |= {name: dense(raw[name], transform) for name in CRITEO_DENSE}
    columns |= {name: _keyed(raw[name].combine_chunks()) for name in CRITEO_CATEGORICAL}
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


def _keyed(column: pa.DictionaryArray) -> pa.DictionaryArray:
    keys = hex_keys(column.dictionary)
    narrow = pa.from_numpy_dtype(np.min_scalar_type(len(keys)))  # halves what is spilled
    return pa.DictionaryArray.from_arrays(column.indices.cast(narrow), pa.array(keys))


def _check(block: TextBlock) -> tuple[list[bytes], BadRows]:
    """Separate the good lines of a block from the bad ones, and report on these."""
    # pyarrow's reader skips a byte order mark too.
    data = block.data.removeprefix(codecs.BOM_UTF8)
    good, bad, first_line = [], BadRows(), block.first_line
    for piece in _pieces(data):
        starts, stops, columns = _lines(piece)
        incomplete = columns != len(COLUMNS)
        # Lines of another number of columns are short, up to 16 million of them in a block: those
        # that are not reported are counted without an object for each.
        reported, counted = np.split(np.flatnonzero(incomplete), [BAD_ROWS_KEPT])
        looked_at = np.union1d(np.flatnonzero(~incomplete), reported)
        for index in looked_at.tolist():
            line = piece[starts[index] : stops[index]].removesuffix(b"\r")
            if _LINE.fullmatch(line) and _all_finite(line.split(b"\t", 14)[1:14]):
                good.append(line)
                bad.good_lines.append(first_line - block.first_line + index)
            else:
                where, (kind, message) = first_line + index, _diagnose(line)
                bad.add(BadRow(file=str(block.path), line=where, kind=kind, message=message))
        for few in (True, False):
            if lines := int(np.count_nonzero((columns[counted] < len(COLUMNS)) == few)):
                bad.kinds[_wrong_columns(few)] += lines
        first_line += len(starts)
    return good, bad


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

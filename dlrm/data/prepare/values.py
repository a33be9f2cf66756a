"""Raw columns of any Arrow type to the few forms that a preparation works on.

These functions are the same for rows to train on and rows to score. They take what a file holds,
so that a number may be an integer, a decimal or a text, and raise :class:`BadValue` if it doesn't
fit. A missing number is NaN, a missing category is the text "".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..column_values import is_list
from .bad_rows import BadValue, shown
from .list_texts import split_numbers
from .number_texts import Marks, find_marks

NUMBER_MISSING = (
    "", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "-nan", "NULL", "null", "None", "none", "\\N",
    "?", "-", "--", ".", "<NA>", "NaT", "unknown", "Unknown",
)  # fmt: skip
"""Texts that stand for a missing number."""
ISO_TIMES = r"^\d{4}-\d\d-\d\d([ T]\d\d(:?\d\d(:?\d\d(\.\d+)?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?$"
"""All texts that pyarrow reads as times, and some that it doesn't."""
LONG = 40  # characters of a text that no advice repeats
SECONDS = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
MISSING_TIME = np.iinfo(np.int64).min
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAY = 86_400_000_000  # microseconds


def numbers(
    array: pa.Array, name: str, marks: Marks | None = None, missing: Sequence[str] = ()
) -> NDArray[np.float64]:
    """``[n]`` numbers; a missing one is NaN, and so are the texts ``missing`` besides those that
    always are. The ``marks`` say how numbers are written; None: plainly, or with an exponent.

    Raises:
        BadValue: a text is not a number, or a number is infinite.
    """
    array = decoded(array)
    kind = array.type
    if is_text(kind):
        array = _parsed_numbers(array, name, marks, missing)
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif pa.types.is_time(kind) or pa.types.is_duration(kind):  # seconds
        unit = pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")
        array = array.cast(unit, safe=False)
        array = pc.divide(array.cast(pa.int64()).cast(pa.float64()), 1e6)
    elif not is_number(kind) and kind != pa.null():
        raise BadValue(name, [], f"it holds {kind}, not numbers; make it another kind")
    found = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if len(rows := np.flatnonzero(np.isinf(found))):
        problem = f"{found[rows[0]]} is not a finite number; correct or remove it"
        raise BadValue(name, rows, problem)
    return found


def vectors(array: pa.Array, name: str, size: int) -> NDArray[np.float64]:
    """``[size, n]`` numbers of lists of ``size`` entries, which may be texts such as ``[0.5, 2]``;
    those of a missing list are NaN.

    Raises:
        BadValue: a list has another number of entries, or an entry is infinite.
    """
    found = np.full((size, len(array)), np.nan)
    if array.type == pa.null():
        return found
    if is_text(array.type):
        array = split_numbers(without_texts(array, NUMBER_MISSING))
    elif not is_list(array.type):
        raise BadValue(name, [], f"it holds {array.type}, not lists; make it another kind")
    sizes = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
    if len(rows := np.flatnonzero((sizes != size) & (sizes >= 0))):
        problem = f"the list has {sizes[rows[0]]} entries; it must have {size}: correct it"
        raise BadValue(name, rows, problem)
    try:
        entries = numbers(array.flatten(), name)  # without those of missing lists
    except BadValue as error:
        error.rows = np.flatnonzero(sizes >= 0)[error.rows // size]
        raise
    found[:, sizes >= 0] = entries.reshape(-1, size).T
    return found


def times(
    array: pa.Array,
    name: str,
    missing: Sequence[str],
    form: str | None,
    unit: str,
    zone: str | None = None,
) -> NDArray[np.int64]:
    """``[n]`` microseconds since 1970 by the clock of the place; ``MISSING_TIME`` if missing.

    The column holds timestamps, dates, texts in ISO 8601 or a ``form`` as in ``strptime``, or
    numbers of a ``unit``: s, ms, us or ns. The place of times with a time zone or an offset is
    ``zone``, by default that of their type, and UTC for texts.

    Raises:
        BadValue: a text is not a time of this form.
    """
    array = decoded(array)
    if form is not None and is_number(array.type):  # such as 14102123 for %y%m%d%H
        array = as_texts(array, name)

    kind = array.type
    if is_text(kind):
        array = _parsed_times(array, name, missing, form)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        seconds = numbers(array, name)
        if len(rows := np.flatnonzero(np.abs(seconds) / SECONDS[unit] > 2**40)):
            first = seconds[rows[0]]
            problem = f"{first:.0f} {unit} since 1970 is no time; set unit: s, ms, us or ns"
            raise BadValue(name, rows, problem)
        array = pa.array(seconds * (1_000_000 / SECONDS[unit]), from_pandas=True)
        array = array.cast(pa.int64(), safe=False).cast(pa.timestamp("us"))
    elif not (pa.types.is_timestamp(kind) or pa.types.is_date(kind) or kind == pa.null()):
        raise BadValue(name, [], f"it holds {kind}, not times; make it another kind")

    if pa.types.is_timestamp(array.type) and array.type.tz is not None:
        there = pa.timestamp("us", zone or array.type.tz)
        array = pc.local_timestamp(array.cast(there, safe=False))
    found = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    return found.fill_null(MISSING_TIME).to_numpy()


def time_part(moments: NDArray[np.int64], part: str) -> pa.Array:
    """One part of the times that :func:`times` returned.

    Returns:
        ``hour`` and ``weekday``: texts, as those of a category. ``age``: days since 1970, of which
        an age is made when the newest row is known; NaN if missing.
    """
    missing = moments == MISSING_TIME
    if part == "age":
        return pa.array(np.where(missing, np.nan, moments / DAY))
    if part == "hour":
        found, names = moments // (DAY // 24) % 24, [f"{hour:02}" for hour in range(24)]
    else:
        found, names = (moments // DAY + 3) % 7, list(WEEKDAYS)  # 1970 began on a Thursday
    found = np.where(missing, len(names), found).astype(np.int32)
    return pa.DictionaryArray.from_arrays(found, pa.array([*names, ""]))


def weights(array: pa.Array, name: str, marks: Marks | None = None) -> NDArray[np.float32]:
    """``[n]`` sample weights, 0 or more, none missing; see :func:`numbers`.

    Raises:
        BadValue: a weight is missing, negative, or beyond float32.
    """
    found = numbers(array, name, marks)
    with np.errstate(over="ignore"):
        narrow = found.astype(np.float32)
    good = (narrow >= 0) & np.isfinite(narrow)
    if len(rows := np.flatnonzero(~good)):
        value = "missing" if np.isnan(found[rows[0]]) else f"{found[rows[0]]:g}"
        problem = f"the weight is {value}; it must be a number of 0 or more: correct it"
        raise BadValue(name, rows, problem)
    return narrow


def decoded(array: pa.Array) -> pa.Array:
    """The column without a dictionary."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def encoded(array: pa.Array, name: str) -> pa.Array:
    """The column with a dictionary; rows must not hold several values.

    Raises:
        BadValue: a row holds several values.
    """
    if pa.types.is_nested(array.type):
        problem = f"it holds {array.type}, not single values"
        raise BadValue(name, [], f"{problem}; give one a row, or make it another kind")
    return array if pa.types.is_dictionary(array.type) else array.dictionary_encode()


def type_name(kind: pa.DataType) -> str:
    """The name of a type in messages, cut short, as a struct may have any number of parts."""
    name = {"null": "missing", "string": "text", "large_string": "text"}.get(str(kind), str(kind))
    return name if len(name) <= 60 else f"{name[:60]}..."


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def as_texts(values: pa.Array, name: str) -> pa.Array:
    """Distinct values as texts, which bytes must be in UTF-8.

    Raises:
        BadValue: bytes are not UTF-8, or values of this type are no texts.
    """
    kind = values.type
    if pa.types.is_floating(kind):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, kind), values)
        whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), 2.0**53))
        integers = pc.if_else(whole, values, 0).cast(pa.int64(), safe=False).cast(pa.string())
        return pc.if_else(whole, integers, values.cast(pa.string()))
    if pa.types.is_nested(kind) or kind == pa.duration("us"):
        raise BadValue(name, [], f"it holds {kind}, which is no category; make it another kind")
    try:
        return values.cast(pa.string() if kind != pa.large_string() else kind)
    except pa.ArrowException as error:
        wrong = failing(len(values), lambda start, stop: values[start:stop].cast(pa.string()))
        row = next(wrong, None)
        value = None if row is None else shown(values[row].as_py())
        problem = f"the value {value} can't be made a text ({error}); write it as UTF-8"
        raise BadValue(name, [], problem, f", or set columns: {{{name}: drop}}") from None


def without_texts(array: pa.Array, missing: Sequence[str]) -> pa.Array:
    """The column with null in place of texts that stand for a missing value."""
    if not is_text(array.type):
        return array
    absent = pc.is_in(array, pa.array(missing, array.type))
    return pc.if_else(absent, pa.scalar(None, array.type), array)


def _parsed_numbers(
    array: pa.Array, name: str, marks: Marks | None, missing: Sequence[str]
) -> pa.Array:
    array = without_texts(pc.utf8_trim_whitespace(array), [*NUMBER_MISSING, *missing])
    if marks is not None:
        fitting = pc.match_substring_regex(array, marks.pattern).fill_null(True)
        if len(rows := np.flatnonzero(~fitting.to_numpy(zero_copy_only=False))):
            raise BadValue(name, rows, *_no_number(array[rows[0]].as_py(), name, marks))
        array = marks.plain(array)

    def parse(part: pa.Array) -> pa.Array:
        return part.cast(pa.float64())

    try:
        return parse(array)
    except pa.ArrowInvalid:
        wrong = _all_failing(array, parse)
        problem = _no_number(array[wrong[0]].as_py(), name, marks)
        raise BadValue(name, wrong, *problem) from None


def _no_number(text: str, name: str, marks: Marks | None) -> tuple[str, str]:
    """What is wrong with a text, and the option to set if it is right."""
    written = f" with {marks}" if marks is not None else ""
    option = f", or set columns: {{{name}: category}}"
    if len(text) < LONG:  # quoted as in JSON, which is YAML as well
        option += f" or missing: [{json.dumps(text, ensure_ascii=False)}]"
    if found := find_marks(pa.array([text]), 1):
        known = found.marks
        told = f'decimal: "{known.decimal}"' if known else 'decimal: "," or thousands: ","'
        told += f', thousands: "{known.thousands}"' if known and known.thousands else ""
        told += f', symbol: "{known.symbol}"' if known and known.symbol else ""
        option = f", or if it is one, set columns: {{{name}: {{kind: number, {told}}}}}"
    return f"{shown(text)} is not a number{written}; correct it", option


def _parsed_times(array: pa.Array, name: str, missing: Sequence[str], form: str | None) -> pa.Array:
    array = without_texts(pc.utf8_trim_whitespace(array), [*NUMBER_MISSING, *missing])
    if form is not None:

        def parse(part: pa.Array) -> pa.Array:
            return pc.strptime(part, format=form, unit="us")
    else:
        # All with an offset from UTC, or none, as the first that may be a time.
        present = array.drop_null().cast(pa.string())
        if not pc.all(pc.match_substring_regex(present[:1], ISO_TIMES)).as_py():
            present = present.filter(pc.match_substring_regex(present, ISO_TIMES))
        first = present[:1]
        zoned = pc.match_substring_regex(first, r"\d(Z|[+-]\d\d(:?\d\d)?)$")
        zoned = pc.and_(zoned, pc.match_substring(first, ":"))
        kind = pa.timestamp("us", "UTC" if zoned.to_pylist() == [True] else None)

        def parse(part: pa.Array) -> pa.Array:
            return part.cast(kind)

    try:
        return parse(array)
    except pa.ArrowInvalid:
        rows = _all_failing(array, parse)
        rule = "of the format " + repr(form) if form else "ISO 8601, as all rows before are"
        problem = f"{shown(array[rows[0]].as_py())} is not a time {rule}; correct it"
        option = f", set format: (as in strptime), or set columns: {{{name}: category}}"
        raise BadValue(name, rows, problem, option) from None


def failing(count: int, convert: Callable[[int, int], object]) -> Iterator[int]:
    """The positions of values that cannot be converted, from the first one on. ``convert`` takes
    those from one position to another, and raises if any of them cannot be."""
    waiting = [(0, count)]
    while waiting:
        start, stop = waiting.pop()
        try:
            convert(start, stop)
        except pa.ArrowException:
            if stop - start == 1:
                yield start
            else:
                middle = (start + stop) // 2
                waiting += [(middle, stop), (start, middle)]


def _all_failing(array: pa.Array, convert: Callable[[pa.Array], object]) -> list[int]:
    """The positions of all values that ``convert`` refuses, of which many may be equal."""
    encoded = array.dictionary_encode()
    values = encoded.dictionary
    wrong = [*failing(len(values), lambda start, stop: convert(values[start:stop]))]
    return np.flatnonzero(np.isin(encoded.indices.fill_null(-1).to_numpy(), wrong)).tolist()

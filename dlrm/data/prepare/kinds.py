"""The kind of a column that the options say nothing of, found in its first values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .bad_rows import BadValue, shown
from .number_texts import PLAIN, Marks, find_marks
from .values import (
    DAY,
    MISSING_TIME,
    NUMBER_MISSING,
    SECONDS,
    is_list,
    is_text,
    times,
)

FEW_VALUES = 20
MANY_VALUES = 500  # of integers that repeat and so may be ids
LIKE_DATES = r"^\s*\d{1,4}([-/.])\d{1,2}[-/.]\d{1,4}(T|\b)"  # in any order
ENOUGH_ROWS = 100  # for conclusions from how values are distributed
LIST_SHARE = 0.2
NUMBER_SHARE = 0.95
HOUR_CODES = ("%H", "%I", "%T", "%R", "%r", "%X", "%c", "%s")  # of strptime
LIKELY_YEARS = (20, 80)  # since 1970, of numbers that may be times
ID_NAME = re.compile(r"(^|_|[a-z](?=I))(id|ids|uuid|guid|code|zip|hash)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class InferredKind:
    """The kind of a column as its first rows suggest it."""

    kind: str
    why: str
    marks: Marks | None = None
    """Of numbers that are not written plainly."""


class NoFeatureError(ValueError):
    """Nothing can be made of a column, and it is not left out silently.

    Args:
        reasons: for each such column, why.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        several = len(reasons) > 1
        what = "columns can't be features" if several else "column can't be a feature"
        told = ", ".join(f"{name!r} ({reason})" for name, reason in reasons.items())
        drop, keep = (", ".join(f"{name}: {kind}" for name in reasons) for kind in ("drop", "pass"))
        super().__init__(
            f"{what}: {told}; leave {'them' if several else 'it'} out with columns: {{{drop}}}, or "
            f"copy {'them' if several else 'it'} to the result with columns: {{{keep}}}"
        )


def find_kind(name: str, sample: pa.Array, untyped: bool) -> InferredKind:
    """The kind of a column that the options say nothing of.

    Args:
        name: its name.
        sample: its first values.
        untyped: whether the file holds nothing but texts.

    Raises:
        NoFeatureError: nothing can be made of it.
    """
    kind = sample.type

    # Types that say it.
    if is_list(kind):
        entries = kind.value_type
        if is_text(entries) or pa.types.is_integer(entries):
            return InferredKind(kind="list", why=f"lists of {entries}")
        raise NoFeatureError({name: f"{kind}, and a list holds texts or integers"})
    if pa.types.is_nested(kind):
        raise NoFeatureError({name: f"{kind}, whose fields are to be taken apart first"})
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return InferredKind(kind="time", why="times")
    if pa.types.is_boolean(kind):
        return InferredKind(kind="category", why="false or true")

    # Numbers and texts, which may be anything.
    if pa.types.is_integer(kind):
        return _find_integer(name, sample)
    if untyped and pa.types.is_floating(kind) and _beyond_integers(sample):
        return InferredKind(
            kind="category", why=f"integers of 16 digits and more{_repeats(sample)}"
        )
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_time(kind):
        return InferredKind(kind="number", why="numbers")
    if kind == pa.null():
        return InferredKind(kind="category", why="no value in the first rows")
    if is_text(kind):
        return _find_text(name, sample, untyped)
    if pa.types.is_binary(kind):
        return InferredKind(kind="category", why=f"texts, {_often(sample)}")
    raise NoFeatureError({name: str(kind)})


def _find_text(name: str, sample: pa.Array, untyped: bool) -> InferredKind:
    """Texts may be times, numbers or lists; otherwise they are categories."""
    if _moments(sample) is not None:
        return InferredKind(kind="time", why="texts that are times")
    if untyped and (found := find_written_number(name, sample)):
        return found
    if untyped and (odd := _odd_number(name, sample)):
        return InferredKind(kind="number", why=f"numbers, except {odd}")
    if separator := find_separator(sample):
        return InferredKind(kind="list", why=f"texts with {separator!r} between entries")

    why = f"texts, {_often(sample)}"
    if pc.all(pc.match_substring_regex(sample, LIKE_DATES)).as_py():
        why += "; if these are times, set kind: time and format:, as in strptime"
    return InferredKind(kind="category", why=why)


def _often(sample: pa.Array) -> str:
    """How many different values there are."""
    distinct = pc.count_distinct(sample).as_py()
    plural = "s" * (distinct != 1)
    return f"{distinct:,} value{plural} in {len(sample):,} rows{_repeats(sample)}"


def _find_integer(name: str, sample: pa.Array) -> InferredKind:
    """Integers are ids if the name says so or if there are few, and else numbers.

    Raises:
        NoFeatureError: they only count the rows.
    """
    present = sample.drop_null()
    distinct = pc.count_distinct(present).as_py()
    if len(present) >= ENOUGH_ROWS and present.null_count == 0 and len(present) == len(sample):
        steps = np.diff(present.to_numpy(zero_copy_only=False).astype(np.int64))
        if (steps == 1).all():
            first = f"{present[0]}, {present[1]}, {present[2]}"
            raise NoFeatureError(
                {name: f"it counts the rows: {first}, ..., which says nothing about new rows"}
            )
    if ID_NAME.search(name):
        return InferredKind(kind="category", why=f"integers, by its name{_repeats(sample)}")
    if len(sample) >= ENOUGH_ROWS and distinct <= FEW_VALUES:
        why = f"integers, only {distinct} value{'s' * (distinct != 1)}{_repeats(sample)}"
        return InferredKind(kind="category", why=why)
    hint = _like_times(present)
    if not hint and MANY_VALUES <= distinct <= len(present) / 2:
        hint = f", {distinct:,} values; if these are ids, set category"
    return InferredKind(kind="number", why=f"integers{hint}")


def _beyond_integers(sample: pa.Array) -> bool:
    """Whether numbers are ids that float64 can't tell apart, such as those of 64 bits."""
    values = sample.drop_null().to_numpy(zero_copy_only=False)
    return bool(len(values) and np.median(np.abs(values)) >= 2**53 and (values % 1 == 0).all())


def _repeats(sample: pa.Array) -> str:
    """A note if all values are the same, or if none repeats."""
    distinct = pc.count_distinct(sample).as_py()
    if len(sample) >= ENOUGH_ROWS and distinct in (1, len(sample)):
        # What is learned of one value says nothing of another row, or nothing at all.
        return ", carries no information: drop it or pass it through"
    return ""


def _like_times(present: pa.Array) -> str:
    """A note if integers may be times: of all units, one makes them of our days."""
    values = present.to_numpy(zero_copy_only=False).astype(np.float64)
    for unit, second in SECONDS.items():
        years = values / second / (365.25 * 86400)
        if (
            len(years) >= ENOUGH_ROWS
            and years.min() >= LIKELY_YEARS[0]
            and years.max() <= LIKELY_YEARS[1]
        ):
            given = "" if unit == "s" else f", unit: {unit}"
            return f"; if these are times, set {{kind: time{given}}}"
    return ""


def find_written_number(name: str, texts: pa.Array) -> InferredKind | None:
    """The kind of a column of numbers such as ``3,14`` or ``1.234,5``; None if it has others."""
    texts = _present(texts)
    many = pc.count_distinct(texts).as_py() > FEW_VALUES
    found = find_marks(texts, NUMBER_SHARE if many else 1)
    if found is None or ID_NAME.search(name):
        return None
    if found.marks is None:
        why = f"texts such as {shown(found.example)}; if these are numbers, set {{kind: number, "
        return InferredKind(kind="category", why=why + 'decimal: ","}, or thousands: ","')
    why = f"numbers such as {shown(found.example)}: {found.marks}"
    why += f", except {shown(found.odd)}" if found.odd is not None else ""
    return InferredKind(kind="number", why=why, marks=found.marks)


def _present(texts: pa.Array) -> pa.Array:
    """Those that are no missing numbers, without white space around them."""
    texts = pc.utf8_trim_whitespace(texts)
    absent = pc.is_in(texts, pa.array(NUMBER_MISSING, texts.type))
    return texts.filter(pc.invert(absent)).drop_null()


def _odd_number(name: str, texts: pa.Array) -> str | None:
    """The first value that is not a number, where nearly all are: it should be corrected."""
    texts = _present(texts)
    number = pc.match_substring_regex(texts, PLAIN)
    share = (pc.sum(number).as_py() or 0) / max(1, len(texts))
    many = pc.count_distinct(texts).as_py() > FEW_VALUES
    if ID_NAME.search(name) or not NUMBER_SHARE <= share < 1 or not many:
        return None
    return shown(texts[pc.index(number, False).as_py()].as_py())


def find_separator(texts: pa.Array) -> str | None:
    """The separator between the entries of lists that are written as text."""
    texts = texts.drop_null()
    if not len(texts):
        return None
    for separator in ("|", ";"):
        with_it = pc.sum(pc.match_substring(texts, separator)).as_py() or 0
        if with_it >= LIST_SHARE * len(texts):
            entries = pc.split_pattern(texts, separator).flatten()
            # Entries repeat; texts with a bar in them don't.
            if pc.count_distinct(entries).as_py() < 0.5 * len(entries):
                return separator
    return None


def _moments(sample: pa.Array) -> NDArray[np.int64] | None:
    """The values if all are timestamps, or texts that look like them."""
    sample = sample.drop_null()
    if len(sample) and (pa.types.is_timestamp(sample.type) or is_text(sample.type)):
        with suppress(BadValue):
            times(sample[:FEW_VALUES], "", ("",), None, "s")  # most texts are none at once
            moments = times(sample, "", ("",), None, "s")
            return moments if (moments != MISSING_TIME).any() else None
    return None


def whole_days(sample: pa.Array, form: str | None = None) -> bool:
    """Whether times have no hours: by their format, or all of the first ones."""
    if form is not None:
        return not any(code in form for code in HOUR_CODES)
    moments = _moments(sample)
    return moments is not None and bool((moments[moments != MISSING_TIME] % DAY == 0).all())

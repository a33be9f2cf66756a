"""The kind of a column that the options say nothing of, found in its first values."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..column_values import is_list
from .bad_rows import BadValue, shown
from .column_options import yaml_line
from .list_texts import find_separator, vector_size
from .number_texts import NUMBER_SHARE, PLAIN, Marks, find_marks, missing_hint
from .values import DAY, MISSING_TIME, NUMBER_MISSING, SECONDS, is_number, is_text, times, type_name

FEW_VALUES = 20
EVENLY = 0.05  # the distance from the uniform distribution below which integers look like ids
LIKE_DATES = r"^\s*\d{1,4}([-/.])\d{1,2}[-/.]\d{1,4}([^\d.]|$)"  # in any order
WITH_YEAR = r"^(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\w{1,9}[-/. ]\w{1,9}(, |[-/. ])\d{4})( |$)"
DATES = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d")
MONTHS = ("%d-%b-%Y", "%d %b %Y", "%b %d, %Y")  # by name, short or in full
CLOCKS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
CLOCK = r"^\d\d:\d\d(:\d\d)?$"
OF_THE_DAY = ("%H:%M", "%H:%M:%S")
ENOUGH_ROWS = 100  # for conclusions from how values are distributed
HOUR_CODES = ("%H", "%I", "%T", "%R", "%r", "%X", "%c", "%s")  # of strptime
SURE = 4.0  # standard deviations
MOST = 3.0  # a trend explains this much more than what is left
MANY_VALUES, DEGREE = 100, 5  # of so many values, a curve may rise and fall, and explains more
EXACT, LARGE = 2**53, "of 16 digits and more"  # a float does not hold every larger integer
DIGIT_DATES = (19_000_101, 20_991_231)
RISING = "rising from row to row, so buckets are ids as well: later values are in the last one"
LIKELY_YEARS = (20, 80)  # since 1970, of numbers that may be times
ID_NAME = re.compile(
    r"(?:^|[_. ]|(?-i:[a-z](?=[A-Z])))"
    r"(?:ids?|uuid|guid|code|zip|zipcode|postcode|hash|user|item|customer|product|movie|sku|isbn"
    r"|ad|campaign|advertiser|publisher|creative|site|app|seller|merchant|store|brand|session|song"
    r"|video|artist|author|hotel)"
    r"(?::token)?$",  # as RecBole writes it
    re.IGNORECASE,
)
TIME_NAME = re.compile(r"time|date|stamp|epoch|when|(?:^|_)(?:ts|at)$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class InferredKind:
    """The kind of a column as its first rows suggest it."""

    kind: str
    why: str
    marks: Marks | None = None
    """Of numbers that are not written plainly."""
    unit: str | None = None
    """Of times that are numbers."""
    format: str | None = None
    """Of times that are texts, but not ISO 8601."""
    size: int | None = None
    """Of vectors."""
    bucketed: bool = False
    """Whether the buckets of a number are ids, too."""


class NoFeatureError(ValueError):
    """Nothing can be made of a column; the message says why."""


def find_kind(
    name: str,
    sample: pa.Array,
    untyped: bool,
    labels: NDArray[np.uint8] | None = None,
    times: float = 1.0,
    in_order: bool = False,
) -> InferredKind:
    """The kind of a column that the options say nothing of, from its first values.

    Args:
        untyped: whether the file holds nothing but texts.
        labels: ``[n]`` 0 or 1, those of the same rows, if they are known.
        times: how many times as many rows the table has, about.
        in_order: whether rows for validation and test come after all others.

    Raises:
        NoFeatureError: nothing can be made of it.
    """
    kind = sample.type

    # Types that say it.
    if is_list(kind):
        entries = kind.value_type
        if is_text(entries) or pa.types.is_integer(entries):
            return InferredKind(kind="list", why=f"lists of {entries}")
        sizes = pc.unique(pc.list_value_length(sample.drop_null())).to_pylist()
        if is_number(entries) and len(sizes) == 1 and sizes[0]:
            return InferredKind(kind="vector", why=f"lists of {sizes[0]} numbers", size=sizes[0])
        rule = "a list holds texts, integers, or always as many numbers"
        raise NoFeatureError(f"{type_name(kind)}, and {rule}")
    if pa.types.is_nested(kind):
        raise NoFeatureError(f"{type_name(kind)}, to be taken apart, as pandas.json_normalize does")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return InferredKind(kind="time", why="times")
    if pa.types.is_boolean(kind):
        return InferredKind(kind="category", why="false or true")

    # Numbers and texts, which may be anything.
    if pa.types.is_integer(kind):
        return _find_integer(name, "integers", sample, labels, in_order)
    if pa.types.is_floating(kind):
        # Integers with gaps are stored as floats.
        values = sample.to_numpy(zero_copy_only=False)
        there = values[~np.isnan(values)]
        if len(there) and (np.floor(there) == there).all():
            if np.abs(there).max() < EXACT:
                whole = pa.array(values, from_pandas=True).cast(pa.int64())
                return _find_integer(name, "whole numbers", whole, labels, in_order)
            if untyped and np.median(np.abs(there)) >= EXACT:
                return InferredKind(kind="category", why=f"integers {LARGE}")
        if in_order and _rises(there):
            return InferredKind(kind="number", why=f"numbers, {RISING}", bucketed=True)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return InferredKind(kind="number", why="numbers")
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return InferredKind(kind="number", why="seconds")
    if kind == pa.null():
        return InferredKind(kind="category", why="no value in the first rows")
    if is_text(kind):
        return _find_text(name, sample, untyped, times)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        with suppress(pa.ArrowInvalid):
            if not untyped:  # of a CSV, the row is named later
                sample.cast(pa.string())
            return InferredKind(kind="category", why=f"texts, {_often(sample)}")
        raise NoFeatureError(f"{kind}, and not UTF-8")
    raise NoFeatureError(str(kind))


def _find_text(name: str, sample: pa.Array, untyped: bool, times: float) -> InferredKind:
    """Texts may be times, numbers or lists; otherwise they are categories."""
    if _moments(sample) is not None:
        return InferredKind(kind="time", why="texts that are times")
    if form := find_time_format(sample):
        why = f"texts that are times, {form}{_alternative(name, 'category')}"
        return InferredKind(kind="time", why=why, format=form)
    written = find_written_number(name, sample)
    if untyped and written:
        return written
    if not written and (size := vector_size(sample)):
        why = f"texts of {size} numbers{_alternative(name, 'list')}"
        return InferredKind(kind="vector", why=why, size=size)

    separator, sure = find_separator(sample, times)
    if separator and sure and not (separator == " " and ID_NAME.search(name)):
        where = "in brackets" if len(separator) > 1 else f"with {separator!r} between entries"
        why = f"texts {where}{_alternative(name, 'category')}"
        return InferredKind(kind="list", why=why)

    # A category, with what else it may be.
    why = f"texts, {_often(sample)}"
    if written and written.marks:
        marks = {mark: text for mark, text in asdict(written.marks).items() if text}
        why += _alternative(name, {"kind": "number", **marks})
    elif separator:
        why += _alternative(name, {"kind": "list", "separator": separator})
    else:
        why += missing_hint(sample)
    if pc.all(pc.match_substring_regex(sample, LIKE_DATES)).as_py():
        why += "; if these are times, set kind: time and format:, as in strptime"
    return InferredKind(kind="category", why=why)


def find_time_format(sample: pa.Array) -> str | None:
    """The format of times that are not written as ISO 8601, if a single one fits all of them: with
    days up to 12 alone, a date such as 03/04/2024 may be read in two ways.
    """
    texts = pc.utf8_trim_whitespace(sample.drop_null())
    if not len(texts):
        return None
    forms = [*OF_THE_DAY]
    if pc.all(pc.match_substring_regex(texts, WITH_YEAR)).as_py():
        forms = [date + clock for date in DATES + MONTHS for clock in CLOCKS]
    elif not pc.all(pc.match_substring_regex(texts, CLOCK)).as_py():
        return None
    for some in (texts[:ENOUGH_ROWS], texts):  # the first ones rule out most
        parsed = (pc.strptime(some, format=f, unit="s", error_is_null=True) for f in forms)
        forms = [form for form, found in zip(forms, parsed, strict=True) if not found.null_count]
    return forms[0] if len(forms) == 1 else None


def _often(sample: pa.Array) -> str:
    """How many different values there are."""
    distinct = pc.count_distinct(sample).as_py()
    plural = "s" * (distinct != 1)
    return f"{distinct:,} value{plural} in {len(sample):,} rows{_repeats(sample)}"


def _find_integer(
    name: str, what: str, sample: pa.Array, labels: NDArray[np.uint8] | None, in_order: bool
) -> InferredKind:
    """Integers are ids or numbers, by their name, how many there are, and the labels; if they only
    count the rows, they are left out."""
    present = sample.drop_null().to_numpy(zero_copy_only=False)
    distinct = np.unique(present)
    steps = np.diff(present.astype(np.int64))
    if len(present) == len(sample) >= ENOUGH_ROWS and (steps == 1).all():
        first = ", ".join(map(str, present[:3]))
        why = f"it counts the rows: {first}, ..., which says nothing about new rows"
        return InferredKind(kind="drop", why=why)
    if ID_NAME.search(name):
        note = _repeats(sample) or _alternative(name, "number")
        return InferredKind(kind="category", why=f"{what}, by its name{note}")

    # Dates, few values, which are ids, and values that hardly repeat, which are numbers.
    if form := find_digit_dates(present):
        why = f"{what} that are dates, {form}{_alternative(name, 'category')}"
        return InferredKind(kind="time", why=why, format=form)
    count = f"{what}, {len(distinct):,} value{'s' * (len(distinct) != 1)}"
    if len(sample) >= ENOUGH_ROWS and len(distinct) <= FEW_VALUES:
        note = _repeats(sample)
        if not note and len(distinct) > 2:
            note = _alternative(name, "number")
        return InferredKind(kind="category", why=count + note)
    if unit := find_time_unit(present):
        if TIME_NAME.search(name):
            why = f"{what} that are {unit} since 1970{_alternative(name, 'number')}"
            return InferredKind(kind="time", why=why, unit=unit)
        given = "time" if unit == "s" else {"kind": "time", "unit": unit}
        return InferredKind(kind="number", why=what + _alternative(name, given))
    if len(present) and np.median(np.abs(present.astype(np.float64))) >= EXACT:
        return InferredKind(kind="category", why=f"{what} {LARGE}{_repeats(sample)}")
    if in_order and _rises(present):
        why = f"{count}, {RISING}{_alternative(name, 'category')}"
        return InferredKind(kind="number", why=why, bucketed=True)
    if len(sample) < ENOUGH_ROWS or len(distinct) > len(present) / 2:
        why = "in few rows" if len(sample) < ENOUGH_ROWS else "that hardly repeat"
        return InferredKind(kind="number", why=f"{what} {why}{_alternative(name, 'category')}")

    # Between these, the labels tell, and if they don't, how the values are spread.
    follows, reason = None, "evenly spread"
    if labels is not None:
        there = sample.is_valid().to_numpy(zero_copy_only=False)
        follows = follows_order(present, labels[there])
    if follows is not None:
        reason = f"the label rate {'follows' if follows else 'does not follow'} their order"
    elif not _evenly_spread(distinct):
        follows, reason = True, "unevenly spread"
    kind, other = ("number", "category") if follows else ("category", "number")
    return InferredKind(kind=kind, why=f"{count}, {reason}{_alternative(name, other)}")


def find_split_time(name: str, sample: pa.Array, untyped: bool) -> InferredKind:
    """The kind of a column that splits the rows by time: later values are beyond all earlier ones.

    Only the parts of a time that repeat, and its age, which is 0 for later rows, become features.
    """
    plain = pa.types.is_integer(sample.type) or pa.types.is_floating(sample.type)
    if plain and (unit := find_time_unit(sample.drop_null().to_numpy(zero_copy_only=False))):
        why = f"{unit} since 1970; later rows have age 0"
        return InferredKind(kind="time", why=why, unit=unit)
    inferred = find_kind(name, sample, untyped)
    if inferred.kind == "time":
        return replace(inferred, why=f"{inferred.why}; later rows have age 0")
    if inferred.kind not in ("number", "category", "drop") or is_text(sample.type):
        return inferred
    why = "no feature: it splits the rows, so later values are out of range"
    return InferredKind(kind="drop", why=why)


def _alternative(name: str, options: Any) -> str:
    """The end of a reason that names what else a column may be."""
    kind = options if isinstance(options, str) else options["kind"]
    what = {"category": "ids", "time": "times", "number": "numbers", "list": "lists"}[kind]
    return f"; if these are {what}: {yaml_line(name, options)}"


def _rises(values: NDArray[np.number]) -> bool:
    """Whether values never fall from row to row, as the days of a log: later ones are beyond them,
    where a network knows nothing of a trend, but of the last bucket."""
    never_fall = bool((values[:-1] <= values[1:]).all())
    return never_fall and len(values) >= ENOUGH_ROWS and bool(values[0] < values[-1])


def _evenly_spread(distinct: NDArray[np.integer]) -> bool:
    """Whether rising values lie between the first and the last as ids do, and not as counts."""
    distinct = distinct.astype(np.float64)  # the range of integers may be beyond their type
    places = (distinct - distinct[0]) / (distinct[-1] - distinct[0])
    return bool(np.abs(places - np.linspace(0, 1, len(distinct))).max() < EVENLY)


def follows_order(values: NDArray[np.integer], labels: NDArray[np.uint8]) -> bool | None:
    """Whether the share of positive labels rises or falls with the values; None if nothing can be
    told, as the shares differ no more than by chance.

    The chi-square of the shares is divided into what a line over the ranks of the values explains,
    and the rest (the Cochran-Armitage test for trend). More than :data:`MANY_VALUES` may follow a
    curve: a film's rating falls and rises with its length, and differs from film to film.

    Args:
        values: ``[n]``, of which many are equal.
        labels: ``[n]`` 0 or 1.
    """
    mean = labels.mean()
    variance = mean * (1 - mean)
    if variance == 0:
        return None
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    surplus = np.bincount(position, labels) - counts * mean
    total = np.sum(surplus**2 / counts) / variance

    # A polynomial of the ranks, orthonormal under the counts.
    degree, most = (DEGREE, 1.0) if len(counts) > MANY_VALUES else (1, MOST)
    ranks = (2 * np.cumsum(counts) - counts) / len(values) - 1
    root = np.sqrt(counts)
    basis, _ = np.linalg.qr(root[:, None] * np.vander(ranks, degree + 1, increasing=True))
    trend = np.sum((basis[:, 1:].T @ (surplus / root)) ** 2) / variance
    rest, freedom = total - trend, len(counts) - 1 - degree
    if trend > SURE**2 + degree - 1 and trend >= most * (rest - freedom):
        return True
    spread = np.sqrt(np.sum(2 + (1 / variance - 6) / counts))
    return False if rest > freedom + SURE * spread else None


def _repeats(sample: pa.Array) -> str:
    """A note if all values are the same, or if none repeats."""
    distinct = pc.count_distinct(sample).as_py()
    if len(sample) >= ENOUGH_ROWS and distinct in (1, len(sample)):
        # What is learned of one value says nothing of another row, or nothing at all.
        return ", carries no information: drop it or pass it through"
    return ""


def find_time_unit(values: NDArray[np.integer]) -> str | None:
    """The unit since 1970 that makes integers times of our days, if there is one."""
    for unit, second in SECONDS.items():
        years = values / second / (365.25 * 86400)
        low, high = LIKELY_YEARS
        if len(years) >= ENOUGH_ROWS and years.min() >= low and years.max() <= high:
            return unit
    return None


def find_digit_dates(values: NDArray[np.integer]) -> str | None:
    """The format of integers such as 20241231, if all are days of our time."""
    form, (low, high) = "%Y%m%d", DIGIT_DATES
    if len(values) < ENOUGH_ROWS or values.min() < low or values.max() > high:
        return None
    days = pa.array(np.unique(values)).cast(pa.string())
    return None if pc.strptime(days, form, unit="s", error_is_null=True).null_count else form


def find_written_number(name: str, texts: pa.Array) -> InferredKind | None:
    """The kind of a column of numbers such as ``3,14`` or ``1.234,5``, or of which a few are odd;
    None if most are others, or all are written plainly."""
    texts = pc.utf8_trim_whitespace(texts)
    absent = pc.is_in(texts, pa.array(NUMBER_MISSING, texts.type))
    texts = texts.filter(pc.invert(absent)).drop_null()
    if ID_NAME.search(name) or not len(texts):
        return None
    many = pc.count_distinct(texts).as_py() > FEW_VALUES
    found = find_marks(texts, NUMBER_SHARE if many else 1)

    # Plain ones, except for a few that should be corrected.
    if found is None:
        plain = pc.match_substring_regex(texts, PLAIN)
        if not many or not NUMBER_SHARE <= pc.mean(plain).as_py() < 1:
            return None
        odd = texts[pc.index(plain, False).as_py()].as_py()
        return InferredKind(kind="number", why=f"numbers, except {shown(odd)}")

    if found.marks is None:
        either = _alternative(name, {"kind": "number", "decimal": ","})
        why = f"texts such as {shown(found.example)}{either}, or with thousands in place of decimal"
        return InferredKind(kind="category", why=why)
    why = f"numbers such as {shown(found.example)}: {found.marks}"
    why += f", except {shown(found.odd)}" if found.odd is not None else ""
    return InferredKind(kind="number", why=why, marks=found.marks)


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

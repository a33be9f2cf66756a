"""Options of a table's preparation: dataclasses that a short YAML file fills in."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dlrm.data.prepare.number_texts import Marks
from dlrm.utils.documents import read_yaml
from dlrm.utils.messages import did_you_mean

Kind = Literal["number", "category", "list", "time", "label", "weight", "split", "pass", "drop"]
Transform = Literal["auto", "none", "log", "log3", "standard", "robust", "quantile"]
TimePart = Literal["hour", "weekday", "age"]
Section = TypeVar("Section")

ALL_OTHERS = "*"
SHARES = {"train": "0.8", "val": "0.1", "test": "0.1"}


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """What one column is, and how its values become features. None: the default, or as found."""

    kind: Kind | None = None
    """``number``: a dense feature. ``category``: a categorical one. ``list``: a multi-hot one.
    ``time``: several features. ``label``, ``weight``, ``split``: the column that says it.
    ``pass``: written to the result as it is. ``drop``: left out."""
    transform: Transform | None = None
    """Of a number; see :mod:`dlrm.data.prepare.numbers`."""
    buckets: int = 32
    """Number of buckets of the transform ``quantile``."""
    min_count: int | None = None
    """Rarer values of a category or list share the id of unseen values."""
    cap: int | None = None
    """At most this many ids, that of unseen values included: the most frequent values."""
    hash: int | None = None
    """Hash the values to this many buckets before they are counted."""
    separator: str | None = None
    """Between the values of a list that is written as text."""
    parts: tuple[TimePart, ...] | None = None
    """The features of a time."""
    format: str | None = None
    """Of a time that is text but not ISO 8601, as in ``strptime``: ``"%d/%m/%Y %H:%M"``."""
    unit: Literal["s", "ms", "us"] = "s"
    """Of a time that is a number: units since 1970."""
    decimal: Literal[".", ","] | None = None
    """Of a number that is text: between the whole number and its fraction."""
    thousands: Literal[",", ".", " ", "'"] | None = None
    """Of a number that is text: between groups of three digits."""

    def __post_init__(self) -> None:
        for name, low in {"buckets": 2, "min_count": 1, "cap": 1, "hash": 1}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
        if self.separator == "":
            raise ValueError("separator is empty; give the text between two values")
        if self.parts is not None and not self.parts:
            raise ValueError("parts is empty; name some, or drop the column with kind: drop")
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError(f"decimal and thousands are both {self.decimal!r}; name one of them")

    @property
    def marks(self) -> Marks | None:
        """How numbers are written; None: plainly."""
        if self.decimal is None and self.thousands is None:
            return None
        other = "," if self.thousands == "." else "."
        return Marks(decimal=self.decimal or other, thousands=self.thousands)


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Which rows are for training, validation and test.

    The shares are exact: decimals or fractions such as 1/7.
    """

    by: Literal["rows", "random", "time", "column"] = "rows"
    """``rows``: train, val and test follow one another. ``random``: by the number of the row,
    scrambled. ``time``: by the values of ``column``, earlier ones for training. ``column``: its
    values are train, val or test."""
    column: str | None = None
    train: str = SHARES["train"]
    val: str = SHARES["val"]
    test: str = SHARES["test"]
    val_from: str | None = None
    """For ``time``: the first value that is not for training, instead of the shares."""
    test_from: str | None = None
    """For ``time``: the first value for test."""

    def __post_init__(self) -> None:
        self.shares()
        if self.by in ("time", "column") and self.column is None:
            raise ValueError(f"split: by is {self.by}, so it needs a column; add column: NAME")
        if self.by in ("rows", "random") and self.column is not None:
            raise ValueError(
                f"split: column is {self.column!r}, but by is {self.by}; set by: time or by: column"
            )
        if (self.val_from is None) != (self.test_from is None):
            raise ValueError("split: val_from and test_from go together; give both or neither")
        if self.val_from is not None and self.by != "time":
            raise ValueError(f"split: by is {self.by}; val_from and test_from need by: time")

    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """The shares of train, val and test.

        Raises:
            ValueError: they are not numbers that add up to 1.
        """
        given = self.train, self.val, self.test
        try:
            train, val, test = (Fraction(share) for share in given)
        except (ValueError, ZeroDivisionError):
            train = val = test = Fraction(-1)
        if min(train, val, test) < 0 or train + val + test != 1:
            raise ValueError(
                f"split: the shares of train, val and test are {', '.join(given)}; they must be "
                "numbers that add up to 1, such as 0.8, 0.1 and 0.1"
            )
        return train, val, test


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Everything that the result depends on but the rows."""

    label: str | None = None
    """The column to predict: 0 and 1, or false and true. Default: the column called ``label``."""
    positive: tuple[str, ...] | None = None
    """The values of the label that count as 1, if they are others."""
    negative: tuple[str, ...] | None = None
    """The values that count as 0, with ``positive``. Default: the one other value of the first
    rows. ``"*"``: all others."""
    weight: str | None = None
    """A column of sample weights: numbers of 0 or more."""
    split: SplitOptions = field(default_factory=SplitOptions)
    columns: Mapping[str, ColumnOptions] = field(default_factory=dict)
    """By name; for the kind alone, ``NAME: KIND`` is enough."""
    transform: Transform = "auto"
    """Of all numbers that don't say otherwise."""
    min_count: int = 1
    """Of all categories and lists that don't say otherwise."""
    cap: int | None = None
    hash: int | None = None
    missing: tuple[str, ...] = ("",)
    """Texts that stand for a missing value in a category, list or time."""
    names: tuple[str, ...] | None = None
    """Names of the columns of a CSV without a header."""
    delimiter: str | None = None
    """Between the fields of a CSV. Default: the one that its first line has most of."""
    quotes: bool = True
    """Whether fields of a CSV may be quoted with ``"``. If not, a quote is an ordinary letter."""

    def __post_init__(self) -> None:
        for name in ("min_count", "cap", "hash"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.negative is not None and self.positive is None:
            raise ValueError("negative needs positive, the values of the label that count as 1")
        if both := sorted(set(self.positive or ()) & set(self.negative or ())):
            raise ValueError(f"{both[0]!r} is in positive and in negative; list it in one of them")
        if self.delimiter is not None and len(self.delimiter.encode()) != 1:
            raise ValueError(f"delimiter is {self.delimiter!r}; it must be one ASCII character")


def read_options(path: Path) -> dict[str, Any]:
    """The content of an options file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not YAML, beyond its limits, or not a mapping.
    """
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold options as name: value")
    return content


def build_options(content: Mapping[str, Any], where: str = "") -> TableOptions:
    """Options from nested mappings, as YAML or JSON has them.

    Args:
        content: names and values.
        where: the file, for errors.

    Raises:
        ValueError: a name is unknown, or a value has another type or range.
    """
    content = dict(content)
    columns = content.get("columns") or {}
    if not isinstance(columns, Mapping):
        raise ValueError(f"{where}columns is {columns!r}; it must hold columns as NAME: KIND")
    content["columns"] = {
        str(name): _build(
            ColumnOptions,
            value if isinstance(value, Mapping) else {"kind": value},
            f"{where}columns: {name}: ",
        )
        for name, value in columns.items()
    }
    if "split" in content:
        if not isinstance(content["split"], Mapping):
            raise ValueError(
                f"{where}split is {content['split']!r}; it must hold options such as by: random"
            )
        content["split"] = _build(SplitOptions, content["split"], f"{where}split: ")
    return _build(TableOptions, content, where)


def _build(cls: type[Section], content: Mapping[str, Any], where: str) -> Section:
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for name in content:
        if name not in names:
            raise ValueError(f"{where}unknown option {name!r}{did_you_mean(str(name), names)}")
    values = {name: _typed(hints[name], value, where + name) for name, value in content.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def _typed(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type of the hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _typed(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_typed(arguments[0], item, where) for item in items)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r}{did_you_mean(str(value), arguments)}")
        return value
    if hint is str:
        if value is None or isinstance(value, bool | list | dict):
            raise ValueError(f"{where} is {value!r}; it must be a text: put it in quotes")
        return str(value)  # a number or a date
    if hint in (int, bool) and type(value) is not hint:
        wanted = "a whole number" if hint is int else "true or false"
        raise ValueError(f"{where} is {value!r}; it must be {wanted}")
    return value

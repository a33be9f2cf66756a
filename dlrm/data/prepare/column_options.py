"""Options of a table's preparation: dataclasses that a short YAML file fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, MinLen
from pydantic import BeforeValidator

from ...utils.documents import read_yaml
from ...utils.validation import Closed, Flag, Text, Texts, Whole, as_list
from .number_texts import Marks

Kind = Literal[
    "number", "vector", "category", "list", "time", "label", "weight", "split", "pass", "drop"
]
Transform = Literal["auto", "none", "log", "log3", "standard", "robust", "quantile"]
TimePart = Literal["hour", "weekday", "age"]
Positive = Annotated[Whole, Ge(1)]

ALL_OTHERS = "*"
DOUBLE = "::"
"""The delimiter of MovieLens, the only one of two characters; such fields are never quoted."""
SHARES = {"train": "0.8", "val": "0.1", "test": "0.1"}


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(Closed):
    """The kind of a column, and how its values become features. None: inferred, or the default."""

    kind: Kind | None = None
    """``number``: a dense feature. ``vector``: ``size`` of them. ``category``: a categorical one.
    ``list``: a multi-hot one. ``time``: several features. ``label``, ``weight``, ``split``: the
    column that says it. ``pass``: written to the result as it is. ``drop``: left out."""
    transform: Transform | None = None
    """Of a number or a vector; see :mod:`dlrm.data.prepare.numbers`."""
    size: Annotated[Whole, Ge(1)] | None = None
    """Of a vector: how many numbers each row has."""
    buckets: Annotated[Whole, Ge(2)] = 32
    """Number of buckets of the transform ``quantile``."""
    bucketed: bool = False
    """Of a number, or of a vector's: the buckets that ``quantile`` would make are ids, too."""
    min_count: Positive | None = None
    """Rarer values of a category or list share the id of unseen values."""
    cap: Positive | None = None
    """At most this many ids, that of unseen values included: the most frequent values."""
    hash: Positive | None = None
    """Hash the values to this many buckets before they are counted."""
    vocabulary: Text | None = None
    """Of a category or list: another such column, whose values stand for the same things. Both have
    one vocabulary, counted over both, and one embedding table."""
    separator: Annotated[Text, MinLen(1)] | None = None
    """Between the values of a list that is written as text; ``[,]``: in brackets as well, as Python
    and JSON write lists, perhaps with quotes."""
    parts: Annotated[tuple[TimePart, ...], MinLen(1), BeforeValidator(as_list)] | None = None
    """The features of a time."""
    format: Text | None = None
    """Of a time that is text but not ISO 8601, as in ``strptime``: ``"%d/%m/%Y %H:%M"``."""
    unit: Literal["s", "ms", "us", "ns"] = "s"
    """Of a time that is a number: units since 1970."""
    decimal: Literal[".", ","] | None = None
    """Of a number that is text: between the whole number and its fraction."""
    thousands: Literal[",", ".", " ", "'"] | None = None
    """Of a number that is text: between groups of three digits."""
    symbol: Annotated[Text, MinLen(1)] | None = None
    """Of a number that is text: what may stand before or after it, such as ``$`` or ``%``."""

    def __post_init__(self) -> None:
        if self.decimal is not None and self.decimal == self.thousands:
            raise ValueError(f"decimal and thousands are both {self.decimal!r}; name one of them")
        if self.kind == "vector" and self.transform == "quantile":
            raise ValueError("transform is quantile, which makes ids; a vector has numbers only")

    @property
    def marks(self) -> Marks | None:
        """How numbers are written; None: plainly."""
        if self.decimal is None and self.thousands is None and self.symbol is None:
            return None
        other = "," if self.thousands == "." else "."
        decimal = self.decimal or other
        return Marks(decimal=decimal, thousands=self.thousands, symbol=self.symbol)


def _as_column(value: Any) -> Any:
    """A kind alone as options."""
    return value if isinstance(value, Mapping | ColumnOptions) else {"kind": value}


ColumnOrKind = Annotated[ColumnOptions, BeforeValidator(_as_column)]


@dataclass(frozen=True, kw_only=True)
class SplitOptions(Closed):
    """Which rows are for training, validation and test.

    The shares are exact: decimals or fractions such as 1/7.
    """

    by: Literal["rows", "days", "random", "time", "column"] = "rows"
    """``rows``: train, val and test follow one another. ``days``: by the protocol of Criteo's logs,
    see :func:`dlrm.data.prepare.splitting.split_by_days`. ``random``: by the number of the row,
    scrambled. ``time``: by the values of ``column``, earlier ones for training. ``column``: its
    values are train, val or test."""
    column: Text | None = None
    train: Text = SHARES["train"]
    val: Text = SHARES["val"]
    test: Text = SHARES["test"]
    val_from: Text | None = None
    """For ``time``: the first value that is not for training, instead of the shares."""
    test_from: Text | None = None
    """For ``time``: the first value for test."""

    def __post_init__(self) -> None:
        self.shares()
        if self.by in ("time", "column") and self.column is None:
            raise ValueError(
                f"by is {self.by}, so it needs a column; "
                f"add column: NAME, as in --split-by {self.by}:NAME"
            )
        if self.by not in ("time", "column") and self.column is not None:
            raise ValueError(
                f"column is {self.column!r}, but by is {self.by}; set by: time or by: column"
            )
        if (self.val_from is None) != (self.test_from is None):
            raise ValueError("val_from and test_from go together; give both or neither")
        if self.val_from is not None and self.by != "time":
            raise ValueError(f"by is {self.by}; val_from and test_from need by: time")

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
                f"the shares of train, val and test are {', '.join(given)}; they must be "
                "numbers that add up to 1, such as 0.8, 0.1 and 0.1"
            )
        return train, val, test


@dataclass(frozen=True, kw_only=True)
class TableOptions(Closed):
    """Everything that the result depends on but the rows."""

    label: Text | None = None
    """The column to predict: 0 and 1, or false and true. Default: the column called ``label``.
    Or a comparison with a column, such as ``rating >= 4`` or ``status == paid``."""
    positive: Texts | None = None
    """The values of the label that count as 1, if they are others."""
    negative: Texts | None = None
    """The values that count as 0, with ``positive``. Default: the one other value of the first
    rows. ``"*"``: all others."""
    weight: Text | None = None
    """A column of sample weights: numbers of 0 or more."""
    split: SplitOptions = field(default_factory=SplitOptions)
    columns: Annotated[
        Mapping[Text, ColumnOrKind], BeforeValidator(lambda named: {} if named is None else named)
    ] = field(default_factory=dict)
    """By name; for the kind alone, ``NAME: KIND`` is enough."""
    transform: Transform = "auto"
    """Of all numbers that don't say otherwise."""
    min_count: Positive = 1
    """Of all categories and lists that don't say otherwise."""
    cap: Positive | None = None
    hash: Positive | None = None
    ids: Literal["vocabulary", "hash"] = "vocabulary"
    """Of categories and lists: positions in a vocabulary that is learned from the rows; or hashes
    of 64 bits, which need none and have no rates, for ``--emb dynamic``."""
    rates: Flag = True
    """Whether each category and part of a time also gives two numbers: how often its value
    occurred, and the share of positives among these rows; see :mod:`dlrm.data.prepare.rates`."""
    missing: Texts = ("",)
    """Texts that stand for a missing value, in numbers besides those that always do, such as NA."""
    names: Texts | None = None
    """Names of the columns of a CSV without a header."""
    delimiter: Text | None = None
    """Between the fields of a CSV. Default: the one that its first line has most of."""
    quotes: Flag = True
    """Whether fields of a CSV may be quoted with ``"``. If not, a quote is an ordinary letter."""

    def __post_init__(self) -> None:
        limits = {"min_count": self.min_count > 1, "cap": self.cap, "hash": self.hash}
        if self.ids == "hash" and (given := [name for name, value in limits.items() if value]):
            raise ValueError(f"ids are hashes, so there is no vocabulary with {given[0]}; drop it")
        if self.negative is not None and self.positive is None:
            raise ValueError("negative needs positive, the values of the label that count as 1")
        if both := sorted(set(self.positive or ()) & set(self.negative or ())):
            raise ValueError(f"{both[0]!r} is in positive and in negative; list it in one of them")
        if self.delimiter not in (None, DOUBLE) and len((self.delimiter or "").encode()) != 1:
            raise ValueError(
                f"delimiter is {self.delimiter!r}; it must be one ASCII character, or {DOUBLE}"
            )


def yaml_line(name: str, options: Any) -> str:
    """The line of YAML that gives a column a kind or other options, for messages."""

    def dumped(content: Any, **style: Any) -> str:
        style |= {"allow_unicode": True, "width": 10**6, "sort_keys": False}
        return str(yaml.safe_dump(content, **style)).strip()

    if "\n" in name:  # only in double quotes is it in the line
        key, value = dumped(name, default_style='"'), dumped(options, default_flow_style=True)
        return f"columns: {{{key}: {value.splitlines()[0]}}}"
    return dumped({"columns": {name: options}}, default_flow_style=True)[1:-1]


def read_options(path: Path) -> dict[str, Any]:
    """The content of an options file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not YAML, beyond its limits, or not a mapping.
    """
    if not path.exists():
        raise FileNotFoundError(f"--config {path}: there is no such file; --dry-run prints one")
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold options as name: value")
    return content

"""Texts that are numbers: with a point or a comma, and with or without marks between thousands."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import yaml

PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
MARKED = r"^[+-]?[\d.,][\d.,' \x{a0}\x{202f}]*([eE][+-]?\d+)?$"
"""All other forms match this, and more."""
SYMBOLS = ("$", "€", "£", "¥", "%")
UNIT = re.compile(r"\d ?((?<= )[^\W\d]|[^\W\d]{2,6})$")
"""Such as km or EUR at the end; a single letter after a digit may be part of a code."""
SPACES = " \u00a0\u202f"
MANY_NUMBERS = 20
NUMBER_SHARE = 0.95  # of the texts of a column, if others may be mistakes


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How numbers are written."""

    decimal: str = "."
    """Between the whole number and its fraction: a point or a comma."""
    thousands: str | None = None
    """Between groups of three digits, if anything. A space may be one that doesn't break."""
    symbol: str | None = None
    """Before or after some of the numbers, such as ``$`` or ``%``."""

    def __str__(self) -> str:
        marks = {"decimal": self.decimal, "thousands": self.thousands, "symbol": self.symbol}
        return " and ".join(f"{name} {mark!r}" for name, mark in marks.items() if mark)

    @property
    def pattern(self) -> str:
        """The pattern of exactly these numbers: ``1,5`` is none with thousands ``,``."""
        point, whole = re.escape(self.decimal), r"\d+"
        if self.thousands:
            whole = rf"(\d+|[1-9]\d{{0,2}}({self._between}\d{{3}})+)"
        number = rf"({whole}({point}\d*)?|{point}\d+)([eE][+-]?\d+)?"
        if not self.symbol:
            return f"^[+-]?{number}$"
        symbol = re.escape(self.symbol)
        return rf"^[+-]?({symbol} ?[+-]?)?{number}( ?{symbol})?$"

    @property
    def _between(self) -> str:
        return f"[{SPACES}]" if self.thousands == " " else re.escape(self.thousands or "")

    def plain(self, texts: pa.Array) -> pa.Array:
        """The same numbers with a point, and without symbols and marks between thousands."""
        if self.symbol:
            texts = pc.utf8_trim_whitespace(pc.replace_substring(texts, self.symbol, ""))
            texts = pc.replace_substring_regex(texts, r"^([+-]) ", r"\1")
        if self.thousands:
            texts = pc.replace_substring_regex(texts, self._between, "")
        return pc.replace_substring(texts, self.decimal, ".")


KNOWN = tuple(
    Marks(decimal=decimal, thousands=thousands)
    for decimal, thousands in (
        (",", None), (",", "."), (".", ","), (",", " "), (".", " "), (".", "'"), (",", "'"),
    )
)  # fmt: skip
"""The forms that can be found in a column, the simplest first."""
POINT_OR_COMMA = (KNOWN[0], KNOWN[2])


@dataclass(frozen=True, kw_only=True)
class FoundMarks:
    """How the numbers of a column are written, as far as its texts tell."""

    marks: Marks | None
    """None: ``1,234`` and the like, where a comma may be either."""
    odd: str | None
    """The first text that is no such number."""
    example: str
    """A text that shows the marks."""


def find_marks(texts: pa.Array, share: float) -> FoundMarks | None:
    """Find out how numbers are written, if not plainly; None if less than a ``share`` of the texts,
    of which none is missing or has white space around it, are numbers."""
    wanted = share * len(texts)
    unit = UNIT.findall(texts[0].as_py()) if len(texts) and share < 1 else []
    symbol = next(
        (s for s in (*SYMBOLS, *unit) if len(texts) and _count(texts, re.escape(s)) >= wanted), None
    )
    if not len(texts) or (symbol is None and _count(texts, MARKED) < wanted):
        return None

    # Which marks fit most texts, the simplest first.
    known = KNOWN if symbol is None else (Marks(), *KNOWN)
    known = tuple(replace(marks, symbol=symbol) for marks in known)
    plain = pc.match_substring_regex(texts, PLAIN)
    counts = {marks: _count(texts, marks.pattern) for marks in known}
    most = max(counts.values())
    if most < wanted or most <= (pc.sum(plain).as_py() or 0):
        return None

    # Whether a comma is a decimal one can't be told from 1,234.
    fitting = [marks for marks, count in counts.items() if count == most]
    unclear = fitting[0] != Marks(symbol=symbol) and all(
        replace(marks, symbol=symbol) in fitting for marks in POINT_OR_COMMA
    )
    matches = pc.match_substring_regex(texts, fitting[0].pattern)
    example = texts.filter(pc.and_(matches, pc.invert(plain)))[0].as_py()
    odd = None if most == len(texts) else texts[pc.index(matches, False).as_py()].as_py()
    return FoundMarks(marks=None if unclear else fitting[0], odd=odd, example=example)


def _count(texts: pa.Array, pattern: str) -> int:
    return pc.sum(pc.match_substring_regex(texts, pattern)).as_py() or 0


def missing_hint(texts: pa.Array) -> str:
    """The option to set if the one text among many different numbers stands for a missing one."""
    distinct = pc.utf8_trim_whitespace(texts.drop_null()).unique()
    others = distinct.filter(pc.invert(pc.match_substring_regex(distinct, PLAIN))).to_pylist()
    if len(others) != 1 or len(distinct) <= MANY_NUMBERS:
        return ""
    missing = yaml.safe_dump({"missing": others}, default_flow_style=True, allow_unicode=True)
    return f"; if these are numbers with gaps: {missing.strip()[1:-1]} in the YAML"

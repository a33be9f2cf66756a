"""Rows that do not fit: their errors, and a report on those that are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

BAD_ROWS_KEPT = 20
BadRowsRule = Literal["stop", "skip", "skip-all"]
Result = TypeVar("Result")


class BadRow(ValueError):
    """Rows that cannot be read.

    Args:
        rows: those that are known to have the problem, by their numbers in the batch, from 0; none:
            no row in particular.
        problem: what is wrong with the first of them, the rule and the remedy.
    """

    unit = "row"
    where = ""
    kind = "not a row of the table"
    """In a count of bad rows."""
    remedy = "or skip such rows with --bad-rows skip"
    """None for a label: its rows are not to be skipped lightly."""

    def __init__(self, rows: Iterable[int], problem: str) -> None:
        super().__init__(problem)
        self.rows = list(map(int, rows))
        self.problem = problem

    def located(self, path: Path, first_row: int = 0) -> ValueError:
        """The error with its file and the number of its row, from 1 and without a header.

        Args:
            path: the file.
            first_row: number of the first row of the batch in the file, from 0.
        """
        if not self.rows:
            return ValueError(f"{path}{self.where}: {self.problem}")
        number = first_row + self.rows[0] + 1
        row = f", {self.unit} {number:,}" if number else ""  # 0: the file as a whole
        remedy = f"; {self.remedy}" if self.remedy and path.is_file() else ""
        return ValueError(f"{path}{row}{self.where}: {self.problem}{remedy}")


class BadValue(BadRow):
    """A value that its column does not take.

    Args:
        column: name of the column.
        rows: see :class:`BadRow`.
        problem: the value, the rule and the remedy.
    """

    def __init__(self, column: str, rows: Iterable[int], problem: str) -> None:
        super().__init__(rows, problem)
        self.where = f", column {column!r}"
        self.kind = f"column {column!r}"


class BadLine(BadRow):
    """A line of a log that is no row of it.

    Args:
        row: its number; -1: the file as a whole.
        kind: in a count of bad rows.
        problem: the value and the rule.
    """

    unit = "line"
    remedy = "correct the input, or skip bad rows with --bad-rows skip"

    def __init__(self, row: int, kind: str, problem: str) -> None:
        super().__init__([row], problem)
        self.kind = kind
        if kind.startswith("label"):
            self.remedy = "correct the input"


@dataclass
class BadRows:
    """Bad rows, however many: a count of each kind, and the first few."""

    kinds: Counter[str] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)
    """The first ``BAD_ROWS_KEPT``: ``file`` once it is known, ``row`` or ``line`` from 1 (without a
    header), ``kind`` and ``message``."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.kinds.total()

    @classmethod
    def of(cls, bad: Mapping[int, BadRow]) -> Self:
        """Those of a part, by their positions; the file is not known yet."""
        made = cls()
        for position in sorted(bad):
            made.add(bad[position], position)
        return made

    def add(self, error: BadRow, position: int) -> None:
        """Add the next bad row of a part."""
        self.kinds[error.kind] += 1
        if len(self.first) < BAD_ROWS_KEPT:
            row = {error.unit: position + 1, "kind": error.kind, "message": error.problem}
            self.first.append(row)

    def extend(self, other: BadRows, path: Path, before: int) -> None:
        """Add those of the next part of a file, with ``before`` rows of it before."""
        self.kinds.update(other.kinds)
        for row in other.first[: BAD_ROWS_KEPT - len(self.first)]:
            unit = "line" if "line" in row else "row"
            self.first.append({"file": str(path), **row, unit: before + row[unit]})

    def as_json(self) -> dict[str, Any]:
        """The content of ``bad_rows.json``."""
        kinds = dict(sorted(self.kinds.items()))
        return {"skipped": self.count, "kinds": kinds, "first": self.first}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The report that :meth:`as_json` returned."""
        return cls(Counter(content["kinds"]), list(content["first"]))


@dataclass(frozen=True)
class Converted(Generic[Result]):
    """The good rows of a part."""

    result: Result
    good: NDArray[np.int64]
    """Their positions in the part."""
    bad: BadRows = field(default_factory=BadRows)
    """The others."""

    @property
    def count(self) -> int:
        """Rows of the part, with bad ones."""
        return len(self.good) + self.bad.count


def shown(value: object) -> str:
    """A value in a message: short, and on one line."""
    text = repr(value)
    return text if len(text) <= 42 else text[:40] + "..."

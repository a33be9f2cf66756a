"""Rows that do not fit: their errors, and a report on those that are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    where = ""
    kind = "not a row of the table"
    """In a count of bad rows."""
    remedy = "or skip such rows with --bad-rows skip"
    """None for a label: its rows are not to be skipped lightly."""
    option = ""
    """The end of the problem that names an option of the preparation. Rows to score come too late
    for it."""

    def __init__(self, rows: Iterable[int], problem: str) -> None:
        super().__init__(problem)
        self.rows = np.fromiter(rows, np.int64)
        self.problem = problem

    def located(self, path: Path, first_row: int = 0, *, to_score: bool = False) -> ValueError:
        """The error with its file and the number of its row, from 1 and without a header;
        ``first_row`` rows of the file come before the batch. Rows ``to_score`` come too late for an
        option.
        """
        problem = self.problem.removesuffix(self.option) if to_score else self.problem
        if not len(self.rows):
            return ValueError(f"{path}{self.where}: {problem}")
        number = first_row + self.rows[0] + 1
        remedy = f"; {self.remedy}" if self.remedy and path.is_file() else ""
        return ValueError(f"{path}, row {number:,}{self.where}: {problem}{remedy}")


class BadValue(BadRow):
    """A value that its column does not take; see :class:`BadRow`. The ``option`` is added to the
    problem."""

    def __init__(self, column: str, rows: Iterable[int], problem: str, option: str = "") -> None:
        super().__init__(rows, problem + option)
        self.option = option
        self.where = f", column {column!r}"
        self.kind = f"column {column!r}"


@dataclass
class BadRows:
    """Bad rows, however many: a count of each kind, and the first few."""

    kinds: Counter[str] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)
    """The first ``BAD_ROWS_KEPT``: ``file`` once it is known, ``row`` from 1 (without a header),
    ``kind`` and ``message``."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.kinds.total()

    @classmethod
    def of(cls, errors: Sequence[BadRow], convert: Callable[[int, BadRow], BadRow]) -> Self:
        """Those of a part, whose file is not known yet. Each error has its rows, by rising
        positions; ``convert`` returns the error of a row alone, whichever of several is given.
        """
        made = cls()
        for error in errors:
            made.kinds[error.kind] += len(error.rows)
        some = [(row, error) for error in errors for row in error.rows[:BAD_ROWS_KEPT].tolist()]
        for row, error in sorted(some, key=lambda one: one[0])[:BAD_ROWS_KEPT]:
            alone = error if len(error.rows) == 1 else convert(row, error)
            made.first.append({"row": row + 1, "kind": alone.kind, "message": alone.problem})
        return made

    def extend(self, other: BadRows, path: Path, before: int) -> None:
        """Add those of the next part of a file, with ``before`` rows of it before."""
        self.kinds.update(other.kinds)
        for row in other.first[: BAD_ROWS_KEPT - len(self.first)]:
            self.first.append({"file": str(path), **row, "row": before + row["row"]})

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

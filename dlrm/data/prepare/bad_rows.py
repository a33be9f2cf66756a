"""Rows of a table that do not fit, skipped: the others are as if these were not in the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlrm.data.prepare.text_blocks import BAD_ROWS_KEPT
from dlrm.data.prepare.values import BadRow

CHUNK = 256  # rows that are searched at a time once a part has a bad row
Result = TypeVar("Result")


class Rows(Protocol):
    """The rows of a part, to be converted in other selections than all of them."""

    @property
    def count(self) -> int:
        """How many, with those that are bad."""

    @property
    def bad(self) -> Mapping[int, BadRow]:
        """Those that are no rows of the table, by their position."""

    def take(self, positions: NDArray[np.int64]) -> pa.RecordBatch:
        """The raw columns of some rows.

        Raises:
            BadRow: one of them cannot be read; its number is that in ``positions``.
        """


class Part(Protocol):
    """Consecutive rows of a file."""

    def parse(self, types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
        """The columns with the names of ``types``."""

    def rows(self, types: Mapping[str, pa.DataType]) -> Rows:
        """The same, row by row."""


@dataclass(frozen=True)
class Converted(Generic[Result]):
    """The good rows of a part."""

    result: Result
    good: NDArray[np.int64]
    """Their positions in the part."""
    bad: Mapping[int, BadRow] = field(default_factory=dict)
    """The others, by position."""


@dataclass
class BadRows:
    """Bad rows: a count of each kind, and the first few."""

    kinds: Counter[str] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)
    """``file``, ``row`` (from 1, without a header), ``kind`` and ``message``."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.kinds.total()

    @classmethod
    def of(cls, bad: Mapping[int, BadRow]) -> Self:
        """Those of a part, by their positions; the file is not known yet."""
        rows = [(position + 1, bad[position]) for position in sorted(bad)]
        first = [
            {"row": row, "kind": error.kind, "message": error.problem}
            for row, error in rows[:BAD_ROWS_KEPT]
        ]
        return cls(Counter(error.kind for _, error in rows), first)

    def add(self, other: BadRows, path: Path, before: int) -> None:
        """Add those of the next part of a file, with ``before`` rows of it before."""
        self.kinds.update(other.kinds)
        for row in other.first[: BAD_ROWS_KEPT - len(self.first)]:
            self.first.append({"file": str(path), **row, "row": before + row["row"]})

    def as_json(self) -> dict[str, Any]:
        """The content of ``bad_rows.json``."""
        kinds = dict(sorted(self.kinds.items()))
        return {"skipped": self.count, "kinds": kinds, "first": self.first}

    def as_metadata(self) -> dict[str, str] | None:
        """For the schema of a file of the other rows."""
        return {"bad_rows": json.dumps(self.as_json())} if self.count else None

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> Self:
        """What :meth:`as_metadata` made."""
        content = json.loads((metadata or {}).get(b"bad_rows", b"{}"))
        return cls(Counter(content.get("kinds", {})), content.get("first", []))


def convert_good_rows(
    part: Part, types: Mapping[str, pa.DataType], convert: Callable[[pa.RecordBatch], Result]
) -> Converted[Result]:
    """Convert the rows of a part that fit, and find those that do not.

    A part without bad rows takes no more time than otherwise, another one a few milliseconds for
    each of them.

    Args:
        part: the rows.
        types: of the columns to read.
        convert: converts raw columns.

    Raises:
        BadRow: it is no row in particular that doesn't fit.
        ValueError: the part cannot be cut into rows.
    """
    try:
        raw = part.parse(types)
        return Converted(convert(raw), np.arange(raw.num_rows))
    except BadRow as error:
        if error.row is None:
            raise

    rows = part.rows(types)
    bad = dict(rows.bad)
    left = np.setdiff1d(np.arange(rows.count), list(bad))

    def good_of(positions: Sequence[int] | NDArray[np.int64]) -> tuple[list[int], Result]:
        """Those of some rows that can be converted together, from the first one on."""
        kept = [int(position) for position in positions]
        while True:
            try:
                return kept, convert(rows.take(np.array(kept, np.int64)))
            except BadRow as error:
                if error.row is None:
                    raise
                bad[kept.pop(error.row)] = error

    good: list[int] = []
    for start in range(0, len(left), CHUNK):
        # With the first good row, since the form of a time is that of the rows before.
        first = good[:1]
        kept, _ = good_of([*first, *left[start : start + CHUNK]])
        good += kept[len(first) :]
    good, result = good_of(good)
    return Converted(result, np.array(good, np.int64), bad)

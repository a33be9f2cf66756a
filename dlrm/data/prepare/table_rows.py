"""Rows of CSV, JSON lines and Parquet, converted by a plan; rows that do not fit can be skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .bad_rows import BadRow, BadRows, Converted
from .columns import ColumnPlan
from .convert import convert_rows
from .files import FilePart, RawFile

CHUNK = 256  # rows that are searched at a time once a part has a bad row
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """The rows of files, as a source of rows for the preparation."""

    files: Sequence[RawFile]
    plan: ColumnPlan
    types: Mapping[str, pa.DataType]
    """Of the columns to read."""
    keep: Sequence[str] = ()
    """Columns to return as they are."""
    required: bool = True
    """See :func:`dlrm.data.prepare.convert.convert_rows`."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files, in the order of their rows."""
        return [file.path for file in self.files]

    @property
    def records(self) -> Sequence[dict[str, Any]]:
        """Name, size in bytes and SHA-256 of each file."""
        return [file.record() for file in self.files]

    def parts(self, block_bytes: int) -> Iterator[FilePart]:
        """All rows, in parts.

        Raises:
            ValueError: a file is empty, cut off or damaged.
        """
        for file in self.files:
            yield from file.parts(block_bytes)

    def convert(
        self, part: FilePart, *, skip_bad: bool
    ) -> Converted[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """The rows of a part, and the columns to keep.

        Raises:
            BadRow: a row does not fit, and it is not to be skipped.
        """
        if skip_bad:
            return convert_good_rows(part, self.types, self._converted)
        raw = part.parse(self.types)
        return Converted(self._converted(raw), np.arange(raw.num_rows))

    def _converted(self, raw: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        rows = convert_rows(self.plan, raw, required=self.required)
        return rows, raw.select(list(self.keep))


def convert_good_rows(
    part: FilePart,
    types: Mapping[str, pa.DataType],
    convert: Callable[[pa.RecordBatch], Result],
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
    return Converted(result, np.array(good, np.int64), BadRows.of(bad))

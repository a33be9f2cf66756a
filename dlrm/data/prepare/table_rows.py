"""Rows of CSV, JSON lines and Parquet, converted by a plan; rows that do not fit can be skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .bad_rows import BAD_ROWS_KEPT, BadRow, BadRows, Converted
from .columns import ColumnPlan
from .convert import convert_rows
from .files import FilePart, RawFile
from .row_source import RowSource

CHUNK = 256  # rows that are searched at a time for the first good one, if there is a bad one
Result = TypeVar("Result")


@dataclass(kw_only=True)
class TableRows(RowSource):
    """The rows of CSV, JSON lines or Parquet."""

    files: Sequence[RawFile]
    plan: ColumnPlan
    types: Mapping[str, pa.DataType]
    """Of the columns to read."""
    keep: Sequence[str] = ()
    """Columns to return as they are."""
    required: bool = True
    """See :func:`dlrm.data.prepare.convert.convert_rows`."""

    def __post_init__(self) -> None:
        self.paths = [file.path for file in self.files]

    def records(self) -> Sequence[dict[str, Any]]:
        """See :class:`RowSource`."""
        return [file.record() for file in self.files]

    def parts(self, block_bytes: int) -> Iterator[FilePart]:
        """See :class:`RowSource`."""
        for file in self.files:
            yield from file.parts(block_bytes)

    def convert(
        self, part: FilePart, *, skip_bad: bool
    ) -> Converted[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """See :class:`RowSource`."""
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

    A part without bad rows takes no more time than otherwise. Another one is converted again for
    each sort of fault, not for each bad row.

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
        if not error.rows:
            raise

    rows = part.rows(types)
    bad = dict(rows.bad)

    def good_of(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Result]:
        """Those of some rows that can be converted together, from the first one on."""
        while True:
            try:
                return positions, convert(rows.take(positions))
            except BadRow as error:
                if not error.rows:
                    raise
                bad.update(dict.fromkeys(positions[error.rows].tolist(), error))
                positions = np.delete(positions, error.rows)

    # The form of a time is that of the rows before, so a good row is needed before any other one
    # can be called bad: it is searched some rows at a time.
    left = np.setdiff1d(np.arange(rows.count), list(bad))
    good, result = good_of(left[:0])
    while len(left):
        size = len(left) if len(good) else CHUNK
        good, result = good_of(np.append(good, left[:size]))
        left = left[size:]

    def own_error(position: int) -> BadRow:
        """The error of a row alone, after a good one; rows with the same fault share an error."""
        try:
            convert(rows.take(np.append(good[:1], position)))
        except BadRow as error:
            return error
        return bad[position]

    for position in sorted(bad)[:BAD_ROWS_KEPT]:
        if position not in rows.bad:
            bad[position] = own_error(position)
    return Converted(result, good, BadRows.of(bad))

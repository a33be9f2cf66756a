"""Rows of CSV, JSON lines and Parquet, converted by a plan, in threads, a part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..threads import map_in_order
from .bad_rows import BadRow, BadRows, Converted
from .columns import ColumnPlan
from .convert import convert_rows
from .files import FilePart, RawFile

Result = TypeVar("Result")


@dataclass(kw_only=True)
class TableRows:
    """The raw rows of files."""

    files: Sequence[RawFile]
    """In the order of their rows."""
    plan: ColumnPlan
    types: Mapping[str, pa.DataType]
    """Of the columns to read."""
    keep: Sequence[str] = ()
    """Columns to return as they are."""
    required: bool = True
    """See :func:`dlrm.data.prepare.convert.convert_rows`."""
    limit: int | None = None
    """Read at most this many lines, over all files."""
    _opened: list[RawFile] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [file.path for file in self.files]

    def records(self) -> Sequence[dict[str, Any]]:
        """Name, size in bytes and SHA-256 of each file that has been read."""
        return [file.record() for file in self._opened]

    def parts(self, block_bytes: int) -> Iterator[FilePart]:
        """Yield all rows, in parts that depend on the content of the files only.

        Raises:
            ValueError: a file is empty, cut off or damaged.
        """
        left = self.limit
        for file in self.files:
            if left == 0:
                return
            self._opened.append(file)
            for part in file.parts(block_bytes, left):
                yield part
                if left is not None:
                    left -= part.lines

    def convert(
        self, part: FilePart, *, skip_bad: bool
    ) -> Converted[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """The rows of a part, as :func:`dlrm.data.prepare.convert.convert_rows` returns them, and
        the columns that are kept as they are.

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


def map_parts(
    source: TableRows,
    function: Callable[[int, FilePart], tuple[Result, int]],
    *,
    block_bytes: int,
    workers: int,
) -> Iterator[tuple[FilePart, Result, int]]:
    """Yield ``function`` of each part and its number in order, computed in threads.

    Yields:
        The part, its result, and the number of rows of its file that come before it.

    Raises:
        ValueError: a row or value doesn't fit; the error names the file, the row, counted from
            1 without a header, and the column.
    """

    def work(numbered: tuple[int, FilePart]) -> tuple[FilePart, Result | BadRow, int]:
        index, part = numbered
        try:
            return part, *function(index, part)
        except BadRow as error:
            return part, error, 0

    done: Counter[Path] = Counter()
    for part, result, rows in map_in_order(work, enumerate(source.parts(block_bytes)), workers):
        if isinstance(result, BadRow):
            raise result.located(part.path, done[part.path], to_score=not source.required)
        yield part, result, done[part.path]
        done[part.path] += rows


def convert_good_rows(
    part: FilePart,
    types: Mapping[str, pa.DataType],
    convert: Callable[[pa.RecordBatch], Result],
) -> Converted[Result]:
    """Convert the rows of a part that fit, and find those that do not.

    A part without bad rows takes no more time than otherwise. Another one is converted again for
    each sort of fault, not for each bad row.

    Raises:
        BadRow: it is no row in particular that doesn't fit.
        ValueError: the part cannot be cut into rows.
    """
    try:
        raw = part.parse(types)
        return Converted(convert(raw), np.arange(raw.num_rows))
    except BadRow as error:
        if not len(error.rows):
            raise

    rows = part.rows(types)
    errors = list(rows.bad)

    def good_of(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Result]:
        """Those of some rows that can be converted together."""
        while True:
            try:
                return positions, convert(rows.take(positions))
            except BadRow as error:
                if not len(error.rows):
                    raise
                wrong = error.rows
                error.rows, positions = positions[wrong], np.delete(positions, wrong)
                errors.append(error)

    bad = [np.empty(0, np.int64), *(error.rows for error in errors)]
    good, result = good_of(np.delete(np.arange(rows.count), np.concatenate(bad)))

    def own_error(position: int, shared: BadRow) -> BadRow:
        """The error of a row alone, after a good one; rows with the same fault share an error."""
        try:
            convert(rows.take(np.append(good[:1], position)))
        except BadRow as error:
            return error
        return shared

    return Converted(result, good, BadRows.of(errors, own_error))

"""Where raw rows come from, in parts that are converted on their own, in threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from ..threads import map_in_order
from .bad_rows import BadRow, Converted

Result = TypeVar("Result")


class Part(Protocol):
    """Consecutive rows of a file."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def consumed(self) -> int:
        """Bytes of the file up to here, for progress."""


class RowSource(ABC):
    """The raw rows of files."""

    paths: Sequence[Path]
    """The files, in the order of their rows."""

    @abstractmethod
    def records(self) -> Sequence[dict[str, Any]]:
        """Name, size in bytes and SHA-256 of each file that has been read."""

    @abstractmethod
    def parts(self, block_bytes: int) -> Iterator[Any]:
        """Yield all rows, in parts that depend on the content of the files only.

        Raises:
            ValueError: a file is empty, cut off or damaged.
        """

    @abstractmethod
    def convert(
        self, part: Any, *, skip_bad: bool
    ) -> Converted[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """The rows of a part, as :func:`dlrm.data.prepare.convert.convert_rows` returns them, and
        columns that are kept as they are.

        Raises:
            BadRow: a row does not fit, and it is not to be skipped.
        """


def map_parts(
    source: RowSource,
    function: Callable[[int, Part], tuple[Result, int]],
    *,
    block_bytes: int,
    workers: int,
) -> Iterator[tuple[Part, Result, int]]:
    """Yield ``function`` of each part in order, computed in threads.

    Args:
        source: the rows.
        function: of the number of the part and the part; returns a result and the number of rows.
        block_bytes: size of the blocks that text is read in.
        workers: threads.

    Yields:
        The part, its result, and the number of rows of its file that come before it.

    Raises:
        ValueError: a row or value doesn't fit; the error names the file, the row, counted from 1
            without a header, and the column.
    """

    def work(numbered: tuple[int, Part]) -> tuple[Part, Result | BadRow, int]:
        index, part = numbered
        try:
            return part, *function(index, part)
        except BadRow as error:
            return part, error, 0

    done: Counter[Path] = Counter()
    for part, result, rows in map_in_order(work, enumerate(source.parts(block_bytes)), workers):
        if isinstance(result, BadRow):
            raise result.located(part.path, done[part.path])
        yield part, result, done[part.path]
        done[part.path] += rows

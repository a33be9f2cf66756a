"""The file of scores, which a thread writes while the next ones are computed."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

ROW, PROBABILITY, LABEL = "row", "probability", "label"
"""Columns of the scores."""
GROUP_ROWS = 1 << 17  # of a row group, and of what is handed to the thread
QUEUED = 4  # parts that wait to be written


class ScoreFile:
    """Writes batches of scores to Parquet or CSV, in the order in which they come.

    Args:
        path: the file to write.
        suffix: ``.parquet`` or ``.csv``.
        named: the file as errors name it.

    Attributes:
        rows: how many have been given.
    """

    def __init__(self, path: Path, suffix: str, named: Path) -> None:
        self.rows = 0
        self._path, self._suffix, self._named = path, suffix, named
        self._writer: Any = None
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self._thread = ThreadPoolExecutor(1, "score-writer")
        self._parts: deque[Future[None]] = deque()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch, or keep it until there are enough.

        Raises:
            ValueError, OSError: an earlier one can't be written.
        """
        self.rows += batch.num_rows
        self._held.append(batch)
        self._held_rows += batch.num_rows
        if self._held_rows >= GROUP_ROWS:
            self._hand_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None and self._held:
                self._hand_over()
            while error is None and self._parts:
                self._finish()
        finally:
            self._thread.shutdown(cancel_futures=True)
            if self._writer is not None:
                self._writer.close()

    def _hand_over(self) -> None:
        table = pa.Table.from_batches(self._held)
        self._held, self._held_rows = [], 0
        self._parts.append(self._thread.submit(self._write, table))
        if len(self._parts) > QUEUED:
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest part."""
        try:
            self._parts.popleft().result()
        except pa.ArrowException as error:
            text = " ".join(str(error).split())
            raise ValueError(f"{self._named} can't be written: {text}") from None

    def _write(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = self._open(table.schema)
        self._writer.write_table(table, GROUP_ROWS)

    def _open(self, schema: pa.Schema) -> Any:
        if self._suffix == ".csv":
            return pyarrow.csv.CSVWriter(self._path, schema)
        # Numbers that never repeat: without dictionaries they are written 4 times as fast.
        encoding = {ROW: "DELTA_BINARY_PACKED", PROBABILITY: "PLAIN"}
        others = [name for name in schema.names if name not in encoding]
        return pq.ParquetWriter(
            self._path,
            schema,
            use_dictionary=others,
            column_encoding=encoding,
            write_page_checksum=True,
        )

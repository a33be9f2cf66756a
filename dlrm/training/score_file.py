"""The file of scores, which a thread writes while the next ones are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dlrm.data.threads import map_in_order

ROW, PROBABILITY, LABEL = "row", "probability", "label"
"""Columns of the scores."""
GROUP_ROWS = 1 << 17  # of a row group, and of what is handed to the thread


def write_batches(batches: Iterable[pa.RecordBatch], path: Path, suffix: str, named: Path) -> int:
    """Write batches of scores to Parquet or CSV, in the order in which they come.

    Args:
        batches: what to write.
        path: the file to write.
        suffix: ``.parquet`` or ``.csv``.
        named: the file as errors name it.

    Returns:
        The number of rows.

    Raises:
        ValueError, OSError: they can't be written.
    """
    writer: Any = None

    def write(table: pa.Table) -> int:
        nonlocal writer
        try:
            writer = writer or _open(path, suffix, table.schema)
            writer.write_table(table, GROUP_ROWS)
        except pa.ArrowException as error:
            text = " ".join(str(error).split())
            raise ValueError(f"{named} can't be written: {text}") from None
        return table.num_rows

    try:
        return sum(map_in_order(write, _in_groups(batches), threads=1))
    finally:
        if writer is not None:
            writer.close()


def _in_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of at least as many rows as a row group has; the last may have fewer."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= GROUP_ROWS:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _open(path: Path, suffix: str, schema: pa.Schema) -> Any:
    if suffix == ".csv":
        return pyarrow.csv.CSVWriter(path, schema)
    # Numbers that never repeat: without dictionaries they are written 4 times as fast.
    encoding = {ROW: "DELTA_BINARY_PACKED", PROBABILITY: "PLAIN"}
    others = [name for name in schema.names if name not in encoding]
    return pq.ParquetWriter(
        path, schema, use_dictionary=others, column_encoding=encoding, write_page_checksum=True
    )

"""Parsed blocks on disk: written once, then read by column and by block."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from dlrm.data.prepare.criteo_rows import COLUMNS, parse_block
from dlrm.data.prepare.text_blocks import BadRow, TextBlock
from dlrm.data.schema import CRITEO_CATEGORICAL
from dlrm.utils.atomic import atomic_write

_SUMMARY = b"summary"


@dataclass(frozen=True, kw_only=True)
class SpilledBlock:
    """A parsed block on disk, and its summary."""

    path: Path
    source: str
    """The raw file."""
    rows: int
    distinct: Mapping[str, int]
    """Distinct values of each categorical column."""
    bad: Mapping[str, int]
    """Bad rows by kind."""
    first_bad: Sequence[BadRow]

    @classmethod
    def of(cls, block: TextBlock, path: Path, transform: str) -> SpilledBlock:
        """Parse ``block`` and write it to ``path``, unless an earlier run has already done so."""
        if not path.exists():
            _write(block, path, transform)
        with pa.memory_map(str(path)) as file:
            summary = json.loads(pa.ipc.open_file(file).schema.metadata[_SUMMARY])
        summary["first_bad"] = [BadRow(**bad) for bad in summary["first_bad"]]
        return cls(path=path, source=str(block.path), **summary)

    def read(self) -> pa.RecordBatch:
        """All columns, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self.path))).get_batch(0)

    def read_column(self, name: str) -> pa.DictionaryArray:
        """A single categorical column, memory-mapped."""
        options = pa.ipc.IpcReadOptions(included_fields=[COLUMNS.index(name)])
        file = pa.ipc.open_file(pa.memory_map(str(self.path)), options=options)
        return file.get_batch(0).column(0)


def _write(block: TextBlock, path: Path, transform: str) -> None:
    batch, bad = parse_block(block, transform)
    if block.problem:
        bad.add(block.problem)
    summary = {
        "rows": batch.num_rows,
        "distinct": {name: len(batch[name].dictionary) for name in CRITEO_CATEGORICAL},
        "bad": bad.kinds,
        "first_bad": [asdict(row) for row in bad.first],
    }
    batch = batch.replace_schema_metadata({_SUMMARY: json.dumps(summary)})
    with atomic_write(path) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as writer:
        writer.write_batch(batch)

"""Pass 1: raw rows are converted a part at a time, and spilled as blocks on disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from ...utils.atomic import atomic_write
from .bad_rows import BadRows
from .columns import Feature
from .table_rows import FilePart, TableRows, map_parts
from .workspace import Workspace

WIDE = 200  # with more columns, a block stays open, as opening it takes time for each of them
_SUMMARY = b"summary"


@dataclass(frozen=True, kw_only=True)
class SpilledBlock:
    """Converted rows on disk: written once, then read by column and as a whole."""

    path: Path
    first: int = 0
    """Number of the first row of all rows."""
    rows: int
    names: Sequence[str]
    """The columns."""
    entries: Mapping[str, int]
    """Length of the dictionary of each column that has one."""
    sizes: Mapping[str, int]
    """Bytes of these."""
    bad: BadRows

    @classmethod
    def write(cls, path: Path, rows: pa.RecordBatch, bad: BadRows) -> None:
        """Spill converted rows, with a report on those that were left out."""
        names = rows.schema.names
        columns = zip(names, map(entries_of, rows), strict=True)
        dictionaries = {n: c.dictionary for n, c in columns if pa.types.is_dictionary(c.type)}
        summary = {
            "rows": rows.num_rows,
            "names": names,
            "entries": {name: len(values) for name, values in dictionaries.items()},
            "sizes": {name: values.nbytes for name, values in dictionaries.items()},
            "bad": bad.as_json(),
        }
        rows = rows.replace_schema_metadata({_SUMMARY: json.dumps(summary)})
        with (
            atomic_write(path) as temporary,
            pa.ipc.new_file(str(temporary), rows.schema) as file,
        ):
            file.write_batch(rows)

    @classmethod
    def open(cls, path: Path) -> SpilledBlock:
        """Open a block that :meth:`write` wrote."""
        with pa.memory_map(str(path)) as file:
            summary = json.loads(pa.ipc.open_file(file).schema.metadata[_SUMMARY])
        return cls(path=path, **summary | {"bad": BadRows.from_json(summary["bad"])})

    def read(self) -> pa.RecordBatch:
        """All columns, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self.path))).get_batch(0)

    @cached_property
    def _open(self) -> pa.RecordBatch:
        return self.read()

    def column(self, name: str) -> pa.Array:
        """A single column, memory-mapped."""
        if len(self.names) > WIDE:
            return self._open[name]
        options = pa.ipc.IpcReadOptions(included_fields=[self.names.index(name)])
        file = pa.ipc.open_file(pa.memory_map(str(self.path)), options=options)
        return file.get_batch(0).column(0)

    def dictionary(self, feature: Feature) -> pa.Array:
        """The distinct values of a category or list, or some of them more than once.

        They are a copy: a mapped block keeps about 1 MB of its file in memory.
        """
        values = entries_of(self.column(feature.name)).dictionary
        return pa.concat_arrays([values, values[:0]])


def entries_of(column: pa.Array) -> pa.Array:
    """The values of a category, or of all lists one after another."""
    return column.flatten() if pa.types.is_large_list(column.type) else column


@dataclass(kw_only=True)
class Spilled:
    """All rows of a source, converted."""

    blocks: list[SpilledBlock] = field(default_factory=list)
    """Those that have rows."""
    rows: int = 0
    rows_of: Counter[Path] = field(default_factory=Counter)
    """Rows of each file, without bad ones."""
    bad: BadRows = field(default_factory=BadRows)


def spill_rows(
    source: TableRows,
    work: Workspace,
    *,
    skip_bad: bool,
    block_bytes: int,
    workers: int,
    progress: bool,
) -> Spilled:
    """Convert and spill all rows, unless an earlier run has already done so. An error names the
    first row that does not fit.

    Raises:
        ValueError: a row or value doesn't fit, and is not to be skipped; the error names the first
            one.
    """

    def spill(index: int, part: FilePart) -> tuple[SpilledBlock, int]:
        path = work / "blocks" / f"{index:06}.arrow"
        done = path.exists() and (skip_bad or not SpilledBlock.open(path).bad.count)
        if not done:
            converted = source.convert(part, skip_bad=skip_bad)
            SpilledBlock.write(path, converted.result[0], converted.bad)

        block = SpilledBlock.open(path)
        return block, block.rows + block.bad.count

    spilled = Spilled()
    consumed: dict[Path, int] = {}
    with progress_bar("read", "B", progress) as bar:
        bar.total = sum(path.stat().st_size for path in source.paths)
        parts = map_parts(source, spill, block_bytes=block_bytes, workers=workers)
        for part, block, before in parts:
            spilled.bad.extend(block.bad, part.path, before)
            spilled.rows_of[part.path] += block.rows
            if block.rows:
                spilled.blocks.append(replace(block, first=spilled.rows, bad=BadRows()))
            spilled.rows += block.rows

            consumed[part.path] = part.consumed
            bar.update(sum(consumed.values()) - bar.n)
    return spilled


def progress_bar(phase: str, unit: str, shown: bool) -> tqdm:
    """A progress bar of one pass on standard error."""
    return tqdm(desc=phase, unit=f" {unit}", unit_scale=True, mininterval=0.5, disable=not shown)

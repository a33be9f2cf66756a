"""Raw rows prepared like the data that a model was trained on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...utils.atomic import atomic_directory
from ...utils.messages import did_you_mean, print_error
from ..schema import META_FILE, Meta
from .bad_rows import BadRow
from .files import with_plain_types
from .transform import Transform, transform_files


def keep_transform(directory: str | os.PathLike[str], target: Path) -> None:
    """Keep the transform of a prepared directory, so that a run has it.

    Vocabularies may have hundreds of megabytes: they are hard links where the file system has
    them, which take no room, and else copies. ``target`` is there completely or not at all. Data
    that was not made from raw rows has nothing to keep.

    Args:
        directory: the prepared directory.
        target: directory to make.
    """
    # Nothing to keep, or it is there already.
    source = Path(directory)
    try:
        files, meta = transform_files(source), Meta.read(source)
    except ValueError:
        return
    if (target / META_FILE).is_file():
        if Meta.read(target).fingerprint == meta.fingerprint:
            return
        shutil.rmtree(target)

    missing = next((file for file in files if not (source / file).is_file()), None)
    if missing is not None:
        if meta.fingerprint:  # other data may look like it, such as synthetic rows of Criteo
            where = source / missing
            print_error(f"note: {where} does not exist: the run can score prepared rows only")
        return

    # Links where there can be some: people edit the files that are no vocabularies in place.
    with atomic_directory(target) as temporary:
        for file in files:
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            linked = False
            if file.parent.name:
                with suppress(OSError):  # another file system, or one without links
                    os.link((source / file).resolve(), temporary / file)
                    linked = True
            if not linked:
                shutil.copyfile(source / file, temporary / file)


def prepare(transform: Transform, rows: Any, also: Sequence[str] = ()) -> pa.RecordBatch:
    """Prepare raw rows in memory.

    Args:
        transform: of the data that the model was trained on.
        rows: as in :func:`as_batch`, with the columns that features are made of.
        also: the label or the weight, which the rows need as well then.

    Raises:
        ValueError: a column is missing, or a value does not fit; the error names it.
    """
    raw = as_batch(rows)
    names = raw.schema.names
    there = set(names)
    needed = [*transform.needed, *also]
    for name in needed:
        if name not in there:
            hint = did_you_mean(name, names, "their columns")
            raise ValueError(f"the rows have no column {name!r}{hint}")
    try:
        return transform.apply(raw.select(needed))
    except BadRow as error:
        raise error.located(Path("the rows")) from None


def as_batch(rows: Any) -> pa.RecordBatch:
    """Rows in memory as one batch: a DataFrame, an Arrow table or batch, a mapping of columns, or a
    list of mappings, one for each row.

    Raises:
        ValueError: they are no table, two columns have one name, or a column has values of several
            types.
    """
    if isinstance(rows, pa.RecordBatch):
        return with_plain_types(rows)
    try:
        if isinstance(rows, Sequence) and rows and all(isinstance(r, Mapping) for r in rows):
            names = dict.fromkeys(name for row in rows for name in row)
            rows = {name: [row.get(name) for row in rows] for name in names}
        if isinstance(rows, Mapping):
            rows = pa.table(dict(rows))
        elif not isinstance(rows, pa.Table):
            rows = pa.Table.from_pandas(rows, preserve_index=False)
    except (pa.ArrowException, ArithmeticError, TypeError, AttributeError, ValueError) as error:
        advice = "give a DataFrame, an Arrow table, a mapping of columns, or a list of mappings"
        if hasattr(rows, "columns") or isinstance(rows, Mapping):
            advice = "give columns names of their own, and each values of one type"
        if isinstance(rows, Mapping):
            advice = "give each column a list of values of one type; of a single row, make [{...}]"
        raise ValueError(f"the rows are no table: {error}; {advice}") from None
    columns = [column.combine_chunks() for column in rows.columns]
    return with_plain_types(pa.RecordBatch.from_arrays(columns, names=rows.schema.names))


def in_batches(
    parts: Iterable[tuple[pa.RecordBatch, ...]], size: int
) -> Iterator[tuple[pa.Table, ...]]:
    """Rows that come in parts, as tables of ``size`` rows each; the last may have fewer.

    Args:
        parts: batches of the same rows, such as their features and their keys.
        size: rows of a table.

    Raises:
        ValueError: the columns of two parts differ.
    """
    held: list[tuple[pa.RecordBatch, ...]] = []
    room = size
    for part in parts:
        start, rows = 0, part[0].num_rows
        while start < rows:
            taken = min(room, rows - start)
            held.append(tuple(batch.slice(start, taken) for batch in part))
            start, room = start + taken, room - taken
            if not room:
                yield _joined(held)
                held, room = [], size
    if held:
        yield _joined(held)


def _joined(parts: list[tuple[pa.RecordBatch, ...]]) -> tuple[pa.Table, ...]:
    for batches in zip(*parts, strict=True):
        first = batches[0].schema
        for other in batches:
            if not other.schema.equals(first):
                raise ValueError(
                    f"the rows have columns {_listed(first)} first and {_listed(other.schema)} "
                    "later: give all files the same columns and types, all or none with a label"
                )
    return tuple(pa.Table.from_batches(batches) for batches in zip(*parts, strict=True))


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)

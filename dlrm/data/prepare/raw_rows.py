"""Raw rows prepared like the data that a model was trained on, and as the inputs of an export."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...utils.atomic import atomic_directory
from ...utils.messages import did_you_mean, print_error
from ..parquet import RowGroupReader
from ..schema import META_FILE, Meta
from .bad_rows import BadRow
from .files import with_plain_types
from .transform import Transform, transform_files

PREPARATION = "preparation"
"""Where an export has what its raw rows are prepared with."""
Arrays = list[NDArray[Any]]
"""``dense [N, B]`` float32; ``ids [F_1, B]`` int64 of the features with one id each; and for each
feature with lists of ids ``values [nnz]`` and ``offsets [B + 1]``, int64."""


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
            if file.parent.name:
                with suppress(OSError):  # another file system, or one without links
                    os.link((source / file).resolve(), temporary / file)
                    continue
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
        raise error.located(Path("the rows"), to_score=True) from None


def as_batch(rows: Any) -> pa.RecordBatch:
    """Rows in memory as one batch: a DataFrame, an Arrow table or batch, a mapping of columns, or a
    list of mappings, one for each row. Two columns must not have one name, and a column values of
    one type.

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
    """Rows that come in parts, as tables of ``size`` rows each; the last may have fewer. A part is
    batches of the same rows, such as their features and their keys.

    Raises:
        ValueError: the columns of two parts differ.
    """
    held: list[pa.Table] = []
    for part in (part for part in parts if part[0].num_rows):
        new = [pa.Table.from_batches([batch]) for batch in part]
        held = list(map(_joined, held, new)) if held else new
        while held[0].num_rows >= size:
            yield tuple(table.slice(0, size) for table in held)
            held = [table.slice(size) for table in held]
    if held and held[0].num_rows:
        yield tuple(held)


def _joined(first: pa.Table, later: pa.Table) -> pa.Table:
    if not first.schema.equals(later.schema):
        columns, others = (
            ", ".join(f"{field.name} ({field.type})" for field in table.schema)
            for table in (first, later)
        )
        raise ValueError(
            f"the rows have columns {columns} first and {others} later: give all files the same "
            "columns and types, all or none with a label"
        )
    return pa.concat_tables([first, later])


@dataclass(frozen=True, kw_only=True)
class InputReader:
    """Reads raw rows, with the columns that the training data had, as inputs of a model.

    Example::

        reader = InputReader.load("EXPORT")
        arrays = reader.arrays({"price": [9.5], "user": ["u1"]})
        probabilities = model(*map(torch.from_numpy, arrays))
    """

    reader: RowGroupReader
    """Checks the prepared rows."""
    transform: Transform

    @classmethod
    def load(cls, export: str | os.PathLike[str]) -> Self:
        """Load the preparation in an export.

        Raises:
            FileNotFoundError, ValueError: it is missing or damaged.
        """
        directory = Path(export) / PREPARATION
        meta = replace(Meta.read(directory), weight=None)
        return cls(reader=RowGroupReader(directory, meta), transform=Transform.load(directory))

    def arrays(self, rows: Any) -> Arrays:
        """The inputs of rows in memory, see :func:`as_batch`. Columns that no feature is made of
        are left out.

        Raises:
            ValueError: a column is missing, or a value does not fit.
        """
        return self._inputs(pa.Table.from_batches([prepare(self.transform, rows)]))

    def read(
        self, inputs: Sequence[str | os.PathLike[str]], *, batch_size: int = 16384
    ) -> Iterator[Arrays]:
        """The inputs of the rows of files, ``batch_size`` rows at a time, in bounded memory.

        Args:
            inputs: files or patterns, as for the preparation of the training data.
            batch_size: rows of a batch; the last may have fewer.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, a column is missing, or a value does not fit; the error
                names the file and the row.
        """
        parts = ((rows,) for rows, _, _ in self.transform.read(inputs))
        for (rows,) in in_batches(parts, batch_size):
            yield self._inputs(rows)

    def _inputs(self, prepared: pa.Table) -> Arrays:
        """The inputs of prepared rows."""
        rows = self.reader.convert(prepared, "the rows")
        columns = list(zip(rows.ids, rows.offsets, strict=True))
        single = [ids for ids, offsets in columns if offsets is None]
        count = prepared.num_rows
        arrays: Arrays = [_stacked(rows.dense, count, np.float32)]
        arrays.append(_stacked(single, count, np.int64))
        for ids, offsets in columns:
            if offsets is not None:
                starts = (offsets - offsets[0]).astype(np.int64)  # those of a slice begin later
                arrays += [ids.astype(np.int64), starts]
        return arrays


def _stacked(rows: Sequence[NDArray[Any]], count: int, dtype: type) -> NDArray[Any]:
    """Rows one below the other; no rows have the shape ``[0, count]``."""
    return np.stack(rows).astype(dtype) if rows else np.empty((0, count), dtype)

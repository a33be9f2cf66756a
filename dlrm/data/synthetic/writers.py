"""Write synthetic rows as Parquet like that of ``prepare_criteo``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dlrm.data.schema import Categorical, Split
from dlrm.data.synthetic.generator import GeneratedRows, Generator, Recipe
from dlrm.data.synthetic.label_model import BINS
from dlrm.data.synthetic.multi_hot import (
    group_rows,
    id_array,
    id_field,
    open_writer,
)
from dlrm.data.threads import map_in_order

FILE_GROUPS = 8  # row groups of a Parquet file

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Job:
    """The rows to write: all that the recipe of the generator says."""

    generator: Generator
    tables: Sequence[Categorical]
    """The columns of ids; some may have bags."""
    progress: Progress
    """Called with the number of rows just written."""

    @property
    def recipe(self) -> Recipe:
        """The options of the data set."""
        return self.generator.recipe


Written = tuple[dict[str, Split], dict[str, np.ndarray]]
Writer = Callable[[Path, Job], Written]
"""A function like :func:`write_parquet`."""


def write_parquet(directory: Path, job: Job) -> Written:
    """Write the splits as Parquet, several files at a time; with bags where tables have them.
    Returns the splits by name, and for each the number of rows by label and true probability, ``[2,
    BINS]``.
    """
    size, splits = group_rows(job.tables) * FILE_GROUPS, job.recipe.splits()
    parts = [
        (split, f"{split}-{number:05d}.parquet", range(start, min(start + size, rows.stop)))
        for split, rows in splits.items()
        for number, start in enumerate(range(rows.start, max(rows.stop, rows.start + 1), size))
    ]

    def write(part: tuple[str, str, range]) -> np.ndarray:
        return _write_file(directory / part[1], part[2], job)

    files: dict[str, list[str]] = {split: [] for split in splits}
    counts = {split: np.zeros((2, BINS), dtype=np.int64) for split in splits}
    results = map_in_order(write, parts, job.recipe.threads)
    for (split, file, _), added in zip(parts, results, strict=True):
        files[split].append(file)
        counts[split] += added
    return {split: split_of(files[split], counts[split]) for split in splits}, counts


def _write_file(path: Path, rows: range, job: Job) -> np.ndarray:
    generator, tables = job.generator, job.tables
    schema = pa.schema(
        [
            pa.field("label", pa.uint8(), nullable=False),
            *(pa.field(column.name, pa.float32(), nullable=False) for column in generator.dense),
            *map(id_field, tables),
        ]
    )

    # A row group at a time.
    multi_hot = any(table.multi_hot for table in tables)
    counts, size = np.zeros((2, BINS), dtype=np.int64), group_rows(tables)

    with open_writer(path, schema, tables if multi_hot else ()) as writer:
        for start in range(rows.start, rows.stop, size):
            made = generator.rows(start, min(start + size, rows.stop))
            arrays = [pa.array(made.labels.cpu().numpy())]
            arrays += [pa.array(column) for column in generator.transformed(made).cpu().numpy()]
            arrays += [
                id_array(ids, table, feature=feature, seed=job.recipe.seed)
                for feature, (ids, table) in enumerate(zip(made.ids, tables, strict=True))
            ]

            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), size)
            counts += tally(made)
            job.progress(len(made.labels))
    return counts


def tally(rows: GeneratedRows) -> np.ndarray:
    """Number of rows by label and true probability, ``[2, BINS]``."""
    tally = torch.bincount(rows.bins + BINS * rows.labels.long(), minlength=2 * BINS)
    return tally.cpu().numpy().reshape(2, BINS)


def split_of(files: list[str], counts: np.ndarray) -> Split:
    """The description of a split, given its files and :func:`tally`."""
    return Split(files=tuple(files), rows=int(counts.sum()), positives=int(counts[1].sum()))

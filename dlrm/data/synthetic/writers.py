"""Write synthetic rows as Parquet like that of ``prepare_criteo``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dlrm.data.schema import Categorical, Split
from dlrm.data.synthetic.generator import GeneratedRows, Generator
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
Writer = Callable[..., tuple[dict[str, Split], dict[str, np.ndarray]]]
"""A function like :func:`write_parquet`."""


def write_parquet(
    directory: Path,
    generator: Generator,
    splits: Mapping[str, range],
    threads: int,
    progress: Progress,
    *,
    tables: Sequence[Categorical],
    seed: int,
) -> tuple[dict[str, Split], dict[str, np.ndarray]]:
    """Write the splits as Parquet, several files at a time; with bags where ``tables`` have them.

    Returns:
        The splits by name, and for each split the number of rows by label and true probability,
        ``[2, BINS]``.
    """
    write = partial(_write_file, generator=generator, tables=tables, seed=seed, progress=progress)
    size = group_rows(tables) * FILE_GROUPS
    jobs = [
        (split, f"{split}-{number:05d}.parquet", range(start, min(start + size, rows.stop)))
        for split, rows in splits.items()
        for number, start in enumerate(range(rows.start, max(rows.stop, rows.start + 1), size))
    ]

    files: dict[str, list[str]] = {split: [] for split in splits}
    counts = {split: np.zeros((2, BINS), dtype=np.int64) for split in splits}
    results = map_in_order(lambda job: write(directory / job[1], rows=job[2]), jobs, threads)
    for (split, file, _), added in zip(jobs, results, strict=True):
        files[split].append(file)
        counts[split] += added
    return {split: split_of(files[split], counts[split]) for split in splits}, counts


def _write_file(
    path: Path,
    *,
    generator: Generator,
    rows: range,
    tables: Sequence[Categorical],
    seed: int,
    progress: Progress,
) -> np.ndarray:
    schema = pa.schema(
        [
            pa.field("label", pa.uint8(), nullable=False),
            *(pa.field(column.name, pa.float32(), nullable=False) for column in generator.dense),
            *map(id_field, tables),
        ]
    )
    multi_hot = any(table.multi_hot for table in tables)
    counts, size = np.zeros((2, BINS), dtype=np.int64), group_rows(tables)

    with open_writer(path, schema, tables if multi_hot else ()) as writer:
        for start in range(rows.start, rows.stop, size):
            made = generator.rows(start, min(start + size, rows.stop))
            arrays = [pa.array(made.labels.cpu().numpy())]
            arrays += [pa.array(column) for column in generator.transformed(made).cpu().numpy()]
            arrays += [
                id_array(ids, table, feature=feature, seed=seed)
                for feature, (ids, table) in enumerate(zip(made.ids, tables, strict=True))
            ]

            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), size)
            counts += tally(made)
            progress(len(made.labels))
    return counts


def tally(rows: GeneratedRows) -> np.ndarray:
    """Number of rows by label and true probability, ``[2, BINS]``."""
    tally = torch.bincount(rows.bins + BINS * rows.labels.long(), minlength=2 * BINS)
    return tally.cpu().numpy().reshape(2, BINS)


def split_of(files: list[str], counts: np.ndarray) -> Split:
    """The description of a split, given its files and :func:`tally`."""
    return Split(files=tuple(files), rows=int(counts.sum()), positives=int(counts[1].sum()))

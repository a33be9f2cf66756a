"""How often each id of a prepared directory occurs: from its vocabularies, or counted."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from dlrm.data.parquet import RowGroupReader
from dlrm.data.preprocess.vocabulary import opened
from dlrm.data.schema import DESCRIBED, META_FILE, Categorical, Meta
from dlrm.utils.device import cpu_count

MOST_ROWS = 1 << 24  # training rows that are counted, of a larger split evenly spaced row groups
_COUNTED = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("id", "count")])


def read_counts(directory: str | os.PathLike[str], meta: Meta) -> list[Tensor]:
    """Occurrences of every id of every column, ``[cardinality]`` int64 each.

    They stand in the vocabularies, where ids that are not named count 0; if a column has none, or
    the data was described as it is (vocabularies there are of other ids), all are counted in the
    training rows.

    Raises:
        ValueError: a vocabulary is damaged, or names an id outside its table.
    """
    paths = [Path(directory) / meta.vocabulary_file(column.name) for column in meta.categorical]
    if meta.options.get("made_by") == DESCRIBED or not all(path.is_file() for path in paths):
        return count_ids(directory, meta)
    return [_of(path, column) for column, path in zip(meta.categorical, paths, strict=True)]


def _of(path: Path, column: Categorical) -> Tensor:
    """The counts of a vocabulary."""
    with opened(path) as file:
        ids, seen = file.read(columns=list(_COUNTED.names)).cast(_COUNTED).columns
    rows = column.cardinality
    first, last = (limit or 0 for limit in pc.min_max(ids).as_py().values())
    if first < 0 or last >= rows:
        raise ValueError(
            f"{path} names ids {first} .. {last}, {META_FILE} a table of {rows} rows for "
            f"{column.name!r}: they are not of one preparation; prepare the data again"
        )
    count = torch.zeros(rows, dtype=torch.int64)
    return count.index_add_(0, *(torch.tensor(values.to_numpy()) for values in (ids, seen)))


def count_ids(
    directory: str | os.PathLike[str], meta: Meta, most_rows: int = MOST_ROWS
) -> list[Tensor]:
    """Count ids in the training rows, or in a part of them and multiply.

    Args:
        directory: where the data lies.
        meta: its description.
        most_rows: of more rows than this, only every n-th row group is read.

    Returns:
        Occurrences of every id of every column, ``[cardinality]`` int64 each.
    """
    reader = RowGroupReader(directory, replace(meta, dense=()))
    groups = reader.row_groups("train")
    every = -(-sum(group.rows for group in groups) // most_rows)
    groups, at_once = groups[::every], cpu_count()
    counts = [torch.zeros(rows, dtype=torch.int64) for rows in meta.cardinalities]
    order = sorted(range(len(counts)), key=lambda index: meta.categorical[index].multi_hot)
    with ThreadPoolExecutor(at_once) as threads:
        for start in range(0, len(groups), at_once):
            for rows in threads.map(reader.read, groups[start : start + at_once]):
                columns = [*rows.ids, *(bags.ids for bags in rows.bags)]  # one-hot ones first
                for index, column in zip(order, columns, strict=True):
                    ids = torch.from_numpy(column.astype(np.int64))
                    counts[index].index_add_(0, ids, torch.ones_like(ids))
    return [count * every for count in counts]

"""How often each id occurs in a prepared directory: read from its vocabularies, or counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm.data.evidence import read_effects
from dlrm.data.parquet import RowGroupReader
from dlrm.data.prepare.vocabulary import read_vocabulary
from dlrm.data.schema import DESCRIBED, HASHED, META_FILE, Categorical, Meta
from dlrm.data.threads import map_in_order
from dlrm.utils.cpus import cpu_count

MOST_ROWS = 1 << 24  # training rows to count; of a larger split, evenly spaced row groups
MOST_HASHED = 1 << 20  # if ids are hashes, which must be sorted
Counts = Callable[[], list[Tensor]]
"""Returns the occurrences of every id of every column, as :func:`read_frequencies`."""


class IdStatistics:
    """How often the ids of each column occur, and what they say about the label; both are read when
    they are first asked for."""

    def __init__(self, directory: str | os.PathLike[str], meta: Meta) -> None:
        self.meta = meta
        self.counts = cache(lambda: read_frequencies(directory, meta))
        self.effects = cache(lambda: read_effects(directory, meta, self.counts))


def read_frequencies(directory: str | os.PathLike[str], meta: Meta) -> list[Tensor]:
    """Occurrences of every id of every column, ``[cardinality]`` int64 each.

    They are read from the vocabularies; an id that is not listed has count 0. If a column has no
    vocabulary, or the data was described by ``describe_parquet.py`` (any vocabularies there belong
    to other ids), the ids of the training rows are counted.

    Raises:
        ValueError: a vocabulary is damaged, or lists an id outside its table.
    """
    paths = [Path(directory) / meta.vocabulary_file(column.name) for column in meta.categorical]
    if HASHED in meta.cardinalities or meta.options.get("made_by") == DESCRIBED:
        return count_ids(directory, meta)
    if not all(path.is_file() for path in paths):
        return count_ids(directory, meta)
    files = zip(paths, meta.categorical, strict=True)
    return list(map_in_order(lambda file: _listed(*file), files, cpu_count()))


def _listed(path: Path, column: Categorical) -> Tensor:
    """The counts in a vocabulary."""
    ids, counts = read_vocabulary(path, ["id", "count"]).columns
    rows = column.cardinality
    first, last = (limit or 0 for limit in pc.min_max(ids).as_py().values())
    if first < 0 or last >= rows:
        raise ValueError(
            f"{path} lists ids {first} .. {last}, but {META_FILE} has a table of {rows} rows for "
            f"{column.name!r}: they were not prepared together; prepare the data again"
        )
    result = torch.zeros(rows, dtype=torch.int64)
    return result.index_add_(0, *(torch.tensor(values.to_numpy()) for values in (ids, counts)))


def count_ids(
    directory: str | os.PathLike[str], meta: Meta, most_rows: int = MOST_ROWS
) -> list[Tensor]:
    """Occurrences of every id of every column in the training rows, ``[cardinality]`` int64 each;
    of hashed ids of those that occur, in any order.

    If there are more than ``most_rows``, only every n-th row group is read, and they are estimates.

    Raises:
        ValueError: there are more ids than fit in memory, or the data is damaged.
    """
    hashes: list[list[NDArray[np.int64]]] = [[] for _ in meta.cardinalities]
    if HASHED in meta.cardinalities:
        most_rows = min(most_rows, MOST_HASHED)
    reader = RowGroupReader(directory, replace(meta, dense=()))
    row_groups = reader.row_groups("train")
    every = -(-sum(row_group.rows for row_group in row_groups) // most_rows)
    try:
        # A column of hashed ids has none before they are counted.
        counts = [torch.zeros(rows % HASHED, dtype=torch.int64) for rows in meta.cardinalities]
    except RuntimeError:  # of PyTorch, if there is not enough memory
        column = max(meta.categorical, key=lambda column: column.cardinality)
        raise ValueError(
            f"{directory}: the counts of {sum(meta.cardinalities):,} ids do not fit in memory, "
            f"most of them of {column.name!r}; renumber the ids from 0, the most frequent first"
        ) from None

    def add(column: tuple[int, np.ndarray]) -> None:
        number, values = column
        if meta.cardinalities[number] == HASHED:
            hashes[number].append(values.ravel())
            return
        ids = torch.from_numpy(values.ravel().astype(np.int64))
        counts[number].index_add_(0, ids, torch.ones_like(ids))

    for rows in map_in_order(reader.read, row_groups[::every], cpu_count()):
        list(map_in_order(add, enumerate(rows.ids), cpu_count()))
    for number, parts in enumerate(hashes):
        if parts:
            found = np.unique(np.concatenate(parts), return_counts=True)[1]
            counts[number] = torch.from_numpy(found)
    return [count.mul_(every) for count in counts]

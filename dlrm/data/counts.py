"""How often each id of a prepared directory occurs, from its vocabularies."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from pyarrow import parquet
from torch import Tensor

from dlrm.data.schema import Meta


def read_counts(directory: str | os.PathLike[str], meta: Meta) -> list[Tensor] | None:
    """Occurrences of every id of every column, ``[cardinality]`` int64 each.

    None where a column has no vocabulary. Ids that it does not name count 0.
    """
    counts = []
    for column in meta.categorical:
        path = Path(directory) / meta.vocabulary_file(column.name)
        if not path.is_file():
            return None
        table = parquet.read_table(path, columns=["id", "count"])
        count = torch.zeros(column.cardinality, dtype=torch.int64)
        ids, seen = (torch.tensor(table[name].to_numpy()) for name in ("id", "count"))
        counts.append(count.index_add_(0, ids.long(), seen.long()))
    return counts

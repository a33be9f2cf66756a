"""Training on a share of the negatives, the same rows in every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlrm.data.column_values import Sampling
from dlrm.data.parquet import RowGroup, RowGroupReader
from dlrm.data.threads import map_in_order
from dlrm.utils.cpus import cpu_count


def sample_negatives(
    reader: RowGroupReader, row_groups: Sequence[RowGroup], share: float, seed: int
) -> list[RowGroup]:
    """Row groups of a split that keep all rows but a random part of those with label 0.

    All labels are read, to know how many rows are left. Which they are depends only on the seed and
    on the position of a row in the files.

    Raises:
        ValueError: ``share``, the part that is kept, is out of (0, 1], no row is left, or a row
            group is damaged.
    """
    if not 0 < share <= 1:
        raise ValueError(f"negatives is {share}, it must be above 0 and at most 1")
    if share == 1:
        return list(row_groups)

    def sampled(numbered: tuple[int, RowGroup]) -> RowGroup:
        number, row_group = numbered
        sampling = Sampling(share, (seed, number))
        labels = reader.labels(reader.read_table(row_group, [reader.meta.label]), row_group)
        return replace(row_group, rows=int(sampling.kept(labels).sum()), sampling=sampling)

    found = list(map_in_order(sampled, enumerate(row_groups), cpu_count()))
    left = [row_group for row_group in found if row_group.rows]
    if not left:
        raise ValueError(
            f"negatives is {share}, which keeps no row of {reader.directory}: all labels are 0; "
            "raise it"
        )
    return left

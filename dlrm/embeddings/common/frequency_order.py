"""The ids of several tables in order of how often they occur."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FrequencyOrder:
    """All ids, the most frequent first; among equally frequent ones, earlier tables and ids first.

    Neighbours mostly have equal counts, since the ids of a table are in order of falling frequency:
    runs of equal counts are sorted, of which 200 M ids have some ten thousand.

    Args:
        counts: occurrences of each id, one tensor ``[V]`` per table, in falling order except for
            single ids.
    """

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self._num_tables = len(counts)
        runs = [count.unique_consecutive(return_counts=True) for count in counts]
        values, lengths = (torch.cat(part) for part in zip(*runs, strict=True))
        order = values.argsort(descending=True, stable=True)
        sizes = torch.tensor([len(value) for value, _ in runs])
        table = torch.arange(len(runs)).repeat_interleave(sizes)
        self._table, self._lengths = table[order], lengths[order]
        self._before = self._lengths.cumsum(0) - self._lengths  # ids in front of each run

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def first(self, number: int) -> list[int]:
        """How many ids of each table are among the first ``number``."""
        taken = (number - self._before).clamp(min=0).minimum(self._lengths)
        return taken.new_zeros(self._num_tables).index_add_(0, self._table, taken).tolist()

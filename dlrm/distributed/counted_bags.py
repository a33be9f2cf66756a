"""Bags with counts of their ids on the host, as needed to send them to other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.utils.bags import Bags
from dlrm.utils.offsets import offsets_of


@dataclass(frozen=True)
class CountedBags:
    """The bags of several tables, one table after another."""

    ids: Tensor  # [nnz]
    lengths: Tensor  # [F, B]
    counts: Sequence[int]  # ids of each table, on the host
    bag_sizes: Sequence[int] | None = None  # the length of all bags of each table, if it is fixed

    @classmethod
    def of(cls, bags: Bags, num_tables: int, bag_sizes: Sequence[int] | None = None) -> CountedBags:
        """Count the ids of bags. Without ``bag_sizes`` the host waits for the device."""
        lengths = bags.offsets.diff().view(num_tables, -1)
        if bag_sizes is None:
            return cls(bags.ids, lengths, lengths.sum(1).tolist())
        counts = [size * lengths.shape[1] for size in bag_sizes]
        return cls(bags.ids, lengths, counts, bag_sizes)

    @property
    def batch(self) -> int:
        """Number of samples B."""
        return self.lengths.shape[1]

    def bags(self) -> Bags:
        """The bags without the counts."""
        return Bags(self.ids, offsets_of(self.lengths))

    def select(self, tables: Tensor, numbers: Sequence[int]) -> CountedBags:
        """The bags of some tables, whose numbers are given on the device and on the host."""
        by_table = self.ids.split(list(self.counts))
        return CountedBags(
            torch.cat([self.ids[:0], *(by_table[table] for table in numbers)]),
            self.lengths.index_select(0, tables),
            [self.counts[table] for table in numbers],
            None if self.bag_sizes is None else [self.bag_sizes[table] for table in numbers],
        )

"""Bags of ids: which bag each id belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dlrm.utils.offsets import offsets_of


@dataclass(frozen=True)
class Bags:
    """The bags of several tables, one table after another."""

    ids: Tensor  # [nnz]
    lengths: Tensor  # [F, B]
    counts: Sequence[int]  # ids of each table, on the host
    bag_sizes: Sequence[int] | None = None  # the length of all bags of each table, if it is fixed

    @classmethod
    def of(
        cls, ids: Tensor, offsets: Tensor, num_tables: int, bag_sizes: Sequence[int] | None = None
    ) -> Bags:
        """The bags that begin at ``offsets [F * B + 1]``. Without ``bag_sizes`` the host waits for
        the device.
        """
        lengths = offsets.diff().view(num_tables, -1)
        if bag_sizes is None:
            return cls(ids, lengths, lengths.sum(1).tolist())
        return cls(ids, lengths, [size * lengths.shape[1] for size in bag_sizes], bag_sizes)

    @property
    def batch(self) -> int:
        """Number of samples B."""
        return self.lengths.shape[1]

    @property
    def offsets(self) -> Tensor:
        """Where each bag begins, and the end, ``[F * B + 1]``."""
        return offsets_of(self.lengths)

    def select(self, tables: Tensor, numbers: Sequence[int]) -> Bags:
        """The bags of some tables, whose numbers are given on the device and on the host."""
        by_table = self.ids.split(list(self.counts))
        return Bags(
            torch.cat([self.ids[:0], *(by_table[table] for table in numbers)]),
            self.lengths.index_select(0, tables),
            [self.counts[table] for table in numbers],
            None if self.bag_sizes is None else [self.bag_sizes[table] for table in numbers],
        )


def check_offsets(offsets: Tensor, count: int) -> None:
    """Raise unless offsets rise from 0 to the number of ids; on a GPU the check is asynchronous."""
    good = (offsets[0] == 0) & (offsets[-1] == count) & (offsets.diff() >= 0).all()
    if good.is_cuda:
        torch._assert_async(good)
    elif not good:
        raise ValueError(
            f"offsets must rise from 0 to the number of ids, {count}; "
            f"got {offsets.tolist()[:8]} ..."
        )


def bag_indices(offsets: Tensor, count: int) -> Tensor:
    """The index of the bag of each of ``count`` ids, in ascending order, ``[count]``."""
    index = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(index, offsets.diff(), output_size=count)


def row_offsets(rows: Sequence[int]) -> Tensor:
    """The first row of each table when tables are stored one after another, ``[F]``."""
    return torch.tensor([0, *accumulate(rows)][:-1])

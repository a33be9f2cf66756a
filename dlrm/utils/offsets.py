"""Offsets of parts that are stored one after another: bags of ids, and rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the start of each bag and the end of the last one, ``[n + 1]`` int64.

    Args:
        lengths: of ``n`` bags, integers of any shape; bags of several tables ``[F, B]`` are stored
            table by table.
    """
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
    return offsets


def row_offsets(rows: Sequence[int]) -> Tensor:
    """The first row of each table when tables are stored one after another, ``[F]``."""
    return torch.tensor([0, *accumulate(rows)][:-1])

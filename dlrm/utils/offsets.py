"""Offsets of bags, from their lengths."""

from __future__ import annotations

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

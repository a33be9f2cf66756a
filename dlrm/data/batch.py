"""One batch, feature-major: a column of the file is a row of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """``B`` samples of ``N`` dense features and ``F`` categorical features.

    One-hot batches carry ``ids [F, B]`` and no offsets. Batches with multi-hot features carry the
    ids of all bags as ``ids [nnz]``, table by table, and ``offsets [F * B + 1]``: the bag of
    feature ``f`` and sample ``b`` is ``ids[offsets[f * B + b] : offsets[f * B + b + 1]]``.
    """

    dense: Tensor  # [N, B] float32
    ids: Tensor  # [F, B] or [nnz], int32 or int64
    labels: Tensor  # [B] float32
    offsets: Tensor | None = None  # [F * B + 1] int64

    @property
    def size(self) -> int:
        """Number of samples B."""
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The batch on ``device``; asynchronous when this one is pinned."""
        return Batch(*(t if t is None else t.to(device, non_blocking=non_blocking) for t in self))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which copies to a GPU overlap with compute."""
        return Batch(*(t if t is None else t.pin_memory() for t in self))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory alive until the work queued on ``stream`` is done."""
        for tensor in self:
            if tensor is not None:
                tensor.record_stream(stream)

    def __iter__(self):
        return iter((self.dense, self.ids, self.labels, self.offsets))

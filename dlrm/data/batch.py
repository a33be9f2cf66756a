"""One batch, feature-major: a column of the file is a row of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """``B`` samples of ``N`` dense features and ``F`` categorical features.

    One-hot batches carry ``ids [F, B]`` and no offsets. Batches with multi-hot features carry the
    ids of all bags as ``ids [nnz]``, table by table, and ``offsets [F * B + 1]``: the bag of
    feature ``f`` and sample ``b`` is ``ids[offsets[f * B + b] : offsets[f * B + b + 1]]``. Whoever
    knows on the host where the ids of each table begin may add that, so that a model need not wait
    for the device to read it from the offsets.
    """

    dense: Tensor  # [N, B] float32
    ids: Tensor  # [F, B] or [nnz], int32 or int64
    labels: Tensor  # [B] float32
    offsets: Tensor | None = None  # [F * B + 1] int64
    bounds: tuple[int, ...] | None = None  # offsets[::B], on the host

    @property
    def size(self) -> int:
        """Number of samples B."""
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The batch on ``device``; asynchronous when this one is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which copies to a GPU overlap with compute."""
        return self._map(Tensor.pin_memory)

    def clone(self) -> Batch:
        """A copy, contiguous."""
        return self._map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory alive until the work queued on ``stream`` is done."""
        for tensor in (self.dense, self.ids, self.labels, self.offsets):
            if tensor is not None:
                tensor.record_stream(stream)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        offsets = None if self.offsets is None else function(self.offsets)
        rest = function(self.ids), function(self.labels), offsets, self.bounds
        return Batch(function(self.dense), *rest)


def joined(batches: Sequence[Batch]) -> Batch:
    """One-hot batches of the same features behind one another."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        dense=torch.cat([batch.dense for batch in batches], dim=1),
        ids=torch.cat([batch.ids for batch in batches], dim=1),
        labels=torch.cat([batch.labels for batch in batches]),
    )

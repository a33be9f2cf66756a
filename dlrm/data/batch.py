"""One batch, feature-major: a column of the file is a row of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dlrm.utils.bags import Bags
from dlrm.utils.offsets import offsets_of


@dataclass(frozen=True)
class Batch:
    """``B`` samples of ``N`` dense features and ``F`` categorical features.

    A one-hot batch has ``ids [F, B]`` and no offsets. A batch with multi-hot features has the ids
    of all bags as ``ids [nnz]``, table by table, and ``offsets [F * B + 1]``: the bag of feature
    ``f`` and sample ``b`` is ``ids[offsets[f * B + b] : offsets[f * B + b + 1]]``. The optional
    ``bounds`` says on the host where the ids of each table begin, so that a model need not wait for
    the device to read it from the offsets. If all bags of each feature have the same length,
    ``bag_sizes`` has these lengths. Batches of equal ``bag_sizes`` and size have equal shapes and
    offsets, so a captured step copies neither.
    """

    dense: Tensor  # [N, B] float32
    ids: Tensor  # [F, B] or [nnz], int32 or int64
    labels: Tensor  # [B] float32
    offsets: Tensor | None = None  # [F * B + 1] int64
    bounds: tuple[int, ...] | None = None  # offsets[::B], on the host
    total: int | None = None  # samples of all processes, if this batch is the share of one
    weights: Tensor | None = None  # [B] float32, of the samples; None: all 1
    bag_sizes: tuple[int, ...] | None = None  # [F] ids of each bag; None: ragged, or no offsets

    @property
    def size(self) -> int:
        """Number of samples B."""
        return self.labels.shape[0]

    @property
    def lookups(self) -> Tensor | Bags:
        """The ids ``[F, B]``, or the bags."""
        return self.ids if self.offsets is None else Bags(self.ids, self.offsets)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it has: dense, ids, labels, offsets, weights."""
        every = (self.dense, self.ids, self.labels, self.offsets, self.weights)
        return [tensor for tensor in every if tensor is not None]

    @property
    def total_size(self) -> int:
        """Number of samples of all processes together."""
        return self.size if self.total is None else self.total

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The batch on ``device``; the copy is asynchronous if this one is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which copies to a GPU overlap with compute."""
        return self.map(Tensor.pin_memory)

    def clone(self) -> Batch:
        """A contiguous copy."""
        return self.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory alive until the work queued on ``stream`` is done."""
        for tensor in self.tensors:
            tensor.record_stream(stream)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with a function applied to each of its tensors."""
        return replace(
            self,
            dense=function(self.dense),
            ids=function(self.ids),
            labels=function(self.labels),
            offsets=None if self.offsets is None else function(self.offsets),
            weights=None if self.weights is None else function(self.weights),
        )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join batches of the same features, one after another.

    Multi-hot batches must have ``bounds``.
    """
    if len(batches) == 1:
        return batches[0]

    weights = [batch.weights for batch in batches if batch.weights is not None]
    whole = Batch(
        dense=torch.cat([batch.dense for batch in batches], dim=1),
        ids=torch.cat([batch.ids for batch in batches], dim=-1),
        labels=torch.cat([batch.labels for batch in batches]),
        weights=torch.cat(weights) if weights else None,
    )
    if batches[0].offsets is None:
        return whole

    # Bags are stored table by table: split the ids of each batch by table, then join the tables.
    bounds = [batch.bounds or () for batch in batches]
    counts = [[end - start for start, end in pairwise(ends)] for ends in bounds]
    ids = [batch.ids.split(sizes) for batch, sizes in zip(batches, counts, strict=True)]
    of_features = [part for feature in zip(*ids, strict=True) for part in feature]
    ends = tuple(map(sum, zip(*bounds, strict=True)))

    if (sizes := batches[0].bag_sizes) is not None:
        offsets = fixed_offsets(sizes, whole.size, whole.ids.device)
    else:
        lengths = [b.offsets.diff().view(-1, b.size) for b in batches if b.offsets is not None]
        offsets = offsets_of(torch.cat(lengths, dim=1))
    return replace(whole, ids=torch.cat(of_features), offsets=offsets, bounds=ends, bag_sizes=sizes)


def fixed_bags(
    bag_sizes: Sequence[int], size: int, device: torch.device | str
) -> tuple[Tensor, tuple[int, ...]]:
    """Return ``offsets [F * B + 1]`` and ``bounds`` of ``size`` samples with bags of fixed lengths.

    Args:
        bag_sizes: ids of each bag of each feature, 0 or more.
        size: samples B.
        device: of the offsets.
    """
    sizes = torch.tensor(tuple(bag_sizes), dtype=torch.int64)
    starts = offsets_of(sizes * size)
    within = torch.arange(size) * sizes[:, None]  # [F, B]
    offsets = torch.cat([(starts[:-1, None] + within).flatten(), starts[-1:]])
    return offsets.to(device), tuple(starts.tolist())


@lru_cache(maxsize=4)
def fixed_offsets(bag_sizes: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return the offsets of :func:`fixed_bags`, which all batches share: do not change them."""
    with torch.inference_mode(False):  # an evaluation may be the first to ask, before training
        return fixed_bags(bag_sizes, size, device)[0]


class RowBuffer:
    """A one-hot batch in one buffer, so that a single copy transfers it to a GPU.

    Its columns are NumPy arrays to fill; :meth:`to` turns them into tensors. Every call to PyTorch
    costs microseconds in every batch, so there are few of them.

    Args:
        size: samples B.
        dense: dense features N.
        one_hot: one-hot features F.
        ids: type of the ids, int32 or int64.
        pinned: use page-locked memory.
        weighted: leave room for sample weights too.
    """

    def __init__(
        self,
        size: int,
        *,
        dense: int,
        one_hot: int,
        ids: np.dtype,
        pinned: bool,
        weighted: bool = False,
    ) -> None:
        ids_end = one_hot * size * ids.itemsize // 4  # in words of four bytes
        self._dense_start = _aligned(ids_end)
        dense_end = self._dense_start + dense * size
        self._labels_start = _aligned(dense_end)
        end = self._labels_start + size
        self._weights_start = _aligned(end)
        if weighted:
            end = self._weights_start + size

        self._words = torch.empty(_aligned(end), dtype=torch.int32, pin_memory=pinned)
        words = self._words.numpy()
        floats = words.view(np.float32)
        self.ids = words[:ids_end].view(ids).reshape(one_hot, size)
        self.dense = floats[self._dense_start : dense_end].reshape(dense, size)
        self.labels = floats[self._labels_start : self._labels_start + size]
        self.weights = floats[self._weights_start : end] if weighted else None

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``; a copy to a GPU is asynchronous."""
        words = self._words.to(device, non_blocking=True)
        floats = words.view(torch.float32)
        ids = words if self.ids.itemsize == 4 else words.view(torch.int64)
        (features, size), dense = self.ids.shape, len(self.dense)
        weights = None
        if self.weights is not None:
            weights = floats.as_strided((size,), (1,), self._weights_start)
        return Batch(
            dense=floats.as_strided((dense, size), (size, 1), self._dense_start),
            ids=ids.as_strided((features, size), (size, 1)),
            labels=floats.as_strided((size,), (1,), self._labels_start),
            weights=weights,
        )


def _aligned(words: int) -> int:
    """``words`` rounded up to 256 bytes, the alignment of PyTorch's tensors on a GPU."""
    return -(-words // 64) * 64

"""One batch, feature-major: a column of the file is a row of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

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
    """Join batches of the same features, one after another; multi-hot ones must have ``bounds``."""
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
    """``offsets [F * B + 1]`` and ``bounds`` of ``size`` samples B with bags of fixed lengths."""
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

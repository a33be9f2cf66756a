"""Random batches with the skew of real ids, and the models of published benchmarks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dlrm.data.batch import Batch, fixed_bags
from dlrm.data.schema import KAGGLE_CARDINALITIES, MLPERF_BAG_SIZES, TERABYTE_CARDINALITIES
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training.step import TrainStep
from dlrm.utils.offsets import offsets_of
from scripts.benchmarks import harness

EXPONENT = 1.05  # of the power law
NAMES = [f"C{number}" for number in range(1, 27)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Tables and layers of a published model, which has 13 dense features."""

    rows: tuple[int, ...]
    """Of each table, at full size."""
    dim: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of :class:`DLRM`, where they are not the defaults."""
    bag_sizes: tuple[int, ...] | None = None
    """Ids of each table for a sample; None: one."""

    def capped(self, cap: int | None) -> list[int]:
        """Rows of the tables, at most ``cap`` in each."""
        return [min(rows, cap or rows) for rows in self.rows]


TERABYTE_MLPS = {"bottom_mlp": (512, 256), "top_mlp": (1024, 1024, 512, 256)}
CROSS = {"interaction": "dcn", "cross_layers": 3, "cross_rank": 512}
SHAPES = {
    "kaggle": Shape(rows=KAGGLE_CARDINALITIES, dim=16),
    "terabyte": Shape(rows=TERABYTE_CARDINALITIES, dim=128, options=TERABYTE_MLPS),
    "mlperf": Shape(
        rows=TERABYTE_CARDINALITIES,
        dim=128,
        options=TERABYTE_MLPS | CROSS,
        bag_sizes=MLPERF_BAG_SIZES,
    ),
}
"""Criteo Kaggle's model, MLPerf v1's DLRM, and MLPerf's multi-hot DLRM-DCNv2."""


def make_step(
    model: DLRM, rule: str = "sgd", *, precision: str, mode: str = "auto", **options: Any
) -> TrainStep:
    """A step of a model: SGD for its dense layers, and ``rule`` for its tables."""
    optimizers = [
        RowOptimizer(model.dense_parameters(), "sgd", lr=0.01),
        RowOptimizer(model.sparse_arch.parameters(), rule, lr=0.01),
    ]
    return TrainStep(model, optimizers, precision=precision, mode=mode, **options)


def step_milliseconds(
    step: TrainStep, batches: Sequence[Batch], device: str, captures: int, **counts: int
) -> dict[str, Any]:
    """The median time of a step on batches in turn, and the range, over several captures of it:
    the driver schedules the branches of every CUDA graph again.
    """
    times = []
    for _ in range(1 if device == "cpu" else captures):
        step.graphs.close()
        run = lambda i: step(batches[i % len(batches)])  # noqa: E731
        times.append(harness.milliseconds(run, device, **counts))
    return {"ms": statistics.median(times), "ms_range": [min(times), max(times)]}


def losses(step: TrainStep, batches: Sequence[Batch]) -> list[float]:
    """The losses of a step on each batch in turn."""
    return [step(batch)["loss"].item() for batch in batches]


def worst_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest difference between two series of losses."""
    return max(abs(a - b) for a, b in zip(expected, found, strict=True))


def draw_ids(
    rows: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    skewed: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random ids of tables with these numbers of rows, ``[F, size]`` int32.

    They are uniform or, if skewed, log-uniform: id i is about i + 1 times as rare as id 0.
    """
    many = torch.tensor(rows, device=device, dtype=torch.float64)[:, None]
    shape = len(rows), size
    uniform = torch.rand(shape, device=device, dtype=torch.float64, generator=generator)
    ids = (many + 1) ** uniform - 1 if skewed else many * uniform
    return ids.minimum(many - 1).int()


@cache
def expected_counts(rows: tuple[int, ...], total: int) -> list[Tensor]:
    """How often each id of each table occurs in ``total`` rows of skewed ids."""
    ids = [torch.arange(1, size + 1, dtype=torch.float64) for size in rows]
    shares = ((1 / each).log1p() / math.log(len(each) + 1) for each in ids)
    return [(share * total).round().long() for share in shares]


def draw_batch(
    rows: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    skewed: bool = True,
    generator: torch.Generator | None = None,
) -> Batch:
    """A random batch with 13 dense features, a quarter of its labels 1; see :func:`draw_ids`."""
    ids = draw_ids(rows, size, device, skewed=skewed, generator=generator)
    dense = torch.randn(13, size, device=device, generator=generator)
    labels = torch.rand(size, device=device, generator=generator) < 0.256
    return Batch(dense, ids, labels.float())


def draw_bags(
    rows: Sequence[int],
    bag_sizes: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    ragged: bool = False,
    generator: torch.Generator | None = None,
) -> Batch:
    """A random multi-hot batch, its ids skewed; see :func:`draw_batch`.

    Args:
        rows: of each table.
        bag_sizes: ids of each bag of each table.
        size: samples B.
        device: of the batch.
        ragged: lengths are random, from 0 to twice ``bag_sizes``, which are their means.
        generator: of the random numbers.
    """
    one_hot = draw_batch(rows, size, device, generator=generator)
    offsets, bounds = fixed_bags(bag_sizes, size, device)
    if ragged:
        means = torch.tensor(bag_sizes, device=device).repeat_interleave(size)
        uniform = torch.rand(len(means), device=device, generator=generator)
        offsets = offsets_of((uniform * (2 * means + 1)).long())
        bounds = tuple(offsets[::size].tolist())
    ids = [
        draw_ids([table], end - begin, device, generator=generator)[0]
        for table, (begin, end) in zip(rows, pairwise(bounds), strict=True)
    ]
    sizes = None if ragged else tuple(bag_sizes)
    return replace(one_hot, ids=torch.cat(ids), offsets=offsets, bounds=bounds, bag_sizes=sizes)


def power_law(rows: int, lookups: int, device: str = "cuda") -> Tensor:
    """Ids from a power law over the rows of a table, ``[lookups]`` int64."""
    uniform = torch.rand(lookups, device=device, dtype=torch.float64)
    power = 1 - EXPONENT
    return (((rows**power - 1) * uniform + 1) ** (1 / power)).long().clamp(1, rows) - 1

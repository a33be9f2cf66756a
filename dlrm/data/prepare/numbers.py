"""Transforms of numbers, and the statistics that they need.

========= ======================================================================================
none      x; at most 250 times what 99% of the rows are below, and 1,000 or more
log       log(max(x, 0) + 1), as in the reference DLRM
log3      log(max(x, -2) + 3), as in TorchRec
standard  (x - mean) / standard deviation, of the numbers that ``none`` leaves alone; at most 100
robust    asinh((x - median) / interquartile range): about linear in the middle and logarithmic in
          the tails, whatever the unit of a price and however huge a few are
auto      none if the numbers are of the size that a network expects, at most 100; 0 if all are the
          same, as nothing is learned of others; else robust
quantile  the number of the bucket, of which all have about equally many rows: an id
========= ======================================================================================

A missing number becomes 0 *after* the transform: the mean, the median, or the number 0. With
``log3`` it counts as the number 0, as in the preparation of Criteo's rows, and with ``quantile`` it
is a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUANTILE_VALUES = 1 << 22
"""Numbers that quantiles are computed from: of more rows, evenly spaced ones. 32 MB."""
LARGE, SMALL = 4.0, 0.1  # between these, the size of a number is left alone
LIMIT = 100.0  # what a number counts as that is beyond it, among numbers of the usual size
FAR = 250.0  # the same where the transform is given, in units of the usual size
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A transform of numbers to float32, with what it learned from the training rows."""

    transform: str
    """Any but ``auto`` and ``quantile``."""
    center: float = 0.0
    scale: float = 1.0
    limit: float = FLOAT32_MAX
    """The largest absolute value of the result of ``none``, ``standard`` and ``robust``."""

    def as_json(self) -> dict[str, object]:
        """Plain values; without a limit, those of versions that had none."""
        plain = asdict(self)
        if self.limit == FLOAT32_MAX:
            del plain["limit"]
        return plain

    def beyond(self, values: Floats) -> Floats:
        """Those of the ``values`` that count as less than they are."""
        return values[np.abs(values - self.center) > self.limit * self.scale]

    def apply(self, values: Floats) -> NDArray[np.float32]:
        """The transformed ``values [n]``; missing ones are NaN and become 0."""
        x = values
        if self.transform in ("log", "log3"):
            low, shift = (0.0, 1.0) if self.transform == "log" else (-2.0, 3.0)
            x = np.clip(np.where(np.isnan(x), 0.0, x), low, FLOAT32_MAX)
            return np.log(x + shift).astype(np.float32)
        if self.transform in ("standard", "robust"):
            x = (x - self.center) / self.scale
            x = np.arcsinh(x) if self.transform == "robust" else x
        return np.nan_to_num(np.clip(x, -self.limit, self.limit), nan=0.0).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is known of a number in the training rows."""

    rows: int
    missing: int
    mean: float
    deviation: float
    sample: Floats
    """In the order of the rows; no missing ones."""

    @property
    def constant(self) -> bool:
        """Whether all numbers are the same, or none is there."""
        same = not len(self.sample) or self.sample.min() == self.sample.max()
        return bool(same and self.deviation <= 1e-9 * abs(self.mean))


def summarise(blocks: Iterable[Floats], rows: int) -> Summary:
    """Summarise ``rows`` numbers in blocks, in the memory of one block and the sample."""
    every = max(1, -(-rows // QUANTILE_VALUES))
    done, present, mean, squares = 0, 0, 0.0, 0.0
    samples = []

    for block in blocks:
        samples.append(block[-done % every :: every])
        done += len(block)
        values = block[~np.isnan(block)]
        if len(values):
            # Chan, Golub and LeVeque 1979: the mean and the sum of squares of two parts.
            count, delta = len(values), values.mean() - mean
            squares += np.square(values - values.mean()).sum()
            squares += delta**2 * present * count / (present + count)
            mean += delta * count / (present + count)
            present += count

    sample = np.concatenate([*samples, np.empty(0)])
    return Summary(
        rows=done,
        missing=done - present,
        mean=float(mean),
        deviation=float(np.sqrt(squares / max(1, present))),
        sample=sample[~np.isnan(sample)],  # sorting it would take most of the time
    )


def fit_scaling(transform: str, summary: Summary) -> Scaling:
    """The scaling of a number, with ``auto`` decided."""
    if transform == "auto" and summary.constant:
        return Scaling(transform="none", limit=0.0)
    if not len(summary.sample):
        return Scaling(transform=transform)

    # Numbers of the usual size stay as they are.
    low, quarter, median, three_quarters, high = np.quantile(
        summary.sample, (0.001, 0.25, 0.5, 0.75, 0.999)
    )
    if transform == "auto":
        if low >= -LARGE and high <= LARGE and summary.deviation >= SMALL:
            return Scaling(transform="none", limit=LIMIT)
        transform = "robust"

    if transform in ("none", "standard"):
        size = np.quantile(np.abs(summary.sample), 0.99, method="lower")
        limit = FAR * float(max(LARGE, size))
        if transform == "none":
            return Scaling(transform=transform, limit=limit)

        # One absurd number would be all that the mean and the deviation tell of.
        mean, deviation = summary.mean, summary.deviation
        usual = summary.sample[np.abs(summary.sample) <= limit]
        if len(usual) < len(summary.sample):
            mean, deviation = float(usual.mean()), float(usual.std())
        return Scaling(transform=transform, center=mean, scale=_positive(deviation), limit=LIMIT)

    if transform == "robust":
        # Most values may be the same, such as 0: then the width of more of them.
        scale = _positive(three_quarters - quarter, high - low, summary.deviation)
        return Scaling(transform=transform, center=float(median), scale=scale)
    return Scaling(transform=transform)


def bucket_edges(summary: Summary, buckets: int) -> Floats:
    """The rising limits between at most ``buckets`` buckets with equally many rows.

    Bucket i holds the numbers from edge i - 1 up to, but without, edge i. Equal numbers are never
    parted, so there are fewer buckets if a few numbers are frequent.
    """
    if not len(summary.sample):
        return np.empty(0)
    places = np.arange(1, buckets) / buckets
    edges = np.unique(np.quantile(summary.sample, places, method="higher"))
    return edges[edges > summary.sample.min()]  # else the first bucket would be empty


def bucket_names(edges: Floats) -> list[str]:
    """A text for each bucket, as its value in the vocabulary; "" is a missing number."""
    limits = ["-inf", *(repr(float(edge)) for edge in edges), "inf"]
    return [*(f"[{low}, {high})" for low, high in pairwise(limits)), ""]


def bucket_numbers(values: Floats, edges: Floats) -> NDArray[np.int32]:
    """The bucket of each number; a missing one is in the last, ``len(edges) + 1``."""
    found = np.searchsorted(edges, values, side="right")
    found[np.isnan(values)] = len(edges) + 1
    return found.astype(np.int32)


def _positive(*widths: float) -> float:
    return float(next((width for width in widths if width > 0), 1.0))

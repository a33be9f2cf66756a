"""Which numbers say anything of the label.

In a table of hundreds of numbers, a network learns noise from those that say nothing: 54 of 60 cost
more than trees have over it. A number says something if the share of positive labels differs among
its ranges by more than by chance, or among the ranges of two numbers together by more than what
both say alone; so the factors of a product are found, which say nothing alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .numbers import bucket_edges, fit_scaling, summarise
from .values import is_number

FEW_NUMBERS = 16  # so many do little harm, and are not judged
RANGES, MERGED = 8, 2  # ranges of a number; so many are one where two numbers are looked at
ALONE, TOGETHER = 3.0, 8.0  # standard deviations beyond chance: of pairs, thousands are tried
CLEAR = 2.0  # of some number, relative to these; else those that are found may be there by chance
GAPS = 4.0  # standard deviations, of missing values and of curves
DEGREE = 3  # of the curve over a number that a network learns as soon
EXACT = 1e-9  # variance of what is left; less is rounding, and nothing is left
MOST_CURVED = 1 << 14  # of more rows, random ones show whether there is a curve
MOST_ROWS = 1 << 16  # of more, random ones are looked at
MOST_PRODUCTS = 1 << 31  # of rows and pairs of numbers
MOST_NUMBERS = 1000  # of more, pairs are not looked at

Floats = NDArray[np.float64]


def telling(numbers: Iterable[NDArray[np.floating]], labels: NDArray[np.number]) -> Floats:
    """How sure it is that labels depend on each number.

    Args:
        numbers: ``[n]`` each; missing ones are NaN.
        labels: ``[n]`` 0 or 1.

    Returns:
        Standard deviations beyond chance, relative to those from which it is sure: more than 1 for
        numbers that say something; 0 for all if none is clear.
    """
    # In any order: each positive may be followed by as many negatives.
    rows = np.random.default_rng(0).permutation(len(labels))[:MOST_ROWS]
    ranges, labels = np.array([_ranges(own[rows]) for own in numbers]), labels[rows]
    residuals = labels - labels.mean(dtype=np.float64)
    variance = float(residuals.var()) or 1.0
    sums = [np.bincount(own, residuals).astype(float) for own in ranges]
    found = [beyond_chance(np.bincount(o), s, variance) for o, s in zip(ranges, sums, strict=True)]
    sure = alone = np.array(found) / ALONE
    if len(ranges) <= MOST_NUMBERS:
        # What numbers say alone is taken out, one after the other, before pairs are looked at.
        for own in ranges[alone > 1]:
            residuals -= (np.bincount(own, residuals) / np.bincount(own).clip(1))[own]
        most = MOST_PRODUCTS // len(ranges) ** 2
        together = _pairs(ranges[:, :most] // MERGED, residuals[:most]).max(axis=1)
        sure = np.maximum(alone, together / TOGETHER)
    return sure if sure.max() > CLEAR else np.zeros(len(sure))


def names_that_tell(
    names: Sequence[str], sample: Mapping[str, pa.Array], labels: NDArray[np.uint8] | None
) -> list[str]:
    """The numbers that say something of the labels, those that say most first."""
    known = [name for name in names if name in sample and is_number(sample[name].type)]
    if labels is None or not known:
        return []
    numbers = (
        sample[name].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) for name in known
    )
    sure = telling(numbers, labels)
    return [known[at] for at in np.argsort(-sure, kind="stable") if sure[at] > 1]


def _ranges(values: NDArray[np.floating]) -> NDArray[np.uint8]:
    """The range of each number, of which all have about equally many rows; the last if missing."""
    there = values[~np.isnan(values)]
    edges = np.quantile(there, np.arange(1, RANGES) / RANGES) if len(there) else np.empty(0)
    found = np.searchsorted(np.unique(edges), values, side="right")
    return np.where(np.isnan(values), RANGES, found).astype(np.uint8)


def beyond_chance(counts: NDArray[np.number], sums: Floats, variance: float) -> float:
    """By how many standard deviations the chi-square of the means of groups is above its mean, from
    the rows of each, the sums of their residuals, and the variance of all residuals."""
    freedom = max(int(np.count_nonzero(counts)) - 1, 1)
    chi_square = (sums**2 / counts.clip(1)).sum() / variance
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


def _pairs(ranges: NDArray[np.uint8], residuals: Floats) -> Floats:
    """The same for each pair of ``p`` numbers, beyond what both say alone.

    Args:
        ranges: ``[p, n]``.
        residuals: ``[n]``.

    Returns:
        ``[p, p]``.
    """
    p, each = len(ranges), int(ranges.max()) + 1
    rows = (ranges.T[:, :, None] == np.arange(each)).reshape(-1, p * each).astype(np.float32)
    counts, sums = rows.T @ rows, rows.T @ (rows * residuals[:, None].astype(np.float32))
    squares = (sums**2 / counts.clip(1)).reshape(p, each, p, each).sum((1, 3))
    squares /= residuals.var() or 1.0
    alone, occur = squares.diagonal(), counts.diagonal().reshape(p, each) > 0

    freedom = np.outer(occur.sum(1) - 1, occur.sum(1) - 1).clip(1)
    found: Floats = (squares - alone - alone[:, None] - freedom) / np.sqrt(2 * freedom)
    np.fill_diagonal(found, 0)
    return found


@np.errstate(over="ignore", invalid="ignore")  # of numbers near the largest
def buckets_tell(values: pa.Array, labels: NDArray[np.uint8] | None) -> float:
    """How sure it is that the buckets of a number say more of the labels than the number itself.

    That is so if labels depend on whether there is a value, or if the shares of positives in its
    ranges are on no smooth curve: a network learns one as soon, but waves and steps late.

    Args:
        values: ``[n]`` numbers.
        labels: ``[n]`` 0 or 1, if they are known.

    Returns:
        Standard deviations beyond chance, relative to those from which it is sure: more than 1 if
        they do.
    """
    if labels is None or not is_number(values.type):
        return 0.0
    numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    missing, mean, beyond = np.isnan(numbers), labels.mean(), 0.0
    if 0 < missing.sum() < len(missing):
        share = missing.mean()
        noise = np.sqrt(mean * (1 - mean) / (share * (1 - share) * len(labels))) or 1.0
        beyond = float(abs(labels[missing].mean() - labels[~missing].mean()) / noise)

    # What a curve over the number leaves, as a model sees it.
    rows = np.random.default_rng(0).permutation(np.flatnonzero(np.isfinite(numbers)))[:MOST_CURVED]
    if len(rows):
        summary = summarise([numbers[rows]], len(rows))
        seen = fit_scaling("auto", summary).apply(numbers[rows]).astype(np.float64)
        curves = np.vander((seen - seen.mean()) / (seen.std() or 1.0), DEGREE + 1)
        residuals = labels[rows] - curves @ np.linalg.lstsq(curves, labels[rows])[0]
        ranges = np.searchsorted(bucket_edges(summary, 32), numbers[rows], side="right")
        sums = np.bincount(ranges, residuals).astype(float)
        variance = max(float(residuals.var()), EXACT)
        beyond = max(beyond, beyond_chance(np.bincount(ranges), sums, variance))
    return beyond / GAPS

"""How often an id occurred, and the share of positives among its rows, as numbers of a row.

A row of an embedding table has to learn both from the few times that its id occurs. A preparation
counts them, so for each column of ids ``NAME`` there are two more dense features, ``count(NAME)``
and ``rate(NAME)``. For a training row, only earlier training rows count, so that no row knows its
own label. For all other rows, whenever they are scored, all training rows count. Counts of earlier
rows are those that are to be expected of all training rows: else they would tell the time, and be
larger in later rows than in any row that a model has learned from.

Where rows are in no order of time, earlier ones may be a class of their own, as in a file sorted by
the label. There, for a training row, a random half of the training rows counts that it is not in.

The shares of rare ids are noise, so rows with the average share are added to those of each id:
the fewer, the more the shares of the ids of the column differ (empirical Bayes). If they differ no
more than by chance, all rates are nearly 0.

Reference: Kleinman, "Proportions with Extraneous Variance", JASA 1973 (moments of beta-binomials).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..threads import map_in_order
from .vocabulary import POSITIVES, Vocabulary

FEW = 100  # rows; after fewer, the count to be expected is that after so many
LEAST = 1e-6  # share of positives; where there are none, the logit would be infinite
EFFECTS = 1e-6, 0.5  # bounds of the part of the variance of labels that the ids of a column explain


def rate_names(feature: str) -> tuple[str, str]:
    """The names of the two numbers of a column of ids."""
    return f"count({feature})", f"rate({feature})"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The counts that the numbers of a column of ids are made of."""

    counts: NDArray[np.int64]
    """``[V]`` rows of each id; ``[2 * V]`` for halves of the training rows, those of the other."""
    positives: NDArray[np.int64]
    """``[V]`` rows of each id whose label is 1."""
    share: float
    """Of positives among all training rows."""
    prior: float
    """Rows with this share that are added to those of each id."""
    rows: int
    """All training rows, those that are not counted yet included."""

    @classmethod
    def of(cls, vocabulary: Vocabulary, path: Path) -> Rates:
        """The counts in the vocabulary of a file, which must have positives.

        Raises:
            ValueError: it has no positives.
        """
        if vocabulary.positives is None:
            raise ValueError(f"{path} has no column {POSITIVES!r}; prepare the data again")
        counts, positives = vocabulary.counts, vocabulary.positives
        rows = int(counts.sum())
        share = float(np.clip(positives.sum() / max(1, rows), LEAST, 1 - LEAST))
        prior = prior_rows(counts, positives, share)
        return cls(counts=counts, positives=positives, share=share, prior=prior, rows=rows)

    def numbers(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The numbers of ``ids [n]``, both of the size that a network expects: ``[2, n]``, a
        quarter of log(1 + count), and how far the logit of the smoothed share of positives is from
        that of all rows.
        """
        return self._numbers(self.counts[ids], self.positives[ids], 1.0)

    def _numbers(
        self, counts: NDArray, positives: NDArray, expected: float | NDArray
    ) -> NDArray[np.float32]:
        """The numbers of rows; counts times ``expected`` are those of all training rows."""
        share = (positives + self.prior * self.share) / (counts + self.prior)
        rate = np.log(share / (1 - share)) - np.log(self.share / (1 - self.share))
        return np.stack([np.log1p(counts * expected) / 4, rate]).astype(np.float32)

    def numbers_of_training(
        self, ids: NDArray[np.int32], labels: NDArray[np.uint8]
    ) -> NDArray[np.float32]:
        """The numbers ``[2, n]`` of the next training rows, each of which counts for later ones."""
        # Rows of an id next to each other: a running sum, less what it is at their first row.
        order = np.argsort(ids, kind="stable")
        place = np.arange(len(ids))
        first = np.maximum.accumulate(np.where(np.diff(ids[order], prepend=-1), place, 0))
        sums = np.cumsum(labels[order], dtype=np.int64) - labels[order]

        seen = self.counts.sum() + place
        counts, positives = self.counts[ids], self.positives[ids]
        counts[order] += place - first
        positives[order] += sums - sums[first]
        np.add.at(self.counts, ids, 1)
        np.add.at(self.positives, ids, labels)
        return self._numbers(counts, positives, self.rows / np.maximum(seen, FEW))

    def numbers_by_half(
        self, ids: NDArray[np.int32], halves: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """The numbers of training rows, ``[2, n]``, for each of which the other half counts."""
        seen = self.counts.reshape(2, -1).sum(axis=1)[halves.astype(np.int8)]
        keys = ids + len(self.counts) // 2 * halves.astype(np.int64)
        counts, positives = self.counts[keys], self.positives[keys]
        return self._numbers(counts, positives, self.rows / np.maximum(seen, FEW))


def prior_rows(counts: NDArray[np.int64], positives: NDArray[np.int64], share: float) -> float:
    """The rows to add to those of each id, by how much the shares of positives of ids differ from
    ``share``, that of all rows."""
    often = counts > 1
    counts, positives = counts[often], positives[often]
    variance = share * (1 - share)

    # By chance alone, each square would be the variance of a label on average.
    beyond_chance = ((positives - counts * share) ** 2 / counts - variance).sum()
    effect = beyond_chance / variance / max(1, (counts - 1).sum())
    return float(1 / np.clip(effect, *EFFECTS) - 1)


def append_rates(
    rows: pa.RecordBatch,
    rates: Mapping[str, Rates],
    label: str | None = None,
    halves: NDArray[np.bool_] | None = None,
    threads: int = 1,
) -> pa.RecordBatch:
    """Append the numbers of columns of ids to prepared rows.

    Args:
        label: of training rows in order of time, the column of labels: these rows are counted.
        halves: of other training rows, the half that each is in, ``[n]``.
    """

    def numbers_of(feature: str) -> NDArray[np.float32]:
        ids = rows[feature].to_numpy()
        if halves is not None:
            return rates[feature].numbers_by_half(ids, halves)
        if label is None:
            return rates[feature].numbers(ids)
        return rates[feature].numbers_of_training(ids, rows[label].to_numpy())

    # A pool of threads takes longer to start than a few rows take.
    found = map_in_order(numbers_of, rates, threads) if threads > 1 else map(numbers_of, rates)
    columns, fields = list(rows.columns), list(rows.schema)
    for feature, numbers in zip(rates, found, strict=True):
        columns += map(pa.array, numbers)
        fields += [pa.field(name, pa.float32(), nullable=False) for name in rate_names(feature)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

"""How much the ids of each column say about the label, estimated from training rows.

Two rows with the same id have more similar labels than others if the id says something: the mean
product of their residuals is the variance of what ids say, their *effect*. It is estimated for ids
of like counts together, so that thousands of ids that occur a few times give one figure.

The residuals are what the other columns leave unexplained: a first-order score, the sum of the mean
residual of each id, shrunk by the same effects (empirical Bayes). Small columns explain first. So
of two columns that say the same, one has the effect: the rows of the other say nothing more. A
model is more than such a sum, so a part of what ids say alone is added. The numbers of the rows, in
bins, explain as small columns do: among them are the rates of ids, which say much of the same. The
counts of ids are numbers too. One that explains no more than by chance what all else leaves
unexplained would add noise to a model, so a preparation leaves it out; and of many other numbers
those that say nothing (:mod:`dlrm.data.prepare.telling`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..utils.cpus import cpu_count
from .parquet import RowGroupReader, Rows
from .prepare.rates import rate_names
from .prepare.telling import FEW_NUMBERS, beyond_chance, telling
from .schema import Meta
from .threads import map_in_order

MOST_ROWS = 1 << 20  # training rows to read; of a larger split, evenly spaced row groups
MOST_VALUES = 1 << 13  # of a number, to find bins
SWEEPS = 3  # over all columns
BINS = 32  # of a number, with as many rows each
RANGES = 24  # ids that occur once, 2 to 3 times, 4 to 7 times, ...
SMALLEST = 1e-4  # effect by which means are shrunk, if no more is found
SURE = 4.0  # standard deviations by which a number explains more than by chance
ALONE = 0.1  # part of what ids say alone that counts although other columns say it too

Floats = NDArray[np.float64]


class Effects(NamedTuple):
    """How much the ids of a column say about the label."""

    by_range: tuple[float, ...]
    """For each range of counts, as a part of the variance of the residuals."""
    rated: bool = False
    """Whether the rates of the ids are among the numbers of a row."""


def range_of(counts: ArrayLike) -> NDArray[np.int64]:
    """The range of each count: 0 for 0 and 1, 1 for 2 and 3, 2 for 4 to 7, ..."""
    exponent = np.frexp(np.asarray(counts, np.float64))[1]
    return np.clip(exponent - 1, 0, RANGES - 1)


class _Column:
    """The ids ``[nnz]`` of a column in the rows that were read, and what they are found to say.
    Each is of one of ``rows [nnz]``; None if each row has one id. The ``counts [V]`` are those of
    each id in all training rows.
    """

    def __init__(
        self,
        ids: NDArray[np.integer],
        rows: NDArray[np.int64] | None,
        counts: ArrayLike,
        num_rows: int,
    ) -> None:
        counts = np.asarray(counts)
        self.size = len(counts)
        if self.size > len(ids):  # most ids are in none of the rows, and take no memory then
            found = np.zeros(self.size, bool)
            found[ids] = True
            ids, counts = np.cumsum(found, dtype=np.int32)[ids] - 1, counts[found]

        self.ids, self.rows = ids, rows
        self.ranges = range_of(counts)
        self.seen: Floats = np.bincount(ids, minlength=len(self.ranges)).astype(float)
        self.lengths = None if rows is None else np.bincount(rows, minlength=num_rows).clip(1)
        self.seen_by_range = self.by_range(self.seen)
        self.pairs = self.by_range(self.seen * (self.seen - 1))  # of different rows
        self.means = np.zeros(len(self.ranges))

    def by_range(self, per_id: Floats) -> Floats:
        """The sums ``[RANGES]`` of figures ``[V]`` of the ids."""
        return np.bincount(self.ranges, per_id, RANGES).astype(float)

    def score(self, means: Floats) -> Floats:
        """The mean of what the ids of each row say, ``[N]``, if they say ``means``."""
        values = means[self.ids]
        if self.rows is None or self.lengths is None:
            return values
        sums: Floats = np.bincount(self.rows, values, len(self.lengths)).astype(float)
        return sums / self.lengths

    def sums(self, residuals: Floats) -> tuple[Floats, Floats]:
        """The sums for each id of the residuals ``[N]`` that are left without this column, given
        those with all columns, and of their squares."""
        values = residuals if self.rows is None else (residuals + self.score(self.means))[self.rows]
        sums: Floats = np.bincount(self.ids, values, len(self.seen)).astype(float)
        squares = np.bincount(self.ids, values * values, len(self.seen)).astype(float)
        if self.rows is None:  # the same as adding the score of each row first
            squares += self.means * (2 * sums + self.means * self.seen)
            sums += self.means * self.seen
        return sums, squares

    def effects(self, residuals: Floats) -> tuple[Floats, Floats, Floats]:
        """Effects by range ``[RANGES]``, the mean residual of the range of each id, and the sums of
        the residuals of each id, less this mean; see :meth:`sums`."""
        sums, squares = self.sums(residuals)
        variance = _variance(sums, squares, len(self.ids))

        # What counts alone explain is no effect of an id.
        means = (self.by_range(sums) / self.seen_by_range.clip(1))[self.ranges]
        squares += means * (means * self.seen - 2 * sums)
        sums -= means * self.seen

        effects = _smooth(self.by_range(sums**2 - squares) / variance, self.pairs)
        return effects, means, sums

    def explains(self, residuals: Floats, left: float) -> bool:
        """Whether the mean residuals of the ids, here bins of a number, differ by more than chance;
        ``left`` is the share of the degrees of freedom that no mean has taken."""
        sums, squares = self.sums(residuals)
        variance = _variance(sums, squares, len(residuals)) / left
        return beyond_chance(self.seen, sums, variance) > SURE


def _variance(sums: Floats, squares: Floats, count: int) -> float:
    """The variance of values, from sums of theirs and of their squares; 1 instead of 0."""
    count = max(count, 1)  # lists may all be empty
    return max(squares.sum() / count - (sums.sum() / count) ** 2, 0.0) or 1.0


def _smooth(products: Floats, pairs: Floats) -> Floats:
    """Mean products of pairs of each range; one of few pairs is near that of the next range.

    From ranges of frequent ids to those of rare ones, each has its neighbour as prior.
    """
    known = np.flatnonzero(pairs)
    effects = np.zeros(len(pairs))
    if not len(known):
        return effects
    overall = max(products.sum() / pairs.sum(), 1e-3)
    prior = max(products[known[-1]] / pairs[known[-1]], 0.0)
    for at in range(len(pairs) - 1, -1, -1):
        # The mean product of n pairs, each counted twice, has the variance 2 / n.
        weight = 1 / max(prior, overall / 4) ** 2
        prior = max((products[at] / 2 + prior * weight) / (pairs[at] / 2 + weight), 0.0)
        effects[at] = prior
    return effects


def estimate_effects(
    columns: Sequence[_Column], numbers: Sequence[_Column], labels: Floats
) -> tuple[list[tuple[float, ...]], list[bool]]:
    """The effects of all ``columns`` on labels ``[N]`` by range, beyond those of ``numbers``; and
    whether each of the numbers explains what all else does not.
    """
    residuals = labels - labels.mean()
    alone = [column.effects(residuals)[0] for column in columns]
    order = sorted([*numbers, *columns], key=lambda column: column.size)
    for _ in range(SWEEPS):
        spent = 0.0  # degrees of freedom: means that are hardly shrunk fit noise as well
        for column in order:
            effects, means, sums = column.effects(residuals)
            shrink = 1 / effects.clip(SMALLEST)[column.ranges]
            spent += (column.seen / (column.seen + shrink)).sum()
            before = column.means
            column.means = means + sums / (column.seen + shrink)
            residuals -= column.score(column.means - before)

    beyond = [column.effects(residuals)[0] for column in columns]
    found = [effect + ALONE * other for effect, other in zip(beyond, alone, strict=True)]
    left = 1 - min(spent / len(labels), 0.99)
    explain = [number.explains(residuals, left) for number in numbers]
    return [tuple(effect.round(6).tolist()) for effect in found], explain


def with_effects(
    directory: str | os.PathLike[str],
    meta: Meta,
    counts: Iterable[ArrayLike],
    doubtful: Collection[str] = (),
    most_rows: int = MOST_ROWS,
) -> Meta:
    """Estimate the effects of all columns from training rows, in bounded memory.

    Args:
        counts: occurrences of every id of every column in all training rows.
        doubtful: numbers that are left out if they are many and say nothing.
        most_rows: if there are more rows, only every n-th row group is read.

    Returns:
        The description with the effects, and without the counts and other numbers that say nothing.

    Raises:
        ValueError: the data is damaged.
    """
    reader = RowGroupReader(directory, replace(meta, weight=None))
    row_groups = reader.row_groups("train")
    every = -(-sum(row_group.rows for row_group in row_groups) // most_rows)
    parts = list(map_in_order(reader.read, row_groups[::every], cpu_count()))

    labels = np.concatenate([part.labels for part in parts]).astype(float)
    columns = [_column(parts, at, count) for at, count in enumerate(counts)]
    numbers = [_binned([part.dense[at] for part in parts]) for at in range(len(meta.dense))]
    effects, explain = estimate_effects(columns, numbers, labels)
    are_counts = {rate_names(name)[0] for name in meta.tables}
    chance = {name for name, explains in zip(meta.dense, explain, strict=True) if not explains}
    left_out = chance & are_counts | _silent(meta, doubtful, parts, labels)
    return replace(
        meta,
        dense=tuple(name for name in meta.dense if name not in left_out),
        effects=dict(zip(meta.tables, effects, strict=True)),
    )


def _silent(
    meta: Meta, numbers: Collection[str], parts: Sequence[Rows], labels: Floats
) -> set[str]:
    """Of many ``numbers``, of which less than half say something, those that say nothing."""
    if len(numbers) <= FEW_NUMBERS:
        return set()
    places = [at for at, name in enumerate(meta.dense) if name in numbers]
    columns = (np.concatenate([part.dense[at] for part in parts]) for at in places)
    says = telling(columns, labels) > 1
    few = 0 < says.sum() < len(places) / 2
    return {meta.dense[at] for at in np.array(places)[~says]} if few else set()


def _column(parts: Sequence[Rows], at: int, counts: ArrayLike) -> _Column:
    """The column of a number in all ``parts``."""
    ids = [part.ids[at] for part in parts]
    num_rows = sum(len(part.labels) for part in parts)
    lengths = [
        np.diff(offsets)
        if (offsets := part.offsets[at]) is not None
        else np.full(len(array), array.shape[1])
        if array.ndim == 2
        else None
        for part, array in zip(parts, ids, strict=True)
    ]
    bags = [length for length in lengths if length is not None]
    rows = np.repeat(np.arange(num_rows), np.concatenate(bags)) if bags else None
    return _Column(np.concatenate([array.ravel() for array in ids]), rows, counts, num_rows)


def _binned(parts: Sequence[NDArray[np.float32]]) -> _Column:
    """A number as a column: its ids are bins."""
    values = np.concatenate(parts)
    some = np.sort(values[:: -(-len(values) // MOST_VALUES)])
    edges = np.unique(some[np.arange(1, BINS) * len(some) // BINS])
    bins = np.searchsorted(edges, values, side="right").astype(np.uint8)
    return _Column(bins, None, np.bincount(bins, minlength=len(edges) + 1), len(values))


def read_effects(
    directory: str | os.PathLike[str], meta: Meta, counts: Callable[[], Sequence[ArrayLike]]
) -> list[Effects]:
    """The effects of all columns, from ``meta`` or, if it has none, from training rows; then
    ``counts`` returns the occurrences of every id of every column."""
    known = meta if meta.effects else with_effects(directory, meta, counts())
    rated = [rate_names(name)[1] in meta.dense for name in meta.tables]
    return [
        Effects(known.effects[name], rate) for name, rate in zip(meta.tables, rated, strict=True)
    ]

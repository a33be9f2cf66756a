"""Which split each row of a table belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm.data.prepare.column_options import SplitOptions
from dlrm.data.prepare.numbers import summarise
from dlrm.data.splits import split_by_shares

TRAIN = 0  # position in SPLITS
Codes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Assigns rows to splits."""

    options: SplitOptions
    rows: int
    """Of the whole table."""
    limits: tuple[float, float] = (np.inf, np.inf)
    """For ``time``: where validation and test begin."""

    def codes(self, first: int, count: int, column: NDArray | None) -> Codes:
        """The split of consecutive rows, ``[count]``: 0 train, 1 val, 2 test.

        Args:
            first: number of the first row in the table, from 0.
            count: number of rows.
            column: ``[count]`` what the split depends on, if it depends on a column.
        """
        by = self.options.by
        if by == "column":
            assert column is not None
            return column.astype(np.uint8)
        if by == "time":
            assert column is not None
            values, limits = column, self.limits
        else:
            train, val, _ = self.options.shares()
            index = np.arange(first, first + count, dtype=np.uint64)
            if by == "random":
                values, limits = _scrambled(index), (float(train), float(train + val))
            else:
                ranges = split_by_shares(self.rows, train, val)
                values, limits = index, (ranges["train"].stop, ranges["val"].stop)
        return (values >= limits[0]).astype(np.uint8) + (values >= limits[1])


def make_splitter(
    options: SplitOptions,
    rows: int,
    columns: Callable[[], Iterable[NDArray[np.float64]]],
    like_time: Callable[[str], float],
) -> Splitter:
    """The splitter of a table that has been read.

    Args:
        options: the options.
        rows: rows of the table.
        columns: the values of the split column in blocks, for ``time``.
        like_time: reads a limit as the values of that column are.
    """
    if options.by != "time":
        return Splitter(options=options, rows=rows)
    if options.val_from is not None and options.test_from is not None:
        limits = like_time(options.val_from), like_time(options.test_from)
        if limits[0] > limits[1]:
            raise ValueError(
                f"split: val_from is {options.val_from}, after test_from {options.test_from}; "
                "validation comes between training and test"
            )
        return Splitter(options=options, rows=rows, limits=limits)
    sample = np.sort(summarise(columns(), rows).sample)
    train, val, _ = options.shares()
    places = int(train * len(sample)), int((train + val) * len(sample))
    found = [float(sample[at]) if at < len(sample) else np.inf for at in places]
    return Splitter(options=options, rows=rows, limits=(found[0], found[1]))


def _scrambled(index: NDArray[np.uint64]) -> NDArray[np.floating]:
    """Numbers in [0, 1) that look random (SplitMix64; Steele, Lea and Flood 2014)."""
    x = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((x ^ x >> np.uint64(31)) >> np.uint64(11)) * 2.0**-53

"""Which split each row belongs to: in a preparation, and among synthetic rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..schema import SPLITS
from .column_options import SplitOptions
from .columns import SPLIT, ColumnPlan
from .numbers import summarise
from .spill import Spilled, SpilledBlock
from .values import numbers, times

DAYS = 7


def split_by_days(rows: Sequence[int]) -> dict[str, range]:
    """The rows of each split under the reference protocol, numbered over all files, by the rows of
    each.

    All days but the last are for training. The first half of the last day is for test, the second
    for validation. A day is a file that has rows, or a seventh of the rows if there is a single
    such file (the rows left over go to training).
    """
    days = [count for count in rows if count]  # a limit may leave the last files unread
    total = sum(days)
    last = days[-1] if len(days) > 1 else total // DAYS
    first = total - last
    half = first + (last + 1) // 2
    return {"train": range(first), "test": range(first, half), "val": range(half, total)}


def split_by_shares(rows: int, train: Fraction, val: Fraction) -> dict[str, range]:
    """The rows of each split if train, val and test follow one another, test taking the rest."""
    first, second = int(train * rows), int((train + val) * rows)
    return {"train": range(first), "val": range(first, second), "test": range(second, rows)}


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Assigns rows to splits: by their position, or by their values."""

    ranges: Mapping[str, range] | None = None
    """The rows of each split, if all of a split follow one another."""
    options: SplitOptions | None = None
    """How rows are assigned that are not in such an order."""
    limits: tuple[float, float] = (np.inf, np.inf)
    """For ``time``: where validation and test begin."""
    in_order: bool = True
    """Whether training rows are in the order of time, as far as the options say."""

    def training(self, block: SpilledBlock) -> NDArray[np.bool_]:
        """Whether each row of a block is for training."""
        return self.codes(block) == 0

    def halves(self, block: SpilledBlock) -> NDArray[np.bool_] | None:
        """The half of all rows that each row of a block is in, at random; None for rows in order
        of time, of which each half would know what comes later.
        """
        return None if self.in_order else _random(block) * 1024 % 1 < 0.5

    def codes(self, block: SpilledBlock) -> NDArray[np.uint8]:
        """The split of each row of a block: its position in ``SPLITS``."""
        if self.ranges is not None:
            codes = np.empty(block.rows, np.uint8)
            for code, rows in enumerate(self.ranges[split] for split in SPLITS):
                start, stop = rows.start - block.first, rows.stop - block.first
                codes[max(start, 0) : max(stop, 0)] = code
            return codes

        assert self.options is not None
        if self.options.by == "column":
            return block.column(SPLIT).to_numpy()
        if self.options.by == "time":
            values, limits = block.column(SPLIT).to_numpy(), self.limits
        else:
            train, val, _ = self.options.shares()
            values = _random(block)
            limits = float(train), float(train + val)
        return (values >= limits[0]).astype(np.uint8) + (values >= limits[1])


def make_splitter(plan: ColumnPlan, spilled: Spilled) -> Splitter:
    """The splitter of rows that have been read.

    Raises:
        ValueError: the values from which validation and test begin are no times, or fall.
    """
    options, blocks = plan.options.split, spilled.blocks
    train, val, _ = options.shares()
    if options.by == "days":
        return Splitter(ranges=split_by_days(list(spilled.rows_of.values())))
    if options.by == "rows":
        return Splitter(ranges=split_by_shares(spilled.rows, train, val))
    if options.by != "time":
        in_order = options.by == "column" and not _sorted_by(plan.label, blocks)
        return Splitter(options=options, in_order=in_order)

    # By time, from given values on or by quantiles.
    if (limits := _given_limits(plan)) is None:
        moments = (block.column(SPLIT).to_numpy() for block in blocks)
        sample = np.append(np.sort(summarise(moments, spilled.rows).sample), np.inf)
        last = len(sample) - 1
        limits = float(sample[int(train * last)]), float(sample[int((train + val) * last)])
    return Splitter(options=options, limits=limits, in_order=_rises(blocks))


def _given_limits(plan: ColumnPlan) -> tuple[float, float] | None:
    """Where validation and test begin in a split by time, in the unit of the column, if given."""
    split = plan.options.split
    if split.val_from is None or split.test_from is None:
        return None
    where, limits = "split: val_from or test_from", pa.array([split.val_from, split.test_from])
    column = next(column for column in plan.columns if column.name == split.column)
    if column.numeric:
        val, test = map(float, numbers(limits, where, column.options.marks))
    else:
        val, test = map(float, times(limits, where, (), None, "s", column.zone))
    if val > test:
        raise ValueError(
            f"split: val_from is {split.val_from}, after test_from {split.test_from}; "
            "validation comes between training and test"
        )
    return val, test


def _rises(blocks: Sequence[SpilledBlock]) -> bool:
    """Whether the time never falls from row to row."""
    last = -np.inf
    for block in blocks:
        times = block.column(SPLIT).to_numpy()
        if len(times):
            if not (times[0] >= last and (np.diff(times) >= 0).all()):
                return False
            last = times[-1]
    return True


def _sorted_by(label: str, blocks: Sequence[SpilledBlock]) -> bool:
    """Whether the label changes from row to row less than half as often as in a random order."""
    rows = positives = changes = 0
    for block in blocks:
        labels = block.column(label).to_numpy()
        rows, positives = rows + len(labels), positives + int(labels.sum())
        changes += int(np.count_nonzero(np.diff(labels)))
    return changes * rows < positives * (rows - positives)


def _random(block: SpilledBlock) -> NDArray[np.floating]:
    """A number in [0, 1) for each row that looks random (SplitMix64; Steele et al., 2014)."""
    index = np.arange(block.first, block.first + block.rows, dtype=np.uint64)
    x = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((x ^ x >> np.uint64(31)) >> np.uint64(11)) * 2.0**-53

"""Which rows of a data set belong to which split."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

DAYS = 7


def split_by_days(rows: Sequence[int]) -> dict[str, range]:
    """The rows of each split under the reference protocol, numbered over all files.

    All days but the last are for training. The first half of the last day is for test, the second
    for validation. A day is a file that has rows, or a seventh of the rows if there is a single
    such file (the rows left over go to training).

    Args:
        rows: rows of each file.
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

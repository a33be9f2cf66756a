import math
from fractions import Fraction

import pytest

from dlrm.data.prepare.splitting import split_by_days, split_by_shares


def test_days_of_the_reference():
    assert split_by_days([45_840_617]) == {
        "train": range(39_291_958),
        "test": range(39_291_958, 39_291_958 + 3_274_330),
        "val": range(39_291_958 + 3_274_330, 45_840_617),
    }
    assert [len(rows) for rows in split_by_days([7]).values()] == [6, 1, 0]
    assert [len(rows) for rows in split_by_days([1]).values()] == [1, 0, 0]


def test_a_day_a_file():
    splits = split_by_days([10, 20, 5])
    assert splits == {"train": range(30), "test": range(30, 33), "val": range(33, 35)}
    assert split_by_days([10, 20, 5, 0]) == splits  # no row of the last file was read
    assert split_by_days([70, 0]) == split_by_days([70])


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 1000, 137_139])
@pytest.mark.parametrize("train", ["days", "0.8", "1/3", "0", "1"])
def test_splits_cover_all_rows_once_and_in_order(train, rows):
    if train == "days":
        splits = split_by_days([rows])
        assert list(splits) == ["train", "test", "val"]
    else:
        splits = split_by_shares(rows, Fraction(train), (1 - Fraction(train)) / 2)
        assert list(splits) == ["train", "val", "test"]
        assert len(splits["train"]) == math.floor(Fraction(train) * rows)
    assert [row for split in splits.values() for row in split] == list(range(rows))


@pytest.mark.parametrize(
    ("rows", "shares", "lengths"),
    [
        (1000, ("0.8", "0.15"), [800, 150, 50]),
        (3, ("0.5", "0"), [1, 0, 2]),
        (10, ("0", "0"), [0, 0, 10]),
        (7, ("1", "0"), [7, 0, 0]),
        (10, ("1/3", "1/3"), [3, 3, 4]),
    ],
)
def test_lengths_by_shares(rows, shares, lengths):
    splits = split_by_shares(rows, *map(Fraction, shares))
    assert [len(split) for split in splits.values()] == lengths

"""Counts and rates of ids: of earlier rows for training rows, of all training rows for others."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.prepare.column_options import SplitOptions
from dlrm.data.prepare.rates import FEW, Rates, prior_rows, rate_names
from dlrm.data.prepare.table import open_later_rows, prepare_table
from dlrm.data.prepare.transform import Transform
from dlrm.data.schema import Meta
from tests.kit import ALL_TRAIN, plan_rows, prepare_rows, write_rows

NAMES = [name for column in ("city", "user") for name in rate_names(column)]


def rows(seed, count=400, **columns):
    rng = np.random.default_rng(seed)
    made = {"label": rng.integers(0, 2, count), "city": rng.choice([*"abc"], count)}
    made |= {"user": [f"u{i}" for i in rng.integers(0, 90, count)], "tags": ["x|y"] * count}
    return pd.DataFrame(made | {"price": rng.random(count)} | columns)


def prepare(table, out, ids_of=None, split=("0.8", "0.1", "0.1"), grow=False, **options):
    path = out.with_suffix(".csv")
    table.to_csv(path, index=False)
    split = dict(zip(("train", "val", "test"), split, strict=True))
    if ids_of is None:
        columns = {"user": {"kind": "category", "min_count": 3}, "tags": "list"}
        files, plan = plan_rows(path, columns=columns, split=split, **options)
    else:
        files, plan, _ = open_later_rows([path], ids_of, SplitOptions(**split))
    prepare_table(files, plan, out, ids_of=ids_of, grow=grow, progress=False, block_bytes=3000)
    return [pd.read_parquet(out / f"{split}.parquet") for split in ("train", "val", "test")]


def expected(earlier, ids, share):
    """The numbers of rows that follow the ``(id, label)`` of ``earlier``, one after another."""
    every = [*earlier, *((own, label) for own, label in ids if label is not None)]
    counted, labels = np.array(every).T
    prior = prior_rows(np.bincount(counted), np.bincount(counted, labels), share)
    found, size = [], len(every)
    for own, label in ids:
        seen = [y for i, y in earlier if i == own]
        smooth = (sum(seen) + prior * share) / (len(seen) + prior)
        rate = np.log(smooth / (1 - smooth)) - np.log(share / (1 - share))
        scaled = len(seen) * size / max(len(earlier), FEW)
        found.append((np.log1p(scaled if label is not None else len(seen)) / 4, rate))
        if label is not None:
            earlier = [*earlier, (own, label)]
    return np.array(found)


def pairs(table, column, labels=True):
    return list(zip(table[column], table["label"] if labels else [None] * len(table), strict=True))


def test_training_rows_know_earlier_rows_and_others_all_of_them(tmp_path):
    table = rows(0)
    train, val, test = prepare(table, tmp_path / "data")
    share = train["label"].mean()
    for column in ("city", "user"):
        names = list(rate_names(column))
        wanted = expected([], pairs(train, column), share)
        np.testing.assert_allclose(train[names], wanted, atol=1e-6)
        for later in (val, test):
            wanted = expected(pairs(train, column), pairs(later, column, labels=False), share)
            np.testing.assert_allclose(later[names], wanted, atol=1e-6)
    # There is no number of a list; and labels by chance have nothing to do with counts.
    assert Meta.read(tmp_path / "data").dense == ("price", "rate(city)", "rate(user)")

    # Raw rows, of which no label is known, get the same numbers.
    raw = table[320:].drop(columns="label").assign(user=lambda t: t["user"])
    scored = Transform.load(tmp_path / "data").apply(
        pa.RecordBatch.from_pandas(raw, preserve_index=False)
    )
    pd.testing.assert_frame_equal(
        scored.to_pandas()[["price", *NAMES]],
        pd.concat([val, test], ignore_index=True)[["price", *NAMES]],
    )


SHARES = {"train": "0.8", "val": "0.1", "test": "0.1"}


@pytest.mark.parametrize(
    "split",
    [
        {"by": "random", **SHARES},
        {"by": "column", "column": "part"},
        {"by": "time", "column": "when", **SHARES},
    ],
    ids=lambda split: split["by"],
)
def test_rows_in_no_order_of_time_know_the_other_half(tmp_path, split):
    """In rows sorted by the label, earlier ones would say which label a row has."""
    table = rows(3, 4000).sort_values("label", kind="stable", ignore_index=True)
    table["part"] = np.where(np.arange(4000) % 10 < 8, "train", "test")
    table["when"] = np.random.default_rng(4).permutation(4000)

    def prepared(order):
        path = tmp_path / f"{order}.csv"
        table.sort_values(order, kind="stable").to_csv(path, index=False)
        columns = {"user": "category", "tags": "list"} | dict.fromkeys(("part", "when"), "drop")
        columns.pop(split.get("column"), None)
        files, plan = plan_rows(path, columns=columns, split=split)
        prepare_table(files, plan, tmp_path / order, progress=False, block_bytes=3000)
        return pd.read_parquet(tmp_path / order / "train.parquet")

    # All rows of an id in the same half know the same rows.
    train = prepared("label")
    names = list(rate_names("user"))
    assert train.groupby("user")[names[1]].nunique().max() == 2
    assert abs(np.corrcoef(train[names[1]], train["label"])[0, 1]) < 0.1
    expected_counts = np.expm1(4 * train.groupby("user")[names[0]].unique().map(np.mean))
    np.testing.assert_allclose(expected_counts, train.groupby("user").size(), rtol=0.2)

    if split["by"] != "random":  # rows that may be in the order of time know earlier ones
        assert prepared("when").groupby("user")[names[1]].nunique().min() > 2


def test_later_labels_change_no_number_of_an_earlier_row():
    rng = np.random.default_rng(1)
    ids, labels = rng.integers(0, 9, 300), rng.integers(0, 2, 300)
    found = []
    for given in (labels, np.append(labels[:161], 1 - labels[161:])):
        empty = np.zeros((2, 9), np.int64)
        rates = Rates(counts=empty[0], positives=empty[1], share=0.5, prior=3.0, rows=300)
        found.append(rates.numbers_of_training(ids, given))
    np.testing.assert_array_equal(found[0][:, :161], found[1][:, :161])
    assert (found[0][:, 170:] != found[1][:, 170:]).any()


def test_rates_are_smoothed_by_how_much_the_shares_of_ids_differ():
    rng = np.random.default_rng(2)
    counts = rng.integers(1, 40, 50_000)
    by_chance = rng.binomial(counts, 0.3)
    assert prior_rows(counts, by_chance, 0.3) > 1000
    for prior in (4.0, 50.0):
        drawn = rng.binomial(counts, rng.beta(0.3 * prior, 0.7 * prior, len(counts)))
        assert prior_rows(counts, drawn, 0.3) == pytest.approx(prior, rel=0.1)
    for few in (np.zeros(0, np.int64), np.ones(5, np.int64)):  # nothing is known
        assert prior_rows(few, few, 0.3) > 1000


def test_counts_are_numbers_of_a_row_where_they_explain_labels(tmp_path):
    """New ids are positive. Later rows have the numbers of the first ones, whatever they say."""
    rng, numbers = np.random.default_rng(7), []
    for new in (0.9, 0.1):
        ids = np.arange(3000) // 60 + rng.integers(0, 3, 3000)
        before = pd.Series(ids).groupby(ids).cumcount()
        label = (rng.random(3000) < np.where(before < 15, new, 0.1)).astype(int)
        table = rows(8, 3000, label=label, city=[f"c{own}" for own in ids])
        out = tmp_path / f"{new}"
        prepare(table, out, tmp_path / "0.9" if numbers else None, grow=bool(numbers))
        numbers.append(Meta.read(out).dense)
    assert numbers == [("price", "count(city)", "rate(city)", "rate(user)")] * 2


@pytest.mark.parametrize(("columns", "ids"), [(100, 50), (3, None)])
def test_counts_of_columns_of_noise_are_left_out(tmp_path, columns, ids):
    """Of many columns and few rows, whose means fit the noise of all; of ids that never repeat,
    whose counts are all equal."""
    random = np.random.default_rng(0)
    noise = {
        f"c{i}": random.integers(0, ids, 1000) if ids else [f"{i}-{row}" for row in range(1000)]
        for i in range(columns)
    }
    table = {"label": random.integers(0, 2, 1000), "few": random.integers(0, 3, 1000), **noise}
    path = write_rows(tmp_path / "rows.parquet", table)
    kinds = dict.fromkeys(noise, "category")
    meta, _ = prepare_rows(path, tmp_path / "out", {"columns": kinds} | ALL_TRAIN)
    assert [name for name in meta.dense if name.startswith("count(")] == []


@pytest.mark.parametrize("grow", [False, True])
def test_later_rows_count_on_if_they_are_learned(tmp_path, grow):
    first, *_ = prepare(rows(2), tmp_path / "first")
    split = ("0.5", "0.5", "0")
    train, val, _ = prepare(rows(3), tmp_path / "second", tmp_path / "first", split, grow)
    share = pd.concat([first, train] if grow else [first])["label"].mean()
    before = pairs(first, "city")
    wanted = expected(before, pairs(train, "city", labels=grow), share)
    np.testing.assert_allclose(train[list(rate_names("city"))], wanted, atol=1e-6)
    known = before + (pairs(train, "city") if grow else [])
    wanted = expected(known, pairs(val, "city", labels=False), share)
    np.testing.assert_allclose(val[list(rate_names("city"))], wanted, atol=1e-6)


def test_without_rates(tmp_path):
    train, *_ = prepare(rows(4), tmp_path / "data", rates=False)
    assert not {*NAMES} & {*train.columns}
    assert (
        "positives" not in pq.read_schema(tmp_path / "data" / "vocabulary" / "city.parquet").names
    )
    raw = pa.RecordBatch.from_pandas(rows(5), preserve_index=False)
    assert not {*NAMES} & {*Transform.load(tmp_path / "data").apply(raw).schema.names}


def test_a_vocabulary_without_positives_is_an_error(tmp_path):
    prepare(rows(6), tmp_path / "data")
    path: Path = tmp_path / "data" / "vocabulary" / "city.parquet"
    pq.write_table(pq.read_table(path).drop_columns("positives"), path)
    with pytest.raises(ValueError, match=r"city.parquet has no column 'positives'; prepare the"):
        Transform.load(tmp_path / "data")

"""What is found in columns as real tables have them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.prepare.column_options import build_options
from dlrm.data.prepare.infer import format_plan
from dlrm.data.prepare.kinds import NoFeatureError, find_kind
from dlrm.data.prepare.table import open_and_plan, prepare_table


def csv(path, **columns):
    """A CSV with a label; returns its path."""
    rows = len(next(iter(columns.values())))
    columns = {"label": [0, 1] * (rows // 2), "city": ["a", "b", "c", "d"] * (rows // 4)} | columns
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]  # noqa: B905
    path.write_text("\n".join(lines) + "\n")
    return path


def test_ids_of_64_bits_are_no_numbers(tmp_path):
    """pyarrow finds float64 in ids beyond 2^63, which would make all of them nearly the same."""
    ids = [10_000_000_000_000_000_000 + i for i in range(40)] * 5
    path = csv(tmp_path / "rows.csv", key=ids, price=[1e20 / 3] * 200)
    files, plan = open_and_plan([path], build_options({"split": {"train": 1, "val": 0, "test": 0}}))
    kinds = {column.name: column.kind for column in plan.columns}
    assert kinds["key"] == "category"
    prepare_table(files, plan, tmp_path / "out", progress=False)
    values = pq.read_table(tmp_path / "out" / "vocabulary" / "key.parquet")["value"].to_pylist()
    assert set(values) == {None, *map(str, ids)}


def test_what_a_column_is_of_no_use_for_is_said():
    rows = range(200)
    cases = {
        "constant": pa.array([1005] * 200),
        "user_id": pa.array([i * 7919 % 1009 for i in rows]),
        "country": pa.array(["DE"] * 200),
    }
    for name, sample in cases.items():
        assert find_kind(name, sample, False).why.endswith(
            "carries no information: drop it or pass it through"
        )
    assert "no information" not in find_kind("c", pa.array(["a", "b"] * 100), False).why


@pytest.mark.parametrize(("unit", "told"), [("s", ""), ("ms", ", unit: ms"), ("us", ", unit: us")])
def test_numbers_that_may_be_times(unit, told):
    scale = {"s": 1, "ms": 1000, "us": 1_000_000}[unit]
    sample = pa.array([(1_400_000_000 + 86_400 * (i % 90)) * scale for i in range(200)])
    found = find_kind("timestamp", sample, False)
    assert found.kind == "number"
    assert found.why == f"integers; if these are times, set {{kind: time{told}}}"
    assert "times" not in find_kind("price", pa.array(range(0, 20_000, 100)), False).why


@pytest.mark.parametrize(
    ("most", "hint"), [(100, ""), (2000, ", 2,000 values; if these are ids, set category")]
)
def test_integers_of_many_values_that_repeat_may_be_ids(most, hint):
    found = find_kind("item", pa.array(np.arange(10_000)[::-1] % most), False)
    assert (found.kind, found.why) == ("number", f"integers{hint}")


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_numbers_with_the_format_of_a_time(tmp_path, form):
    """The hours of Avazu's clicks, 14102123, were taken for seconds since 1970."""
    hours = [int(f"1410{21 + i // 24 % 7}{i % 24:02}") for i in range(200)]
    columns = {"label": [0, 1] * 100, "city": ["a", "b"] * 100, "hour": hours}
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        csv(path, **columns)
    elif form == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        rows = zip(*columns.values(), strict=True)
        path.write_text(
            "".join(json.dumps(dict(zip(columns, r, strict=True))) + "\n" for r in rows)
        )
    own = {"hour": {"kind": "time", "format": "%y%m%d%H"}}
    split = {
        "by": "time",
        "column": "hour",
        "val_from": "2014-10-27",
        "test_from": "2014-10-27 12:00",
    }
    files, plan = open_and_plan([path], build_options({"columns": own, "split": split}))
    meta = prepare_table(files, plan, tmp_path / "out", progress=False)
    assert [meta.splits[name].rows for name in ("train", "val", "test")] == [176, 12, 12]
    values = pq.read_table(tmp_path / "out" / "vocabulary" / "hour_hour.parquet")["value"]
    assert {f"{hour:02}" for hour in range(24)} <= set(values.to_pylist())
    ages = pq.read_table(tmp_path / "out" / "train.parquet")["hour_age"].to_numpy()
    assert np.exp(ages.max()) == pytest.approx(1 + 5 + 23 / 24, abs=1e-3)


def test_a_format_without_hours_makes_none(tmp_path):
    days = [20240101 + i % 28 for i in range(200)]
    path = csv(tmp_path / "rows.csv", day=days)
    own = {"day": {"kind": "time", "format": "%Y%m%d"}}
    _, plan = open_and_plan([path], build_options({"columns": own}))
    assert "weekday age" in format_plan(plan)
    assert "hour" not in format_plan(plan)


def test_all_columns_that_can_not_be_features_are_named_at_once(tmp_path):
    rows = {"label": [0, 1] * 100, "c": ["a", "b"] * 100, "place": [{"x": 1}] * 200}
    pq.write_table(pa.table(rows | {"vector": [[0.5]] * 200}), tmp_path / "rows.parquet")
    message = (
        r"columns can't be features: 'place' \(struct<.*\), 'vector' \(list<.*\); leave them out "
        r"with columns: {place: drop, vector: drop}, or copy them to the result with columns: "
        r"{place: pass, vector: pass}"
    )
    with pytest.raises(NoFeatureError, match=message):
        open_and_plan([tmp_path / "rows.parquet"], build_options({}))


def test_times_of_which_some_have_a_zone_may_be_times():
    texts = [f"2026-01-{i % 28 + 1:02}T10:00:0{i % 10}{'Z' if i % 2 else ''}" for i in range(200)]
    found = find_kind("seen", pa.array(texts), untyped=True)
    assert found.kind == "category"
    assert found.why.endswith("if these are times, set kind: time and format:, as in strptime")

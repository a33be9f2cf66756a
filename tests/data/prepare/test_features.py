"""What columns become: kinds that are found, transforms, vocabularies, splits."""

import uuid
from collections import Counter
from datetime import time
from itertools import combinations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from dlrm.data.prepare import numbers
from dlrm.data.prepare.keys import DistinctIds
from dlrm.data.prepare.numbers import Scaling, bucket_edges, bucket_numbers, fit_scaling, summarise
from dlrm.data.prepare.plan_summary import format_plan
from dlrm.data.prepare.raw_rows import as_batch
from dlrm.data.prepare.transform import Transform
from dlrm.data.schema import SPLITS, Meta
from tests.kit import ALL_TRAIN, plan_rows, prepare_rows, read_splits, read_values, write_rows

NAN = float("nan")


def prepare(tmp_path, values, name="out", **options):
    prepare_rows(write_rows(tmp_path / f"{name}.parquet", values), tmp_path / name, options)
    return read_splits(tmp_path / name)


def kinds(tmp_path, columns, **options):
    path = write_rows(tmp_path / "found.parquet", columns)
    return {c.name: c.kind for c in plan_rows(path, **options)[1].columns}


def test_kinds_that_are_found(tmp_path):
    n = 200
    time = pa.array(np.arange(n) * 10**9, pa.timestamp("ns", "Europe/Berlin"))
    columns = {
        "label": pa.array([True, False] * (n // 2)),
        "price": [1.5, None] * (n // 2),
        "count": pa.array([i * 7 % 150 for i in range(n)]),
        "userId": pa.array([i * 7 % 150 for i in range(n)]),
        "stars": pa.array([i % 5 for i in range(n)], pa.uint8()),
        "money": pa.array(list(range(n)), pa.decimal128(9, 2)),
        "name": [f"n{i % 7}" for i in range(n)],
        "coded": pa.array([f"n{i % 7}" for i in range(n)]).dictionary_encode(),
        "flag": [True, None] * (n // 2),
        "tags": [["a", None], None] * (n // 2),
        "numbers": [[1, 2], []] * (n // 2),
        "bars": ["a|b", "b"] * (n // 2),
        "when": time,
        "day": pa.array(np.arange(n, dtype=np.int32), pa.date32()),
        "iso": ["2024-02-29T10:00:00Z"] * n,
        "empty": pa.array([None] * (n - 1) + ["x"], pa.string()),
        "blob": pa.array([b"a"] * n),
        "blobs": pa.array([b"a"] * n, pa.large_binary()),
        "half": pa.array([np.float16(1.5), np.float16(2)] * (n // 2), pa.float16()),
        "none": pa.array([[], None] * (n // 2), pa.list_(pa.int64())),
        "stay": pa.array(np.arange(n) * 1_500_000_001, pa.duration("ns")),
        "clock": pa.array(list(range(n)), pa.time32("s")),
    }
    assert kinds(tmp_path, columns) == {
        "label": "label", "price": "number", "count": "number", "userId": "category",
        "stars": "category", "money": "number", "name": "category", "coded": "category",
        "flag": "category", "tags": "list", "numbers": "list", "bars": "list", "when": "time",
        "day": "time", "iso": "time", "empty": "category", "blob": "category",
        "blobs": "category", "half": "number", "none": "list", "stay": "number", "clock": "number",
    }  # fmt: skip
    tables = prepare(tmp_path, columns, split={"by": "random"})
    assert sum(table.num_rows for table in tables.values()) == n
    told = Meta.read(tmp_path / "out")
    assert {c.name for c in told.categorical if c.multi_hot} == {"tags", "numbers", "bars", "none"}
    assert "day_hour" not in told.tables
    assert {"day_weekday", "when_hour", "iso_hour"} <= set(told.tables)


VECTORS = [[1.5, -2.0, 0.0], None, [NAN, 4.0, None], [0.5, 0.5, 0.5]] * 30


@pytest.mark.parametrize(
    "type_",
    [pa.list_(pa.float64()), pa.list_(pa.float32(), 3), pa.large_list(pa.float16()), pa.string()],
    ids=str,
)
def test_lists_of_as_many_numbers_each_are_vectors(tmp_path, type_):
    """As texts, too, as pandas and NumPy write them into a CSV."""
    rows = pa.array(VECTORS, type_ if type_ != pa.string() else pa.list_(pa.float64()))
    if type_ == pa.string():
        forms = "[{}, {}, {}]", "[{}  {}\n {}]", "{};{};{}"
        rows = [row and forms[at % 3].format(*row) for at, row in enumerate(rows.to_pylist())]
        rows = pa.array([text and text.replace("None", "nan") for text in rows])
    columns = {"label": [0, 1] * 60, "user": ["a", "b", "c"] * 40, "taste": rows}
    given = {"transform": "none", "rates": False}
    table = prepare(tmp_path, columns, **given, **ALL_TRAIN)["train"]
    expected = np.nan_to_num(np.array([row or [NAN] * 3 for row in VECTORS], float))
    found = np.stack([table[f"taste_{number}"].to_numpy() for number in range(3)], axis=1)
    assert np.array_equal(found, expected)
    assert Meta.read(tmp_path / "out").dense == ("taste_0", "taste_1", "taste_2")
    options = yaml.safe_load((tmp_path / "out" / "table.yaml").read_text())["columns"]
    assert options["taste"] == {"kind": "vector", "transform": "none", "size": 3}

    # Later rows, as lists of another type too.
    rows = [{"user": "a", "taste": [1, 2, 3]}, {"user": "b", "taste": [0.5, None, 2.0]}]
    for batch in (rows, rows[:1]):
        later = Transform.load(tmp_path / "out").apply(as_batch(batch))
        numbers = [later[f"taste_{number}"].to_pylist() for number in range(3)]
        assert numbers == [[1, 0.5][: len(batch)], [2, 0][: len(batch)], [3, 2][: len(batch)]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "row 122, column 'taste': the list has 2 entries; it must have 3: correct it"),
        ([1.0, 2.0, np.inf], "row 122, column 'taste': inf is not a finite number"),
    ],
)
def test_vectors_that_do_not_fit_are_named(tmp_path, monkeypatch, value, message):
    rows = [*VECTORS, None, value]
    columns = {"label": [0, 1] * 61, "user": ["a", "b"] * 61, "taste": pa.array(rows)}
    path = write_rows(tmp_path / "rows.parquet", columns)
    options = {"columns": {"taste": {"kind": "vector", "size": 3}}}
    with pytest.raises(ValueError, match=message):
        prepare_rows(path, tmp_path / "out", options | ALL_TRAIN)
    meta, _ = prepare_rows(path, tmp_path / "out", options | ALL_TRAIN, bad_rows="skip")
    assert meta.splits["train"].rows == 121


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([[0.5], [0.5, 1.0]], {}, "a list holds texts, integers, or always as many numbers"),
        (["0.5 a", "2 3"], {"taste": "vector"}, "'taste' .string, not lists of numbers"),
        (
            [[0.5]] * 2,
            {"taste": {"kind": "vector", "transform": "quantile"}},
            "a vector has numbers only",
        ),
    ],
)
def test_columns_that_are_no_vectors(tmp_path, values, options, message):
    columns = {"label": [0, 1] * 60, "user": ["a", "b"] * 60, "taste": values * 60}
    path = write_rows(tmp_path / "rows.parquet", columns)
    with pytest.raises(ValueError, match=message):
        plan_rows(path, columns=options)


def test_the_hour_is_that_of_the_place(tmp_path):
    """10 o'clock UTC is 11 in Berlin in winter and 12 in summer."""
    time = pa.array(["2024-01-01T10:00:00", "2024-07-01T10:00:00"]).cast(pa.timestamp("s"))
    time = time.cast(pa.timestamp("s", "UTC")).cast(pa.timestamp("s", "Europe/Berlin"))
    prepare(tmp_path, {"label": [0, 1], "when": time}, **ALL_TRAIN)
    assert read_values(tmp_path / "out", "when_hour") == ["11", "12", None]

    # Later rows count by the same clock, however they are written.
    transform = Transform.load(tmp_path / "out")
    wanted = transform.apply(pa.RecordBatch.from_pydict({"when": time}))
    for same in (
        time.cast(pa.timestamp("ns", "Asia/Tokyo")),
        pa.array(["2024-01-01T10:00:00Z", "2024-07-01T10:00:00Z"]),
        pa.array(["2024-01-01 05:00:00-05:00", "2024-07-01 05:00:00-05:00"]),
    ):
        assert transform.apply(pa.RecordBatch.from_pydict({"when": same})).equals(wanted)


@pytest.mark.parametrize(
    ("options", "texts", "days"),
    [
        ({"format": "%d/%m/%Y"}, ["29/02/2024", "01/03/2024"], ["Friday", "Thursday"]),
        ({"unit": "ms"}, [1709200000000, 1709290000000], ["Friday", "Thursday"]),
        ({}, ["2024-02-29", "2024-03-01"], ["Friday", "Thursday"]),
    ],
)
def test_forms_of_times(tmp_path, options, texts, days):
    columns = {"label": [0, 1], "when": texts}
    options = {"when": {"kind": "time", "parts": ["weekday", "age"], **options}}
    table = prepare(tmp_path, columns, columns=options, **ALL_TRAIN)["train"]
    assert read_values(tmp_path / "out", "when_weekday") == [*days, None]
    assert table["when_age"][1].as_py() == 0
    assert table["when_age"][0].as_py() == pytest.approx(np.log1p(1), abs=0.03)


def test_scalings():
    rng = np.random.default_rng(0)
    x = np.append(rng.lognormal(5, 2, 5000), NAN)
    summary = summarise([x[:100], x[100:]], len(x))
    assert (summary.rows, summary.missing) == (5001, 1)
    assert summary.mean == pytest.approx(np.nanmean(x))
    assert summary.deviation == pytest.approx(np.nanstd(x))
    low, middle, high = np.nanquantile(x, [0.25, 0.5, 0.75])
    expected = {
        "none": x,
        "log": np.log1p(x),
        "log3": np.log(x + 3),
        "standard": (x - np.nanmean(x)) / np.nanstd(x),
        "robust": np.arcsinh((x - middle) / (high - low)),
    }
    for name, values in expected.items():
        found = fit_scaling(name, summary).apply(x)
        assert found.dtype == np.float32
        missing = np.log(3) if name == "log3" else 0  # as in the preparation of Criteo
        assert found == pytest.approx(np.nan_to_num(values, nan=missing), rel=1e-5)
    assert fit_scaling("auto", summary).transform == "robust"
    usual = rng.normal(size=1000)
    assert fit_scaling("auto", summarise([usual], 1000)).transform == "none"
    assert fit_scaling("auto", summarise([usual * 0.01], 1000)).transform == "robust"
    assert Scaling(transform="log").apply(np.array([-5.0, NAN])).tolist() == [0, 0]
    assert np.isfinite(Scaling(transform="none").apply(np.array([1e300]))).all()


@pytest.mark.parametrize("transform", ["standard", "robust", "auto"])
@pytest.mark.parametrize("values", [[7.0] * 50, [0.0] * 49 + [5.0], [1e30] * 50, [NAN] * 50])
def test_numbers_without_a_spread(transform, values):
    x = np.array(values)
    assert np.isfinite(fit_scaling(transform, summarise([x], len(x))).apply(x)).all()


def test_a_column_without_a_value_in_the_training_rows_is_noted(tmp_path, capsys):
    """It ended the program; later values of a number would reach weights that never learned it."""
    columns = {
        "label": [0, 1] * 100,
        "city": ["a", "b"] * 100,
        "text": [None] * 180 + ["x"] * 20,
        "number": pa.array([None] * 180 + [1e9] * 20, pa.float64()),
        "bucket": pa.array([None] * 180 + [7.0] * 20),
        "day": pa.array([None] * 180 + [20_000] * 20, pa.date32()),
        "null": pa.nulls(200),
    }
    bucket = {"kind": "number", "transform": "quantile"}
    tables = prepare(tmp_path, columns, columns={"bucket": bucket, "number": "number"})
    told = capsys.readouterr().err
    assert "no value in any training row of text, number, bucket, day, null: nothing is" in told
    assert "columns: {text: drop, number: drop, bucket: drop, day: drop, 'null': drop}" in told
    assert tables["test"]["number"].to_pylist() == [0] * 20
    assert tables["test"]["day_age"].to_pylist() == [0] * 20
    scores = Transform.load(tmp_path / "out").apply(pa.RecordBatch.from_pydict(columns))
    assert scores.num_rows == 200
    with pytest.raises(ValueError, match=r"no column has a value in any training row \(null\)"):
        prepare(tmp_path, {"label": [0, 1] * 9, "null": pa.nulls(18)}, name="none")


def test_a_number_far_beyond_those_of_the_training_rows_is_noted_and_limited(tmp_path, capsys):
    """1e30 in a test row alone was called divergence of the training."""
    x = np.random.default_rng(0).normal(size=200)
    columns = {"label": [0, 1] * 100, "c": ["a", "b"] * 100, "x": x, "one": [5.0] * 200}
    columns["x"][[190, 191]] = -1e30, 101
    columns["one"][195] = 1e6
    tables = prepare(tmp_path, columns, columns={"one": "number"})
    assert tables["test"]["x"].to_pylist()[9:12] == pytest.approx([x[189], -100, 100])
    assert set(tables["test"]["one"].to_pylist()) == {0}, "the training rows have one number"
    told = capsys.readouterr().err
    assert "note: x has 2 numbers such as -1e+30, far beyond the others: they count as -100" in told
    assert "set columns: {x: {kind: number, transform: robust}}" in told


@pytest.mark.parametrize("transform", ["none", "standard"])
def test_an_absurd_number_spoils_no_transform_that_is_given(tmp_path, capsys, transform):
    """With 1e30 in a training row, `none` diverged and `standard` made all others 0."""
    x = np.random.default_rng(0).normal(20, 10, size=200)
    columns = {"label": [0, 1] * 100, "c": ["a", "b"] * 100, "x": [*x[:50], 1e30, *x[51:]]}
    tables = prepare(tmp_path, columns, columns={"x": {"kind": "number", "transform": transform}})
    found = np.array(tables["train"]["x"])
    assert np.abs(found).max() < 20_000
    assert np.delete(found, 50).std() > 0.1
    assert "note: x has 1 number such as 1e+30, far beyond the others" in capsys.readouterr().err


def test_a_table_of_numbers_alone_gets_buckets_as_ids(tmp_path):
    """Next to the numbers: buckets alone cost up to 0.1 AUC where it rises with a number."""
    x = np.random.default_rng(0).normal(size=200)
    columns = {"label": [0, 1] * 100, "x": x, "y": x * 100, "z": x + 1}
    tables = prepare(tmp_path, columns, columns={"z": {"kind": "number", "transform": "log"}})
    meta = Meta.read(tmp_path / "out")
    assert (meta.tables, meta.dense) == (("x_bucket", "y_bucket", "z_bucket"), ("x", "y", "z"))
    train = tables["train"]
    for low in set(train["x_bucket"].to_pylist()):
        own = train.filter(pc.equal(train["x_bucket"], low))["x"].to_numpy()
        others = train.filter(pc.not_equal(train["x_bucket"], low))["x"].to_numpy()
        assert not ((others > own.min()) & (others < own.max())).any()
    scored = Transform.load(tmp_path / "out").apply(pa.RecordBatch.from_pydict(columns))
    assert pa.concat_tables(tables[s] for s in SPLITS)["x_bucket"].to_pylist() == (
        scored["x_bucket"].to_pylist()
    )
    wanted = [[NAN] * 200, list(x), list(x)]
    few = {name: pa.array(values, pa.float64()) for name, values in zip("xyz", wanted, strict=True)}
    prepare(tmp_path, {"label": [0, 1] * 100, **few}, name="missing", columns={"x": "number"})
    assert Meta.read(tmp_path / "missing").dense == ("x", "y", "z")


@pytest.mark.parametrize(("size", "buckets"), [(2, 2), (101, 32)])
@pytest.mark.parametrize("vector", [False, True])
def test_of_hundreds_of_numbers_the_first_have_buckets(tmp_path, vector, size, buckets):
    """Of 300 in all the model had 23.6 M weights, and a step took fifty times as long."""
    x = np.random.default_rng(0).normal(size=(200, size))
    numbers = {"v": list(x)} if vector else {f"v_{i}": x[:, i] for i in range(size)}
    tables = prepare(tmp_path, {"label": [0, 1] * 100, **numbers})
    meta = Meta.read(tmp_path / "out")
    assert meta.tables == tuple(f"v_{i}_bucket" for i in range(buckets))
    assert meta.dense == tuple(f"v_{i}" for i in range(size))
    first = tables["train"].sort_by("v_1")["v_1_bucket"].to_numpy()
    assert (np.diff(first) != 0).sum() == 31  # each bucket is one range of its own number


def test_texts_and_bytes_may_be_views():
    """As Polars hands them over: few functions of Arrow take them."""
    table = pa.table({"a": pa.array(["x", None], pa.string_view())})
    table = table.append_column("b", pa.array([b"x", b""], pa.binary_view()))
    lists = pa.array([["x", None], None], pa.list_(pa.string_view()))
    assert as_batch(pa.table({"c": lists})).schema.types == [pa.large_list(pa.string())]
    coded = pa.DictionaryArray.from_arrays([0, None], pa.array(["x"], pa.string_view()))
    assert as_batch(pa.table({"c": coded})).to_pylist() == [{"c": "x"}, {"c": None}]
    lists = pa.ListArray.from_arrays([0, 1, 2], coded)  # of categories
    assert as_batch(pa.table({"c": lists})).to_pylist() == [{"c": ["x"]}, {"c": [None]}]
    for rows in (table, table.to_batches()[0]):
        assert as_batch(rows).schema.types == [pa.string(), pa.binary()]
        assert as_batch(rows).to_pylist() == table.to_pylist()


def test_types_that_extend_others(tmp_path):
    """Databases write UUIDs, and pandas writes what pd.cut returns as intervals."""
    key = uuid.uuid4()
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0] * 50, pa.int8()))
    keys = pa.array([key.bytes, None] * 50, pa.uuid())
    digests = pa.array([b"\xff\0", b"ok"] * 50, pa.binary(2))
    columns = {"label": [0, 1] * 50, "key": keys, "flag": flags, "digest": digests}
    prepare(tmp_path, columns, **ALL_TRAIN)
    wanted = {"key": {str(key), ""}, "flag": {"0", "1"}, "digest": {"ff00", "6f6b"}}
    for name, values in wanted.items():
        assert {*read_values(tmp_path / "out", name)} == values | {None}
    cut = pa.array(pd.cut([0.0, 1.0], 2))
    assert as_batch(pa.table({"x": cut})).schema.types[0].num_fields == 2


@pytest.mark.parametrize("form", ["%H:%M", "%H:%M:%S"])
def test_times_of_the_day_are_hours_and_a_number(tmp_path, form):
    """They were ids, of which a day has 1,440 and more."""
    minutes = [97 * i % 1440 for i in range(200)]
    at = [time(m // 60, m % 60).strftime(form) for m in minutes]
    columns = {"label": [0, 1] * 100, "item": ["a", "b"] * 100, "at": at}
    path = write_rows(tmp_path / "rows.csv", columns)
    meta, plan = prepare_rows(path, tmp_path / "out", ALL_TRAIN)
    assert plan.columns[2].why.startswith(f"texts that are times, {form}; if these are ids")
    assert [c.name for c in meta.categorical] == ["item", "at_hour"]
    assert "at_age" in meta.dense
    ages = pq.read_table(tmp_path / "out" / meta.splits["train"].files[0])["at_age"].to_numpy()
    assert (np.argsort(ages) == np.argsort(minutes)[::-1]).all()


def test_quantiles_of_many_rows_are_those_of_a_part(monkeypatch):
    monkeypatch.setattr(numbers, "QUANTILE_VALUES", 100)
    x = np.arange(10_050.0)
    blocks = np.split(x, [33, 4000, 4001])
    summary = summarise(blocks, len(x))
    assert summary.sample.tolist() == x[::101].tolist()
    assert summary.mean == pytest.approx(x.mean())


def test_buckets_hold_equally_many_rows(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.lognormal(3, 2, 1000)
    x[::10] = NAN
    columns = {"label": [0, 1] * 500, "x": x, "c": ["a"] * 1000}
    options = {"x": {"kind": "number", "transform": "quantile", "buckets": 10}}
    table = prepare(tmp_path, columns, columns=options, **ALL_TRAIN)["train"]
    counts = Counter(table["x"].to_pylist())
    assert sorted(counts.values()) == pytest.approx([90] * 10 + [100], abs=2)
    assert len(set(table["x"].to_numpy()[::10])) == 1  # missing ones
    transform = Transform.load(tmp_path / "out")
    ids = transform.apply(pa.RecordBatch.from_pydict({"x": [-1e9, 1e9], "c": ["a", "b"]}))["x"]
    assert ids.to_pylist() == [table["x"][int(np.nanargmin(x))].as_py(),
                               table["x"][int(np.nanargmax(x))].as_py()]  # fmt: skip
    few = summarise([np.repeat([1.0, 2.0], 50)], 100)
    edges = bucket_edges(few, 8)
    assert edges.tolist() == [2.0]
    assert bucket_numbers(np.array([0, 1, 2, NAN]), edges).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("cap", [None, 4, 1])
@pytest.mark.parametrize("min_count", [1, 3])
def test_rare_values_share_an_id(tmp_path, cap, min_count):
    values = ["a"] * 9 + ["b"] * 5 + ["c"] * 5 + ["d"] * 2 + ["e"]
    columns = {"label": [0, 1] * 11, "c": values}
    own = {"kind": "category", "min_count": min_count, "cap": cap}
    table = prepare(tmp_path, columns, columns={"c": own}, **ALL_TRAIN)["train"]
    kept = [v for v in "abcde" if values.count(v) >= min_count][: None if cap is None else cap - 1]
    (described,) = Meta.read(tmp_path / "out").categorical
    assert described.cardinality == len(kept) + 1
    vocabulary = pq.read_table(tmp_path / "out" / "vocabulary" / "c.parquet").to_pydict()
    assert vocabulary["count"] == sorted(vocabulary["count"], reverse=True)
    assert set(vocabulary["value"]) == {*kept, None}
    ids = {value: i for i, value in enumerate(vocabulary["value"])}
    assert table["c"].to_pylist() == [ids.get(value, described.oov_id) for value in values]


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 150_000])
def test_different_ids_are_counted(size):
    ids = np.random.default_rng(size).integers(2**63 - 1, size=size)
    for own in (ids, np.arange(size), np.arange(size) << 40):
        counter = DistinctIds()
        for part in np.array_split(np.repeat(own, 2), 7):
            counter.add(part)
        assert counter.count == pytest.approx(size, rel=0.05 if size > 4095 else 0)


def test_hashed_values(tmp_path):
    values = [f"v{i % 97}" for i in range(500)] + [""] * 20
    columns = {"label": [0, 1] * 260, "c": values, "d": [[v] for v in values]}
    options = {"c": {"kind": "category", "hash": 10}, "d": {"kind": "list", "hash": 10}}
    table = prepare(tmp_path, columns, columns=options, **ALL_TRAIN)["train"]
    meta = Meta.read(tmp_path / "out")
    assert meta.cardinalities == (12, 11)  # buckets, a missing value, unseen values
    assert len(set(table["c"].to_pylist())) == 11
    assert table["d"].to_pylist()[-1] == []
    found = Transform.load(tmp_path / "out").apply(
        pa.RecordBatch.from_pydict({"c": ["new 1", "new 2", "v5"], "d": [["x"]] * 3})
    )
    assert meta.categorical[0].oov_id not in found["c"].to_pylist()  # unseen values are hashed too
    assert found["c"][2].as_py() == table["c"][5].as_py()


def test_splits(tmp_path):
    rng = np.random.default_rng(0)
    week = rng.integers(1, 54, 2000)
    columns = {"label": week % 2, "row": np.arange(2000) * 2.0, "week": week, "part": week % 7}
    keep = {"row": "pass", "part": "category", "week": {"kind": "number", "transform": "none"}}
    by_time = {"by": "time", "column": "week"}
    tables = prepare(tmp_path, columns, "a", columns=keep,
                     split={**by_time, "val_from": 45, "test_from": 47})  # fmt: skip
    for split, low, high in (("train", 1, 44), ("val", 45, 46), ("test", 47, 53)):
        found = tables[split]["week"].to_numpy()
        assert (found.min(), found.max()) == (low, high)
    tables = prepare(tmp_path, columns, "b", columns=keep, split=by_time)
    weeks = [tables[split]["week"].to_numpy() for split in SPLITS]
    assert weeks[0].max() < weeks[1].min() <= weeks[1].max() < weeks[2].min()
    assert len(weeks[0]) == pytest.approx(1600, abs=50)
    random = {"by": "random", "train": "1/2", "val": "1/4", "test": "1/4"}
    tables = prepare(tmp_path, columns, "d", columns=keep, split=random)
    assert [tables[split].num_rows for split in SPLITS] == pytest.approx([1000, 500, 500], abs=80)
    assert sorted(np.concatenate([t["row"].to_numpy() for t in tables.values()])) == list(
        columns["row"]
    )
    with pytest.raises(ValueError, match="val_from is 9, after test_from 5"):
        prepare(tmp_path, columns, "e", columns=keep,
                split={**by_time, "val_from": 9, "test_from": 5})  # fmt: skip


def test_a_column_that_says_the_split(tmp_path):
    columns = {"label": [0, 1] * 30, "part": ["train", "val", "test"] * 20, "c": ["a", "b"] * 30}
    tables = prepare(tmp_path, columns, split={"by": "column", "column": "part"})
    assert [tables[split].num_rows for split in SPLITS] == [20, 20, 20]
    assert tables["train"]["label"].to_pylist() == columns["label"][::3]
    assert tables["test"]["label"].to_pylist() == columns["label"][2::3]
    assert "part" not in tables["train"].schema.names


def test_a_positive_value_and_names_with_odd_letters(tmp_path, run):
    long = ["你" * 100, "你" * 100 + "!"]  # as of questions; no file may have such names
    names = ["a/b", "Größe (cm)", "..", "x.y", *long]
    columns = {"state": ["sold", "lost"] * 100} | {n: ["u", "v", "w", "x"] * 50 for n in names}
    tables = prepare(tmp_path, columns, label="state", positive="sold")
    assert tables["train"]["state"].to_pylist() == [1, 0] * 80
    files = sorted(p.name for p in (tmp_path / "out" / "vocabulary").iterdir())
    known = ["%2E..parquet", "Größe (cm).parquet", "a%2Fb.parquet", "x.y.parquet"]
    assert files[:4] == known
    assert [name[:74] for name in files[4:]] == ["你" * 74] * 2
    given = "--output", tmp_path / "runs", "--device", "cpu", "--max_steps", 2
    run("train", "--data", tmp_path / "out", *given)


def test_the_table_that_is_printed(tmp_path):
    columns = {"label": [1, 0] * 3, "a\x1b[2J": [2.5, 3.5] * 3, "b": ["x", "y"] * 3}
    plan = plan_rows(write_rows(tmp_path / "rows.csv", columns))[1]
    header, *lines = [line.split("  ") for line in format_plan(plan).splitlines()]
    assert header[0].strip() == "column"
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["label", "int64", "label", "0 or 1", "given"],
        ["a\\x1b[2J", "double", "number", "auto, missing: 0 after it", "numbers"],
        ["b", "text", "category", "ids", "texts, 2 values in 6 rows"],
    ]


def test_a_typing_error_among_gaps_does_not_make_numbers_a_category(tmp_path):
    """Gaps are no texts of their own, however many there are."""
    values = ["" if i % 3 == 0 else f"{i}.5" for i in range(300)]
    values[100] = "1O.5"
    columns = {"label": [0, 1] * 150, "a": values, "b": ["x"] * 300}
    path = write_rows(tmp_path / "rows.csv", columns)
    assert [column.kind for column in plan_rows(path)[1].columns] == ["label", "number", "category"]
    with pytest.raises(ValueError, match=r"row 101, column 'a': '1O\.5' is not a number; correct"):
        prepare_rows(path, tmp_path / "out")


ENTRIES = ["[{}]", "[]", "[{}, {}]", "[{}, {}, {}]"]


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        ([text.format(1, 20, 3) for text in ENTRIES], "[,]"),
        ([text.format("'1'", "'20'", "'3'") for text in ENTRIES], "[,]"),
        (["(1,)", "()", '("1", "20")', "(1,20,3)"], "[,]"),
        (["[1]", "[]", "[ 1 20]", "[1  20 3]"], "[ ]"),
        (["1", "", "1,20", "1,20,3"], ","),
    ],
)
def test_lists_that_are_written_as_texts(tmp_path, texts, separator):
    tags = texts * 50
    if separator == ",":  # texts, of which most say more than numbers with a comma
        tags += [f"{i % 7},3,{i % 5},20"[: 2 * i % 9] for i in range(200)]
    columns = {"label": [0, 1] * (len(tags) // 2), "tags": tags}
    path = write_rows(tmp_path / "rows.jsonl", columns)
    _, plan = prepare_rows(path, tmp_path / "out", ALL_TRAIN)
    assert [(c.kind, c.options.separator) for c in plan.columns[1:]] == [("list", separator)]
    values = read_values(tmp_path / "out", "tags")
    ids = pq.read_table(tmp_path / "out" / "train.parquet")["tags"].to_pylist()
    found = [[values[i] for i in row] for row in ids[:4]]
    assert found == [["1"], [], ["1", "20"], ["1", "20", "3"]]


def test_lists_of_the_values_of_another_column_are_named(tmp_path):
    """With one vocabulary, a table of histories had an AUC of .776, without .740."""
    rng = np.random.default_rng(0)
    draw = [rng.integers(0, 90, i % 4) for i in range(600)]
    seen, tags = ([[f"{mark}{i}" for i in own] for own in draw] for mark in "pt")
    columns = {"label": [0, 1] * 300, "item": [f"p{i}" for i in rng.integers(0, 90, 600)]}
    columns |= {"seen": seen, "written": ["|".join(own) for own in seen], "tags": tags}
    columns |= {"user_id": rng.integers(0, 90, 600), "item_id": rng.integers(0, 90, 600)}
    path = write_rows(
        tmp_path / "rows.parquet", columns | {"either": [own.tolist() for own in draw]}
    )
    why = {column.name: column.why for column in plan_rows(path)[1].columns}
    line = "; if the entries are of item: columns: {seen: {kind: list, vocabulary: item}}"
    assert why["seen"].endswith(line)
    assert why["written"].endswith("written: {kind: list, vocabulary: item, separator: '|'}}")
    assert not [name for name in ("tags", "either") if "entries are of" in why[name]]

    shared = yaml.safe_load(line.partition("columns: ")[2])
    meta, _ = prepare_rows(path, tmp_path / "out", {"columns": shared})
    assert {c.name: c.vocabulary for c in meta.categorical}["seen"] == "item"


def test_words_may_be_lists_and_titles_are_none(tmp_path):
    some = [" ".join(names) for size in (1, 2, 3) for names in combinations("abcdefgh", size)]
    genres = (some * 3)[:200]
    titles = [f"the {i} of {7 * i % 113}" for i in range(200)]
    places = ["Paris, France", "Lyon, France", "Rome, Italy", "Bari, Italy"] * 50
    columns = {"label": [0, 1] * 100, "genres": genres, "title": titles, "place": places}
    plan = plan_rows(write_rows(tmp_path / "rows.parquet", columns))[1]
    why = {column.name: column.why for column in plan.columns}
    assert {feature.column.kind for feature in plan.categorical} == {"category"}
    assert why["genres"].endswith("lists: columns: {genres: {kind: list, separator: ' '}}")
    assert "lists" not in why["title"]
    assert "lists" not in why["place"]

    # As ids, texts that hardly repeat say nothing: they cost a table 0.35 of its AUC.
    notes = [" ".join(f"w{i * k % 19}" for k in range(2, 9 + i // 19)) for i in range(200)]
    # Queries of one word repeat, but are the same in a list.
    queries = [note if i % 3 else f"w{i % 19}" for i, note in enumerate(notes)]
    columns |= {"customer": notes, "query": queries, "note": notes}
    plan = plan_rows(write_rows(tmp_path / "rows.csv", columns))[1]
    assert {c.name for c in plan.columns if c.kind == "list"} == {"query", "note"}
    assert plan.columns[-1].why.startswith("texts with ' ' between entries; if these are ids: ")


@pytest.mark.parametrize("where", ["one file", "each day"])
def test_titles_of_a_large_catalogue_are_ids(tmp_path, where):
    """Their first rows hardly repeat, as those of texts do of which each is written once."""
    rng, size, rows = np.random.default_rng(0), 20_000, 10_000
    items = [" ".join(f"w{word}" for word in rng.integers(0, 90, 4 + i % 5)) for i in range(size)]
    files = [rng.integers(0, size, size=14 * rows)]
    if where == "each day":  # the same listings, each once a day
        files = [np.arange(rows), np.arange(rows)[::-1]]
    for day, order in enumerate(files):
        seen = [items[i] for i in order]
        own = np.arange(len(order)) + day * rows
        new = [f"{items[i % size]} {i // 380} {i % 380}" for i in own]
        columns = {"label": [0, 1] * (len(order) // 2), "title": seen, "review": new}
        write_rows(tmp_path / f"{day}.csv", columns | {"filling": ["x" * 400] * len(order)})
    plan = plan_rows(tmp_path)[1]
    assert {c.name: c.kind for c in plan.columns if c.name != "filling"} == {
        "label": "label",
        "title": "category",
        "review": "list",
    }

"""A table prepared as a whole: against plain Python, other formats and errors."""

import gzip
import math
import random
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dlrm.data.prepare import learner
from dlrm.data.prepare.column_options import SplitOptions
from dlrm.data.prepare.table import open_and_plan, open_later_rows, prepare_table
from dlrm.data.prepare.transform import Transform
from dlrm.data.schema import SPLITS, Meta
from tests.kit import prepare_rows, read_splits, write_rows

BLOCK = 4_000  # bytes, some 60 rows
SHARES = {"train": "0.7", "val": "0.1", "test": "0.2"}


def table_rows(count=400, seed=0):
    """Rows of every kind, with gaps, quotes, line ends and letters beyond ASCII."""
    rng = random.Random(seed)
    cities = ["Zürich", "New York", 'the "city"', "東京", "a,b", "line\nend", "NA"]
    day = 1_700_000_000
    return [
        {
            "clicked": int(rng.random() < 0.3),
            "price": "" if rng.random() < 0.1 else f"{rng.lognormvariate(3, 2):.3f}",
            "user_id": str(int(rng.paretovariate(0.6)) % 300),
            "city": "" if rng.random() < 0.1 else rng.choice(cities),
            "tags": "|".join(rng.sample("abcdef", rng.randrange(4))),
            "when": f"2023-11-{1 + i * 27 // count:02} {rng.randrange(24):02}:05:00",
            "epoch": day + i * 1000,
            "key": f"row {i}",
        }
        for i in range(count)
    ]


def write(path, rows, delimiter=","):
    """Write rows to a file of the format of its name."""
    return write_rows(path, {name: [row[name] for row in rows] for name in rows[0]}, delimiter)


OPTIONS = {
    "label": "clicked",
    "split": SHARES,
    "columns": {"key": "pass", "epoch": {"kind": "time", "parts": ["weekday", "age"]}},
}


def prepare(inputs, output, options=None, **given):
    return prepare_rows(inputs, output, OPTIONS if options is None else options, **given)[0]


def expected_ids(values, training):
    """Value to id, and the id of all others, as the documentation says."""
    counts = Counter(v for bag in values[:training] for v in bag)
    ranked = sorted(counts, key=lambda value: (-counts[value], value.encode()))
    return {value: i for i, value in enumerate(ranked)}, len(ranked)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("table")
    rows = table_rows()
    write(directory / "rows.csv", rows)
    meta = prepare(directory / "rows.csv", directory / "out", block_bytes=BLOCK)
    return directory, rows, meta


def test_every_value(prepared):
    directory, rows, meta = prepared
    table = pa.concat_tables(read_splits(directory / "out").values())
    assert [meta.splits[split].rows for split in SPLITS] == [280, 40, 80]
    assert meta.dense[:3] == ("price", "when_age", "epoch_age")
    assert meta.dense[3:5] == ("rate(user_id)", "rate(city)")
    assert meta.tables == (
        "user_id", "city", "tags", "when_hour", "when_weekday", "epoch_weekday",
    )  # fmt: skip
    assert table["clicked"].to_pylist() == [row["clicked"] for row in rows]
    assert table["key"].to_pylist() == [row["key"] for row in rows]
    training = sorted(float(row["price"]) for row in rows[:280] if row["price"])
    quarter, median, three = np.quantile(training, [0.25, 0.5, 0.75])
    for row, found in zip(rows, table["price"].to_pylist(), strict=True):
        x = math.asinh((float(row["price"]) - median) / (three - quarter)) if row["price"] else 0
        assert found == pytest.approx(x, rel=1e-6)
    newest = rows[279]["epoch"]
    ages = [math.log1p(max(0, newest - row["epoch"]) / 86400) for row in rows]
    assert table["epoch_age"].to_pylist() == pytest.approx(ages, rel=1e-5)
    for name in ("user_id", "city"):
        ids, oov = expected_ids([[row[name]] for row in rows], 280)
        assert table[name].to_pylist() == [ids.get(row[name], oov) for row in rows]
    hours = [row["when"][11:13] for row in rows]
    ids, oov = expected_ids([[hour] for hour in hours], 280)
    assert table["when_hour"].to_pylist() == [ids.get(hour, oov) for hour in hours]
    days = ["Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday"]
    days = [days[(int(row["when"][8:10]) - 1) % 7] for row in rows]  # 1 November 2023
    ids, oov = expected_ids([[day] for day in days], 280)
    assert table["when_weekday"].to_pylist() == [ids.get(day, oov) for day in days]
    bags = [row["tags"].split("|") if row["tags"] else [] for row in rows]
    ids, oov = expected_ids(bags, 280)
    assert table["tags"].to_pylist() == [[ids[tag] for tag in bag] for bag in bags]


def test_scoring_gives_what_the_preparation_gave(prepared, tmp_path):
    directory, rows, _ = prepared
    transform = Transform.load(directory / "out")
    found = list(transform.read([directory / "rows.csv"], keep=["key"], block_bytes=BLOCK))
    assert len(found) > 4
    table = pa.concat_tables(read_splits(directory / "out").values())
    scored = pa.Table.from_batches([prepared for prepared, *_ in found])
    for name in table.schema.names:  # training rows count for later ones alone
        first = 280 if name.startswith(("count(", "rate(")) else 0
        assert scored[name].to_pylist()[first:] == table[name].to_pylist()[first:]
    keys = [key for _, kept, _ in found for key in kept["key"].to_pylist()]
    assert keys == [row["key"] for row in rows]
    numbers = [number for *_, some in found for number in some.tolist()]
    assert numbers == list(range(1, len(rows) + 1))

    new = [{**row, "city": "unseen", "price": ""} for row in rows[:5]]
    for row in new:
        del row["clicked"], row["key"]
    path = write(tmp_path / "new.csv", new)
    ((scored, *_),) = transform.read([path])
    assert "clicked" not in scored.schema.names
    assert set(scored["city"].to_pylist()) == {transform.vocabularies["city"].oov_id}
    assert scored["price"].to_pylist() == [0] * 5
    assert scored["user_id"].to_pylist() == table["user_id"][:5].to_pylist()
    del new[3]["city"]
    path = tmp_path / "less.csv"
    write(path, [{k: v for k, v in row.items() if k != "city"} for row in new])
    with pytest.raises(ValueError, match=r"less.csv has no column 'city'"):
        list(transform.read([path]))


def typed(rows):
    """The same rows with the types of JSON and Parquet."""
    return [
        {
            **row,
            "price": float(row["price"]) if row["price"] else None,
            "user_id": int(row["user_id"]),
            "city": row["city"] or None,
            "tags": row["tags"].split("|") if row["tags"] else [],
        }
        for row in rows
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "tsv", "csv"])
def test_every_format_gives_the_same(prepared, tmp_path, form):
    directory, rows, _ = prepared
    where = tmp_path / "in"
    (where / "deep").mkdir(parents=True)
    for name, half in {"b": rows[200:], "a": rows[:200]}.items():
        half = typed(half) if form in ("jsonl", "parquet") else half
        if name == "b":  # columns may be in another order
            half = [dict(reversed(row.items())) for row in half]
        path = write(where / "deep" / f"{name}.{form}", half, "\t" if form == "tsv" else ",")
        if form == "tsv":
            path.with_suffix(".tsv.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    (where / "_left.csv").write_text("alone")
    inputs = f"{where}/**/[ab].csv" if form == "csv" else where
    prepare(inputs, tmp_path / "out", block_bytes=BLOCK)
    for split, table in read_splits(directory / "out").items():
        found = read_splits(tmp_path / "out")[split]
        assert found.schema.names == table.schema.names
        assert found.to_pylist() == table.to_pylist()


def prepare_later(inputs, output, ids_of, split=None, **kwargs):
    split = SplitOptions(**(split or {"train": "0", "val": "0", "test": "1"}))
    files, plan, left_out = open_later_rows([inputs], ids_of, split)
    meta = prepare_table(files, plan, output, ids_of=ids_of, progress=False, **kwargs)
    return meta, left_out


def test_folders_are_columns_and_numbers_in_names_are_in_order(tmp_path, capfd):
    """Hive and Spark leave the columns that name folders out of the files in them."""
    rows = tmp_path / "rows"
    days = "3", "__HIVE_DEFAULT_PARTITION__", "a b"
    for number, day in enumerate(days, 9):
        directory = rows / f"{number}" / f"day={day.replace(' ', '%20')}" / "shop=1"
        directory.mkdir(parents=True)
        table = {"label": [0, 1] * 60, "city": ["x", "y"] * 60, "shop": [number] * 120}
        pq.write_table(pa.table(table), directory / "part.parquet")
    whole = {"split": {"train": 1, "val": 0, "test": 0}, "rates": False}
    files, plan = open_and_plan([rows], whole)
    pattern = open_and_plan([str(rows / "*" / "day=*")], whole)[0]
    assert [file.path for file in pattern] == [file.path for file in files]
    assert {c.name: c.why for c in plan.columns}["shop"].startswith("integers, 2 values")
    prepare_table(files, plan, tmp_path / "out", progress=False)
    ids = pq.read_table(tmp_path / "out" / "vocabulary" / "day.parquet").to_pydict()
    values = dict(zip(ids["id"], ids["value"], strict=True))
    found = pq.read_table(tmp_path / "out" / "train.parquet")
    assert [values[i] for i in found["day"].to_pylist()] == ["3"] * 120 + [""] * 120 + ["a b"] * 120
    assert pc.count_distinct(found["shop"]).as_py() == 3  # a column of the files comes first
    [(scored, *_)] = Transform.load(tmp_path / "out").read([rows / "9"])
    assert scored["day"].to_pylist() == [ids["id"][ids["value"].index("3")]] * 120

    texts = write(rows / "9" / "day=3" / "rows.csv", [{"label": 0, "city": "x"}])
    open_and_plan([texts], {})
    assert "no column is made of day" in capfd.readouterr().err


def test_files_may_be_days(tmp_path):
    """Those before the last are for training; of the last, one half is for test."""
    for day, rows in enumerate((90, 60, 41)):
        columns = {"label": [*[0, 1] * 45][:rows], "day": [f"d{day}"] * rows}
        write_rows(tmp_path / f"day_{day}.csv", columns)
    meta = prepare([tmp_path], tmp_path / "out", {"split": {"by": "days"}})
    assert [meta.splits[split].rows for split in SPLITS] == [150, 20, 21]
    with pytest.raises(ValueError, match="column is 'day', but by is days; set by: time or by: c"):
        SplitOptions(by="days", column="day")


def test_a_column_without_a_value_in_any_of_several_files(tmp_path):
    for file in ("a", "b"):
        rows = {"label": [0, 1] * 60, "city": ["x", "y"] * 60, "null": pa.nulls(120)}
        pq.write_table(pa.table(rows), tmp_path / f"{file}.parquet")
    plan = open_and_plan([tmp_path], {})[1]
    assert {c.name: c.why for c in plan.columns}["null"] == "no value in the first rows"


def test_later_rows_get_the_ids_and_the_scaling_of_those_prepared_before(prepared, tmp_path):
    directory, _, before = prepared
    rows = [row | {"new": "x"} for row in table_rows(200, seed=1)]
    rows[0] |= {"user_id": "never seen", "price": "1e9"}
    path = write(tmp_path / "later.csv", rows)
    meta, left_out = prepare_later(path, tmp_path / "out", directory / "out", block_bytes=BLOCK)
    assert left_out == ["new"]
    assert meta.fingerprint == before.fingerprint
    assert [meta.splits[split].rows for split in SPLITS] == [0, 0, 200]
    assert (meta.dense, meta.categorical) == (before.dense, before.categorical)
    transform = Transform.load(directory / "out")  # what predict.py makes of the same rows
    scored = pa.Table.from_batches([part for part, _, _ in transform.read([path])])
    written = pq.read_table(tmp_path / "out" / "test.parquet")
    for name in (*meta.dense, *meta.tables, "clicked"):
        assert written[name].to_pylist() == scored[name].to_pylist(), name
    copied = Transform.load(tmp_path / "out")  # from which others can go on
    assert copied.rules() == transform.rules()
    again, _ = prepare_later(path, tmp_path / "again", tmp_path / "out", block_bytes=BLOCK)
    assert again.fingerprint == before.fingerprint


def test_later_rows_get_the_ids_of_a_run(prepared, tmp_path, run):
    directory, rows, before = prepared
    shutil.copytree(directory / "out", tmp_path / "run" / "preparation")
    path, output = write(tmp_path / "later.csv", rows), ["--output", tmp_path / "later"]
    run("prepare_table", path, *output, "--ids-of", tmp_path / "run")
    assert Meta.read(tmp_path / "later").fingerprint == before.fingerprint
    told = run("prepare_table", path, *output, "--ids-of", tmp_path, "--min-count", 2, status=2)
    assert told.stderr.startswith("error: min_count: with --ids-of, only the split is given")


def test_later_rows_are_split_as_they_are_told(prepared, tmp_path):
    directory, rows, _ = prepared
    parts = [row | {"part": ("train", "test")[i % 2]} for i, row in enumerate(rows)]
    path, ids_of = write(tmp_path / "later.csv", parts), directory / "out"
    meta, left_out = prepare_later(path, tmp_path / "a", ids_of, {"by": "column", "column": "part"})
    assert [meta.splits[split].rows for split in SPLITS] == [200, 0, 200]
    assert not left_out
    by_time = {"by": "time", "column": "when", "train": "0.5", "val": "0", "test": "0.5"}
    meta, _ = prepare_later(path, tmp_path / "b", ids_of, by_time)
    assert 0 < meta.splits["train"].rows < 400
    with pytest.raises(ValueError, match="by time:part: the earlier preparation has no such col"):
        prepare_later(path, tmp_path / "c", ids_of, by_time | {"column": "part"})
    # In the first result "part" is a split column, which rows of the next day need not have.
    next_day = write(tmp_path / "next.csv", rows)
    meta, _ = prepare_later(next_day, tmp_path / "d", tmp_path / "a")
    assert meta.splits["test"].rows == 400


def test_later_rows_that_do_not_fit_are_refused(prepared, tmp_path):
    directory, rows, _ = prepared
    ids_of = directory / "out"
    less = [{k: v for k, v in row.items() if k != "city"} for row in rows]
    path = write(tmp_path / "less.csv", less)
    with pytest.raises(ValueError, match=r"less\.csv has no column 'city', which the earlier prep"):
        prepare_later(path, tmp_path / "out", ids_of)
    path = write(tmp_path / "rows.csv", rows)
    with pytest.raises(ValueError, match="is also the output"):
        prepare_later(path, ids_of, ids_of)
    prepare_later(path, tmp_path / "out", ids_of)
    with pytest.raises(ValueError, match=r"was prepared before, with other options and .*ids_of"):
        prepare(path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"was not made by dlrm prepare"):
        prepare_later(path, tmp_path / "new", tmp_path)


def test_the_options_that_are_written_give_the_same(prepared, tmp_path, run):
    directory, _, _ = prepared
    config = directory / "out" / "table.yaml"
    rows = directory / "rows.csv"
    told = run("prepare_table", rows, "--output", tmp_path / "out", "--config", config).stdout
    assert "log               2 numbers: when_age, epoch_age\n" in told
    assert "robust            1 numbers: price\n" in told
    for split, table in read_splits(directory / "out").items():
        assert read_splits(tmp_path / "out")[split].equals(table)
    shown = run(
        "prepare_table", directory / "rows.csv", "--output", tmp_path / "no", "--label", "clicked",
        "--columns", "{tags: drop}", "--dry-run",
    ).stdout  # fmt: skip
    assert "tags     text          drop      left out" in shown
    wrong = run("prepare_table", rows, "--output", tmp_path / "no", "--columns", "x", status=2)
    assert "--columns: is 'x', it must be as in '{row_id: drop}'" in wrong.stderr
    assert "price    double        number    auto, missing: 0 after it" in shown
    assert "label: clicked" in shown
    assert "split in the order of the rows (by time: --split-by time:when)" in shown
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("cap", [None, 40])
def test_columns_with_one_vocabulary_have_ids_of_the_same_values(tmp_path, cap, monkeypatch):
    monkeypatch.setattr(learner, "CHUNK_BYTES", 100)
    rng = random.Random(0)
    rows = [
        {
            "label": rng.random() < 0.3,
            "movie": rng.randrange(60),
            "seen": " ".join(str(rng.randrange(30, 90)) for _ in range(rng.randrange(5))),
        }
        for _ in range(500)
    ]
    table = write(tmp_path / "rows.csv", rows)
    columns = {
        "movie": {"kind": "category", "cap": cap},
        "seen": {"kind": "list", "separator": " ", "vocabulary": "movie", "cap": cap},
    }
    meta = prepare(table, tmp_path / "out", {"columns": columns}, block_bytes=BLOCK)
    assert meta.owners == (0, 0)
    assert meta.cardinalities[0] == meta.cardinalities[1] == (cap or meta.cardinalities[0])
    files = [pq.read_table(tmp_path / "out" / meta.vocabulary_file(n)) for n in ("movie", "seen")]
    assert files[0].equals(files[1])

    training = rows[:400]
    counts = Counter(str(row["movie"]) for row in training)
    counts.update(movie for row in training for movie in row["seen"].split())
    listed = dict(zip(*(files[0][n].to_pylist() for n in ("value", "count")), strict=True))
    assert all(counts[value] == count for value, count in listed.items() if value)
    ids = {value: number for number, value in enumerate(files[0]["value"].to_pylist())}
    for split, part in (("train", training), ("test", rows[450:])):
        found = pq.read_table(tmp_path / "out" / f"{split}.parquet")
        expected = [ids.get(str(row["movie"]), ids[None]) for row in part]
        assert found["movie"].to_pylist() == expected
        lists = [[ids.get(m, ids[None]) for m in row["seen"].split()] for row in part]
        assert found["seen"].to_pylist() == lists
    scored = next(Transform.load(tmp_path / "out").read([table]))[0]
    assert scored["seen"].to_pylist()[450:] == lists


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"vocabulary": "price"}, "both must be a category or list, and the other one must have"),
        ({"vocabulary": "none"}, "both must be a category or list"),
        ({"vocabulary": "seen"}, "both must be a category or list"),
        ({"vocabulary": "movie", "min_count": 2}, "so its min_count must be the same, 1"),
    ],
)
def test_a_vocabulary_that_a_column_cannot_have(tmp_path, seen, message):
    rows = [{"label": i % 2, "movie": i, "seen": "1 2", "price": i / 7} for i in range(20)]
    table = write(tmp_path / "rows.csv", rows)
    columns = {"movie": "category", "seen": {"kind": "list", "separator": " "} | seen}
    with pytest.raises(ValueError, match=message):
        prepare(table, tmp_path / "out", {"columns": columns | {"price": "number"}})


def test_a_split_of_unseen_ids_alone_is_noted(tmp_path, capfd):
    columns = {"label": [0, 1] * 100, "day": [f"d{i // 10}" for i in range(200)]}
    path = write_rows(tmp_path / "rows.parquet", columns | {"city": ["a", "b"] * 100})
    prepare_rows(path, tmp_path / "out")
    noted = capfd.readouterr().err
    for split in ("val", "test"):
        assert f"no row of the {split} split has a value of the training rows in day:" in noted

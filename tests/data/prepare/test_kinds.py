"""What is found in columns as real tables have them."""

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dlrm.data.prepare.column_options import yaml_line
from dlrm.data.prepare.infer import ColumnsError
from dlrm.data.prepare.kinds import find_kind
from dlrm.data.prepare.plan_summary import format_plan
from tests.kit import ALL_TRAIN, plan_rows, prepare_rows, read_splits, read_values, write_rows


def csv(path, **columns):
    """A CSV with a label; returns its path."""
    rows = len(next(iter(columns.values())))
    own = {"label": [0, 1] * (rows // 2), "city": ["a", "b", "c", "d"] * (rows // 4)}
    return write_rows(path, own | columns)


def test_ids_of_64_bits_are_no_numbers(tmp_path):
    """pyarrow finds float64 in ids beyond 2^63, which would make all of them nearly the same."""
    ids = [10_000_000_000_000_000_000 + i for i in range(40)] * 5
    path = csv(tmp_path / "rows.csv", key=ids, price=[1e20 / 3] * 200)
    _, plan = prepare_rows(path, tmp_path / "out", ALL_TRAIN)
    assert plan.columns[2].kind == "category"
    assert {*read_values(tmp_path / "out", "key")} == {None, *map(str, ids)}


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


@pytest.mark.parametrize(
    ("unit", "told"),
    [("s", "time"), *((unit, f"{{kind: time, unit: {unit}}}") for unit in ("ms", "us", "ns"))],
)
def test_numbers_that_may_be_times(unit, told):
    scale = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
    sample = pa.array([(1_400_000_000 + 86_400 * (i % 90)) * scale for i in range(200)])
    found = find_kind("opened", sample, False)
    assert found.kind == "number"
    assert found.why == f"integers; if these are times: columns: {{opened: {told}}}"
    for name in ("timestamp", "created_at", "ts"):
        found = find_kind(name, sample, False)
        assert (found.kind, found.unit) == ("time", unit)
        ends = f"that are {unit} since 1970; if these are numbers: columns: {{{name}: number}}"
        assert found.why == f"integers {ends}"
    assert "times" not in find_kind("price", pa.array(range(0, 20_000, 100)), False).why


RNG = np.random.default_rng(0)
HOURS = RNG.integers(0, 24, 20_000)
COUNTS = RNG.geometric(0.03, 20_000)
FREE = RNG.random(20_000)
MINUTES = RNG.integers(60, 360, 20_000)


@pytest.mark.parametrize("type_", [np.int64, np.uint64, np.float64])
def test_integers_that_are_too_large_for_numbers_are_ids(type_):
    """Hashes of 64 bits: numbers would hold neither which of them are equal nor what they mean."""
    values = (2**62 + COUNTS * 2**40).astype(type_)
    for sample in (values, -values) if type_ == np.int64 else (values,):
        found = find_kind("page", pa.array(sample), True, (FREE < 0.2).astype(np.uint8))
        assert (found.kind, found.why) == ("category", "integers of 16 digits and more")


@pytest.mark.parametrize("whole_floats", [False, True])
@pytest.mark.parametrize(
    ("name", "values", "labels", "kind", "why"),
    [
        ("user", HOURS, None, "category", "by its name"),
        ("userID", HOURS, None, "category", "by its name"),
        ("item_id:token", COUNTS, None, "category", "by its name"),
        ("bid", HOURS, FREE < 0.1 + HOURS / 30, "number", "24 values, the label rate follows"),
        ("hour", HOURS, 0.5 + np.sin(HOURS) / 3 > FREE, "category", "rate does not follow their"),
        ("visits", COUNTS, np.minimum(COUNTS, 50) / 60 > FREE, "number", "the label rate follows"),
        ("length", MINUTES, abs(MINUTES / 300 - 0.7) > FREE, "number", "the label rate follows"),
        ("shop", MINUTES, MINUTES * 7919 % 100 / 99 > FREE, "category", "does not follow their"),
        ("hour", HOURS, FREE < 0.2, "category", "24 values, evenly spread"),
        ("visits", COUNTS, FREE < 0.2, "number", "unevenly spread"),
        ("visits", COUNTS, None, "number", "unevenly spread"),
        ("movie", RNG.permutation(20_000) % 2000, None, "category", "by its name"),
        ("ad", COUNTS, FREE < 0.001, "category", "by its name"),
        ("film", RNG.permutation(20_000) % 2000, None, "category", "2,000 values, evenly spread"),
        ("paid", RNG.integers(0, 10**6, 20_000), None, "number", "hardly repeat"),
        ("rooms", HOURS % 3, None, "category", "3 values"),
    ],
)
def test_what_integers_are_is_found_in_names_labels_and_their_spread(
    name, values, labels, kind, why, whole_floats
):
    """pandas writes integers with a gap as 123.0: ids that became numbers cost 0.06 AUC."""
    sample = pa.array(values)
    if whole_floats:
        sample = pa.array(np.where(np.arange(len(values)) == 7, np.nan, values), from_pandas=True)
    found = find_kind(name, sample, True, None if labels is None else labels.astype(np.uint8))
    assert found.kind == kind
    assert found.why.startswith("whole numbers" if whole_floats else "integers")
    assert why in found.why
    other = {"category": "numbers: columns: {%s: number}", "number": "ids: columns: {%s: category}"}
    quoted = f"'{name}'" if ":" in name else name
    assert found.why.endswith(f"; if these are {other[kind] % quoted}")


@pytest.mark.parametrize("type_", [np.int64, np.float32])
def test_a_number_that_rises_from_row_to_row_has_buckets(tmp_path, type_):
    """Ids of days are none that later rows have; a network knows their trend by the last bucket."""
    days = (np.arange(400) // 4 * 3 + 0.5).astype(type_)
    path = csv(tmp_path / "rows.csv", day=days, price=COUNTS[:400])
    meta, plan = prepare_rows(path, tmp_path / "out", {})
    assert "rising from row to row, so buckets are ids" in plan.columns[2].why
    assert "day" in meta.dense
    assert meta.tables == ("city", "day_bucket")
    table = read_splits(tmp_path / "out")
    assert {*table["test"]["day_bucket"].to_pylist()} == {table["train"]["day_bucket"][-1].as_py()}

    # Not where later rows are like all others, or of numbers that fall once.
    days[200] = 0
    small = (np.arange(400) % 256).astype(np.uint8)
    cases = ((np.sort(days), {"by": "random"}), (days, {}), (small, {}))
    for values, split in cases:
        path = csv(tmp_path / "other.csv", day=values, price=COUNTS[:400])
        assert "rising" not in plan_rows(path, split=split)[1].columns[2].why


def test_integers_of_a_small_type_are_evenly_spread():
    """The difference of the first and the last may be beyond their type."""
    sample = pa.array(RNG.integers(-120, 120, 5000).astype(np.int8))
    assert "evenly spread" in find_kind("code_no", sample, False).why
    assert "unevenly" not in find_kind("code_no", sample, False).why


def test_a_word_for_missing_numbers_is_named(tmp_path):
    """A third of the values made ids of all numbers, and nothing said so."""
    values = ["not asked" if i % 3 else f"{i}.5" for i in range(200)]
    path = csv(tmp_path / "rows.csv", age=values)
    why = plan_rows(path)[1].columns[2].why
    assert why.endswith("; if these are numbers with gaps: missing: [not asked] in the YAML")
    given = yaml.safe_load(re.search(r"missing: \[.*?\]", why)[0])
    assert plan_rows(path, **given)[1].columns[2].kind == "number"
    assert "missing" not in find_kind("c", pa.array(["a", "1", "2"] * 100), True).why


def test_a_name_in_the_yaml_that_a_message_gives(tmp_path):
    for name in ("yes", "a b", "x: y", "[z]", "item_id:token", "two\nlines", '"\n'):
        for options in ("number", {"kind": "list", "separator": "|"}):
            assert yaml.safe_load(line := yaml_line(name, options)) == {"columns": {name: options}}
            assert "\n" not in line


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_numbers_with_the_format_of_a_time(tmp_path, form):
    """The hours of Avazu's clicks, 14102123, were taken for seconds since 1970."""
    hours = [int(f"1410{21 + i // 24 % 7}{i % 24:02}") for i in range(200)]
    columns = {"label": [0, 1] * 100, "city": ["a", "b"] * 100, "hour": hours}
    path = write_rows(tmp_path / f"rows.{form}", columns)
    own = {"hour": {"kind": "time", "format": "%y%m%d%H"}}
    split = {"by": "time", "column": "hour", "val_from": "2014-10-27"}
    split |= {"test_from": "2014-10-27 12:00"}
    meta, _ = prepare_rows(path, tmp_path / "out", {"columns": own, "split": split})
    assert [meta.splits[name].rows for name in ("train", "val", "test")] == [176, 12, 12]
    assert {f"{hour:02}" for hour in range(24)} <= {*read_values(tmp_path / "out", "hour_hour")}
    ages = pq.read_table(tmp_path / "out" / "train.parquet")["hour_age"].to_numpy()
    assert np.exp(ages.max()) == pytest.approx(1 + 5 + 23 / 24, abs=1e-3)


def test_a_format_without_hours_makes_none(tmp_path):
    days = [20240101 + i % 28 for i in range(200)]
    path = csv(tmp_path / "rows.csv", day=days)
    own = {"day": {"kind": "time", "format": "%Y%m%d"}}
    _, plan = plan_rows(path, columns=own)
    assert "weekday age" in format_plan(plan)
    assert "hour" not in format_plan(plan)


def test_all_columns_that_can_not_be_features_are_named_at_once(tmp_path):
    rows = {"label": [0, 1] * 100, "c": ["a", "b"] * 100, "place": [{"x": 1}] * 200}
    rows |= {"key": [b"a", b"\xff"] * 100, "vector": [[0.5], []] * 100}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    summary = r"label +int64 +label"
    message = (
        r"columns can't be features: 'place' \(struct<.*\), 'key' \(binary, and not UTF-8\), "
        r"'vector' \(list<.*\); leave them out with columns: {place: drop, key: drop, "
        r"vector: drop}, or copy them to the result with columns: {place: pass, key: pass, "
        r"vector: pass}"
    )
    with pytest.raises(ColumnsError, match=message) as error:
        plan_rows(tmp_path / "rows.parquet")
    assert re.search(summary, error.value.summary)
    given = {"place": "drop", "vector": "drop", "key": "category"}  # as of later rows
    with pytest.raises(ValueError, match=r"b'\\xff' can't be made .*, or set columns: {key: drop}"):
        prepare_rows(tmp_path / "rows.parquet", tmp_path / "out", {"columns": given})


def test_the_columns_are_printed_before_an_error_about_them(tmp_path, script, capsys):
    """Without any category, the error came before a word on what had been found."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"label": [0, 1] * 500, "amount": [1.5, 2.5] * 500}), path)
    (tmp_path / "options").write_text("columns: {amount: drop}")
    program, given = script("prepare_table"), ["--config", str(tmp_path / "options")]
    assert program.main([str(path), "--output", str(tmp_path / "out"), *given]) == 2
    printed = capsys.readouterr()
    assert re.search(r"amount +\w+ +drop +left out", printed.out)
    assert "set one with columns: {NAME: category} in the YAML of --config" in printed.err


PARTS = ["time_hour", "time_weekday", "time_age"]
SECONDS = np.sort(1_600_000_000 + np.random.default_rng(0).integers(0, 10**6, 300)).tolist()


@pytest.mark.parametrize(
    ("column", "options", "features", "why"),
    [
        (SECONDS, {}, PARTS, "s since 1970; later rows have age 0"),
        ([1000 * x for x in SECONDS], {}, PARTS, "ms since 1970"),
        (list(range(100, 400)), {}, [], "no feature: it splits the rows"),
        (sorted(list(range(10)) * 30), {}, [], "no feature: it splits the rows"),
        (SECONDS, {"time": "number"}, ["time"], "given; later rows are out of its range"),
    ],
)
def test_the_time_of_a_split_is_no_number_out_of_range(tmp_path, column, options, features, why):
    path = csv(tmp_path / "rows.csv", time=column, city=list("abc") * 100)
    content = {"split": {"by": "time", "column": "time"}, "columns": options}
    meta, plan = prepare_rows(path, tmp_path / "out", content)
    assert [f.name for f in plan.features if f.column.name == "time"] == features
    assert why in format_plan(plan)
    assert [meta.splits[name].rows for name in ("train", "val", "test")] == [240, 30, 30]
    same = plan_rows(path, **yaml.safe_load(plan.as_yaml()))[1]
    assert [feature.name for feature in same.features] == [f.name for f in plan.features]


def test_addresses_are_no_times():
    found = find_kind("ip", pa.array([f"10.0.{i % 9}.{i % 256}" for i in range(300)]), untyped=True)
    assert found.kind == "category"
    assert "times" not in found.why


def test_times_of_which_some_have_a_zone_may_be_times():
    texts = [f"2026-01-{i % 28 + 1:02}T10:00:0{i % 10}{'Z' if i % 2 else ''}" for i in range(200)]
    found = find_kind("seen", pa.array(texts), untyped=True)
    assert found.kind == "category"
    assert found.why.endswith("if these are times, set kind: time and format:, as in strptime")


@pytest.mark.parametrize(
    ("form", "days", "kind"),
    [
        ("%d.%m.%Y", 200, "time"),
        ("%d.%m.%Y %H:%M", 10, "time"),  # no other form begins like that
        ("%d/%m/%Y %H:%M:%S", 200, "time"),
        ("%m/%d/%Y %I:%M %p", 200, "time"),
        ("%m-%d-%Y", 200, "time"),
        ("%Y/%m/%d", 10, "time"),
        ("%d-%b-%Y", 200, "time"),
        ("%d %b %Y %H:%M", 10, "time"),
        ("%b %d, %Y %I:%M %p", 200, "time"),
        ("%d/%m/%Y", 10, "category"),  # which of both is the month?
        ("%d/%m/%y", 200, "category"),
        ("%d/%m/%Y at %H:%M", 200, "category"),
    ],
)
def test_times_as_people_write_them(tmp_path, form, days, kind):
    hours = [np.datetime64("2024-01-01T08:05") + np.timedelta64(11 * i, "h") for i in range(400)]
    texts = [
        hour.item().strftime(form) for hour in hours if hour.item().timetuple().tm_yday <= days
    ]
    texts = (texts * 20)[:400]
    found = find_kind("seen", pa.array([None, *texts]), True)
    assert (found.kind, found.format) == (kind, form if kind == "time" else None)
    assert ("if these are times" in found.why) == (kind == "category")

    # Of a column that is given as a time, the format is found as well.
    given = {"kind": "time"} | ({} if kind == "time" else {"format": form})
    plan = plan_rows(csv(tmp_path / "rows.csv", seen=texts), columns={"seen": given})[1]
    assert plan.columns[2].options.format == form
    parts = [feature.part for feature in plan.features if feature.part]
    assert parts == ["hour"] * ("%M" in form) + ["weekday", "age"]


def test_integers_that_are_days_are_times(tmp_path):
    days = pd.date_range("2023-12-20", periods=30).strftime("%Y%m%d").astype(int).to_numpy()
    path = csv(tmp_path / "rows.csv", seen=np.tile(days, 10)[:200], at=["08:30", "21:15"] * 100)
    meta, plan = prepare_rows(path, tmp_path / "out", ALL_TRAIN)
    assert plan.columns[2].why.startswith("integers that are dates, %Y%m%d; if these are ids: ")
    assert "seen_weekday" in [column.name for column in meta.categorical]
    ages = pq.read_table(tmp_path / "out" / meta.splits["train"].files[0])["seen_age"]
    assert len(set(ages.to_pylist())) == 30
    for odd in (20231332, 18991231):  # no days, or none of our time
        found = find_kind("seen", pa.array([*np.tile(days, 10), odd]), True)
        assert found.kind != "time"


def test_a_number_is_bucketed_if_the_missing_ones_tell_of_the_label(tmp_path):
    """A missing number is 0, as the median is: a table lost 0.02 of its AUC."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 1000)
    columns = {"label": label, "city": rng.integers(0, 5, 1000)}
    for name, missing in (("tells", label * 0.2 + 0.1), ("silent", 0.2), ("whole", 0)):
        columns[name] = np.where(rng.random(1000) < missing, np.nan, rng.normal(size=1000))
    path = write_rows(tmp_path / "rows.csv", columns)
    meta, plan = prepare_rows(path, tmp_path / "out", ALL_TRAIN)
    why = "numbers; buckets are ids, as labels jump between them or with gaps"
    assert [column.why for column in plan.columns[2:]] == [why, "numbers", "numbers"]
    assert [column.name for column in meta.categorical] == ["city", "tells_bucket"]
    assert meta.dense[:3] == ("tells", "silent", "whole")
    _, plain = plan_rows(path, columns={"tells": "number"})  # as it is given
    assert not plain.columns[2].options.bucketed

    columns["label"] = np.where(label, "yes", "no")
    _, named = plan_rows(write_rows(tmp_path / "named.csv", columns), positive="yes")
    assert [column.why for column in named.columns[1:]] == [
        column.why for column in plan.columns[1:]
    ]


def test_a_number_is_bucketed_if_labels_jump_between_its_buckets(tmp_path):
    """A network learns a line or a smooth curve as soon as buckets, and anything else late."""
    rng = np.random.default_rng(0)
    values = dict(zip(("line", "curve", "wave", "steps"), rng.normal(size=(4, 9000)), strict=True))
    values["line"] = np.exp(values["line"])  # as a model sees prices
    logit = np.log(values["line"]) / 2 + values["curve"] ** 2 / 3 + np.sin(3 * values["wave"])
    logit += 2 * (abs(values["steps"]) < 0.5) - 1
    label = (rng.random(9000) < 1 / (1 + np.exp(-logit))).astype(int)
    columns = {"label": label, "city": rng.integers(0, 5, 9000)} | values
    columns["same"] = label * 9.7 - 5.8  # a line leaves nothing but rounding
    _, plan = plan_rows(write_rows(tmp_path / "rows.parquet", columns))
    assert [c.name for c in plan.columns if c.options.bucketed] == ["wave", "steps"]
    columns["label"] = rng.permutation(label)  # of which no number says anything
    _, plan = plan_rows(write_rows(tmp_path / "rows.parquet", columns))
    assert not any(column.options.bucketed for column in plan.columns)


def test_of_many_numbers_with_gaps_those_that_tell_most_are_bucketed(tmp_path):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 2000)
    columns = {"label": label, "city": rng.integers(0, 5, 2000)}
    for i in range(40):
        missing = 0.2 + label * (0.1 if i < 20 else 0.5)
        columns[f"s{i}"] = np.where(rng.random(2000) < missing, np.nan, rng.normal(size=2000))
    _, plan = plan_rows(write_rows(tmp_path / "rows.csv", columns))
    bucketed = [column.name for column in plan.columns if column.options.bucketed]
    assert len(bucketed) == 32
    assert bucketed[-20:] == [f"s{i}" for i in range(20, 40)]


def test_hexadecimal_integers_are_ids(tmp_path):
    """They were called numbers, and the first one no number."""
    keys, sizes = [f"0x{i * i:x}" for i in range(200)], [i * 7 % 199 for i in range(200)]
    path = csv(tmp_path / "rows.csv", key=keys, size=sizes)
    _, plan = prepare_rows(path, tmp_path / "out", ALL_TRAIN)
    assert [column.kind for column in plan.columns[2:]] == ["category", "number"]


def test_lists_of_which_the_first_rows_have_none(tmp_path):
    """They were refused with the advice to name a separator."""
    path = csv(tmp_path / "rows.csv", seen=[""] * 400)
    _, plan = prepare_rows(path, tmp_path / "out", {"columns": {"seen": "list"}})
    assert plan.columns[2].options.separator == "|"


def test_rows_are_split_by_times_as_people_write_them(tmp_path):
    days = np.random.default_rng(0).permutation(300)
    texts = [(np.datetime64("2023-06-01") + day).item().strftime("%d.%m.%Y") for day in days]
    path = csv(tmp_path / "rows.csv", seen=texts)
    split = {"by": "time", "column": "seen"}
    prepare_rows(
        path, tmp_path / "out", {"split": split, "columns": {"city": "pass"}, "rates": False}
    )
    ages = [table["seen_age"].to_numpy() for table in read_splits(tmp_path / "out").values()]
    assert ages[0].max() == pytest.approx(np.log1p(239))
    assert not np.concatenate(ages[1:]).any()  # of later rows


def test_many_columns_are_judged_by_many_rows(tmp_path, monkeypatch):
    """4 MB are 60 rows of 10,000 columns, too few to tell ids from numbers."""
    monkeypatch.setattr("dlrm.data.prepare.infer.SAMPLE_BYTES", 400_000)
    columns = {f"c{i}": [10 + i % 7 for i in range(200)] for i in range(2000)}
    path = csv(tmp_path / "rows.csv", label=[0, 1] * 100, **columns)
    _, plan = plan_rows(path)
    assert {column.kind for column in plan.columns} == {"label", "category"}

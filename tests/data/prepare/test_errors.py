"""What is wrong with a table is said in one line: file, row, column, value, rule, remedy."""

import gzip
import json
import os
import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dlrm.data.prepare import infer
from dlrm.data.prepare.column_options import read_options
from dlrm.data.prepare.plan_summary import format_plan
from dlrm.data.prepare.transform import Transform
from tests.kit import plan_rows, prepare_rows, read_values, write_rows

GOOD = ["label,price,city"] + [f"{i % 2},{i}.5,{'abc'[i % 3]}" for i in range(300)]
CUT = gzip.compress("\n".join(GOOD).encode())[:-20]


def prepare(inputs, tmp_path, block_bytes=1000, **options):
    return prepare_rows(inputs, tmp_path / "out", options, block_bytes=block_bytes)[0]


def write(path, lines):
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("latin-1"))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2.5", r"row 201: 2 fields, a row has 3: '1,2.5'; corr.*; or skip .* --bad-rows skip$"),
        ("1,2.5,Z\xfcrich", r"row 201, column 'city': byte 2 \(0xfc\) is not UTF-8"),  # Latin-1
        ("1,2.5,a,b", r"row 201: 4 fields, a row has 3"),
        ("1,dear,a", r"row 201, column 'price': 'dear' is not a number; correct it, or set col"),
        ("1,inf,a", r"row 201, column 'price': inf is not a finite number"),
        ("2,2.5,a", r"row 201, column 'label': the value is '2'; it must be 0 or 1"),
        (",2.5,a", r"row 201, column 'label': the value is missing; it must be 0 or 1"),
    ],
)
def test_a_row_that_does_not_fit(tmp_path, line, message):
    path = write(tmp_path / "rows.csv", [*GOOD[:201], line, *GOOD[201:]])
    with pytest.raises(ValueError, match=rf"rows.csv, {message}"):
        prepare(path, tmp_path)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_texts_that_stand_for_a_missing_number(tmp_path):
    """The error of another text tells a remedy, which works."""
    lines = [*GOOD[:101], "1,?,a", "0,-,b", "1,no idea,a", *GOOD[101:]]
    path = write(tmp_path / "rows.csv", lines)
    with pytest.raises(ValueError, match=r"row 103, .*: 'no idea' is not") as raised:
        prepare(path, tmp_path)
    remedy = yaml.safe_load(re.search(r"missing: \[.*?\]", str(raised.value))[0])
    meta = prepare(path, tmp_path, **remedy, split={"train": 1, "val": 0, "test": 0})
    assert meta.splits["train"].rows == 303
    prices = pq.read_table(tmp_path / "out" / "train.parquet")["price"].to_pylist()
    assert prices[100:103] == [0] * 3


@pytest.mark.parametrize("first", ["", "\n", GOOD[0] + "\n"])
def test_files_without_rows_among_others(tmp_path, capsys, first):
    """An empty file ended the program; if the first had a header alone, numbers became ids."""
    paths = [tmp_path / f"day_{i}.csv" for i in range(4)]
    for path, text in zip(paths, (first, "\n".join(GOOD), "", GOOD[0]), strict=True):
        path.write_text(text)
    meta = prepare(list(paths), tmp_path)
    assert (meta.dense[0], sum(split.rows for split in meta.splits.values())) == ("price", 300)
    assert "day_2.csv" in (told := capsys.readouterr().err)
    assert "counts as 0 rows" in told


def test_ordinary_quotes_within_fields(tmp_path):
    lines = [*GOOD[:100], '1,2.5,5" pipe', *GOOD[100:200], '1,2.5,"a\nb"', *GOOD[200:]]
    path = write(tmp_path / "rows.csv", lines)
    meta = prepare(path, tmp_path, split={"train": 1, "val": 0, "test": 0})
    assert meta.splits["train"].rows == 302
    assert {'5" pipe', "a\nb"} <= {*read_values(tmp_path / "out", "city")}
    path = write(tmp_path / "bad.csv", [*lines[:100], '1,2.5,"two\nlines, ""x"""', "1,x,a"])
    with pytest.raises(ValueError, match="row 101, column 'price': 'x'"):
        prepare_rows(path, tmp_path / "bad")


def test_json_lines_that_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(infer, "SAMPLE_BYTES", 1000)
    rows = [json.dumps({"label": i % 2, "price": i, "city": "a"}) for i in range(200)]
    for bad, message in (
        ('{"label": 1, "price": "dear", "city": "a"}', "row 151: .*price"),
        ('{"label": 1, "price": 2, "city": "a", "more": 1}', "row 151: .*unexpected field"),
        ('{"label": 1, "price": 2', "row 151: "),
    ):
        path = write(tmp_path / "rows.jsonl", [*rows[:150], bad, *rows[150:]])
        with pytest.raises(ValueError, match=rf"rows.jsonl, {message}") as raised:
            prepare(path, tmp_path, columns={"price": "number"})
        assert " in row " not in str(raised.value)  # of the lines that were parsed together


def test_columns_of_json_lines_can_be_left_out(tmp_path, monkeypatch):
    """Each of them was an unexpected field, also in rows to score."""
    rows = [
        {"label": i % 2, "price": i, "city": "a", "place": {f"x{i}": i}, "note": [1]}
        for i in range(200)
    ]
    lines = [json.dumps(row) for row in rows]
    path = write(tmp_path / "rows.jsonl", lines)
    monkeypatch.setattr(infer, "SAMPLE_BYTES", 1000)  # later ones have other parts
    given = {"price": "number", "place": "drop", "note": "drop"}
    meta = prepare(path, tmp_path, columns=given)
    assert [meta.dense[0], *(column.name for column in meta.categorical)] == ["price", "city"]
    new = write(tmp_path / "new.jsonl", [json.dumps(row | {"key": [{}]}) for row in rows])
    scored = Transform.load(tmp_path / "out").read([new])
    assert sum(len(numbers) for _, _, numbers in scored) == 200
    path = write(tmp_path / "more.jsonl", [*lines, json.dumps(rows[0] | {"more": 1})])
    with pytest.raises(ValueError, match=r"row 201: unexpected field 'more'; correct the row"):
        prepare_rows(path, tmp_path / "more", {"columns": given})


def test_inputs_that_are_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\*.csv: no such file, directory"):
        prepare(str(tmp_path / "none*.csv"), tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no file, and files are read several times; wr"):
        prepare(tmp_path / "pipe", tmp_path)
    path = write(tmp_path / "rows.csv", GOOD)
    with pytest.raises(ValueError, match="is given more than once"):
        prepare([path, path], tmp_path)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ([GOOD], {"label": "clicked"}, r"0.csv has no label 'clicked'"),
        ([GOOD, ["label,price,town", "1,2,a"]], {}, r"1.csv has no column 'city', but .*0.csv has"),
        ([GOOD, ["label,price,city,x", "1,2,a,b"]], {}, r"0.csv has no column 'x', but .*1.csv ha"),
        ([["label,price,price", "1,2,a"]], {}, r"0.csv has 2 columns named 'price'"),
        ([["price", "1.5"]], {}, r"has no label 'label'; valid: price; name it with --l"),
        ([GOOD], {"columns": {"city": "drop", "price": "drop"}}, "no column is a category or list"),
        ([["1,2.5,7", "0,3.5,8"]], {}, r"first line holds numbers .* list them with names:"),
    ],
)
def test_columns_that_are_not_as_they_should_be(tmp_path, files, options, message):
    paths = [write(tmp_path / f"{i}.csv", lines) for i, lines in enumerate(files)]
    with pytest.raises(ValueError, match=message):
        plan_rows(paths, **options)


def test_no_column_is_dropped_silently(tmp_path, capsys):
    rows = {"label": [0, 1] * 100, "c": ["a", "b"] * 100}
    for values, reason in (
        ([{"a": 1}] * 200, "struct.*as pandas.json_normalize does"),
        ([{f"a{i}": 1 for i in range(50)}] * 200, r"struct<a0: int64, .{42}\.\.\., to be taken"),
        ([[1.5], []] * 100, "list<.*double>"),
    ):
        pq.write_table(pa.table(rows | {"odd": values}), tmp_path / "rows.parquet")
        with pytest.raises(
            ValueError, match=rf"a feature: 'odd' .*{reason}.*columns: {{odd: drop}}"
        ):
            prepare(tmp_path / "rows.parquet", tmp_path)
    told = format_plan(plan_rows(write_rows(tmp_path / "rows.csv", {"": range(200)} | rows))[1])
    assert re.search(
        r"column_1 +int64 +drop +left out +it counts the rows: 0, 1, 2, \.\.\., w", told
    )
    for values in ([None] * 200, pa.nulls(200, pa.string()), [float("nan")] * 200):
        pq.write_table(pa.table(rows | {"odd": values}), tmp_path / "rows.parquet")
        prepare(tmp_path / "rows.parquet", tmp_path)
        told = capsys.readouterr().err
        assert "no value in any training row of odd:" in told
        assert "columns: {odd: drop}" in told
        (tmp_path / "out" / "meta.json").unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colums": {}}, "unknown option 'colums', did you mean 'columns'"),
        ({"columns": {"price": "numbr"}}, "columns.price.kind is 'numbr', did you mean 'number'"),
        ({"columns": {"price": {"transfrom": "log"}}}, "unknown option 'transfrom', did you mean"),
        ({"columns": {"pirce": "number"}}, "has no column 'pirce', did you mean 'price'"),
        ({"columns": {"price": {"buckets": 1}}}, "buckets is 1, it must be at least 2"),
        ({"columns": ["price"]}, "columns is .*, it must hold names and values, as name: value"),
        ({"min_count": "two"}, "min_count is 'two', it must be a whole number"),
        ({"split": {"train": 0.9}}, "train, val and test are 0.9, 0.1, 0.1; they must be"),
        ({"split": {"by": "time"}}, "needs a column; add column: NAME, as in --split-by time:N"),
        ({"split": "random"}, "split is 'random', it must hold names and values"),
        (
            {"split": {"by": "column", "column": "city"}, "columns": {"price": "category"}},
            "row 1, column 'city': the value is 'a'; it must be train, val or test",
        ),
        ({"columns": {"city": "label"}, "label": "label"}, "city and label are both the label"),
        ({"split": {"train": 0, "val": 0, "test": 1}}, "the split leaves none for training"),
    ],
)
def test_mistakes_in_the_options(tmp_path, options, message):
    path = write(tmp_path / "rows.csv", GOOD)
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path, **options)


def test_an_options_file_that_is_no_yaml(tmp_path, run):
    path, rows = tmp_path / "o.yaml", write(tmp_path / "rows.csv", GOOD)
    for content, message in (
        ("a: [", "can't be read: "),
        ("- a", "must hold options as name: value"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_options(path)
    path.write_text("columns: {price: numbr}")
    output = "--output", tmp_path / "out"
    told = run("prepare_table", rows, *output, "--config", path, status=2).stderr
    assert told.startswith(f"error: {path}: columns.price.kind is 'numbr', did you mean 'number'")
    path.write_text("columns: {when: {parts: [minute]}}")
    told = run("prepare_table", rows, *output, "--config", path, status=2).stderr
    assert told.endswith(": columns.when.parts.0 is 'minute'; valid: age, hour, weekday\n")
    told = run("prepare_table", rows, *output, "--config", "o.yml", status=2).stderr
    assert told == "error: --config o.yml: there is no such file; --dry-run prints one\n"
    told = run("prepare_table", rows, *output, "--split", "1", status=2).stderr
    assert told == "error: --split has 1 values; give train, val and test\n"


def test_a_damaged_transform(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"meta.json does not exist"):
        Transform.load(tmp_path)
    prepare(write(tmp_path / "rows.csv", GOOD), tmp_path)
    path = tmp_path / "out" / "transform.json"
    content = json.loads(path.read_text())
    for damaged in ({**content, "version": 9}, {"version": 1}, [], {**content, "columns": [1]}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="is not a transform"):
            Transform.load(tmp_path / "out")
    assert np.isfinite(content["scalings"]["price"]["scale"])


def test_dates_that_can_be_read_in_two_ways_are_pointed_out(tmp_path):
    rows = [f"{i % 2},{1 + i % 12:02}/03/2024 {i % 24:02}:00,{i % 9}-{i % 7}" for i in range(300)]
    path = write(tmp_path / "rows.csv", ["label,when,code", *rows])
    _, plan = plan_rows(path)
    why = {column.name: column.why for column in plan.columns}
    assert "if these are times, set kind: time and format:" in why["when"]
    assert "times" not in why["code"]


def test_a_csv_whose_first_line_is_a_row(tmp_path):
    """A label of texts hides that the header is missing: 0 and 1 alone are found at once."""
    good = prepare(write(tmp_path / "good.csv", GOOD), tmp_path)
    assert good.splits["train"].rows
    path = write(tmp_path / "rows.csv", GOOD[1:])
    hint = "if the first line is a row, list the names of the columns with names: in the YAML"
    with pytest.raises(ValueError, match=rf"has no label 'label'; valid: .*; {hint}"):
        prepare(path, tmp_path)
    with pytest.raises(ValueError, match=rf"has no column 'price'; its columns: .*; {hint}"):
        list(Transform.load(tmp_path / "out").read([path]))
    write(path, ["price,city", "1.5,a"])
    with pytest.raises(ValueError, match="has no label 'label'") as raised:
        prepare(path, tmp_path)
    assert "first line" not in str(raised.value)


@pytest.mark.parametrize(
    ("before", "names"),
    [
        (["# exported by hand", "", '# units: "m, s', "#"], False),
        (["sep=,"], False),
        (["# a, b, c"], False),  # as many fields as the header, which is no row
        (["# label,price"], True),
    ],
)
def test_comments_before_the_rows_are_left_out(tmp_path, capsys, before, names):
    header, rows = GOOD[0], [*GOOD[1:], "1,2.5,#c"]
    options = {"names": header.split(",")} if names else {}
    plain = prepare(write(tmp_path / "rows.csv", [header, *rows]), tmp_path)
    path = write(tmp_path / "more.csv", [*before, *([] if names else [header]), *rows])
    meta, _ = prepare_rows(path, tmp_path / "more", options, block_bytes=40)
    assert f"note: comments or blank lines at the start of {path} are" in capsys.readouterr().err
    assert [*meta.splits.values()] == [*plain.splits.values()]
    for split in meta.splits:
        (one, other) = (tmp_path / name / f"{split}.parquet" for name in ("out", "more"))
        assert one.read_bytes() == other.read_bytes()


def test_a_first_line_with_a_hash_may_be_the_header_or_a_row(tmp_path, capsys):
    lines = ["#label,tag"] + [f"{i % 2},{'#x' if i % 3 else 'y'}" for i in range(90)]
    path = write(tmp_path / "rows.csv", lines)
    assert plan_rows(path, label="#label")[1].columns[0].name == "#label"
    with pytest.raises(ValueError, match="no label 'label', did you mean '#label'"):
        plan_rows(path)
    path.write_text("#x,1\n#z,0\ny,1\n" * 40)
    meta = prepare(path, tmp_path, names=["tag", "label"], split={"train": 1, "val": 0, "test": 0})
    assert meta.splits["train"].rows == 120
    assert "comments" not in capsys.readouterr().err


def test_columns_without_a_name_get_one(tmp_path):
    lines = [f"{line},{i}" for i, line in enumerate(GOOD[1:])]
    path = write(tmp_path / "rows.csv", ["label,price,city, ", *lines])
    _, plan = plan_rows(path, columns={"column_4": "drop"})
    assert plan.columns[3].name == "column_4"


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("rest", [GOOD[1:], []])
def test_a_quote_that_is_never_closed(tmp_path, rest, end):
    """The rows after it would be a part of its value, and lost."""
    lines = [*GOOD[:101], '0,1.5,"open', *rest]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + end)
    message = (
        "rows.csv: a quote is never closed, in the row that begins '0,1.5,\"open.*quotes: false"
    )
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path, block_bytes=1 << 20)
    whole = prepare(path, tmp_path, block_bytes=1 << 20, quotes=False)
    assert sum(split.rows for split in whole.splits.values()) == 101 + len(rest)


@pytest.mark.parametrize(
    ("name", "start", "text"),
    [
        ("rows.csv", b"", "rows.csv is empty"),
        ("rows.csv", f"{GOOD[0]}\n".encode(), "rows.csv has no rows"),
        ("a.csv.gz", CUT, r"a.csv.gz: .* damaged or cut off before byte "),
        ("x.parquet", b"PAR1", "x.parquet is not a complete Parquet file"),
        ("rows.csv.bz2", b"BZh91AY", r"rows.csv.bz2: .* damaged or cut off before byte"),
        ("a.csv", "a,b".encode("utf-16"), r"a.csv is UTF-16; convert it .* iconv -f UTF-16"),
        ("a.csv", "\ufeffa,b".encode("utf-16-be"), "a.csv is UTF-16; convert it"),
        ("a.xlsx", b"PK\3\4\0", r"is a ZIP archive, as Excel .* save it as CSV"),
        ("a.json", b' \n[{"label": 1}]', r"is one JSON array; write each .*jq -c '.\[\]'"),
        ("a.dat", pickle.dumps([1]), "a.dat is a pickle, which may run code when it is"),
        ("rows.csv.xz", b"\xfd7zXZ\0", "is packed with xz; unpack it, or pack it with gzip or z"),
        ("a.csv", b"label,price\r1,2\r", r"lines end with a carriage return alone; .* tr '"),
        ("a.h5", b"\x89HDF\r\n", "is a file of Avro, ORC, HDF5, SQLite or NumPy; write its"),
        ("a.orc", b"ORC\n\7\x12", "is a file of Avro, ORC, HDF5, SQLite or NumPy; write its"),
        ("a.orc", b"ORC\x13\0\0\n", "is no text, as a byte is 0; write its rows as Parquet or C"),
        ("rows.feather", b"ARROW1\0\0", "is a Feather file; write it with DataFrame.to_parquet"),
        ("a.csv", b"PAR1\x15\x80", "is a Parquet file; give it a name that ends in .parquet"),
        ("rows.csv", b"label^price\n1^2\n", r"if these are several columns, .* delimiter: in th"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path, name, start, text):
    (tmp_path / name).write_bytes(start)
    with pytest.raises(ValueError, match=text):
        plan_rows(tmp_path / name)


def test_a_row_longer_than_the_first_rows_is_not_taken_for_none(tmp_path, monkeypatch):
    """It was said that the file has no rows."""
    monkeypatch.setattr("dlrm.data.prepare.infer.SAMPLE_BYTES", 1000)
    path = tmp_path / "rows.csv"
    path.write_text("label,text\n0," + "a" * 2000 + "\n1,b\n" * 50)
    with pytest.raises(ValueError, match=r"rows.csv: no line end in 1,000 bytes"):
        plan_rows(path)


@pytest.mark.parametrize("given", [{}, {"delimiter": "::"}])
def test_two_colons_are_a_delimiter(tmp_path, given):
    """MovieLens has them, and titles with quotes."""
    path = tmp_path / "ratings.dat"
    rows = [f'{i % 40}::"Great, {i % 3}" (1995)::{i % 2}' for i in range(200)]
    path.write_text("\n".join(["user::title::label", *rows]) + "\n")
    _, plan = prepare_rows(path, tmp_path / "out", given)
    assert [column.kind for column in plan.columns] == ["category", "category", "label"]
    assert {*read_values(tmp_path / "out", "title")} == {
        None,
        *(f'"Great, {i}" (1995)' for i in range(3)),
    }
    path.write_text(path.read_text() + "7::x\n")
    with pytest.raises(ValueError, match=r"2 fields, a row has 3: '7::x'; .* the delimiter '::'"):
        prepare_rows(path, tmp_path / "more", given)


def test_many_columns_are_summarised(tmp_path):
    columns = {"label": [0, 1] * 100} | {f"n{i}": np.arange(200) % 99 / 7 for i in range(40)}
    columns |= {f"c{i}": ["a", "b"] * 100 for i in range(20)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    _, plan = plan_rows(tmp_path / "rows.parquet")
    header, label, numbers, categories = format_plan(plan).splitlines()
    assert header.startswith("column")
    assert label.startswith("label")
    assert numbers.startswith("n0, n1, n2, ... (40 in all)  double  number")
    assert numbers.endswith("numbers; and 39 alike")
    assert categories.startswith("c0, c1, c2, ... (20 in all)  text")

"""Bad rows of a table, skipped: counted, named, and everything else as if they were not there."""

import gzip
import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from dlrm.commands import prepare_table as program
from dlrm.data.prepare import infer, learner, table_rows
from dlrm.data.prepare.transform import Transform
from tests.kit import contents, prepare_rows, write_rows

OPTIONS = {
    "columns": {
        "price": "number",
        "when": {"kind": "time", "parts": ["hour", "age"]},
        "key": "pass",
    }
}
HEADER = "label,price,city,when,key"
BAD = {
    "1,2.5,a": "not a row of the table",
    "1,2.5,a,2024-01-01,k,more": "not a row of the table",
    "1,dear,a,2024-01-01 10:00,k": "column 'price'",
    "1,inf,a,2024-01-01 10:00,k": "column 'price'",
    "2,2.5,a,2024-01-01 10:00,k": "column 'label'",
    ",2.5,a,2024-01-01 10:00,k": "column 'label'",
    "1,2.5,a,yesterday,k": "column 'when'",
    "1,2.5,a,2024-01-01T10:00:00Z,k": "column 'when'",  # the rows before have no offset
    "1,2.5,Z\xfcrich,2024-01-01 10:00,k": "column 'city'",  # in Latin-1
}


def good_row(i):
    price = "NA" if i % 11 == 0 else f"{i}.5"
    return f'{i % 2},{price},"c {i % 7}\nx",2024-01-{1 + i % 28:02} {i % 24:02}:30,{i}'


def write(path, lines):
    path.write_bytes(b"\n".join(line.encode("latin-1") for line in [HEADER, *lines]) + b"\n")
    return path


def prepare(path, out, bad_rows="skip", block_bytes=3000, **options):
    given = {"bad_rows": bad_rows, "block_bytes": block_bytes, "workers": 2}
    return prepare_rows(path, out, OPTIONS | options, **given)[0]


def found(out):
    """What the files hold, but for the bad rows and what names the input."""
    files = sorted(out.rglob("*.parquet"))
    rows = {str(file.relative_to(out)): pq.read_table(file).to_pydict() for file in files}
    transform = json.loads((out / "transform.json").read_text())
    return rows | {name: transform[name] for name in ("scalings", "newest", "edges")}


def spoiled(seed, count=600, share=0.1):
    """Lines, and the row (from 1) and the kind of the bad ones."""
    rng = random.Random(seed)
    lines, bad = [], {}
    for i in range(count):
        if i > 3 and rng.random() < share:
            line = rng.choice(list(BAD))
            bad[len(lines) + 1] = BAD[line]
            lines.append(line)
        lines.append(good_row(i))
    return lines, bad


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_rest_is_as_if_bad_rows_were_not_there(tmp_path, share):
    lines, bad = spoiled(1, share=share)
    prepare(write(tmp_path / "bad.csv", lines), tmp_path / "out")
    clean = write(tmp_path / "clean.csv", [good_row(i) for i in range(600)])
    prepare(clean, tmp_path / "wanted", bad_rows="stop", block_bytes=10_000)
    assert found(tmp_path / "out") == found(tmp_path / "wanted")
    report = json.loads((tmp_path / "out" / "bad_rows.json").read_text())
    kinds = list(bad.values())
    assert report["skipped"] == len(bad)
    assert report["kinds"] == {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    assert {row["row"]: row["kind"] for row in report["first"]} == dict(list(bad.items())[:20])
    assert {row["file"] for row in report["first"]} == {str(tmp_path / "bad.csv")}


@pytest.mark.parametrize("wrong", ["9,1.5,a,2024-01-01,k", "1,dear,a,2024-01-01,k", "1,1,a,noon,k"])
def test_many_bad_rows_take_few_conversions(tmp_path, monkeypatch, wrong):
    converted = []
    convert = table_rows.convert_rows
    monkeypatch.setattr(
        table_rows, "convert_rows", lambda *a, **k: converted.append(1) or convert(*a, **k)
    )
    lines = [good_row(i) for i in range(100)]
    path = write(tmp_path / "rows.csv", [*lines, *[wrong] * 3000, *lines])
    prepare(path, tmp_path / "out", bad_rows="skip-all", block_bytes=1 << 20)
    report = json.loads((tmp_path / "out" / "bad_rows.json").read_text())
    assert report["skipped"] == 3000
    assert [row["row"] for row in report["first"]] == list(range(101, 121))
    assert len(converted) < 60  # 20 of them for the messages


def test_json_lines(tmp_path):
    rows = [json.dumps({"label": i % 2, "price": i, "city": "abc"[i % 3]}) for i in range(300)]
    bad = {40: "{", 41: '{"label": 1, "price": "dear", "city": "a"}', 200: "[1]"}
    bad |= {250: '{"label": 7, "price": 1, "city": "a"}'}
    lines = list(rows)
    for row, line in bad.items():
        lines.insert(row - 1, line)
    for name, content in (("bad", lines), ("clean", rows)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(content))
        rows = tmp_path / f"{name}.jsonl.gz"
        prepare_rows(rows, tmp_path / name, {"columns": {"price": "number"}}, bad_rows="skip")
    report = json.loads((tmp_path / "bad" / "bad_rows.json").read_text())
    assert [row["row"] for row in report["first"]] == [40, 41, 200, 250]
    assert found(tmp_path / "bad") == found(tmp_path / "clean")


def test_parquet(tmp_path):
    price = [str(i) for i in range(300)]
    price[17], price[200] = "x", "y"
    label = np.arange(300) % 2
    label[250] = 3
    columns = {"label": label, "price": price, "city": ["a", "b", "c"] * 100}
    path, options = write_rows(tmp_path / "rows.parquet", columns), {"columns": {"price": "number"}}
    meta, _ = prepare_rows(path, tmp_path / "out", options, bad_rows="skip")
    assert sum(split.rows for split in meta.splits.values()) == 297
    report = json.loads((tmp_path / "out" / "bad_rows.json").read_text())
    assert [row["row"] for row in report["first"]] == [18, 201, 251]
    assert report["kinds"] == {"column 'label'": 1, "column 'price'": 2}


def test_scores_leave_bad_rows_out_and_number_the_others(tmp_path):
    clean = write(tmp_path / "clean.csv", [good_row(i) for i in range(300)])
    prepare(clean, tmp_path / "out", bad_rows="stop")
    lines, bad = spoiled(2, count=300)
    # The label of a row that is scored may be missing; if it is there, it is checked as well.
    scored = [i for i in range(1, len(lines) + 1) if i not in bad or lines[i - 1][0] == ","]
    assert len(scored) > 300 > len(lines) - len(scored) > 0
    path = write(tmp_path / "bad.csv", lines)
    transform = Transform.load(tmp_path / "out")
    parts = list(transform.read([path], keep=["key"], skip_bad=True, block_bytes=2000))
    numbers = np.concatenate([numbers for *_, numbers in parts])
    assert numbers.tolist() == scored
    keys = [key for _, kept, _ in parts for key in kept["key"].to_pylist()]
    assert keys == [lines[i - 1].rsplit(",", 1)[1] for i in scored]
    with pytest.raises(ValueError, match=r"bad.csv, row \d+"):
        list(transform.read([path], keep=["key"]))


def test_killed_and_started_again_it_reports_the_same(tmp_path, monkeypatch):
    lines, _ = spoiled(3)
    path = write(tmp_path / "bad.csv", lines)
    prepare(path, tmp_path / "wanted")
    with monkeypatch.context() as broken:
        broken.setattr(learner, "make_vocabulary", None)  # the first pass is done by then
        with pytest.raises(TypeError):
            prepare(path, tmp_path / "out")
    assert list((tmp_path / "out" / ".prepare" / "blocks").iterdir())
    with monkeypatch.context() as once:
        once.setattr(table_rows, "convert_good_rows", None)  # nothing is converted again
        prepare(path, tmp_path / "out")
    ours, wanted = contents(tmp_path / "out"), contents(tmp_path / "wanted")
    assert ours == wanted


def test_nothing_but_bad_rows(tmp_path):
    path = write(tmp_path / "rows.csv", ["0,1.5,a,2024-01-01,k,more"] * 50)
    with pytest.raises(ValueError, match=r"rows.csv has no rows"):
        prepare(path, tmp_path / "out")
    path = write(tmp_path / "rows.csv", ["3,1.5,a,2024-01-01,k"] * 50)
    message = r"50 of 50 rows do not fit \(column 'label': 50\); .*, row 1: the value is '3'"
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path / "out", bad_rows="skip-all")


def test_half_of_the_rows_are_not_left_out_by_the_way(tmp_path, capsys):
    """The label of a third value was skipped in 98% of the rows, which left one class."""
    good = [good_row(i) for i in range(100)]
    path = write(tmp_path / "rows.csv", [*good, *["1,dear,a,2024-01-01,k"] * 101])
    message = (
        r"101 of 201 rows do not fit \(column 'price': 101\); .*rows.csv, row 101: 'dear' is not a "
        r"number; .*; correct them, or keep only the other 100 rows with --bad-rows skip-all"
    )
    with pytest.raises(ValueError, match=message.replace("; correct them, or", "; or")):
        prepare(path, tmp_path / "out")
    prepare(path, tmp_path / "out", bad_rows="skip-all")
    assert not capsys.readouterr().err
    path = write(tmp_path / "rows.csv", [*good, "1,dear,a,2024-01-01,k"] * 2)
    prepare(path, tmp_path / "some")
    assert not capsys.readouterr().err
    path = write(tmp_path / "rows.csv", [*good, *["1,dear,a,2024-01-01,k"] * 2])
    prepare(path, tmp_path / "more")
    assert "warning: 2.0% of the rows are left out: 2 of 102 rows" in capsys.readouterr().err


def test_the_program_says_what_it_skipped(tmp_path, capsys):
    lines, bad = spoiled(4, share=0.05)
    path = write(tmp_path / "bad.csv", lines)
    config = tmp_path / "table.yaml"
    config.write_text(json.dumps(OPTIONS))
    call = [str(path), "--output", str(tmp_path / "out"), "--config", str(config)]
    assert program.main(call) == 2
    assert "row" in capsys.readouterr().err
    assert program.main([*call, "--bad-rows", "skip"]) == 0
    assert f"skipped {len(bad)} (column" in capsys.readouterr().out


def test_the_row_of_a_bad_number_in_a_column_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr(infer, "SAMPLE_BYTES", 1000)
    lines = [f"{i % 2},{1_700_000_000 + i}" for i in range(300)]
    lines[150] = "1,yesterday"
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["label,when", *lines]) + "\n")
    options = {"columns": {"when": {"kind": "time", "parts": ["hour"]}}}
    with pytest.raises(ValueError, match="row 151, column 'when': 'yesterday' is not a number"):
        prepare_rows(path, tmp_path / "out", options, block_bytes=1000)

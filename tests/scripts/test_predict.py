"""Raw rows are scored from the directory of a run alone, exactly as the same rows prepared."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import dlrm
from dlrm.data.prepare.fingerprint import fingerprint
from dlrm.data.prepare.raw_rows import in_batches, keep_transform
from dlrm.data.schema import Meta
from dlrm.model import DLRM
from dlrm.training import predictor
from tests.kit import best_name, latest_step, write_rows

ROOT = Path(__file__).parents[2]
SMALL = ["--batch_size", "128", "--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]"]
SMALL += ["--max_steps", "6", "--optim.lr", "0.05", "--device", "cpu", "--name", "run"]
ROWS, TEST = 2000, 1500  # the rows from TEST on are the test split
CPU = ("--device", "cpu")


def test_a_gpu_gets_as_many_rows_at_a_time_as_fit_well(monkeypatch):
    dense = [("dense", {})]

    def rows(features, free):
        monkeypatch.setattr(predictor, "free_memory", lambda device: int(free))
        tables = {"num_embeddings": [9] * features, "embedding_dim": 16, "plan": dense * features}
        model = DLRM(num_dense=13, bottom_mlp=[512, 256, 64], top_mlp=[512, 256], **tables)
        return predictor.rows_at_once(model, torch.device("cuda"))

    assert rows(26, 140e9) == 1 << 19
    assert rows(26, 16e9) == 1 << 17
    assert rows(300, 16e9) == predictor.BATCH_SIZE, "pairs of 300 vectors take 200 times as much"


def write_csv(path, rows, without=()):
    names = [name for name in rows[0] if name not in without]
    return write_rows(path, {name: [row[name] for row in rows] for name in names})


def scores(path):
    """The table of scores, by its suffix."""
    if path.suffix == ".csv":
        return pd.read_csv(path, dtype={"probability": np.float32})
    return pd.read_parquet(path)


@pytest.fixture
def predict(run, tmp_path):
    """Scores rows; returns the table of scores."""

    def predict(trained, rows, *options, suffix=".parquet"):
        output = tmp_path / f"scores{suffix}"
        done = run("predict", trained, rows, output, *CPU, *options)
        found = scores(output)
        assert done.stdout.startswith(f"{len(found):,} predictions in {output}, ")
        assert done.stdout.endswith(" rows/s\n")
        return found

    return predict


@pytest.fixture
def refused(run, tmp_path):
    """The one line with which scoring is refused; there is no output."""

    def refused(trained, rows, *options, output="refused.parquet"):
        done = run("predict", trained, rows, tmp_path / output, *options, status=2)
        assert not (tmp_path / output).is_file()
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("error: ")
        return done.stderr

    return refused


def test_raw_rows_of_criteo_get_the_scores_of_prepared_ones(criteo, predict, tmp_path):
    """With and without a label, plain and gzip, whatever the size of the batches."""
    directory, lines = criteo
    prepared = predict(directory / "run", directory / "data")
    assert prepared.columns.tolist() == ["row", "probability", "label"]
    assert prepared["row"].tolist() == list(range(1, ROWS - TEST + 1))
    test = tmp_path / "test"
    test.write_text("".join(lines[TEST:]))
    labelled = predict(directory / "run", test)
    assert labelled.equals(prepared)
    last = predict(directory / "run", test, "--last")
    assert last.equals(predict(directory / "run", directory / "data", "--last"))
    newest = f"step_{latest_step(directory / 'run')}"
    assert last.equals(labelled) == (best_name(directory / "run") == newest)
    bare = tmp_path / "bare.gz"
    bare.write_bytes(gzip.compress("".join(line[2:] for line in lines[TEST:]).encode()))
    found = predict(directory / "run", bare, suffix=".csv")
    assert found.columns.tolist() == ["row", "probability"]
    assert found["probability"].tolist() == prepared["probability"].tolist()
    one = predict(directory / "run", bare, "--batch-size", "64")
    other = predict(directory / "run", directory / "data", "--batch-size", "64")
    assert one["probability"].tolist() == other["probability"].tolist()
    assert np.allclose(one["probability"], found["probability"], rtol=1e-5)


@pytest.mark.parametrize("form", ["csv", "csv.gz", "parquet", "jsonl"])
def test_raw_rows_of_a_table_get_the_scores_of_prepared_ones(form, table, predict, tmp_path):
    directory, rows = table
    prepared = predict(directory / "run", directory / "data")
    assert prepared.columns.tolist() == ["row", "row_id", "probability", "label"]
    assert prepared["row_id"].tolist() == [row["row_id"] for row in rows[TEST:]]
    path = tmp_path / f"new.{form}"
    new = [{k: v for k, v in row.items() if k != "clicked"} for row in rows[TEST:]]
    if form == "jsonl":
        typed = [{**row, "price": float(row["price"]) if row["price"] else None} for row in new]
        path.write_text("".join(json.dumps(row) + "\n" for row in typed))
    else:
        write_csv(tmp_path / "new.csv", new)
    if form == "csv.gz":
        path.write_bytes(gzip.compress((tmp_path / "new.csv").read_bytes()))
    if form == "parquet":  # with the types of a program, dates among them
        read = pyarrow.csv.read_csv(tmp_path / "new.csv")
        assert pa.types.is_timestamp(read.schema.field("when").type)
        pq.write_table(read, path)
    found = predict(directory / "run", path, suffix=".csv")
    assert found.columns.tolist() == ["row", "row_id", "probability"]
    assert found["row_id"].tolist() == prepared["row_id"].tolist()
    assert found["probability"].tolist() == prepared["probability"].tolist()
    kept = predict(directory / "run", path, "--keep", "user", "row_id")
    assert kept["user"].tolist() == [row["user"] for row in rows[TEST:]]


def test_rows_with_an_empty_label_are_scored(table, predict, tmp_path):
    directory, rows = table
    new = [{**row, "clicked": row["clicked"] if i % 2 else ""} for i, row in enumerate(rows[:20])]
    found = predict(directory / "run", write_csv(tmp_path / "new.csv", new))
    same = predict(directory / "run", write_csv(tmp_path / "new.csv", rows[:20]))
    assert found["probability"].tolist() == same["probability"].tolist()
    assert found["label"].isna().tolist() == [True, False] * 10
    assert found["label"][1::2].tolist() == same["label"][1::2].tolist()


def test_a_run_that_was_moved_scores_without_its_data(table, start, predict, tmp_path):
    directory, rows = table
    expected = predict(directory / "run", directory / "data")
    for name in ("run", "data"):
        shutil.copytree(directory / name, tmp_path / name, symlinks=True)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "data")
    write_csv(tmp_path / "new.csv", rows[TEST:], without=["row_id"])
    done = start("predict", tmp_path / "elsewhere", tmp_path / "new.csv", tmp_path / "s.csv", *CPU)
    assert done.wait().returncode == 0, done.stderr
    found = scores(tmp_path / "s.csv")
    assert found.columns.tolist() == ["row", "probability", "label"]
    assert found["probability"].tolist() == expected["probability"].tolist()


def test_vocabularies_are_linked_or_copied_once(table, tmp_path, monkeypatch, capsys):
    directory, _ = table
    kept = directory / "run" / "preparation"
    vocabulary = Path(Meta.vocabulary_file("user"))
    assert (kept / vocabulary).samefile(directory / "data" / vocabulary)
    assert not (kept / "meta.json").samefile(directory / "data" / "meta.json")
    shutil.copytree(directory / "data", tmp_path / "less")
    (tmp_path / "less" / vocabulary).unlink()

    def no_links(*_):
        raise OSError("another file system")

    monkeypatch.setattr("os.link", no_links)
    keep_transform(directory / "data", tmp_path / "copy")
    copy = tmp_path / "copy" / vocabulary
    assert copy.read_bytes() == (kept / vocabulary).read_bytes()
    assert copy.stat().st_nlink == 1
    monkeypatch.setattr("shutil.copyfile", no_links)
    keep_transform(directory / "data", tmp_path / "copy")  # it is there
    keep_transform(tmp_path / "less", tmp_path / "none")
    assert f"note: {tmp_path / 'less' / vocabulary} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_values_that_training_did_not_have_get_the_unseen_id(table, predict, tmp_path):
    directory, rows = table
    new = [{**rows[0], "user": name, "price": ""} for name in ("nobody", "someone", "user 1")]
    found = predict(directory / "run", write_csv(tmp_path / "new.csv", new))["probability"]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[1] != pytest.approx(found[2], rel=1e-4)


def test_skipped_rows_do_not_shift_the_others(criteo, predict, refused, tmp_path):
    directory, lines = criteo
    good = lines[TEST:]
    wrong = ["not a row\n", good[0].replace("\t", "\tx", 1), "2" + good[0][1:]]
    mixed = [wrong[0], *good[:5], wrong[1], *good[5:], wrong[2]]
    path = tmp_path / "rows"
    path.write_text("".join(mixed))
    assert "rows, row 1: 1 fields, a row has 40" in refused(directory / "run", path)
    found = predict(directory / "run", path, "--bad-rows", "skip")
    assert found["row"].tolist() == [2, 3, 4, 5, 6, *range(8, len(good) + 3)]
    expected = predict(directory / "run", directory / "data")
    assert found["probability"].tolist() == expected["probability"].tolist()
    path.write_text(wrong[0])
    assert "has no rows to score" in refused(directory / "run", path, "--bad-rows", "skip")


def test_several_files_are_numbered_through(criteo, table, predict, refused, tmp_path):
    directory, lines = criteo
    for i in range(2):
        (tmp_path / f"part_{i}").write_text("".join(lines[10 * i : 10 * i + 10]))
    found = predict(directory / "run", tmp_path / "part_*")
    assert found["row"].tolist() == list(range(1, 21))
    (tmp_path / "part_1").write_text("".join(line[2:] for line in lines[10:20]))
    message = refused(directory / "run", tmp_path / "part_*")
    assert "part_1 has no column 'label', but" in message
    directory, rows = table
    (tmp_path / "many").mkdir()
    for i in range(2):
        write_csv(tmp_path / "many" / f"{i}.csv", rows[10 * i : 10 * i + 10])
    found = predict(directory / "run", tmp_path / "many")
    assert found["row"].tolist() == list(range(1, 21))
    assert found["row_id"].tolist() == [row["row_id"] for row in rows[:20]]


def test_a_lack_of_memory_is_told(table, refused, monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(predictor.metrics, "predict", fails)
    directory, _ = table
    for rows in ("raw.csv", "data"):
        message = refused(directory / "run", directory / rows)
        assert message == "error: out of memory: give a smaller --batch-size\n"


def test_rows_that_do_not_fit(criteo, table, predict, refused, tmp_path):
    directory, rows = table
    trained, path = directory / "run", tmp_path / "new.csv"
    write_csv(path, rows[:5], without=["user"])
    assert "new.csv has no column 'user'" in refused(trained, path)
    write_csv(path, [*rows[:4], {**rows[4], "price": "cheap"}])
    message = refused(trained, path)
    assert "new.csv, row 5, column 'price': 'cheap' is not a number; correct it; or" in message
    assert "columns:" not in message  # an option of the preparation
    found = predict(trained, path, "--bad-rows", "skip")
    assert found["row"].tolist() == [1, 2, 3, 4]
    write_csv(path, rows[:5])
    assert "no column 'other'" in refused(trained, path, "--keep", "other")
    assert "leave out --split" in refused(trained, path, "--split", "val")
    assert "its name must end in .parquet or .csv" in refused(trained, path, output="scores.txt")
    assert "no such file" in refused(trained, tmp_path / "none.csv")
    write_csv(path, [{**rows[0], "row": 1}])
    assert "'row' can't be passed through" in refused(trained, path, "--keep", "row")
    write_csv(path, [{**rows[0], "clicked": "yes"}])
    assert "the value is 'yes'; it must be 0 or 1" in (message := refused(trained, path))
    assert "correct it, or leave the column out: scores need no label" in message
    path.write_text("")
    assert "new.csv is empty" in refused(trained, path)
    path.write_text(",".join(rows[0]) + "\n")
    assert "new.csv has no rows to score" in refused(trained, path)
    assert "is not a checkpoint" in refused(tmp_path, path)
    trained = criteo[0] / "run"
    assert "rows.txt: no such file" in refused(trained, tmp_path / "rows.txt")
    assert "no column 'x' to keep" in refused(trained, criteo[0] / "data", "--keep", "x")
    (tmp_path / "rows").write_bytes(gzip.compress(b"x" * 999)[:-9])
    assert "damaged or cut off" in refused(trained, tmp_path / "rows")


def test_rows_are_not_written_over(table, run, tmp_path):
    directory, rows = table
    path = write_csv(tmp_path / "new.csv", rows[:5])
    before = path.read_text()
    done = run("predict", directory / "run", tmp_path / "*.csv", path, *CPU, status=2)
    assert "is also to be scored: name another file" in done.stderr
    assert path.read_text() == before


def test_data_of_another_preparation_is_refused(criteo, programs, run, refused, tmp_path):
    """Though its tables may have the sizes of the model's."""
    directory, lines = criteo
    trained, other = directory / "run", tmp_path / "other"
    swapped = "".join(lines).translate(str.maketrans("abcdef", "fedcba"))
    (tmp_path / "swapped").write_text(swapped)
    split = ("--split", "0.7", "0.05", "0.25", "--min-count", "2")
    programs("scripts.prepare_criteo", tmp_path / "swapped", "--output", other, *split)
    metas = [Meta.read(place) for place in (directory / "data", other)]
    assert metas[0].cardinalities == metas[1].cardinalities
    assert metas[0].fingerprint != metas[1].fingerprint
    message = refused(trained, other)
    assert f"{other} was prepared separately from the data of {trained}" in message
    assert "dlrm prepare --criteo --ids-of RUN, to train on them with --spl" in message
    assert run("evaluate", trained, other, *CPU, status=2).stderr == message
    init = ("--init_from", trained, "--output", tmp_path)
    done = run("train", "--data", other, *SMALL[:-1], "new", *init, status=2)
    assert "was prepared separately" in done.stderr
    shutil.copytree(trained, tmp_path / "run")
    done = run("train", "--resume", tmp_path / "run", "--data", other, "--max_steps", "9", status=2)
    assert "the data was prepared again" in done.stderr

    kept = tmp_path / "run" / "preparation"  # the remedy
    again = ("--output", tmp_path / "again", "--ids-of", kept)
    programs("scripts.prepare_criteo", tmp_path / "swapped", *again, "--split", "0", "0", "1")
    assert Meta.read(tmp_path / "again").fingerprint == metas[0].fingerprint
    assert '"auc"' in run("evaluate", trained, tmp_path / "again", *CPU).stdout
    done = run("train", "--data", tmp_path / "again", *SMALL[:-1], "new", *init, status=2)
    assert "is empty; prepare rows for it, as with --split 0.8 0.1 0.1, or" in done.stderr


def test_a_model_is_measured_on_the_rows_of_another_day(table, programs, run, predict, tmp_path):
    directory, rows = table
    path, again = write_csv(tmp_path / "later.csv", rows[:400]), tmp_path / "again"
    kept = directory / "run" / "preparation"
    later = (path, "--output", again, "--ids-of", kept)
    programs("scripts.prepare_table", *later)
    assert '"auc"' in run("evaluate", directory / "run", again, *CPU).stdout
    prepared = predict(directory / "run", again)
    assert len(prepared) == 400
    assert prepared.equals(predict(directory / "run", path)[prepared.columns])
    done = run("prepare_table", *later, "--label", "price", status=2)
    assert done.stderr == (
        f"error: label: with --ids-of, only the split is given; everything else is as {kept} was "
        "prepared\n"
    )


def test_a_fingerprint_is_of_the_ids_and_not_of_how_they_are_written(criteo, tmp_path):
    directory, _ = criteo
    meta = Meta.read(directory / "data")
    rules = {name: meta.options[name] for name in ("dense_transform", "cap")}
    (tmp_path / "vocabulary").mkdir()
    for name in meta.tables:
        path = Meta.vocabulary_file(name)
        content = pq.read_table(directory / "data" / path)
        counted = content.set_column(2, "count", pa.array(range(len(content))))
        pq.write_table(counted, tmp_path / path, row_group_size=7, compression="none")
    assert fingerprint(tmp_path, meta.tables, rules) == meta.fingerprint
    assert fingerprint(tmp_path, meta.tables, rules | {"cap": 9}) != meta.fingerprint
    assert fingerprint(tmp_path, meta.tables[::-1], rules) != meta.fingerprint
    pq.write_table(content.take(list(range(len(content)))[::-1]), tmp_path / path)
    assert fingerprint(tmp_path, meta.tables, rules) != meta.fingerprint


def test_a_run_without_a_preparation_of_its_own(criteo, refused, tmp_path):
    directory, lines = criteo
    shutil.copytree(directory / "run", tmp_path / "run")
    (tmp_path / "rows").write_text(lines[0])
    meta = tmp_path / "run" / "preparation" / "meta.json"
    meta.write_text(meta.read_text().replace(Meta.read(meta.parent).fingerprint, "0" * 64))
    assert "is not of the data that" in refused(tmp_path / "run", tmp_path / "rows")
    shutil.rmtree(meta.parent)
    assert "can't score raw rows" in refused(tmp_path / "run", tmp_path / "rows")


def test_the_model_in_python(criteo, table, predict, tmp_path):
    directory, rows = table
    expected = predict(directory / "run", directory / "data")["probability"].to_numpy()
    model = dlrm.load(directory / "run")
    path = write_csv(tmp_path / "new.csv", rows[TEST:])
    frame = pd.DataFrame(rows[TEST:]).drop(columns=["clicked", "row_id"])
    frame["price"] = pd.to_numeric(frame["price"])
    frame["when"] = pd.to_datetime(frame["when"])
    for given in (path, str(path), frame, pa.Table.from_pandas(frame), frame.to_dict("list")):
        assert np.array_equal(model.predict(given), expected)
    assert model.predict(frame[:0]).shape == (0,)
    assert model.predict(frame[:1])[0] == pytest.approx(expected[0], rel=1e-5)
    with pytest.raises(ValueError, match="the rows have no column 'user', did you mean 'users'"):
        model.predict(frame.rename(columns={"user": "users"}))
    with pytest.raises(ValueError, match="the rows, row 2, column 'price': 'x' is not a number"):
        model.predict({**frame[:2].to_dict("list"), "price": ["1", "x"]})
    with pytest.raises(ValueError, match="the rows are no table"):
        model.predict(3)
    with pytest.raises(ValueError, match=r"no table: .*; of a single row, make \[{...}\]"):
        model.predict({"price": 3, "user": "u1"})

    directory, lines = criteo
    expected = predict(directory / "run", directory / "data")["probability"].to_numpy()
    model = dlrm.load(directory / "run" / "checkpoints" / "best")
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    values = [line.rstrip("\n").split("\t") for line in lines[TEST:]]
    frame = pd.DataFrame(values, columns=names)
    assert np.array_equal(model.predict(frame), expected)
    frame[names[1:14]] = frame[names[1:14]].apply(pd.to_numeric)
    frame[names[14:]] = frame[names[14:]].replace("", None)
    assert np.array_equal(model.predict(frame), expected)
    with pytest.raises(ValueError, match="row 3, column 'C2': 'no' is not 1 to 8 hex digits"):
        model.predict(frame.assign(C2=["a", None, "no"] * 166 + ["1", "2"]))
    with pytest.raises(ValueError, match="column 'C2': it holds int64, not texts"):
        model.predict(frame.assign(C2=1))


def test_groups_of_values_that_are_all_unseen_are_told(table, programs, run, tmp_path):
    directory, rows = table
    new = [{**row, "user": f"new {place % 3}"} for place, row in enumerate(rows[:60])]
    path = write_csv(tmp_path / "new.csv", new)
    given = ("--output", tmp_path / "data", "--ids-of", directory / "data")
    programs("scripts.prepare_table", path, *given)
    done = run("evaluate", directory / "run", tmp_path / "data", *CPU, "--group", "user")
    assert '"rows_without_group": 60' in done.stdout
    assert (
        "note: no row is in a group, as the values of 'user' are missing or unseen" in done.stderr
    )


def test_rows_are_divided_into_batches():
    parts = [(pa.RecordBatch.from_pydict({"x": [i] * rows}),) for i, rows in enumerate((3, 0, 9))]
    found = [table["x"].to_pylist() for (table,) in in_batches(parts, 4)]
    assert found == [[0, 0, 0, 2], [2] * 4, [2] * 4]

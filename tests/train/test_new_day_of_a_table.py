"""A run on a table that is trained on with later rows, whose new values get ids and rows."""

import collections
import random
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.prepare.vocabulary import Vocabulary, extend_ids
from dlrm.data.schema import Meta
from dlrm.training.checkpoint import load_model

ROWS, TRAIN = 400, 320
SMALL = ["--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]", "--batch_size", "64"]
SMALL += ["--optim.warmup_steps", "2", "--device", "cpu", "--optim.lr", "0.05"]
OPTIONS = """\
label: clicked
min_count: 2
columns:
  price: {kind: number, transform: log}
  age: {kind: number, buckets: 4}
  user: category
  few: {kind: category, cap: 12}
  tags: {kind: list, separator: "|"}
"""


def write_day(path, day):
    rng, first = random.Random(day), 30 * day
    rows = [
        {
            "price": round(rng.lognormvariate(2, 1), 2),
            "age": rng.randrange(90),
            "user": f"u{rng.randrange(first, first + 80)}" if rng.random() < 0.9 else "",
            "few": f"f{rng.randrange(day, day + 20)}",
            "tags": "|".join(f"t{rng.randrange(5 * day, 5 * day + 9)}" for _ in range(3)),
            "clicked": int(rng.random() < 0.3),
        }
        for _ in range(ROWS)
    ]
    pd.DataFrame(rows).to_csv(path, index=False)
    return rows


@pytest.fixture
def days(tmp_path, run):
    """The rows of two days, of which the second extends the first."""
    (tmp_path / "options").write_text(OPTIONS)
    rows = [write_day(tmp_path / f"{day}.csv", day) for day in (0, 1)]
    given = ("--split", "0.8", "0.1", "0.1")
    options = ("--config", tmp_path / "options")
    run("prepare_table", tmp_path / "0.csv", "--output", tmp_path / "0", *given, *options)
    later = ("--ids-of", tmp_path / "0", "--append-new")
    run("prepare_table", tmp_path / "1.csv", "--output", tmp_path / "1", *given, *later)
    return tmp_path, rows


def test_new_values_get_ids_after_the_old_ones(days, run):
    directory, rows = days
    metas = [Meta.read(directory / name) for name in "01"]
    grown = {}
    for column in metas[0].tables:
        files = [directory / name / Meta.vocabulary_file(column) for name in "01"]
        (old, before), (new, after) = (
            (table["value"].to_pylist(), table["count"].to_pylist())
            for table in map(pq.read_table, files)
        )
        assert new[: len(old)] == old
        grown[column] = len(new) - len(old)
        if column == "age":  # its buckets are those of the first day
            assert after == before
            continue
        texts = [row[column].split("|") if column == "tags" else [row[column]] for row in rows[1]]
        seen = collections.Counter(value for row in texts[:TRAIN] for value in row)
        unlisted = {value: count for value, count in seen.items() if value not in old}
        late = [seen[value] for value in new[len(old) :]]
        assert late == sorted(late, reverse=True) == after[len(old) :]
        if column == "few":
            assert len(new) == 12
        else:
            assert set(new[len(old) :]) == {v for v, count in unlisted.items() if count >= 2}
        assert sum(after) == sum(before) + sum(seen.values())
        ids = {value: i for i, value in enumerate(new)}
        wanted = [[ids.get(value, ids[None]) for value in row] for row in texts]
        found = [
            i if column == "tags" else [i]
            for split in ("train", "val", "test")
            for i in pq.read_table(directory / "1" / f"{split}.parquet")[column].to_pylist()
        ]
        assert found == wanted
    assert grown["user"] > 10
    assert grown["tags"] > 2
    assert metas[1].cardinalities == tuple(
        old + grown[name] for name, old in zip(metas[0].tables, metas[0].cardinalities, strict=True)
    )
    assert metas[1].rows_at(metas[0].fingerprint) == metas[0].cardinalities
    transforms = [(directory / name / "transform.json").read_text() for name in "01"]
    assert transforms[0].partition('"scalings"')[2] == transforms[1].partition('"scalings"')[2]
    again = ("--split", "0.8", "0.1", "0.1", "--ids-of", directory / "1")
    run("prepare_table", directory / "1.csv", "--output", directory / "2", *again)
    assert Meta.read(directory / "2").extends == metas[1].extends  # nothing is new


def test_a_run_takes_rows_for_them_and_scores_raw_rows(days, run):
    directory, _ = days
    given = ["--output", directory, *SMALL, "--max_steps"]
    run("train", "--data", directory / "0", "--name", "first", *given, "3")
    more = ["--init_from", directory / "first", "--name", "second"]
    run("train", "--data", directory / "1", *more, *given, "0")
    old, new = (load_model(directory / name, "cpu")[0] for name in ("first", "second"))
    tables = zip(old.sparse_arch.to_dense(), new.sparse_arch.to_dense(), strict=True)
    for column, (before, after) in zip(Meta.read(directory / "1").categorical, tables, strict=True):
        assert after[: len(before)].equal(before)
        rest = after[len(before) :]
        assert rest.equal(before[column.oov_id].expand_as(rest))
    scores = [directory / f"{name}.csv" for name in ("prepared", "raw")]
    run("predict", directory / "second", directory / "1", scores[0], "--split", "test")
    run("predict", directory / "second", directory / "1.csv", scores[1])
    prepared, raw = map(pd.read_csv, scores)
    assert raw["probability"].tolist()[360:] == pytest.approx(prepared["probability"].tolist())


def test_what_cannot_be_extended(days, run):
    directory, _ = days

    def refused(*options):
        given = directory / "1.csv", "--output", directory / "out", "--append-new", *options
        return run("prepare_table", *given, status=2).stderr

    assert "--append-new needs --ids-of" in refused("--label", "clicked")
    ids_of = "--ids-of", directory / "0"
    assert "leaves none for training; leave --append-new out or choose" in refused(*ids_of)
    replace(Meta.read(directory / "0"), fingerprint=None).write(directory / "0")
    assert "has no meta.json with a fingerprint" in refused(*ids_of)


def test_counts_of_values_that_stay_without_an_id_are_those_of_unseen_ones():
    old = Vocabulary(
        values=pa.array(["b", None, "a"], pa.large_string()), counts=np.array([5, 3, 1]), oov_id=1
    )
    values, counts = pa.array(["a", "c", "d", "e", "f"]), np.array([4, 2, 2, 1, 7])
    made, _ = extend_ids(old, values, counts, min_count=2, most=5)
    assert made.values.to_pylist() == ["b", None, "a", "f", "c"]
    assert made.counts.tolist() == [5, 6, 5, 7, 2]
    assert made.oov_id == 1
    full, _ = extend_ids(old, values, counts, min_count=1, most=2)
    assert full.values.equals(old.values)


def test_long_unseen_texts_are_forgotten_for_new_ones():
    old = Vocabulary(
        values=pa.array(["b", None, "a", "", "g"], pa.large_string()),
        counts=np.array([5, 3, 3, 2, 1]),
        oov_id=1,
        unseen=np.array([0, 0, 2, 1, 1], np.int32),
    )
    # c and d are new; b and g are unseen for 1 and 2, a for 3; "" occurs, but not for training
    values, counts = pa.array(["", "c", "d", "e"]), np.array([0, 3, 2, 1])
    made, _ = extend_ids(old, values, counts, min_count=1, evict_after=2)
    assert made.values.to_pylist() == ["b", None, "c", "e", "d"]
    assert made.counts.tolist() == [5, 9, 3, 1, 2]
    assert made.unseen.tolist() == [1, 0, 0, 0, 0]
    assert made.ids(values, "x").tolist() == [1, 2, 4, 3]
    made, _ = extend_ids(old, values, counts, min_count=2, evict_after=3)
    assert made.values.to_pylist() == ["b", None, "c", "", "g", "d"]
    assert made.unseen.tolist() == [1, 0, 0, 2, 2, 0]
    full, _ = extend_ids(old, values, counts, min_count=1, most=5, evict_after=3)
    assert full.values.to_pylist() == ["b", None, "c", "", "g"]
    assert full.counts.tolist() == [5, 9, 3, 2, 1]

"""A run that is trained on with a later day, whose new values get ids and rows of their own.

Days are Criteo's, and those of a table with lists.
"""

import collections
import json
import random
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm.data.criteo import Options, prepare
from dlrm.data.prepare.vocabulary import Vocabulary, extend_ids
from dlrm.data.schema import CRITEO_CATEGORICAL, Meta
from dlrm.training.checkpoint import load_model
from tests.kit import criteo_rows, read_splits, write_criteo

ROWS = 600


def write_day(path, day):
    """Rows of a day: some values of the days before are gone, others are new."""
    rng = random.Random(day)
    rows = criteo_rows(ROWS, seed=day)
    for row in rows:
        values = [rng.randrange(40 * day, 40 * day + 90) // 2 for _ in range(26)]
        row[14:] = ["" if rng.random() < 0.1 else f"{value:x}" for value in values]
    return write_criteo(path, rows)


def options(**given):
    return Options(split=("0.8", "0.1", "0.1"), **given)


def quiet(raw, output, given, **more):
    return prepare([raw], output, given, progress=False, **more)


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Prepared data of three days, each of which extends the one before."""
    directory = tmp_path_factory.mktemp("days")
    for day in range(3):
        before = {"ids_of": str(directory / f"{day - 1}"), "append_new": True} if day else {}
        given = options(min_count=2, **before)
        quiet(write_day(directory / f"{day}.txt", day), directory / f"{day}", given)
    return directory


@pytest.fixture(scope="module")
def first(days):
    """A run on the first day."""
    from dlrm.commands import train

    given = ["--data", days / "0", "--output", days, "--name", "first", *SMALL, "--max_steps", "4"]
    assert train.main([str(one) for one in given]) == 0
    return days / "first"


SMALL = ["--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]", "--batch_size", "64"]
SMALL += ["--optim.warmup_steps", "2", "--device", "cpu", "--optim.lr", "0.05"]


def vocabulary(directory, name):
    table = pq.read_table(directory / Meta.vocabulary_file(name))
    assert table["id"].to_pylist() == list(range(len(table)))
    return table["value"].to_pylist(), table["count"].to_pylist()


def ids_of(directory, name):
    """The ids of a column in each row."""
    ids = [i for rows in read_splits(directory).values() for i in rows[name].to_pylist()]
    return [i if isinstance(i, list) else [i] for i in ids]


def raw_column(path, place):
    return [
        f"{int(field, 16):08x}" if (field := line.rstrip("\n").split("\t")[place]) else ""
        for line in path.read_text().splitlines(keepends=True)
    ]


def require_extended(first, second, name, rows, cap=None):
    """The vocabulary of a column extends that of the day before, as its values in each row say.

    Returns:
        The number of new values.
    """
    (old, before), (values, counts) = (vocabulary(day, name) for day in (first, second))
    late = values[len(old) :]
    assert values[: len(old)] == old
    train = rows[: Meta.read(second).splits["train"].rows]
    seen = collections.Counter(value for row in train for value in row)
    new = {value for value in seen if value not in old and seen[value] >= 2}
    assert set(late) <= new if len(values) == cap else set(late) == new

    found = [seen[value] for value in late]
    assert found == sorted(found, reverse=True) == counts[len(old) :]
    known = zip(old, before, counts, strict=False)
    assert all(now == was + seen[value] for value, was, now in known if value is not None)
    assert sum(counts) == sum(before) + sum(seen.values())
    ids = {value: i for i, value in enumerate(values)}
    assert ids_of(second, name) == [[ids.get(value, ids[None]) for value in row] for row in rows]
    return len(late)


def test_old_values_keep_their_ids_and_new_ones_follow(days):
    appended = 0
    for place, name in enumerate(CRITEO_CATEGORICAL, 14):
        for day in (1, 2):
            rows = [[value] for value in raw_column(days / f"{day}.txt", place)]
            appended += require_extended(days / str(day - 1), days / str(day), name, rows)
    assert appended > 500
    metas = [Meta.read(days / str(day)) for day in range(3)]
    assert [e.fingerprint for e in metas[2].extends] == [m.fingerprint for m in metas[:2]]
    assert metas[2].rows_at(metas[0].fingerprint) == metas[0].cardinalities
    assert metas[2].rows_at(metas[2].fingerprint) is None


def test_an_interrupted_preparation_continues_with_the_same_ids(days, tmp_path, monkeypatch):
    given = options(ids_of=str(days / "0"), append_new=True)
    done = []

    def killed(vocabulary, *arguments, **more):
        if len(done) == 9:
            raise KeyboardInterrupt
        done.append(vocabulary)
        return extend_ids(vocabulary, *arguments, **more)

    monkeypatch.setattr("dlrm.data.prepare.learner.extend_ids", killed)
    with pytest.raises(KeyboardInterrupt):
        quiet(days / "1.txt", tmp_path / "out", given)
    assert not (tmp_path / "out" / "meta.json").exists()
    monkeypatch.setattr("dlrm.data.prepare.learner.extend_ids", extend_ids)
    quiet(days / "1.txt", tmp_path / "out", given)
    for file in ("train.parquet", "vocabulary/C1.parquet", "vocabulary/C26.parquet"):
        assert (tmp_path / "out" / file).read_bytes() == (days / "1" / file).read_bytes()


def test_rows_without_new_values_extend_nothing(days, tmp_path):
    given = options(ids_of=str(days / "1"), append_new=True)
    meta, old = quiet(days / "1.txt", tmp_path / "out", given), Meta.read(days / "1")
    assert (meta.fingerprint, meta.extends) == (old.fingerprint, old.extends)
    given = options(ids_of=str(days / "1"))  # and without the option what was extended stays so
    meta = quiet(days / "2.txt", tmp_path / "later", given)
    assert (meta.fingerprint, meta.extends) == (old.fingerprint, old.extends)


def test_values_that_cannot_be_appended(days, tmp_path):
    with pytest.raises(ValueError, match="--append-new needs --ids-of"):
        options(append_new=True)
    known = {"ids_of": str(days / "0"), "append_new": True}
    with pytest.raises(ValueError, match="none for training; leave --append-new out"):
        quiet(days / "1.txt", tmp_path / "a", Options(split=("0", "0", "1"), **known))
    every = tmp_path / "every"
    quiet(days / "0.txt", every, options(vocabulary="all"))
    grown = quiet(days / "1.txt", tmp_path / "b", options(**known | {"ids_of": str(every)}))
    assert grown.categorical[0].oov_id is None
    meta = json.loads((every / "meta.json").read_text())
    (every / "meta.json").write_text(json.dumps(meta | {"fingerprint": None}))
    with pytest.raises(ValueError, match=r"has no meta\.json with a fingerprint; prepare it again"):
        quiet(days / "1.txt", tmp_path / "c", options(**known | {"ids_of": str(every)}))
    meta["extends"] = [{"fingerprint": "x", "cardinalities": [10**6] * 26}]
    (every / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="which is no beginning of the ids"):
        Meta.read(every)


@pytest.fixture(scope="module")
def forgetting(days):
    """The second and third day once more, with values forgotten that were unseen for so long."""
    directory = days / "forgetting"
    for forget in (1, 2):
        before = days / "0"
        for day in (1, 2):
            output = directory / f"{forget}_{day}"
            given = options(ids_of=str(before), append_new=True, forget=forget)
            before = output
            quiet(days / f"{day}.txt", output, given)
    return directory


@pytest.mark.parametrize("forget", [1, 2])
def test_ids_of_values_that_were_long_unseen_go_to_new_ones(forget, days, forgetting):
    """Against the same rules, one value after another."""
    forgotten = 0
    for place, name in enumerate(CRITEO_CATEGORICAL, 14):
        values, counts = map(list, vocabulary(days / "0", name))
        unseen, other = [0] * len(values), values.index(None)
        for day in (1, 2):
            made = forgetting / f"{forget}_{day}"
            column = raw_column(days / f"{day}.txt", place)
            train = column[: Meta.read(made).splits["train"].rows]
            unseen = [u + 1 for u in unseen]
            unseen[other] = 0
            for value in set(train) & set(values):
                unseen[values.index(value)] = 0
            free = [i for i, u in enumerate(unseen) if u >= forget]
            free.sort(key=lambda i: (-unseen[i], -i))
            seen = {v: train.count(v) for v in set(train) - set(values) if train.count(v) >= 2}
            for value in sorted(seen, key=lambda v: (-seen[v], int(v or "-1", 16))):
                if free:
                    counts[other] += counts[free[0]]
                    values[free[0]], counts[free[0]], unseen[free.pop(0)] = value, 0, 0
                    forgotten += 1
                else:
                    values, counts, unseen = [*values, value], [*counts, 0], [*unseen, 0]
            for value in train:
                counts[values.index(value) if value in values else other] += 1
            assert vocabulary(made, name) == (values, counts)
            table = pq.read_table(made / Meta.vocabulary_file(name))
            assert table["unseen"].to_pylist() == unseen
            ids = [values.index(v) if v in values else other for v in column]
            assert ids_of(made, name) == [[i] for i in ids]
    assert forgotten > 100
    smaller, whole = Meta.read(forgetting / f"{forget}_2"), Meta.read(days / "2")
    assert sum(smaller.cardinalities) < sum(whole.cardinalities) - 50


def test_rows_of_forgotten_values_begin_anew(days, first, forgetting, run, tmp_path):
    """From the first day to the third, between which ids have changed their values."""
    data = forgetting / "1_2"
    given = ["--data", data, "--output", tmp_path, *SMALL, "--init_from", first]
    run("train", *given, "--name", "new", "--max_steps", "0")
    old, new = (load_model(path, "cpu")[0] for path in (first, tmp_path / "new"))
    taken = 0
    tables = zip(old.sparse_arch.to_dense(), new.sparse_arch.to_dense(), strict=True)
    for column, (before, after) in zip(Meta.read(data).categorical, tables, strict=True):
        known, values = (vocabulary(path, column.name)[0] for path in (days / "0", data))
        for i, value in enumerate(values):
            same = i < len(known) and known[i] == value
            assert after[i].equal(before[i if same else column.oov_id]), (column.name, i)
            taken += i < len(known) and not same
    assert taken > 50
    scored = tmp_path / "scores.csv"
    run("predict", tmp_path / "new", days / "2.txt", scored)
    assert len(scored.read_text().splitlines()) == ROWS + 1


def test_rows_that_are_only_scored_do_not_age_values(forgetting, days, tmp_path):
    given = Options(split=("0", "0", "1"), ids_of=str(forgetting / "2_1"))
    meta = quiet(days / "2.txt", tmp_path / "scored", given)
    assert meta.fingerprint == Meta.read(forgetting / "2_1").fingerprint
    later = options(ids_of=str(tmp_path / "scored"), append_new=True, forget=2)
    quiet(days / "2.txt", tmp_path / "later", later)
    for name in CRITEO_CATEGORICAL:
        one, other = (
            pq.read_table(d / Meta.vocabulary_file(name))
            for d in (tmp_path / "later", forgetting / "2_2")
        )
        assert one.equals(other)


def test_what_cannot_be_forgotten(days, first, forgetting, run, tmp_path):
    raw, out = days / "1.txt", tmp_path / "out"

    def refused(*given, program="prepare_criteo"):
        done = run(program, raw, "--output", out, *given, status=2)
        assert done.stderr.count("\n") == 1
        return done.stderr

    ids_of = ("--ids-of", days / "0")
    assert "--forget needs --append-new" in refused(*ids_of, "--forget", "2")
    given = (*ids_of, "--append-new", "--forget", "0")
    assert "--forget: is '0', it must be a whole number, 1 or more" in refused(*given)
    every = tmp_path / "every"
    quiet(days / "0.txt", every, options(vocabulary="all"))
    given = ("--ids-of", every, "--append-new", "--forget", "1", "--split", "0.8", "0.1", "0.1")
    assert "has no id that forgotten values could share: prepare it" in refused(*given)
    moved = tmp_path / "moved"
    shutil.copytree(first, moved, symlinks=True)
    shutil.rmtree(moved / "preparation")
    given = ["--data", forgetting / "1_2", "--output", tmp_path, *SMALL, "--init_from", moved]
    done = run("train", *given, status=2)
    assert "moved/preparation is not of the data that" in done.stderr
    assert "restore it, or start without --init_from" in done.stderr


@pytest.mark.parametrize("kind", ["dense", "paged", "offload"])
@pytest.mark.parametrize("start", ["unseen", "random"])
def test_old_rows_are_copied_and_new_ones_begin_as_told(kind, start, days, first, run, tmp_path):
    """From the first day to the third at once."""
    data = days / "2"
    given = ["--data", data, "--output", tmp_path, "--name", "new", *SMALL, "--init_from", first]
    run("train", *given, "--emb", kind, "--tables.threshold", "0", "--max_steps", "0")
    if start == "random":
        given[5] = "other"
        run("train", *given, "--new_rows", "random", "--emb", kind, "--max_steps", "0")
    (old, _), (new, state) = (load_model(path, "cpu") for path in (first, tmp_path / given[5]))
    meta = Meta.read(data)
    assert state.fingerprint == meta.fingerprint
    assert new.top_mlp[0].weight.equal(old.top_mlp[0].weight)
    tables = zip(old.sparse_arch.to_dense(), new.sparse_arch.to_dense(), strict=True)
    for column, (before, after) in zip(meta.categorical, tables, strict=True):
        assert len(before) < len(after) == column.cardinality
        assert after[: len(before)].equal(before)
        more = after[len(before) :]
        if start == "unseen":
            assert more.equal(before[column.oov_id].expand_as(more))
        else:
            assert more.abs().max() <= column.cardinality**-0.5
            assert len(more.unique(dim=0)) == len(more) > 1


def test_a_run_that_took_new_rows_is_resumed(days, first, run, tmp_path):
    """The rows of a resumed run come from its checkpoint, not once more from the first run."""
    given = ["--data", days / "1", "--output", tmp_path, *SMALL, "--init_from", first]
    run("train", *given, "--name", "whole", "--max_steps", "6")
    run("train", *given, "--name", "parts", "--max_steps", "3")
    run("train", "--resume", tmp_path / "parts", "--max_steps", "6")
    whole, parts = (load_model(tmp_path / n, "cpu", last=True)[0] for n in ("whole", "parts"))
    for name, value in whole.state_dict().items():
        assert value.equal(parts.state_dict()[name]), name
    begun = load_model(first, "cpu")[0].sparse_arch.to_dense()[0]
    assert not whole.sparse_arch.to_dense()[0][: len(begun)].equal(begun)


def test_tables_without_an_unseen_row_begin_with_their_mean(days, run, tmp_path):
    first, second = tmp_path / "0", tmp_path / "1"
    quiet(days / "0.txt", first, options(vocabulary="all"))
    quiet(days / "1.txt", second, options(ids_of=str(first), append_new=True))
    given = ["--output", tmp_path, *SMALL, "--max_steps"]
    run("train", "--data", first, "--name", "old", *given, "2")
    run("train", "--data", second, "--name", "new", "--init_from", tmp_path / "old", *given, "0")
    old, new = (load_model(tmp_path / n, "cpu")[0].sparse_arch.to_dense() for n in ("old", "new"))
    for before, after in zip(old, new, strict=True):
        more = after[len(before) :]
        torch.testing.assert_close(more, before.mean(0).expand_as(more))


@pytest.mark.parametrize("kind", ["drop", "hash", "block", "auto"])
def test_kinds_that_need_the_order_of_frequency_are_refused(kind, days, run, tmp_path):
    given = ["--data", days / "1", "--output", tmp_path, *SMALL, "--tables.threshold", "0"]
    budget = ["--budget", "2x"] if kind == "auto" else []
    done = run("train", *given, "--emb", kind, *budget, status=2)
    assert f"--emb {kind} needs ids in order of falling frequency" in done.stderr
    assert done.stderr.count("\n") == 1


def test_kinds_that_cannot_grow_are_refused_with_what_works(days, first, run, tmp_path):
    given = ["--data", days / "1", "--output", tmp_path, *SMALL, "--max_steps", "1"]
    tt = ["--emb", "tt", "--tt.rank", "2", "--tables.threshold", "0"]
    done = run("train", *given, *tt, "--init_from", first, status=2)
    assert "--emb tt can't take the values that" in done.stderr
    assert done.stderr.count("\n") == 1
    run("train", *given, "--name", "grown", "--init_from", first)
    run("train", *given, "--name", "small", *tt, "--init_from", tmp_path / "grown")  # the remedy
    given[1] = days / "0"  # and there is no way back
    done = run("train", *given, "--init_from", tmp_path / "grown", status=2)
    assert "was prepared separately from the data of" in done.stderr


OF_TABLE = """\
label: clicked
min_count: 2
columns:
  price: {kind: number, transform: log}
  age: {kind: number, transform: quantile, buckets: 4}
  user: category
  few: {kind: category, cap: 12}
  tags: {kind: list, separator: "|"}
"""


@pytest.fixture
def table_days(tmp_path, run):
    """A directory with two days of a table, of which the second extends the first; their rows."""
    (tmp_path / "options").write_text(OF_TABLE)
    every, more = [], ["--config", tmp_path / "options"]
    for day in range(2):
        rng, raw = random.Random(day), tmp_path / f"{day}.csv"
        rows = [
            {
                "price": round(rng.lognormvariate(2, 1), 2),
                "age": rng.randrange(90),
                "user": f"u{rng.randrange(80) + 30 * day}" if rng.random() < 0.9 else "",
                "few": f"f{rng.randrange(day, day + 20)}",
                "tags": "|".join(f"t{rng.randrange(9) + 5 * day}" for _ in range(3)),
                "clicked": int(rng.random() < 0.3),
            }
            for _ in range(400)
        ]
        pd.DataFrame(rows).to_csv(raw, index=False)
        run("prepare_table", raw, "--output", tmp_path / f"{day}", *SPLIT, *more)
        more = ["--ids-of", tmp_path / "0", "--append-new"]
        every.append(rows)
    return tmp_path, every


SPLIT = ["--split", "0.8", "0.1", "0.1"]


def test_new_values_of_a_table_get_ids_too(table_days, run):
    directory, (_, rows) = table_days
    days = directory / "0", directory / "1"
    grown = {}
    for name in ("user", "few", "tags"):
        values = [row[name].split("|") if name == "tags" else [row[name]] for row in rows]
        grown[name] = require_extended(*days, name, values, cap=12 if name == "few" else None)
    assert grown["user"] > 10
    assert grown["tags"] > 2
    assert vocabulary(days[0], "age") == vocabulary(days[1], "age"), "the buckets of the first day"

    metas = [Meta.read(day) for day in days]
    sizes = zip(metas[0].tables, metas[0].cardinalities, strict=True)
    assert metas[1].cardinalities == tuple(size + grown.get(name, 0) for name, size in sizes)
    assert metas[1].rows_at(metas[0].fingerprint) == metas[0].cardinalities
    transforms = [(day / "transform.json").read_text() for day in days]
    assert transforms[0].partition('"scalings"')[2] == transforms[1].partition('"scalings"')[2]
    again = ("--output", directory / "2", *SPLIT, "--ids-of", days[1])
    run("prepare_table", directory / "1.csv", *again)
    assert Meta.read(directory / "2").extends == metas[1].extends  # nothing is new


def test_raw_rows_with_new_values_are_scored_as_prepared_ones(table_days, run):
    directory, _ = table_days
    given = ["--output", directory, *SMALL, "--max_steps"]
    run("train", "--data", directory / "0", "--name", "first", *given, "3")
    more = ["--init_from", directory / "first", "--name", "second"]
    run("train", "--data", directory / "1", *more, *given, "0")
    scores = [directory / f"{name}.csv" for name in ("prepared", "raw")]
    run("predict", directory / "second", directory / "1", scores[0], "--split", "test")
    run("predict", directory / "second", directory / "1.csv", scores[1])
    prepared, raw = map(pd.read_csv, scores)
    assert raw["probability"].tolist()[360:] == pytest.approx(prepared["probability"].tolist())


def test_counts_of_values_that_stay_without_an_id_are_those_of_unseen_ones():
    old = Vocabulary(
        values=pa.array(["b", None, "a"], pa.large_string()), counts=np.array([5, 3, 1]), oov_id=1
    )
    values, counts = pa.array(["a", "c", "d", "e", "f"]), np.array([4, 2, 2, 1, 7])
    made = extend_ids(old, values, counts, min_count=2, most=5)
    assert made.values.to_pylist() == ["b", None, "a", "f", "c"]
    assert made.counts.tolist() == [5, 6, 5, 7, 2]
    assert made.oov_id == 1
    full = extend_ids(old, values, counts, min_count=1, most=2)
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
    made = extend_ids(old, values, counts, min_count=1, evict_after=2)
    assert made.values.to_pylist() == ["b", None, "c", "e", "d"]
    assert made.counts.tolist() == [5, 9, 3, 1, 2]
    assert made.unseen.tolist() == [1, 0, 0, 0, 0]
    assert made.ids(values, "x").tolist() == [1, 2, 4, 3]
    made = extend_ids(old, values, counts, min_count=2, evict_after=3)
    assert made.values.to_pylist() == ["b", None, "c", "", "g", "d"]
    assert made.unseen.tolist() == [1, 0, 0, 2, 2, 0]
    full = extend_ids(old, values, counts, min_count=1, most=5, evict_after=3)
    assert full.values.to_pylist() == ["b", None, "c", "", "g"]
    assert full.counts.tolist() == [5, 9, 3, 2, 1]

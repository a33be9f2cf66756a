"""Parquet from other programs, described by the script, is read by the loader."""

from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.schema import Meta
from tests.kit import open_loader


@pytest.fixture
def describe(run):
    """Runs the program; returns what it prints."""
    return partial(run, "describe_parquet")


def frame(rows=200, seed=0):
    """Clicks as pandas would hold them."""
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "clicked": np.arange(rows) % 4 == 0,
            "price": random.normal(size=rows),
            "age": random.integers(0, 90, rows),
            "item": random.integers(0, 40, rows),
            "shop": pd.array([None if i % 50 == 7 else i % 9 for i in range(rows)], "Int64"),
            "tags": [[i % 12] * (i % 3) for i in range(rows)],
            "title": "words",
        }
    )


@pytest.fixture
def shop(tmp_path):
    """A directory with two training files and one of test, written by pandas."""
    for seed, name in enumerate(("train-0", "train-1", "test")):
        frame(seed=seed).to_parquet(tmp_path / f"{name}.parquet", index=False)
    return tmp_path


ARGUMENTS = ("--train", "train-*.parquet", "--test", "test.parquet", "--label", "clicked")


def test_described_files_are_read(shop, describe):
    run = describe(shop, *ARGUMENTS, "--dense", "price", "age")
    assert "train" in run.stdout
    assert "25.00% positive" in run.stdout
    meta = Meta.read(shop)
    assert meta.dense == ("price", "age")
    assert meta.tables == ("item", "shop", "tags")
    assert meta.cardinalities == (41, 10, 13)
    assert [column.oov_id for column in meta.categorical] == [40, 9, 12]
    assert [column.multi_hot for column in meta.categorical] == [False, False, True]
    assert (meta.splits["train"].rows, meta.splits["train"].positives) == (400, 100)
    (batch,) = open_loader(shop, "test", batch_size=200)
    expected = frame(seed=2)
    np.testing.assert_array_equal(batch.dense[0], expected["price"].astype(np.float32))
    np.testing.assert_array_equal(batch.dense[1], expected["age"])
    np.testing.assert_array_equal(batch.labels, expected["clicked"])
    np.testing.assert_array_equal(batch.ids[:200], expected["item"])
    np.testing.assert_array_equal(batch.ids[200:400], expected["shop"].fillna(9))
    np.testing.assert_array_equal(batch.ids[400:], np.concatenate(expected["tags"]))


def test_bags_of_one_length_are_noticed(tmp_path, describe):
    pairs, ragged = [[1, 2], [3, 4], [5, 6]], [[1], [2, 3], [4]]
    columns = {
        "fixed": pa.array(pairs, pa.list_(pa.int32(), 2)),
        "same": pa.array(pairs),
        "ragged": pa.array(ragged),
        "empty": pa.array([[], [], []], pa.list_(pa.int32())),
        "null": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
    }
    pq.write_table(pa.table({"label": [0, 1, 0], **columns}), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"label": [0, 1, 0], **columns, "same": ragged}), tmp_path / "b.parquet"
    )
    given = (tmp_path, "--label", "label", "--train", "a.parquet")
    describe(*given)
    meta = Meta.read(tmp_path)
    assert meta.lengths == (2, 2, None, None, None)
    (batch,) = open_loader(tmp_path, batch_size=3)
    assert batch.offsets.diff().tolist() == [2] * 6 + [1, 2, 1] + [0] * 3 + [2, 0, 2]
    describe(*given, "b.parquet", "--overwrite")
    assert Meta.read(tmp_path).lengths == (2, None, None, None, None)


def test_names_with_brackets_and_directories_of_files(shop, describe):
    (shop / "train-0.parquet").rename(shop / "train[0].parquet")
    (shop / "rest").mkdir()
    (shop / "train-1.parquet").rename(shop / "rest" / "1.parquet")
    for rest in ("rest/", "rest/*.parquet"):
        given = "--train", "train[0].parquet", rest, "--label", "clicked"
        describe(shop, *given, "--overwrite")
        assert Meta.read(shop).splits["train"].files == ("train[0].parquet", "rest/1.parquet")


def test_files_elsewhere_are_read_only_on_request(shop, describe, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (shop / "test.parquet").rename(elsewhere / "test.parquet")
    given = "--train", shop / "train-0.parquet", "--test", elsewhere / "test.parquet"
    run = describe(shop, *given, "--label", "clicked")
    assert f"1 files are not in {shop}: train with --loader.allow_outside\n" in run.stdout
    meta = Meta.read(shop, allow_outside=True)
    assert meta.splits["train"].files == ("train-0.parquet",)
    assert meta.splits["test"].files == (str(elsewhere / "test.parquet"),)
    with pytest.raises(
        ValueError, match=r"test\.parquet', which is not in .*--loader.allow_outside"
    ):
        open_loader(shop, "test", batch_size=200)
    (batch,) = open_loader(shop, "test", batch_size=200, allow_outside=True)
    np.testing.assert_array_equal(batch.labels, frame(seed=2)["clicked"])


def test_an_existing_description_is_kept_unless_told(shop, describe):
    describe(shop, *ARGUMENTS)
    meta = Meta.read(shop)  # columns are told apart by their types
    assert (meta.dense, meta.tables) == (("price",), ("age", "item", "shop", "tags"))
    again = describe(shop, *ARGUMENTS, "--dense", "price", status=2)
    assert "meta.json exists; use --overwrite to replace it" in again.stderr
    describe(shop, *ARGUMENTS, "--overwrite")


MISTAKES = {
    "no training files": (("--test", "test.parquet"), "no training files"),
    "missing file": (("--train", "day-*.parquet"), "day-*.parquet: no such file,"),
    "file under two names": (
        (*ARGUMENTS, "--val", "./test.parquet"),
        "parquet is given more than once",
    ),
    "file twice": ((*ARGUMENTS, "--val", "test.parquet"), "is given more than once"),
    "missing label": (("--train", "test.parquet"), "has no columns named 'label'"),
    "missing column": ((*ARGUMENTS, "--dense", "cost"), "has no columns named 'cost'"),
    "column twice": ((*ARGUMENTS, "--categorical", "item", "item"), "column 'item' is named 2"),
    "label as feature": ((*ARGUMENTS, "--dense", "clicked"), "column 'clicked' is named 2"),
    "text": ((*ARGUMENTS, "--categorical", "title"), "column 'title' is "),
    "negative ids": ((*ARGUMENTS, "--categorical", "debt"), "column 'debt' has id -3"),
    "ids beyond 64 bits": ((*ARGUMENTS, "--categorical", "hashed"), "'hashed' has id 1844674407"),
    "no categorical": ((*ARGUMENTS, "--categorical"), "no categorical columns, a model needs"),
    "label of 2": (("--train", "test.parquet", "--label", "age"), "column 'age': row"),
    "unknown option": ((*ARGUMENTS, "--lable", "x"), "option --lable, did you mean '--label'?"),
    "no Parquet": (("--train", "notes.txt"), "notes.txt is not a complete Parquet file"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_one_line(shop, describe, kind):
    arguments, message = MISTAKES[kind]
    for path in shop.glob("*.parquet"):
        frame().assign(debt=-3, hashed=np.uint64(2**64 - 9)).to_parquet(path, index=False)
    (shop / "notes.txt").write_text("nothing of note")
    run = describe(shop, *arguments, status=2)
    assert message in run.stderr
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert not (shop / "meta.json").exists()


def test_hashed_ids_are_warned_of(tmp_path, describe):
    hashed = frame().assign(item=np.random.default_rng(0).integers(0, 2**62, 200))
    hashed.to_parquet(tmp_path / "train.parquet", index=False)
    run = describe(tmp_path, "--train", "train.parquet", "--label", "clicked")
    assert "warning: item needs a table of" in run.stderr
    assert "shop" not in run.stderr


def test_columns_without_a_number_are_noted(shop, describe):
    for name in ("train-0", "train-1", "test"):
        rows = frame().assign(age=pd.array([None] * 200, "Int64"), price=np.nan)
        rows["paid"] = np.where(np.arange(200) == 199, 1.0 if name == "test" else np.nan, np.nan)
        rows.to_parquet(shop / f"{name}.parquet", index=False)
    found = describe(shop, *ARGUMENTS, "--dense", "price", "age", "paid")
    notes = [line for line in found.stderr.splitlines() if "any number" in line]
    assert notes == [
        "note: dense columns without any number in all 600 rows, of which a model learns nothing: "
        "price, age"
    ]


def test_columns_that_are_left_out_or_look_like_ids_are_noted(describe, tmp_path):
    rows = frame(2000).assign(user_id=[float(i % 300) for i in range(2000)], seen=pd.Timestamp(0))
    rows.loc[7, "user_id"] = None
    rows.to_parquet(tmp_path / "train.parquet", index=False)
    printed = describe(tmp_path, "--train", "train.parquet", "--label", "clicked").stderr
    assert "left out: title (string), seen (timestamp[" in printed.replace("large_", "")
    assert "scripts/prepare_table.py makes features of texts, times and lists" in printed
    assert "dense columns of whole numbers that look like ids: user_id; scripts/prep" in printed
    given = ("--dense", "user_id", "price", "--overwrite")
    printed = describe(tmp_path, "--train", "train.parquet", "--label", "clicked", *given).stderr
    assert "look like ids" not in printed


def test_files_without_checksums_are_noted_once(shop, describe):
    found = describe(shop, *ARGUMENTS)
    assert (
        f"note: 3 of 3 files have no checksums, such as {shop / 'train-0.parquet'}" in found.stderr
    )
    for name, version, others in (("test", "1.0", 2), ("train-0", "2.0", 1)):
        path = shop / f"{name}.parquet"
        table = pq.read_table(path)
        pq.write_table(table, path, write_page_checksum=True, data_page_version=version)
        found = describe(shop, *ARGUMENTS, "--overwrite")
        assert f"note: {others} of 3 files have no checksums, such as" in found.stderr
    path = shop / "train-1.parquet"
    pq.write_table(pq.read_table(path), path, write_page_checksum=True, use_dictionary=False)
    assert "checksums" not in describe(shop, *ARGUMENTS, "--overwrite").stderr


def test_a_file_with_fewer_rows_than_it_says_is_refused(shop, describe):
    path = shop / "test.parquet"
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - length : -8]
    rows = footer.index(b"\x16\x90\x03")  # the number of all rows, 200, as Thrift writes it
    changed = footer[:rows] + b"\x16\x92\x03" + footer[rows + 3 :]
    path.write_bytes(data[: -8 - length] + changed + data[-8:])
    found = describe(shop, *ARGUMENTS, status=2)
    assert "test.parquet is not a complete Parquet file (201 rows, 200 in its row" in found.stderr


HOSTILE = "shop\x1b[2J\n\u202eerror: none"


def test_names_of_columns_and_files_are_escaped_wherever_they_are_printed(tmp_path, run):
    def printed(*arguments, status=0):
        result = run(*arguments, status=status)
        text = result.stdout + result.stderr
        assert text.replace("\n", "").replace("\r", "").isprintable()
        assert "\\x1b[2J\\n\\u202eerror" in text
        return text

    rows = frame().rename(columns={"shop": HOSTILE, "age": f"age{HOSTILE}"})
    for name in ("train", "test"):
        rows.to_parquet(tmp_path / f"{name}{HOSTILE}.parquet", index=False)
    files = ("--train", "train*", "--test", "test*", "--label", "clicked")
    files = (*files, "--unseen", "error")
    printed("describe_parquet", tmp_path, *files, "--dense", "price", f"age{HOSTILE}")
    common = ("--batch_size", 100, "--device", "cpu", "--max_steps", 2)
    train = ("train", "--data", tmp_path, *common, "--output", tmp_path / "runs")
    printed(*train, "--emb", "auto", "--budget", "2x", "--name", "one")
    rows[HOSTILE] += 99
    rows.to_parquet(tmp_path / f"test{HOSTILE}.parquet", index=False)
    assert "outside the table" in printed(*train, "--emb", "dense", "--name", "two", status=2)
    for name in ("train", "test"):
        (tmp_path / f"{name}{HOSTILE}.parquet").write_bytes(b"PAR1")
    printed(*train, "--name", "three", status=2)
    printed("describe_parquet", tmp_path, *files, "--overwrite", status=2)


def test_ids_that_the_training_rows_did_not_have(shop, tmp_path, describe):
    """One more row of each table stands for them; a file is described with the tables of others."""
    describe(shop, *ARGUMENTS, "--dense", "price", "age")
    new = tmp_path / "new"
    new.mkdir()
    later = frame(seed=9)
    later.loc[3, "item"] = 10**6
    later.at[5, "tags"] = [3, 77]
    later.to_parquet(new / "later.parquet", index=False)
    describe(new, "--test", "later.parquet", "--tables-of", shop)
    meta, trained = Meta.read(new), Meta.read(shop)
    assert meta.categorical == trained.categorical
    assert meta.label == "clicked"
    (batch,) = open_loader(new, "test", batch_size=200, num_embeddings=trained.cardinalities)
    item = batch.ids[:200]
    assert item[3] == trained.categorical[0].oov_id == 40
    assert item[4] == later["item"][4]
    starts = batch.offsets[400:]
    assert batch.ids[starts[5] : starts[6]].tolist() == [3, 12]
    with pytest.raises(ValueError, match="outside the table of 30 rows"):
        list(open_loader(new, "test", batch_size=200, num_embeddings=(30, 10, 13)))


def test_tables_without_a_row_for_unseen_ids(shop, tmp_path, describe):
    dense = "--dense", "price", "age"
    describe(shop, *ARGUMENTS, *dense, "--unseen", "error")
    assert Meta.read(shop).cardinalities == (40, 10, 12)
    new = tmp_path / "new"
    new.mkdir()
    later = frame(seed=9)
    later.loc[3, "item"] = 40
    later.to_parquet(new / "later.parquet", index=False)
    arguments = new, "--test", "later.parquet", "--tables-of"
    found = describe(*arguments, shop, status=2)
    assert "column 'item' has id 40, its table 40 rows and none for unseen ids" in found.stderr
    later["item"] = later["item"].where(later.index != 3).astype("Int64")
    later.to_parquet(new / "later.parquet", index=False)
    told = describe(*arguments, shop, status=2).stderr
    assert "column 'item' has nulls, its table no row for them" in told
    assert "no files; name them with --test" in describe(new, "--tables-of", shop, status=2).stderr
    (shop / "meta.json").write_text((shop / "meta.json").read_text().replace("describe", "x"))
    assert "was not made by this program" in describe(*arguments, shop, status=2).stderr

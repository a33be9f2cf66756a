"""The loader on real Parquet files: every row once, in an order that can be continued."""

import dataclasses
import json
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm.data import loader as loader_module
from dlrm.data import shuffle
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import Categorical, Meta, Split
from dlrm.data.shuffle_buffer import ShuffleBuffer
from dlrm.training.prefetch import Prefetcher
from tests.kit import open_loader, same_batches, write_split

DENSE = ("I1", "I2")
TABLES = (50, 3000, 7)
ROWS = 1000


def columns(rows=ROWS, seed=0):
    """A label, two dense columns and three of ids; ``I1`` numbers the rows."""
    random = np.random.default_rng(seed)
    data = {"label": random.integers(0, 2, rows).astype(np.uint8)}
    data["I1"] = np.arange(rows, dtype=np.float32)
    data["I2"] = random.normal(size=rows).astype(np.float32)
    for i, cardinality in enumerate(TABLES, start=1):
        data[f"C{i}"] = random.integers(0, cardinality, rows).astype(np.int32)
    return data


def write(directory, data, *, files=2, categorical=None, dense=DENSE, **described):
    """Write ``data`` as the split "train" in several files, with its meta file."""
    if categorical is None:
        categorical = [Categorical(name=f"C{i}", cardinality=c) for i, c in enumerate(TABLES, 1)]
    return write_split(directory, data, categorical, files=files, dense=dense, **described)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared directory: 1,000 rows in two files of eight row groups each."""
    directory = tmp_path_factory.mktemp("data")
    write(directory, columns())
    return directory


def rows(batches):
    """The row numbers in ``batches``, in order."""
    return [int(row) for batch in batches for row in batch.dense[0]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 100, 999, 1000, 4096])
def test_batches_hold_the_columns_of_the_file(data, batch_size, shuffle):
    loader = open_loader(data, batch_size=batch_size, shuffle=shuffle, window=3)
    batches, source = list(loader), columns()
    assert len(batches) == len(loader) == -(-ROWS // batch_size)
    assert all(batch.size == batch_size for batch in batches[:-1])
    order = rows(batches)
    assert sorted(order) == list(range(ROWS))
    assert (order == list(range(ROWS))) is not shuffle
    start = 0
    for batch in batches:
        these = order[start : start + batch.size]
        start += batch.size
        assert batch.dense.dtype == batch.labels.dtype == torch.float32
        assert batch.ids.dtype == torch.int32
        assert batch.offsets is None
        assert batch.dense.is_contiguous()
        assert batch.ids.is_contiguous()
        np.testing.assert_array_equal(batch.labels, source["label"][these])
        np.testing.assert_array_equal(batch.dense, [source[name][these] for name in DENSE])
        expected = [source[f"C{i}"][these] for i in range(1, 1 + len(TABLES))]
        np.testing.assert_array_equal(batch.ids, expected)


def test_order_depends_on_seed_and_epoch_alone(data):
    def order(epoch=0, **options):
        options = {"seed": 1, "batch_size": 100, "shuffle": True, **options}
        loader = open_loader(data, **options)
        loader.set_epoch(epoch)
        return rows(loader)

    reference = order()
    assert order(readers=5, prefetch=1) == reference
    assert order(batch_size=33) == reference
    assert order(epoch=1) != reference
    assert order(seed=2) != reference
    assert order(window=3) != reference


def test_large_row_groups_are_dealt_in_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "RUNS_PER_WINDOW", 1)
    count = 21_000  # row groups of 6,000, 4,500, 6,000 and 4,500 rows: not all runs are whole
    source = columns(count)
    lists = [[i % 90] * (i % 3) for i in range(count)]
    tables = [
        Categorical(name="C2", cardinality=3000),
        Categorical(name="H1", cardinality=90, multi_hot=True),
    ]
    write(tmp_path, {**source, "H1": lists}, categorical=tables, group=6000)
    loader = open_loader(tmp_path, batch_size=2100, shuffle=True)
    batches = list(loader)
    order = np.array(rows(batches))
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    groups = np.digitize(order, [6000, 10_500, 16_500])
    for batch in groups.reshape(10, 2100)[:-1]:
        assert np.bincount(batch).min() > 100  # an even deal: 600, 450, 600, 450
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.15
    assert (groups[:64] == groups[0]).all()
    assert np.diff(order[:64]).min() < 0
    for batch, these in zip(batches, order.reshape(10, 2100), strict=True):
        np.testing.assert_array_equal(batch.ids[:2100], source["C2"][these])
        got = torch.tensor_split(batch.ids, batch.offsets[2100:-1])[1:]
        assert [bag.tolist() for bag in got] == [lists[row] for row in these]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 64), (3, 50), (5, 33), (3, 333)])
def test_ranks_share_every_global_batch(data, world_size, batch_size, drop_last):
    options = {"shuffle": True, "window": 3, "drop_last": drop_last}
    whole = open_loader(data, batch_size=world_size * batch_size, **options)
    ranks = [
        open_loader(data, batch_size=batch_size, rank=r, world_size=world_size, **options)
        for r in range(world_size)
    ]
    assert {len(loader) for loader in ranks} == {len(whole)}
    shares = zip(*ranks, strict=True)
    for batch, share in zip(whole, shares, strict=True):
        assert rows([batch]) == rows(share)
        sizes = [part.size for part in share]
        assert {part.total_size for part in share} == {batch.size}
        assert max(sizes) - min(sizes) <= 1
        assert drop_last is False or sizes == [batch_size] * world_size
    sizes = [batch.size for batch in whole]
    for batches in range(3 * len(sizes)):
        assert ranks[0].samples(batches) == sum((3 * sizes)[:batches])


def test_rank_without_rows_gets_an_empty_batch(tmp_path):
    write(tmp_path, columns(13))
    last = [list(open_loader(tmp_path, batch_size=3, rank=r, world_size=4))[-1] for r in range(4)]
    assert [batch.size for batch in last] == [1, 0, 0, 0]
    assert last[3].ids.shape == (3, 0)
    assert last[3].dense.shape == (2, 0)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("done", [0, 1, 5, 10])
def test_resumes_after_the_last_batch_yielded(data, done, shuffle):
    options = {"batch_size": 101, "shuffle": shuffle, "window": 3, "seed": 5}
    first = open_loader(data, prefetch=7, **options)
    first.set_epoch(3)
    iteration = iter(first)
    seen = [next(iteration) for _ in range(done)]
    state = json.loads(json.dumps(first.state_dict()))
    rest = list(iteration)

    second = open_loader(data, **options)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.set_epoch(3)
    assert same_batches(list(second), rest)
    assert same_batches(list(second), seen + rest), "the iteration after is a whole epoch again"


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_batches_that_a_prefetcher_holds_come_again(data, count):
    class Holding(Prefetcher):
        def look_ahead(self, samples):
            return count

    plain, ahead = (open_loader(data, batch_size=101, shuffle=True) for _ in range(2))
    batches, prefetcher = list(plain), Holding()
    for index, (prepared, _) in enumerate(zip(prefetcher(ahead), plain, strict=True)):
        assert same_batches([prepared.batch], [batches[index]])
        state = ahead.state_dict(unused=prefetcher.samples_held)
        assert state == plain.state_dict()
        assert prefetcher.samples_held <= count * 101
    assert index == len(batches) - 1


def test_resumes_with_another_number_of_ranks(data):
    def loader(rank, world_size):
        options = {"batch_size": 40, "shuffle": True, "window": 3}
        return open_loader(data, rank=rank, world_size=world_size, **options)

    order = rows(loader(0, 1))
    one = loader(1, 2)
    iteration = iter(one)
    next(iteration), next(iteration)
    three = [loader(rank, 3) for rank in range(3)]
    for each in three:
        each.load_state_dict(one.state_dict())
    rest = [row for share in zip(*three, strict=True) for row in rows(share)]
    assert rest == order[160:]


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"batch_size": 11}, {"window": 2}, {"shuffle": False}, {"drop_last": True},
     {"negatives": 0.5}],
)  # fmt: skip
def test_refuses_the_state_of_other_options(data, changed):
    options = {"batch_size": 10, "shuffle": True, "window": 3}
    state = open_loader(data, **options).state_dict()
    other = open_loader(data, **{**options, **changed})
    ((name, value),) = changed.items()
    if name == "window":  # of 16 row groups
        name, value = "windows", 8
    with pytest.raises(ValueError, match=f"{name} is {value} here and .* in the state"):
        other.load_state_dict(state)


@pytest.mark.parametrize("bags", [False, True])
def test_a_share_of_the_negatives_is_kept_the_same_in_every_epoch(tmp_path, bags):
    source = columns()
    if bags:
        lists = pa.array([[1] * (row % 4) for row in range(ROWS)], pa.list_(pa.int32()))
        own = [Categorical(name="C1", cardinality=TABLES[0], multi_hot=True)]
        write(tmp_path, source | {"C1": lists}, categorical=own)
    else:
        write(tmp_path, source)

    def read(epoch=0, share=0.2, **options):
        options = {"batch_size": 64, "shuffle": True, "seed": 3, "negatives": share, **options}
        loader = open_loader(tmp_path, **options)
        loader.set_epoch(epoch)
        found = rows(loader)
        assert len(found) == loader.rows == len(set(found))
        return set(found)

    kept = read()
    positives = set(np.flatnonzero(source["label"]).tolist())
    assert positives <= kept
    assert 60 < len(kept - positives) < 140  # of about 500
    assert kept == read(epoch=1) == read(shuffle=False) == read(window=2, readers=3)
    assert kept == {r for rank in range(3) for r in rows(open_loader(
        tmp_path, batch_size=10, rank=rank, world_size=3, seed=3, negatives=0.2
    ))}  # fmt: skip
    assert kept != read(seed=4)
    assert read(share=1.0) == set(range(ROWS))
    assert read(share=1e-9) == positives


def test_negatives_are_refused_if_nothing_is_left(data, tmp_path):
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="it must be above 0 and at most 1"):
            open_loader(data, batch_size=8, negatives=share)
    write(tmp_path, columns() | {"label": np.zeros(ROWS)})
    with pytest.raises(ValueError, match=r"keeps no row of .*all labels are 0; raise it"):
        open_loader(tmp_path, batch_size=8, negatives=1e-9)


def test_refuses_the_state_of_other_data(data, tmp_path):
    write(tmp_path, columns(), files=3)
    state = open_loader(data, batch_size=10).state_dict()
    with pytest.raises(ValueError, match="'train' loader cannot be continued: data is"):
        open_loader(tmp_path, batch_size=10).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a loader"):
        open_loader(data, batch_size=10).load_state_dict({**state, "order": None})
    with pytest.raises(ValueError, match="not the state of a loader"):
        open_loader(data, batch_size=10).load_state_dict({"step": 3})


FOREIGN = {
    "bool label": {"label": np.arange(ROWS) % 2 == 0},
    "float label": {"label": (np.arange(ROWS) % 2).astype(np.float64)},
    "int64 label": {"label": np.arange(ROWS) % 2},
    "float64 dense": {"I2": np.linspace(-1, 1, ROWS)},
    "float16 dense": {"I2": np.linspace(-1, 1, ROWS).astype(np.float16)},
    "int64 dense": {"I2": np.arange(ROWS) - 5},
    "bool dense": {"I2": np.arange(ROWS) % 3 == 0},
    "int64 ids": {"C2": np.arange(ROWS)},
    "uint32 ids": {"C2": np.arange(ROWS, dtype=np.uint32)},
    "uint64 ids": {"C2": np.arange(ROWS, dtype=np.uint64)},
    "int16 ids": {"C2": np.arange(ROWS, dtype=np.int16)},
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("shuffle", [False, True])
def test_reads_types_that_others_write(tmp_path, kind, shuffle):
    write(tmp_path, {**columns(), **FOREIGN[kind]})
    ((name, values),) = FOREIGN[kind].items()
    loader = open_loader(tmp_path, batch_size=ROWS, shuffle=shuffle, window=3)
    (batch,) = loader
    got = {"label": batch.labels, "I2": batch.dense[1], "C2": batch.ids[1]}[name]
    assert got.dtype == (torch.int32 if name == "C2" else torch.float32)
    np.testing.assert_array_equal(got, values[rows([batch])].astype(got.numpy().dtype))


def test_wide_ids_where_a_table_needs_them(tmp_path):
    ids = np.full(ROWS, 3_000_000_000)
    tables = [Categorical(name="C1", cardinality=4_000_000_000)]
    write(tmp_path, {**columns(), "C1": ids}, categorical=tables)
    (batch,) = open_loader(tmp_path, batch_size=ROWS)
    assert batch.ids.dtype == torch.int64
    assert batch.ids[0, 0] == 3_000_000_000


def test_nulls(tmp_path):
    source = columns()
    hole = np.arange(ROWS) % 10 == 3
    tables = [Categorical(name="C1", cardinality=50, oov_id=7)]
    changed = {
        "I1": pa.array(source["I1"], mask=hole),
        "I2": np.where(hole, np.nan, 2.0),
        "C1": pa.array(source["C1"], mask=hole),
    }
    write(tmp_path, {**source, **changed}, categorical=tables)
    (batch,) = open_loader(tmp_path, batch_size=ROWS)
    np.testing.assert_array_equal(batch.dense[0], np.where(hole, 0, source["I1"]))
    np.testing.assert_array_equal(batch.dense[1], np.where(hole, 0, 2))
    np.testing.assert_array_equal(batch.ids[0], np.where(hole, 7, source["C1"]))


def test_other_names_and_no_dense_columns(tmp_path):
    source = columns()
    data = {"clicked": source["label"], "item": source["C1"]}
    tables = [Categorical(name="item", cardinality=50)]
    write(tmp_path, data, categorical=tables, dense=(), label="clicked")
    (batch,) = open_loader(tmp_path, batch_size=ROWS)
    assert batch.dense.shape == (0, ROWS)
    np.testing.assert_array_equal(batch.ids[0], source["C1"])


def readers():
    """Threads of loaders that are alive."""
    names = ("parquet-reader", "batch-assembler")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def test_threads_end_with_the_iteration(data):
    loader = open_loader(data, batch_size=10, shuffle=True, window=1)
    for _ in loader:
        assert readers()
        break
    assert not readers()
    iteration = iter(loader)
    next(iteration)
    loader.close()
    assert not readers()
    with pytest.raises(StopIteration):
        next(iteration)
    before = iter(loader)
    next(before)
    assert len(list(loader)) == 100, "a new iteration ends the one before"
    with pytest.raises(StopIteration):
        next(before)
    assert not readers()


@pytest.mark.parametrize("window", [20, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_next_epoch_is_read_during_the_last_batches(data, monkeypatch, window, rank):
    read, reads = RowGroupReader.read, []

    def counted(self, row_group):
        reads.append(row_group.index)
        return read(self, row_group)

    options = {"batch_size": 33, "shuffle": True, "window": window, "world_size": 2, "rank": rank}
    fresh = open_loader(data, **options)
    expected = []
    for epoch in range(5):
        fresh.set_epoch(epoch)
        expected.append(list(fresh))

    monkeypatch.setattr(RowGroupReader, "read", counted)
    loader = open_loader(data, readers=2, epochs=4, **options)
    for epoch in range(4):
        loader.set_epoch(epoch)
        assert same_batches(list(loader), expected[epoch])
        assert bool(readers()) is (epoch < 3)
    assert len(reads) == (16 if window == 20 else 4 * 16)

    # What was read ahead is of no use to another epoch, to the same one, or once it is closed.
    for epoch in (0, 2, 2, 4):
        loader.set_epoch(epoch)
        assert same_batches(list(loader), expected[epoch])
    loader.set_epoch(0)
    list(loader)
    state = loader.state_dict()
    loader.close()
    assert not readers()
    loader.load_state_dict(state)
    assert not list(loader)
    loader.set_epoch(1)
    assert same_batches(list(loader), expected[1])
    loader.close()


def test_an_error_in_the_next_epoch_is_raised_there(data, monkeypatch):
    read, reads = RowGroupReader.read, []

    def damaged(self, row_group):
        reads.append(row_group.index)
        if len(reads) > 16:
            raise ValueError("damaged")
        return read(self, row_group)

    monkeypatch.setattr(RowGroupReader, "read", damaged)
    loader = open_loader(data, batch_size=100, shuffle=True, window=3, readers=1, epochs=2)
    assert len(list(loader)) == 10
    deadline = time.monotonic() + 30
    while len(reads) <= 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(reads) > 16, "the next epoch is read before it is asked for"
    loader.set_epoch(1)
    with pytest.raises(ValueError, match="damaged"):
        list(loader)
    assert not readers()


def test_errors_of_readers_reach_the_consumer(tmp_path):
    ids = columns()["C1"]
    ids[900] = 50
    write(tmp_path, {**columns(), "C1": ids})
    loader = open_loader(tmp_path, batch_size=10, prefetch=1)
    seen = []
    with pytest.raises(ValueError, match=r"train_1.parquet, row group 6, column 'C1'"):
        seen.extend(loader)
    assert len(seen) == 88  # what lies before the row group with the mistake
    assert not readers()


ILL_TYPED = {
    "string ids": ({"C2": ["a"] * ROWS}, "'C2' is string, it must be an integer"),
    "float ids": ({"C2": np.ones(ROWS)}, "'C2' is double, it must be an integer"),
    "listed ids": ({"C2": [[1]] * ROWS}, r"'C2' is list<.*>, it must be an integer"),
    "no bags": ({}, "'C1' is int32, it must be a list of integers"),
    "string dense": ({"I2": ["1"] * ROWS}, "'I2' is string, it must be a bool, integer or float"),
    "string label": ({"label": ["1"] * ROWS}, r"'label' is string, it must be .* \(the label\)"),
}


@pytest.mark.parametrize("kind", ILL_TYPED)
def test_wrong_types_are_found_at_once(tmp_path, kind):
    changed, message = ILL_TYPED[kind]
    bags = [Categorical(name="C1", cardinality=50, multi_hot=True)] if kind == "no bags" else None
    write(tmp_path, {**columns(), **changed}, categorical=bags)
    with pytest.raises(ValueError, match=rf"train_0.parquet: column {message}"):
        open_loader(tmp_path, batch_size=10)


def test_missing_and_doubled_columns(data, tmp_path):
    meta = write(tmp_path, columns())
    tables = (*meta.categorical, Categorical(name="C9", cardinality=3))
    dataclasses.replace(meta, categorical=tables).write(tmp_path)
    with pytest.raises(ValueError, match=r"train_0.parquet has no columns named 'C9'.*I1, I2, C1"):
        open_loader(tmp_path, batch_size=10)
    meta.write(tmp_path)
    table = pa.table(columns())
    doubled = pa.table([*table.columns, table["C1"]], names=[*table.column_names, "C1"])
    pq.write_table(doubled, tmp_path / "train_1.parquet")
    with pytest.raises(ValueError, match=r"train_1.parquet has 2 columns named 'C1'"):
        open_loader(tmp_path, batch_size=10)


BAD_VALUES = {
    "id beyond the table": ("C1", 50, r"'C1': value 37 is id 50, outside the table of 50 rows"),
    "negative id": ("C1", -1, r"'C1': value 37 is id -1, outside"),
    "null id": ("C1", None, r"'C1': value 37 is null; .* oov_id"),
    "null label": ("label", None, r"'label': row 37 is null"),
    "label of 2": ("label", 2, r"'label': row 37 is 2; a label must be in \[0, 1\]"),
    "label of NaN": ("label", float("nan"), r"'label': row 37 is nan"),
    "infinite dense": ("I2", float("inf"), r"'I2': row 37 is infinite"),
    "dense beyond float32": ("I2", 1e39, r"'I2': row 37 is infinite or beyond float32"),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_bad_values_are_named(tmp_path, kind):
    name, value, message = BAD_VALUES[kind]
    values = columns()[name].tolist()
    values[64 + 37] = value
    if kind == "label of NaN":
        values = np.array(values)
    write(tmp_path, {**columns(), name: values})
    with pytest.raises(ValueError, match=rf"train_0.parquet, row group 1, column {message}"):
        list(open_loader(tmp_path, batch_size=10))


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64])
def test_negative_ids_of_narrow_types(tmp_path, kind):
    ids = columns()["C3"].astype(kind)
    ids[64 + 37] = -1
    tables = [Categorical(name="C3", cardinality=100_000)]
    write(tmp_path, {**columns(), "C3": ids}, categorical=tables)
    with pytest.raises(ValueError, match="row group 1, column 'C3': value 37 is id -1, outside"):
        list(open_loader(tmp_path, batch_size=10))


def test_ids_are_checked_against_the_tables_in_use(data):
    with pytest.raises(ValueError, match=r"'C2': .* outside the table of 2000 rows"):
        list(open_loader(data, batch_size=10, num_embeddings=(50, 2000, 7)))
    with pytest.raises(ValueError, match="3 categorical columns, the model tables for 2: prep"):
        open_loader(data, batch_size=10, num_embeddings=(50, 2000))


def test_damaged_files(tmp_path):
    write(tmp_path, columns())
    path = tmp_path / "train_1.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"train_1.parquet is not a complete Parquet file"):
        open_loader(tmp_path, batch_size=10)
    chunk = pq.read_metadata(tmp_path / "train_0.parquet").row_group(2).column(4)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    damaged = bytearray(whole)
    middle = start + chunk.total_compressed_size // 2
    damaged[middle : middle + 20] = bytes(20)
    path.write_bytes(damaged)
    message = r"train_1.parquet, row group 2, column 'C2' cannot be read .*damaged"
    with pytest.raises(ValueError, match=message):
        list(open_loader(tmp_path, batch_size=10))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train_1.parquet does not exist, but .*meta.json"):
        open_loader(tmp_path, batch_size=10)


def test_a_file_that_is_replaced_between_epochs(tmp_path):
    """By one with the same columns and rows: a copy is read, other rows are not."""
    write(tmp_path, columns())
    loader = open_loader(tmp_path, batch_size=100)
    first, path = list(loader), tmp_path / "train_1.parquet"
    path.write_bytes(path.read_bytes())
    assert same_batches(first, list(loader))
    write(tmp_path, columns(seed=1))
    with pytest.raises(ValueError, match=r"train_.\.parquet was replaced while it was in use, so"):
        list(loader)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train", r"'train' has 1000 rows in its files, .*json says 999"),
        ("val", r"split 'val' of .*meta.json is empty"),
        ("trian", r"no split 'trian', did you mean 'train'\? valid: train, val"),
    ],
)
def test_other_number_of_rows_than_described(tmp_path, split, message):
    meta = write(tmp_path, columns())
    splits = {
        "train": dataclasses.replace(meta.splits["train"], rows=999),
        "val": Split(files=(), rows=0, positives=0),
    }
    dataclasses.replace(meta, splits=splits).write(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_loader(tmp_path, split, batch_size=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, it must be at least 1"),
        ({"window": 0}, "window is 0, it must be at least 1"),
        ({"readers": 0}, "readers is 0, it must be at least 1"),
        ({"prefetch": -1}, "prefetch is -1, it must be at least 1"),
        ({"rank": 2, "world_size": 2}, r"rank is 2, it must be in \[0, world_size=2\)"),
        ({"seed": -1}, "seed is -1, it must not be negative"),
        ({"device": "meta"}, "device is meta, it must be cpu or cuda"),
    ],
)
def test_bad_options(data, options, message):
    with pytest.raises(ValueError, match=message):
        open_loader(data, **{"batch_size": 10, **options})
    with pytest.raises(TypeError, match="a loader has no option windw"):
        open_loader(data, batch_size=10, windw=2)
    with pytest.raises(ValueError, match="epoch is -1, it must not be negative"):
        open_loader(data, batch_size=10).set_epoch(-1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ids_of_one_table_have_the_stride_of_any_other_matrix(tmp_path, shuffle):
    """Else a compiled step would be compiled again."""
    table = Categorical(name="C1", cardinality=40)
    write(tmp_path, {**columns(40), "C1": np.arange(40)}, categorical=[table])
    batches = list(open_loader(tmp_path, batch_size=7, shuffle=shuffle))
    assert [batch.ids.stride() for batch in batches] == [(7, 1)] * 5 + [(5, 1)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_small_batches_are_gathered_together(data, monkeypatch, device):
    """As many as have ``ROWS_AT_ONCE`` rows, on a GPU ``BYTES_AT_ONCE``; never beyond a buffer."""
    meta = Meta.read(data)
    columns = 1 + len(meta.dense) + len(meta.categorical)
    monkeypatch.setattr(loader_module, "ROWS_AT_ONCE", 30 if device == "cpu" else 1)
    monkeypatch.setattr(loader_module, "BYTES_AT_ONCE", 30 * 4 * columns)
    runs = []
    batches = ShuffleBuffer.batches

    def counted(self, firsts, size):
        runs.append(len(firsts))
        return batches(self, firsts, size)

    monkeypatch.setattr(ShuffleBuffer, "batches", counted)
    options = {"shuffle": True, "window": 20, "drop_last": True, "device": device}
    assert len(list(open_loader(data, batch_size=10, **options))) == 100
    assert runs == [3] * 33 + [1]
    runs.clear()
    ranks = [
        list(open_loader(data, batch_size=5, rank=rank, world_size=2, **options))
        for rank in range(2)
    ]
    assert runs == 2 * ([6] * 16 + [4])
    whole = list(open_loader(data, batch_size=10, **options))
    both = [[*rows([a]), *rows([b])] for a, b in zip(*ranks, strict=True)]
    assert both == [rows([batch]) for batch in whole]


def test_a_position_inside_of_a_run(data):
    """The state is that after the batch, not after the run that it was gathered with."""
    options = {"batch_size": 7, "shuffle": True, "window": 20}
    first, again = open_loader(data, **options), open_loader(data, **options)
    batches = iter(first)
    begun = [next(batches) for _ in range(5)]
    state = first.state_dict(unused=7)
    assert state["position"] == 28
    again.load_state_dict(state)
    rest = list(again)
    assert same_batches([begun[4], *batches], rest)


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_batches_are_read(data):
    loader = open_loader(data, device="cuda", batch_size=10, shuffle=True)
    value = torch.zeros(1, device="cuda")
    for step, _ in enumerate(loader):
        if step == 3:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value += 1
                time.sleep(0.05)
    graph.replay()
    assert value.item() == 1

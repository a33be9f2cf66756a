"""The order of an epoch: a permutation of all rows, or windows from all over the files, in bounded
memory."""

import gc
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dlrm.data import loader as loader_module
from dlrm.data import synthetic
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import Categorical, Meta
from tests.kit import combinations, open_loader, write_split

ROWS, GROUPS = 20_000, 40


def write(directory, rows=ROWS, group_rows=ROWS // GROUPS, extra=0, multi_hot=False):
    """Rows numbered by ``I1``, with ``extra`` more dense columns."""
    number = np.arange(rows)
    data = {"label": number % 2, "I1": number.astype(np.float32), "C1": number.astype(np.int32)}
    more = [f"X{i}" for i in range(extra)]
    data |= dict.fromkeys(more, data["I1"])
    tables = [Categorical(name="C1", cardinality=rows)]
    if multi_hot:
        data["H1"] = [[i % 7] * (i % 3) for i in range(rows)]
        tables.append(Categorical(name="H1", cardinality=7, multi_hot=True))
    write_split(directory, data, tables, group=group_rows, dense=["I1", *more])
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A log in the order of time: 40 row groups of 500 rows."""
    return write(tmp_path_factory.mktemp("log"))


def order(loader, epoch=0):
    """The row numbers of an epoch in their order."""
    loader.set_epoch(epoch)
    return np.concatenate([batch.dense[0].numpy() for batch in loader]).astype(int)


def shift(rows):
    """How far the mean row of each twentieth of an epoch is from the middle, in standard errors of
    a permutation: 1 on average, and hardly ever above 4."""
    parts = rows.reshape(20, -1)
    error = len(rows) / np.sqrt(12 * parts.shape[1])
    return np.abs(parts.mean(1) - (len(rows) - 1) / 2) / error


def test_every_part_of_an_epoch_is_of_all_times(data):
    loader = open_loader(data, batch_size=250, shuffle=True)
    assert loader.windows == 1
    for epoch in range(3):
        rows = order(loader, epoch)
        np.testing.assert_array_equal(np.sort(rows), np.arange(ROWS))
        assert shift(rows).max() < 4
        assert abs(np.corrcoef(rows, np.arange(ROWS))[0, 1]) < 0.03
        assert len(set(rows[-500:] // 500)) == GROUPS


@pytest.mark.parametrize(("window", "windows"), [(8, 5), (12, 4), (39, 2), (1, 40)])
def test_a_window_is_of_all_times(data, window, windows):
    loader = open_loader(data, batch_size=250, shuffle=True, window=window)
    rows = order(loader)
    np.testing.assert_array_equal(np.sort(rows), np.arange(ROWS))
    assert loader.windows == windows
    if GROUPS % windows == 0:
        for part in rows.reshape(windows, -1):
            # One of each stretch of as many row groups as there are windows, and no other.
            groups = np.unique(part // 500)
            np.testing.assert_array_equal(groups // windows, np.arange(GROUPS // windows))


def test_no_window_is_short(tmp_path):
    write(tmp_path, rows=17 * 100, group_rows=100)  # two windows of 8, and a last one of 1?
    rows = order(open_loader(tmp_path, batch_size=100, shuffle=True, window=8))
    last = np.unique(rows[-500:] // 100)
    assert len(last) >= 5
    assert last.min() < 6
    assert last.max() > 10


@pytest.mark.parametrize("sizes", [(500, 5), (3, 1000), (129, 64)])
def test_row_groups_of_other_sizes(tmp_path, sizes):
    count, group = sizes[0] * 5, sizes[1]
    write(tmp_path, rows=count, group_rows=group)
    loader = open_loader(tmp_path, batch_size=64, shuffle=True)
    first, second = order(loader, 0), order(loader, 1)
    np.testing.assert_array_equal(np.sort(first), np.arange(count))
    assert (first != second).any()


def test_windows_fit_into_the_memory(data):
    reader = RowGroupReader(data, Meta.read(data))
    total = sum(map(reader.decoded_bytes, reader.row_groups("train"))) + 8 * ROWS
    assert total == ROWS * (4 * 3 + 8)

    def windows(memory):
        return open_loader(data, batch_size=10, shuffle=True, memory=memory).windows

    assert windows(total) == 1
    assert windows(total - 1) == 4
    assert windows(total * 3 // 4) == 4
    assert windows(total * 3 // 4 - 1) == 8
    assert windows(total // 10) == 32
    assert windows(1) == GROUPS, "the least is a row group at a time"
    assert open_loader(data, batch_size=10, memory=1).windows == 1, "nothing to shuffle"


def test_bags_count_with_all_of_their_ids(tmp_path):
    write(tmp_path, rows=300, group_rows=300, multi_hot=True)
    reader = RowGroupReader(tmp_path, Meta.read(tmp_path))
    (row_group,) = reader.row_groups("train")
    ids = sum(max(i % 3, 1) for i in range(300))  # Parquet counts an empty list as a value
    assert reader.decoded_bytes(row_group) == 300 * 4 * 3 + 4 * ids + (8 + 4) * 300


def storages():
    """Bytes of all tensors in the process, by address."""
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_keeps_to_the_memory(tmp_path, share):
    gc.collect()
    others = storages()  # of other tests
    rows = 200_000
    write(tmp_path, rows=rows, group_rows=rows // 64, extra=15)
    memory = int(rows * (4 * 18 + 8) * share)
    loader = open_loader(
        tmp_path, batch_size=512, shuffle=True, memory=memory, readers=1, prefetch=1
    )
    assert loader.windows == (1 if share == 1 else 8)
    for epoch in range(2):
        loader.set_epoch(epoch)
        own = [storages() for index, _ in enumerate(loader) if index % 20 == 0]
        peak = max(sum(size for at, size in each.items() if at not in others) for each in own)
        assert memory / 3 < peak < memory + 2_000_000, "and the row groups that are being decoded"


@combinations(slow=pytest.mark.slow, done=[0, 1, 133, 300, 400], memory=[None, 200_000])
def test_resumes_exactly_on_a_machine_with_other_memory(data, memory, done):
    options = {"batch_size": 50, "shuffle": True}
    first = open_loader(data, memory=memory, **options)
    first.set_epoch(2)
    iteration = iter(first)
    for _ in range(done):
        next(iteration)
    state = json.loads(json.dumps(first.state_dict()))
    rest = [batch.dense[0].tolist() for batch in iteration]
    next_epoch = order(first, 3)

    second = open_loader(data, memory=100_000, **options)
    assert second.windows != first.windows
    second.load_state_dict(state)
    second.set_epoch(2)
    assert [batch.dense[0].tolist() for batch in second] == rest
    np.testing.assert_array_equal(order(second, 3), next_epoch)


def test_a_device_reads_a_single_window_once(data, monkeypatch):
    read, reads = RowGroupReader.read, []

    def counted(self, row_group):
        reads.append(row_group.index)
        return read(self, row_group)

    monkeypatch.setattr(RowGroupReader, "read", counted)
    kept, fresh = (open_loader(data, batch_size=300, shuffle=True) for _ in range(2))
    first = iter(kept)
    next(first)
    kept.close()  # complete, though it has not been used up
    for epoch in range(1, 4):
        np.testing.assert_array_equal(order(kept, epoch), order(kept, epoch))
    assert sorted(reads) == list(range(GROUPS))
    np.testing.assert_array_equal(order(fresh, 3), order(kept, 3))


def test_only_some_row_groups_wait_in_host_memory_for_a_device(data, monkeypatch):
    submitted = []
    stored = loader_module.StoredRows

    class Counted(stored):
        def _read_more(self):
            super()._read_more()
            submitted.append(len(self._reads))

    monkeypatch.setattr(loader_module, "StoredRows", Counted)
    order(open_loader(data, batch_size=300, shuffle=True, readers=2))
    assert max(submitted) == 6


def test_synthetic_rows_drift_if_asked(tmp_path):
    def label_by_first_id(name, **options):
        synthetic.write(
            tmp_path / name,
            rows=60_000,
            cardinalities=[3] * 8,
            fractions=(1, 0, 0),
            device="cpu",
            **options,
        )
        table = pq.read_table(tmp_path / name / "train-00000.parquet")
        halves = np.array_split(np.arange(60_000), 2)
        labels, ids = (table[column].to_numpy() for column in ("label", "C1"))
        return np.array([[labels[h][ids[h] == i].mean() for i in range(2)] for h in halves])

    plain, drifting = label_by_first_id("plain"), label_by_first_id("drifting", drift=2.0)
    assert np.abs(plain[0] - plain[1]).max() < 0.02
    assert np.abs(drifting[0] - drifting[1]).max() > 0.05
    with pytest.raises(ValueError, match="drift is 9, it must be at most 8"):
        synthetic.write(tmp_path / "bad", drift=9)

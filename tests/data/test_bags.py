"""Multi-hot data: ragged bags and bags of fixed lengths."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from dlrm.data.batch import Batch, concatenate, fixed_bags, fixed_offsets
from dlrm.data.schema import Categorical, Meta
from tests.kit import combinations, open_loader, same_batches, write_split

ROWS = 700
SIZES = (3, 1, 5)  # of the bags of H1, C1, H2


def kinds(size):
    """The types of a column of bags that other programs write."""
    return [
        pa.list_(pa.int32()),
        pa.list_(pa.field("element", pa.int32(), nullable=False)),
        pa.large_list(pa.int64()),
        pa.list_(pa.int32(), size),
        pa.binary(4 * size),
        pa.binary(8 * size),
    ]


def column_of(bags, kind):
    """Bags as a column of this type; None is a null."""
    if pa.types.is_fixed_size_binary(kind):
        size = max(len(bag) for bag in bags if bag is not None)
        item = f"<i{kind.byte_width // size}"
        bags = [None if bag is None else np.array(bag, item).tobytes() for bag in bags]
    return pa.array(bags, kind)


def write(directory, tables, columns, group=64):
    """Rows numbered by ``I1``, with these columns of ids, in two files."""
    number = np.arange(len(next(iter(columns.values()))))
    rows = {"label": number % 2, "I1": number.astype(np.float32), **columns}
    write_split(directory, rows, tables, files=2, group=group, dense=["I1"])


def fixed(directory, kind=0, rows=ROWS, bag_size=True, cardinality=1000, group=64):
    """Data whose bags have the lengths SIZES; returns the ids of each feature ``[rows, L]``."""
    random = np.random.default_rng(0)
    ids = [random.integers(0, cardinality, (rows, size)) for size in SIZES]
    names = ("H1", "C1", "H2")
    columns, tables = {}, []
    for name, values, size in zip(names, ids, SIZES, strict=True):
        if size == 1:
            columns[name] = values[:, 0]
        else:
            columns[name] = column_of(values.tolist(), kinds(size)[kind])
        lengths = {"multi_hot": True, "bag_size": size if bag_size else None} if size > 1 else {}
        tables.append(Categorical(name=name, cardinality=cardinality, **lengths))
    write(directory, tables, columns, group)
    return ids


def ragged(directory, rows=ROWS, group=64):
    """Data with ragged, fixed and one-hot columns; returns the bags of each feature."""
    random = np.random.default_rng(1)
    bags = {
        "R1": [random.integers(0, 90, random.integers(0, 5)).tolist() for _ in range(rows)],
        "H1": random.integers(0, 90, (rows, 2)).tolist(),
        "C1": random.integers(0, 90, (rows, 1)).tolist(),
        "R2": [[row % 90] * (row % 3) for row in range(rows)],
    }
    nulls = [None if row % 10 == 0 else bag for row, bag in enumerate(bags["R1"])]
    unknown = [[None if i == 89 else i for i in bag] for bag in bags["R2"]]
    columns = {**bags, "R1": nulls, "C1": [bag[0] for bag in bags["C1"]], "R2": unknown}
    tables = [
        Categorical(name="R1", cardinality=90, multi_hot=True),
        Categorical(name="H1", cardinality=90, multi_hot=True, bag_size=2),
        Categorical(name="C1", cardinality=90),
        Categorical(name="R2", cardinality=90, multi_hot=True, oov_id=89),
    ]
    write(directory, tables, columns, group)
    return [[bag or [] for bag in nulls], *list(bags.values())[1:]]


def check(batch, features):
    """The ids of ``batch`` are those of its rows in ``features``, bag by bag."""
    order = batch.dense[0].long().tolist()
    expected = [list(feature[row]) for feature in features for row in order]
    assert batch.offsets.dtype == torch.int64
    assert batch.offsets.tolist() == [0, *np.cumsum([len(bag) for bag in expected]).tolist()]
    assert batch.ids.tolist() == [int(i) for bag in expected for i in bag]
    assert list(batch.bounds) == (
        batch.offsets[:: batch.size].tolist() if batch.size else [0] * (len(features) + 1)
    )


@combinations(
    slow=pytest.mark.slow, batch_size=[50, 333, ROWS, 1], window=[None, 3, 1], shuffle=[False, True]
)
def test_every_row_has_its_bags(tmp_path, shuffle, window, batch_size):
    for data, bag_sizes in ((fixed, SIZES), (ragged, None)):
        directory = tmp_path / data.__name__
        directory.mkdir()
        features = data(directory)
        options = {"batch_size": batch_size, "shuffle": shuffle, "window": window, "readers": 3}
        loader = open_loader(directory, **options)
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = list(loader)
            for batch in batches[:5] + batches[-2:]:
                check(batch, features)
                assert batch.bag_sizes == bag_sizes
                assert batch.ids.dtype == torch.int32
            order = torch.cat([batch.dense[0] for batch in batches]).tolist()
            assert sorted(order) == list(range(ROWS))
            assert (order == sorted(order)) is not shuffle


@pytest.mark.parametrize(
    ("kind", "known"), [*((k, True) for k in range(6)), *((k, False) for k in range(4))]
)
def test_fixed_bags_of_all_types_are_those_of_lists(tmp_path, kind, known):
    features = fixed(tmp_path, kind, bag_size=known)
    for batch in open_loader(tmp_path, batch_size=300, shuffle=True, window=4):
        check(batch, features)
        assert batch.bag_sizes == (SIZES if known else None)
        if known:
            offsets, bounds = fixed_bags(SIZES, batch.size, "cpu")
            assert torch.equal(batch.offsets, offsets)
            assert batch.bounds == bounds


def test_flat_columns_and_bags_of_one_are_the_same(tmp_path):
    ids = np.random.default_rng(2).integers(0, 50, (2, ROWS)).astype(np.int32)
    options = {"batch_size": 128, "shuffle": True, "window": 3}
    for name, lists in (("flat", False), ("lists", True)):
        (tmp_path / name).mkdir()
        columns = {f"C{f}": ids[f, :, None].tolist() if lists else ids[f] for f in range(2)}
        more = {"multi_hot": True, "bag_size": 1} if lists else {}
        tables = [Categorical(name=f"C{f}", cardinality=50, **more) for f in range(2)]
        write(tmp_path / name, tables, columns)
    flat, bags = (open_loader(tmp_path / name, **options) for name in ("flat", "lists"))
    for one_hot, bag in zip(flat, bags, strict=True):
        assert torch.equal(one_hot.dense, bag.dense)
        assert torch.equal(one_hot.ids.flatten(), bag.ids)
        assert bag.bag_sizes == (1, 1)


@pytest.mark.parametrize("data", [fixed, ragged])
@pytest.mark.parametrize("window", [None, 3])
def test_resumes_and_shares_among_ranks(tmp_path, data, window):
    data(tmp_path)
    options = {"shuffle": True, "window": window}
    whole = list(open_loader(tmp_path, batch_size=90, **options))
    loader = open_loader(tmp_path, batch_size=90, **options)
    iteration = iter(loader)
    for _ in range(4):
        next(iteration)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = open_loader(tmp_path, batch_size=90, **options)
    resumed.load_state_dict(state)
    assert same_batches(list(resumed), whole[4:])
    ranks = [
        open_loader(tmp_path, batch_size=30, rank=rank, world_size=3, **options)
        for rank in range(3)
    ]
    shares = [concatenate(parts) for parts in zip(*ranks, strict=True)]
    assert same_batches(shares, whole)


def test_a_resident_window_knows_the_lengths_of_every_epoch(tmp_path):
    features = ragged(tmp_path)
    loader = open_loader(tmp_path, batch_size=100, shuffle=True)
    list(loader)
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        for batch in loader:
            check(batch, features)


def test_wide_ids_and_a_rank_without_rows(tmp_path):
    features = fixed(tmp_path, kind=2, rows=7, cardinality=4_000_000_000)
    for rank in range(3):
        loader = open_loader(tmp_path, batch_size=2, rank=rank, world_size=3)
        batches = list(loader)
        assert [batch.size for batch in batches] == [2, int(rank == 0)]
        for batch in batches:
            assert batch.ids.dtype == torch.int64
            check(batch, features)


def test_bags_of_another_length_are_named(tmp_path):
    null = [[1, 2], None, [4, 5]]
    for kind, lists in ((0, [[1, 2], [3], [4, 5]]), (3, null), (4, null), (5, null)):
        column = column_of(lists, kinds(2)[kind])
        table = Categorical(name="H1", cardinality=9, multi_hot=True, bag_size=2)
        write(tmp_path, [table], {"H1": column})
        message = r"'H1': row 0 has [01] ids, .* says bag_size 2; take bag_size out"
        message += r"|'H1' cannot be read \(Expected all lists to be of size=2"  # by pyarrow itself
        with pytest.raises(ValueError, match=message):
            list(open_loader(tmp_path, batch_size=3))


@pytest.mark.parametrize("bag_size", [None, 3])
def test_bytes_of_bags_of_another_length_are_named(tmp_path, bag_size):
    table = Categorical(name="H1", cardinality=9, multi_hot=True, bag_size=bag_size)
    write(tmp_path, [table], {"H1": column_of([[1, 2], [4, 5]], pa.binary(8))})
    message = r"'H1' is fixed_size_binary\[8\], it must be a list .*, or the bytes of bag_size "
    with pytest.raises(ValueError, match=message):
        open_loader(tmp_path, batch_size=3)


@pytest.mark.parametrize("bad", [0, True, "3"])
def test_bad_bag_sizes(tmp_path, bad):
    fixed(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["categorical"][0]["bag_size"] = bad
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"categorical\.0\.bag_size is"):
        Meta.read(tmp_path)
    meta["categorical"][0] |= {"bag_size": 2, "multi_hot": False}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="column 'H1' has bag_size 2, and is not multi_hot"):
        Meta.read(tmp_path)


def test_shared_offsets_can_be_saved_for_backward():
    with torch.inference_mode():
        offsets = fixed_offsets((2, 3), 5, torch.device("cpu"))
    assert offsets is fixed_offsets((2, 3), 5, torch.device("cpu"))
    assert not offsets.is_inference()


def one_hot(directory):
    """Data without bags."""
    ids = np.random.default_rng(2).integers(0, 50, ROWS)
    write(directory, [Categorical(name="C1", cardinality=50)], {"C1": ids})


@pytest.mark.gpu
@pytest.mark.parametrize("data", [fixed, ragged, one_hot])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "window": 3}, {}])
def test_bags_on_the_gpu(tmp_path, data, options):
    data(tmp_path)
    host = open_loader(tmp_path, batch_size=64, **options)
    loader = open_loader(tmp_path, batch_size=64, device="cuda", **options)
    for epoch in range(2):
        host.set_epoch(epoch)
        loader.set_epoch(epoch)
        copies = []
        for batch in loader:
            assert batch.labels.is_cuda
            torch.cuda._sleep(1_000_000)  # the consumer lags behind; batches must not change
            offsets = None if batch.offsets is None else batch.offsets * 1
            tensors = (batch.dense * 1, batch.ids * 1, batch.labels * 1, offsets)
            copies.append(Batch(*tensors, bounds=batch.bounds, bag_sizes=batch.bag_sizes))
        assert same_batches(copies, list(host))

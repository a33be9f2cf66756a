"""Multi-hot ids by MLPerf's rule, in synthetic data and from prepared one-hot data."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm.data import synthetic
from dlrm.data.loader import BatchLoader
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import MLPERF_BAG_SIZES, TERABYTE_CARDINALITIES, Meta
from dlrm.data.synthetic.multi_hot import draw_bags

SIZES = [1 + f % 4 for f in range(26)]


def read(directory, split="train"):
    """The labels and the ids ``[rows, L]`` of each feature of a split."""
    reader = RowGroupReader(directory, Meta.read(directory))
    groups = [reader.read(group) for group in reader.row_groups(split)]
    ids = [np.concatenate(parts) for parts in zip(*(g.ids for g in groups), strict=True)]
    labels = np.concatenate([group.labels for group in groups])
    return labels, [values.reshape(len(labels), -1) for values in ids]


def check_bags(directory, split, meta, seed):
    """The rows in ``bags`` are those in ``flat``, with the bags that are drawn for their ids."""
    labels, bags = read(directory / "bags", split)
    own_labels, own = read(directory / "flat", split)
    np.testing.assert_array_equal(labels, own_labels)
    features = zip(bags, own, meta.cardinalities, meta.lengths, strict=True)
    for feature, (bag, one_hot, rows, size) in enumerate(features):
        ids = torch.from_numpy(one_hot[:, 0]).long()
        expected = draw_bags(ids, rows, size, feature=feature, seed=seed)
        np.testing.assert_array_equal(bag, expected)


def test_an_id_always_has_the_same_bag():
    ids = torch.randint(0, 1000, (5000,), generator=torch.Generator().manual_seed(0))
    bags = draw_bags(ids, 1000, 9, feature=3, seed=1)
    assert bags.dtype == torch.int32
    assert torch.equal(bags[:, 0], ids.int())
    of_each = draw_bags(torch.arange(1000), 1000, 9, feature=3, seed=1)
    assert torch.equal(bags, of_each[ids])
    assert not torch.equal(bags, draw_bags(ids, 1000, 9, feature=4, seed=1))
    assert not torch.equal(bags, draw_bags(ids, 1000, 9, feature=3, seed=2))
    assert draw_bags(ids, 1000, 1, feature=0, seed=0).tolist() == ids[:, None].tolist()


@pytest.mark.parametrize("cardinality", [1, 3, 64, 1000])
def test_draws_are_uniform_and_independent(cardinality):
    bags = draw_bags(
        torch.arange(cardinality), cardinality, 1 + 200_000 // cardinality, feature=0, seed=0
    )
    draws = bags[:, 1:].numpy()
    counts, expected = np.bincount(draws.ravel(), minlength=cardinality), draws.size / cardinality
    assert len(counts) == cardinality
    if cardinality > 1:
        chi = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi - (cardinality - 1)) < 5 * np.sqrt(2 * (cardinality - 1))
        assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02
        own = np.repeat(np.arange(cardinality), draws.shape[1])
        assert abs(np.corrcoef(own, draws.ravel())[0, 1]) < 0.02


def test_synthetic_bags_add_to_the_one_hot_ids(tmp_path, script):
    program = script("make_synthetic")
    given = ["--like", "mlperf", "--rows", "9000", "--cap", "500", "--device", "cpu"]
    assert program.main([*given, "--output", str(tmp_path / "bags")]) == 0
    plain = [*given, "--bag-sizes", *["1"] * 26, "--output", str(tmp_path / "flat")]
    assert program.main(plain) == 0
    meta = Meta.read(tmp_path / "bags")
    assert meta.cardinalities == tuple(min(500, size) for size in TERABYTE_CARDINALITIES)
    assert meta.lengths == meta.bag_sizes == MLPERF_BAG_SIZES
    assert sum(meta.lengths) == 214
    assert Meta.read(tmp_path / "flat").lengths == (1,) * 26
    assert meta.planted == Meta.read(tmp_path / "flat").planted
    check_bags(tmp_path, "train", meta, seed=0)
    batch = next(iter(BatchLoader(tmp_path / "bags", "train", batch_size=64)))
    assert batch.bag_sizes == MLPERF_BAG_SIZES
    assert batch.ids.shape == (64 * 214,)


def test_prepared_rows_get_bags(tmp_path, script):
    meta = synthetic.write(
        tmp_path / "flat",
        rows=3000,
        cardinalities=[50] * 26,
        fractions=(0.7, 0.3, 0.0),
        device="cpu",
    )
    program = script("make_multi_hot")
    sizes = ["--bag-sizes", *map(str, SIZES), "--seed", "7"]
    assert program.main([str(tmp_path / "flat"), "--output", str(tmp_path / "bags"), *sizes]) == 0
    made = Meta.read(tmp_path / "bags")
    assert made.lengths == tuple(SIZES)
    assert (made.splits, made.planted, made.dense) == (meta.splits, meta.planted, meta.dense)
    assert made.options["one_hot"] == json.loads(json.dumps(meta.options))
    for split in ("train", "val"):
        check_bags(tmp_path, split, made, seed=7)
        left, right = (
            BatchLoader(tmp_path / name, split, batch_size=500) for name in ("flat", "bags")
        )
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a.dense, b.dense)
    field = pq.read_schema(tmp_path / "bags" / made.splits["train"].files[0]).field("C2")
    assert field.type == pa.binary(4 * SIZES[1])
    assert not field.nullable


def test_nulls_become_the_id_of_unknown_values(tmp_path, script):
    directory = tmp_path / "own"
    directory.mkdir()
    table = pa.table({"label": [0, 1, 0], "C": pa.array([1, None, 2], pa.int64())})
    pq.write_table(table, directory / "a.parquet")
    split = {"train": {"files": ["a.parquet"], "rows": 3, "positives": 1}}
    column = {"name": "C", "cardinality": 9, "oov_id": 8}
    content = {"schema_version": 1, "dense": [], "categorical": [column], "splits": split}
    (directory / "meta.json").write_text(json.dumps(content))
    script("make_multi_hot").convert(directory, tmp_path / "bags", [4])
    assert read(tmp_path / "bags")[1][0][:, 0].tolist() == [1, 8, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there are 26 bag sizes for 2 categorical columns; give one for each"),
        (["--bag-sizes", "1", "0"], "the bag size of 'C2' is 0, it must be at least 1"),
        (["--bag-sizes", "2", "2", "--seed", "-1"], "seed is -1, it must not be negative"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, script, options, message):
    synthetic.write(tmp_path / "flat", rows=100, cardinalities=[5, 5], device="cpu")
    program = script("make_multi_hot")
    assert program.main([str(tmp_path / "flat"), "--output", str(tmp_path / "o"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_columns_that_have_bags_are_refused(tmp_path, script):
    synthetic.write(tmp_path / "flat", rows=100, cardinalities=[5], bag_sizes=[2], device="cpu")
    with pytest.raises(ValueError, match="column 'C1' is multi-hot; bags are drawn for one-hot"):
        script("make_multi_hot").convert(tmp_path / "flat", tmp_path / "o", [2])

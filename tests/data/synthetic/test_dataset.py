"""What is written: layout, determinism, raw TSV, errors."""

import json
import resource
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from dlrm.data import synthetic
from dlrm.data.loader import BatchLoader
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, KAGGLE_CARDINALITIES, Meta
from dlrm.data.synthetic import dataset
from dlrm.data.synthetic.distributions import profiles
from dlrm.data.synthetic.multi_hot import GROUP_ROWS
from tests.kit import contents, corrupt, read_criteo, read_split

KAGGLE = profiles()["kaggle"]


def test_layout_of_parquet(demo):
    meta = Meta.read(demo)
    assert meta.dense == CRITEO_DENSE
    assert meta.tables == CRITEO_CATEGORICAL
    assert meta.cardinalities == tuple(min(size, 20_000) for size in KAGGLE_CARDINALITIES)
    assert {name: split.rows for name, split in meta.splits.items()} == {
        "train": 240_000,
        "val": 30_000,
        "test": 30_000,
    }
    for name, split in meta.splits.items():
        table = read_split(demo, name)
        assert list(table) == ["label", *CRITEO_DENSE, *CRITEO_CATEGORICAL]
        assert table["label"].dtype == np.uint8
        assert set(table.dtypes[list(CRITEO_DENSE)]) == {np.dtype(np.float32)}
        assert set(table.dtypes[list(CRITEO_CATEGORICAL)]) == {np.dtype(np.int32)}
        assert len(table) == split.rows
        assert table["label"].sum() == split.positives
        assert table[list(CRITEO_DENSE)].min().min() == 0
        ids = table[list(CRITEO_CATEGORICAL)]
        assert ids.min().min() == 0
        assert (ids.max().to_numpy() < meta.cardinalities).all()
    groups = pq.ParquetFile(demo / meta.splits["train"].files[0]).metadata
    assert [groups.row_group(k).num_rows for k in range(2)] == [GROUP_ROWS, 240_000 - GROUP_ROWS]


def test_ids_come_in_order_of_falling_frequency(demo):
    table = read_split(demo, "train")
    for name in CRITEO_CATEGORICAL:
        counts = np.bincount(table[name])
        common = counts[counts > 400]
        assert (np.diff(common) < 6 * np.sqrt(common[:-1])).all(), name
        half = len(counts) // 2
        assert counts[:half].sum() >= counts[half:].sum(), name


def test_demo_that_is_there_is_kept(demo):
    before = contents(demo)
    assert synthetic.write_demo(demo) == Meta.read(demo)
    assert contents(demo) == before


def test_another_process_may_make_the_demo_first(demo, tmp_path, monkeypatch):
    write = synthetic.write

    def late(directory, **options):
        shutil.copytree(demo, directory)
        return write(directory, **options)

    monkeypatch.setattr(dataset, "write", late)
    assert synthetic.write_demo(tmp_path / "demo") == Meta.read(demo)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_demo_does_not_take_a_directory_of_others(tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ValueError, match="already exists"):
        synthetic.write_demo(tmp_path)
    assert contents(tmp_path).keys() == {"mine"}


def test_several_files_per_split(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.data.synthetic.multi_hot.GROUP_ROWS", 1000)
    monkeypatch.setattr("dlrm.data.synthetic.writers.FILE_GROUPS", 1)
    rows, threads = 2010, torch.get_num_threads()
    given = {"cardinalities": [10], "fractions": (1, 0, 0), "threads": 2}
    meta = synthetic.write(tmp_path / "d", rows=rows, **given)
    assert torch.get_num_threads() == threads
    assert meta.splits["train"].files == tuple(f"train-0000{k}.parquet" for k in range(3))
    assert len(read_split(tmp_path / "d", "train")) == rows
    assert meta.splits["val"].rows == len(read_split(tmp_path / "d", "val")) == 0
    assert meta.planted["val"] == {}


def test_a_flipped_bit_is_found(tmp_path):
    synthetic.write(tmp_path / "data", rows=500, device="cpu")
    path = tmp_path / "data" / "train-00000.parquet"
    column = pq.read_metadata(path).row_group(0).column(5)
    corrupt(path, column.dictionary_page_offset + column.total_compressed_size - 1)
    with pytest.raises(ValueError, match="row group 0, column 'I5' cannot be read"):
        list(BatchLoader(tmp_path / "data", "train", batch_size=100))


def test_same_arguments_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.data.synthetic.multi_hot.GROUP_ROWS", 500)
    monkeypatch.setattr("dlrm.data.synthetic.writers.FILE_GROUPS", 2)
    for name, options in {"a": {"threads": 1}, "b": {"threads": 3}, "c": {"seed": 1}}.items():
        synthetic.write(tmp_path / name, rows=6_000, **options)
    made = {name: contents(tmp_path / name) for name in "abc"}
    assert made["a"] == made["b"]
    assert made["a"] != made["c"]


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bytes(tmp_path):
    for device in ("cpu", "cuda"):
        synthetic.write(tmp_path / device, rows=300_000, device=device)
    assert contents(tmp_path / "cpu") == contents(tmp_path / "cuda")


def test_own_law_or_the_next_larger_one():
    tables = dataset._columns(KAGGLE, [50_000, 583, 40_000_000])
    assert [column.name for column in tables] == ["C1", "C2", "C3"]
    assert [column.cardinality for column in tables] == [50_000, 583, 40_000_000]
    assert tables[0].cdf[1] == pytest.approx(KAGGLE.categorical[9].cdf[1], rel=0.2)  # C10's
    assert tables[1].cdf == KAGGLE.categorical[1].cdf
    assert tables[2].cdf == KAGGLE.categorical[2].cdf


def test_tokens_are_injective_and_use_all_32_bits(kaggle, script):
    tokens = script("make_synthetic").Tokens(kaggle, seed=0)
    values = np.concatenate(
        [
            tokens.values(c, np.arange(min(column.cardinality, 50_000)))
            for c, column in enumerate(kaggle.categorical)
        ]
    )
    assert len(np.unique(values)) == len(values)
    assert values.max() > 1 << 31
    column = kaggle.categorical[2]
    text = tokens.text(2, np.array([5, column.missing_rank, 6])).to_pylist()
    assert text[1] is None
    assert text[0] == f"{tokens.values(2, np.array([5]))[0]:08x}"


def test_tsv_holds_the_same_rows_as_parquet(tmp_path, script):
    options = {"rows": 6_000, "seed": 3, "fractions": (0.6, 0.2, 0.2)}
    meta = synthetic.write(tmp_path / "parquet", **options)
    program = "--like kaggle --rows 6000 --seed 3 --fractions 0.6 0.2 0.2 --format tsv --output"
    assert script("make_synthetic").main([*program.split(), str(tmp_path / "tsv")]) == 0
    assert sorted(contents(tmp_path / "tsv")) == ["synthetic.json", "train.txt"]
    assert json.loads((tmp_path / "tsv/synthetic.json").read_text())["planted"] == meta.planted
    raw = read_criteo(tmp_path / "tsv/train.txt")
    made = pd.concat(read_split(tmp_path / "parquet", s) for s in ("train", "val", "test"))
    assert np.array_equal(raw["label"], made["label"])
    for name in CRITEO_DENSE:
        transformed = np.log1p(raw[name].fillna(0).clip(lower=0))
        np.testing.assert_allclose(made[name], transformed, rtol=1e-6)
    assert (raw["I2"] < 0).any()
    for column in KAGGLE.categorical:
        pairs = pd.DataFrame(
            {"token": raw[column.name].to_numpy(), "id": made[column.name].to_numpy()}
        )
        pairs = pairs.drop_duplicates()
        assert pairs["token"].is_unique
        assert pairs["id"].is_unique
        assert pairs["token"].str.fullmatch("([0-9a-f]{8})?").all()
        assert (pairs.loc[pairs["token"] == "", "id"] == column.missing_rank).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows is 0, it must be at least 1"),
        ({"like": "kagle"}, "did you mean 'kaggle'"),
        ({"auc": 1.0}, "auc is 1.0"),
        ({"positives": 0}, "positives is 0, it must be greater than 0"),
        ({"fractions": (float("nan"), 0.5, 0.5)}, "fractions is .* add up to 1"),
        ({"seed": -1}, "seed is -1, it must be at least 0"),
        ({"fractions": (0.5, 0.6)}, "fractions is .* add up to 1"),
        ({"fractions": (0.5, 0.6, 0.2)}, "fractions is .* add up to 1"),
        ({"fractions": (1.5, -0.5, 0)}, "which are not negative and add up"),
        ({"cardinalities": []}, "there are no cardinalities"),
        ({"cardinalities": [5, 0]}, "the cardinality of C2 is 0, it must be 1 to"),
        ({"cardinalities": [1 << 28]}, "the cardinality of C1 is 268435456"),
        ({"device": "tpu"}, "device is 'tpu', it must be cpu or cuda"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        synthetic.write(tmp_path / "d", **{"rows": 10, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="there is no CUDA GPU; use cpu"):
        synthetic.write(tmp_path / "d", rows=10, device="cuda")


def test_nothing_half_written_stays(tmp_path):
    def fail(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.write(tmp_path / "d", rows=10, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_room_the_directory_is_named(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path / 'data'} can't be written: "):
            synthetic.write(tmp_path / "data", rows=5000, cardinalities=[50] * 26)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not list(tmp_path.iterdir())

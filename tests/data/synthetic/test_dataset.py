"""Synthetic Criteo: layout, determinism, distributions, the label model, raw TSV, errors."""

import importlib.util
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.data import synthetic
from dlrm.data.criteo import CriteoLoader
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, KAGGLE_CARDINALITIES, Meta
from dlrm.data.synthetic import dataset
from dlrm.data.synthetic.distributions import (
    SLOT_BITS,
    UNIFORM_BITS,
    Distribution,
    PermutedUniforms,
    invert,
    profiles,
)
from dlrm.data.synthetic.generator import Generator
from dlrm.data.synthetic.label_model import FREQUENT, best_metrics
from dlrm.data.synthetic.writers import GROUP_ROWS, Tokens
from dlrm.data.threads import map_in_order

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT.parent / "shared/data/criteo_kaggle_137k.tsv.gz"
KAGGLE = profiles()["kaggle"]
CPU = torch.device("cpu")


def script(name):
    (path,) = (ROOT / "scripts").rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generator(rows, categorical=KAGGLE.categorical, dense=KAGGLE.dense, **options):
    options = {"seed": 0, "auc": 0.8, "positives": 0.256, "device": CPU} | options
    return Generator(dense, categorical, rows=rows, **options)


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.fixture(scope="module")
def kaggle():
    """A generator of the full Kaggle size."""
    return generator(KAGGLE.rows)


@pytest.fixture(scope="module")
def block(kaggle):
    """A random sample of the full size, as many rows as the real sample has."""
    return kaggle.rows(0, 137_139)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo data set."""
    directory = tmp_path_factory.mktemp("synthetic") / "demo"
    synthetic.write_demo(directory)
    return directory


def read(directory, meta, split):
    return pd.concat([pd.read_parquet(directory / file) for file in meta.splits[split].files])


# What is written


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
        table = read(demo, meta, name)
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
    table = read(demo, Meta.read(demo), "train")
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


def test_several_files_per_split(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.data.synthetic.writers.GROUP_ROWS", 1000)
    monkeypatch.setattr("dlrm.data.synthetic.writers.FILE_GROUPS", 1)
    rows = 2010
    meta = synthetic.write(
        tmp_path / "d", rows=rows, cardinalities=[10], fractions=(1, 0, 0), threads=2
    )
    assert meta.splits["train"].files == tuple(f"train-0000{k}.parquet" for k in range(3))
    assert len(read(tmp_path / "d", meta, "train")) == rows
    assert meta.splits["val"].rows == len(read(tmp_path / "d", meta, "val")) == 0
    assert meta.planted["val"] == {}


# Determinism


def test_a_flipped_bit_is_found(tmp_path):
    synthetic.write(tmp_path / "data", rows=500, device="cpu")
    path = tmp_path / "data" / "train-00000.parquet"
    column, damaged = pq.read_metadata(path).row_group(0).column(5), bytearray(path.read_bytes())
    damaged[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="row group 0, column 'I5' cannot be read"):
        list(CriteoLoader(tmp_path / "data", "train", batch_size=100))


def test_same_arguments_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.data.synthetic.writers.GROUP_ROWS", 500)
    monkeypatch.setattr("dlrm.data.synthetic.writers.FILE_GROUPS", 2)
    for name, options in {"a": {"threads": 1}, "b": {"threads": 3}, "c": {"seed": 1}}.items():
        synthetic.write(tmp_path / name, rows=6_000, **options)
    made = {name: contents(tmp_path / name) for name in "abc"}
    assert made["a"] == made["b"]
    assert made["a"] != made["c"]


def test_a_row_does_not_depend_on_its_block(kaggle):
    whole = kaggle.rows(1_000_000, 1_001_000)
    parts = [kaggle.rows(1_000_000, 1_000_007), kaggle.rows(1_000_007, 1_001_000)]
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    assert torch.equal(whole.bins, torch.cat([part.bins for part in parts]))
    assert torch.equal(whole.ids, torch.cat([part.ids for part in parts], dim=1))
    assert torch.equal(whole.dense, torch.cat([part.dense for part in parts], dim=1))
    assert torch.equal(whole.missing, torch.cat([part.missing for part in parts], dim=1))


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bytes(tmp_path):
    for device in ("cpu", "cuda"):
        synthetic.write(tmp_path / device, rows=300_000, device=device)
    assert contents(tmp_path / "cpu") == contents(tmp_path / "cuda")


def test_threads_of_torch_are_left_as_they_were(tmp_path):
    before = torch.get_num_threads()
    synthetic.write(tmp_path / "d", rows=100, cardinalities=[3])
    assert torch.get_num_threads() == before


# Distributions


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 97, 1000, 4096])
def test_streams_are_permutations(rows):
    uniforms = PermutedUniforms(rows, jitter=[False] * 3, seed=5, device=CPU)
    orders = uniforms.order(torch.arange(rows))
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(rows))
    if rows >= 97:
        ranks = torch.cat([torch.arange(rows)[None], orders]).double()
        correlation = torch.corrcoef(ranks) - torch.eye(4)
        assert correlation.abs().max() < 5 / rows**0.5


def test_streams_reach_beyond_32_bits():
    rows = 4_373_472_329
    uniforms = PermutedUniforms(rows, jitter=[False], seed=0, device=CPU)
    order = uniforms.order(torch.arange(rows - 10_000, rows))[0]
    assert 0 <= order.min() < rows // 100
    assert rows - rows // 100 < order.max() < rows
    assert len(order.unique()) == 10_000


def test_every_value_occurs_as_often_as_its_share_says():
    column = Distribution(name="C1", knots=(0, 1, 3, 1003), cdf=(0.0, 0.5, 0.75, 1.0))
    rows = 40_000
    uniforms = PermutedUniforms(rows, jitter=[False], seed=0, device=CPU)
    values = invert(column.quantiles()[None], uniforms.draw(torch.arange(rows)))
    counts = np.bincount(values[0], minlength=1003)
    assert len(counts) == 1003
    # A slot of the quantile table is the resolution of a share.
    np.testing.assert_allclose(counts[:3] / rows, [0.5, 0.125, 0.125], atol=2 ** (1 - SLOT_BITS))
    assert set(counts[3:]) <= set(range(7, 14))  # 10 each


def test_no_value_is_missed_that_deserves_a_row():
    """The tail of Kaggle's largest table at its full size: a row or two each."""
    column = KAGGLE.categorical[2]
    rows = round(KAGGLE.rows * (1 - column.missing))
    assert column.smallest_share * KAGGLE.rows >= 1
    step = (1 << UNIFORM_BITS) // KAGGLE.rows
    uniform = (torch.arange(rows - 1_000_000, rows) + KAGGLE.rows - rows) * step  # as drawn
    values = invert(column.quantiles()[None], uniform[None]).unique()
    assert values[-1] == column.values - 1
    assert len(values) > 0.99 * (column.values - values[0])


def test_rare_values_are_no_grid():
    column = Distribution(name="C1", knots=(0, 1_000_000), cdf=(0.0, 1.0))
    uniforms = PermutedUniforms(1000, jitter=[True], seed=0, device=CPU)
    values = invert(column.quantiles()[None], uniforms.draw(torch.arange(1000)))[0].sort().values
    assert torch.equal(values // 1000, torch.arange(1000))
    assert len((values % 1000).unique()) > 500


def test_missing_rates_and_columns_missing_together(kaggle, block):
    for column, missing in zip(KAGGLE.dense, block.missing, strict=True):
        assert missing.double().mean() == pytest.approx(column.missing, abs=0.005)
    masks = {
        column.name: ids == column.missing_rank
        for column, ids in zip(KAGGLE.categorical, block.ids, strict=True)
        if column.missing
    }
    for column in KAGGLE.categorical:
        if column.missing:
            assert masks[column.name].double().mean() == pytest.approx(column.missing, abs=0.005)
            assert torch.equal(masks[column.name], masks[column.missing_group])
    assert not torch.equal(masks["C3"], masks["C19"])


@pytest.mark.parametrize("cardinality", [1, 2, 3, 100, 9_999, 10_131_227, 40_000_000])
def test_resized_law(cardinality):
    column = KAGGLE.categorical[2]
    resized = column.resized(cardinality, name="X")
    assert resized.cardinality == cardinality
    assert resized.cdf[0] == 0
    assert resized.cdf[-1] == 1
    assert np.all(np.diff(resized.knots) > 0)
    density = np.diff(resized.cdf) / np.diff(resized.knots)
    assert np.all(np.diff(density) <= 1e-12)
    assert not resized.missing or 0 <= resized.missing_rank < cardinality
    if cardinality >= 100:  # the head keeps its proportions
        original = np.diff(column.cdf)[:5] / column.cdf[1]
        np.testing.assert_allclose(np.diff(resized.cdf)[:5] / resized.cdf[1], original)
    last = resized.quantiles()[-2:]
    assert last[0] < cardinality << 12


def test_own_law_or_the_next_larger_one():
    tables = dataset._columns(KAGGLE, [50_000, 583, 40_000_000], "parquet")
    assert [column.name for column in tables] == ["C1", "C2", "C3"]
    assert [column.cardinality for column in tables] == [50_000, 583, 40_000_000]
    assert tables[0].cdf[1] == pytest.approx(KAGGLE.categorical[9].cdf[1], rel=0.2)  # C10's
    assert tables[1].cdf == KAGGLE.categorical[1].cdf
    assert tables[2].cdf == KAGGLE.categorical[2].cdf


def test_terabyte_tables_are_within_range(monkeypatch):
    monkeypatch.setattr("dlrm.data.synthetic.generator.PILOT_ROWS", 1 << 12)
    profile = profiles()["terabyte"]
    made = generator(profile.rows, profile.categorical, profile.dense).rows(0, 20_000)
    for column, ids in zip(profile.categorical, made.ids, strict=True):
        assert ids.min() >= 0
        assert ids.max() < column.cardinality
    assert made.ids[0].max() > 30_000_000


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs the real sample")
def test_fit_to_the_real_sample(block):
    real = script("calibrate_synthetic").read_sample(SAMPLE)
    for column, ids in zip(KAGGLE.categorical, block.ids, strict=True):
        wanted = real[column.name].value_counts().to_numpy()
        made = np.sort(np.bincount(ids))[::-1]
        made = made[made > 0]
        assert len(made) == pytest.approx(len(wanted), rel=0.06, abs=8), column.name
        size = min(len(made), len(wanted))
        gap = np.abs(made[:size].cumsum() - wanted[:size].cumsum()).max() / len(real)
        assert gap < 0.02, column.name
    for column, values, missing in zip(KAGGLE.dense, block.dense, block.missing, strict=True):
        present = values[~missing]
        for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
            wanted = real[column.name].quantile(share)
            assert np.quantile(present, share) == pytest.approx(wanted, rel=0.06, abs=1), (
                column.name
            )


# The label model


def test_best_metrics_are_those_of_the_true_probabilities(kaggle, block):
    bins, labels = block.bins.numpy(), block.labels.numpy()
    probabilities = kaggle.label_model.probabilities
    counts = np.stack(
        [np.bincount(bins[labels == y], minlength=len(probabilities)) for y in (0, 1)]
    )
    best = best_metrics(counts, probabilities)
    assert best["auc"] == pytest.approx(roc_auc_score(labels, probabilities[bins]), abs=1e-12)
    assert best["log_loss"] == pytest.approx(log_loss(labels, probabilities[bins]), abs=1e-9)
    assert best["accuracy"] == pytest.approx(((probabilities[bins] >= 0.5) == labels).mean())
    assert best["positives"] == pytest.approx(labels.mean())
    assert best["normalized_entropy"] == pytest.approx(
        best["log_loss"] / log_loss(labels, np.full(len(labels), labels.mean()))
    )


def test_truth_is_as_hard_as_the_real_data(block, kaggle):
    probabilities = kaggle.label_model.probabilities[block.bins]
    labels = block.labels.numpy()
    assert labels.mean() == pytest.approx(0.256, abs=0.005)
    assert probabilities.mean() == pytest.approx(labels.mean(), abs=0.004)  # calibrated
    assert roc_auc_score(labels, probabilities) == pytest.approx(0.80, abs=0.005)
    assert log_loss(labels, probabilities) == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(("auc", "positives"), [(0.7, 0.5), (0.9, 0.03)])
def test_difficulty_is_by_option(auc, positives):
    made = generator(40_000, auc=auc, positives=positives)
    block = made.rows(0, 40_000)
    assert block.labels.double().mean() == pytest.approx(positives, abs=0.01)
    reached = roc_auc_score(block.labels, block.bins)
    assert reached == pytest.approx(auc, abs=0.015)


def test_truth_is_learnable(demo):
    """A linear model on dense features and frequent ids gets well above chance, below the best."""
    meta = Meta.read(demo)
    train, test = (read(demo, meta, split) for split in ("train", "test"))
    train = train[:20_000]

    def features(table):
        columns = [table[list(CRITEO_DENSE)].to_numpy()]
        columns += [np.equal.outer(table[c].to_numpy(), np.arange(8)) for c in CRITEO_CATEGORICAL]
        return np.concatenate(columns, axis=1).astype(np.float32)

    model = LogisticRegression(max_iter=200, C=0.01).fit(features(train), train["label"])
    auc = roc_auc_score(test["label"], model.decision_function(features(test)))
    assert 0.68 < auc < meta.planted["test"]["auc"] - 0.01


def test_rare_ids_carry_real_but_little_information(kaggle, block):
    """Taking the effects of rare ids away costs the best AUC a little."""
    label_model, labels = kaggle.label_model, block.labels
    dense = block.dense.clamp(min=0) * ~block.missing
    score = label_model.score(dense, block.ids)
    assert roc_auc_score(labels, score) == pytest.approx(0.80, abs=0.005)
    tables = label_model.id_tables.view(26, 2, FREQUENT, -1).clone()
    whole = label_model.id_tables
    try:
        tables[:, 1] = 0
        label_model.id_tables = tables.view_as(whole)
        without = roc_auc_score(labels, label_model.score(dense, block.ids))
    finally:
        label_model.id_tables = whole
    assert 0.002 < roc_auc_score(labels, score) - without < 0.04


# Raw TSV


def test_tokens_are_injective_and_use_all_32_bits(kaggle):
    tokens = Tokens(kaggle, seed=0)
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


def test_tsv_holds_the_same_rows_as_parquet(tmp_path):
    options = {"rows": 6_000, "seed": 3, "fractions": (0.6, 0.2, 0.2)}
    meta = synthetic.write(tmp_path / "parquet", **options)
    raw_meta = synthetic.write(tmp_path / "tsv", format="tsv", **options)
    assert sorted(contents(tmp_path / "tsv")) == ["synthetic.json", "train.txt"]
    assert raw_meta.planted == meta.planted
    assert json.loads((tmp_path / "tsv/synthetic.json").read_text())["planted"] == meta.planted
    raw = script("calibrate_synthetic").read_sample(tmp_path / "tsv/train.txt")
    made = pd.concat(read(tmp_path / "parquet", meta, s) for s in ("train", "val", "test"))
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


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows is 0, it must be at least 1"),
        ({"like": "kagle"}, "did you mean 'kaggle'"),
        ({"format": "csv"}, "format is 'csv', it must be parquet or tsv"),
        ({"auc": 1.0}, "auc is 1.0"),
        ({"positives": 0}, "positives is 0, it must lie between 0 and 1"),
        ({"fractions": (float("nan"), 0.5, 0.5)}, "fractions is .* add up to 1"),
        ({"seed": -1}, "seed is -1, it must be at least 0"),
        ({"fractions": (0.5, 0.6)}, "fractions is .* add up to 1"),
        ({"fractions": (0.5, 0.6, 0.2)}, "fractions is .* add up to 1"),
        ({"fractions": (1.5, -0.5, 0)}, "none of them negative"),
        ({"cardinalities": []}, "there are no cardinalities"),
        ({"cardinalities": [5, 0]}, "the cardinality of C2 is 0, it must be 1 to"),
        ({"cardinalities": [1 << 28]}, "the cardinality of C1 is 268435456"),
        ({"cardinalities": [5], "format": "tsv"}, "there are 1 cardinalities, .* columns C1..C26"),
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


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/mine").write_text("kept")
    with pytest.raises(ValueError, match="already exists"):
        synthetic.write(tmp_path / "d", rows=10, cardinalities=[3])
    assert contents(tmp_path / "d") == {"mine": b"kept"}


@pytest.mark.parametrize("format", ["parquet", "tsv"])
def test_nothing_half_written_stays(tmp_path, format):
    def fail(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.write(tmp_path / "d", rows=10, format=format, progress=fail)
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


def test_map_in_order_gives_results_in_order_and_stops_at_an_error():
    started = []

    def work(job):
        started.append(job)
        return 10 // (5 - job)

    results = map_in_order(work, range(100), 2)
    assert [next(results) for _ in range(5)] == [2, 2, 3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        list(results)
    assert len(started) < 12


# The scripts


def test_program_writes_and_reports(tmp_path, capsys):
    program = script("make_synthetic")
    status = program.main(["--output", str(tmp_path / "d"), "--rows", "5000", "--cap", "100"])
    assert status == 0
    meta = Meta.read(tmp_path / "d")
    assert meta.cardinalities == tuple(min(size, 100) for size in KAGGLE_CARDINALITIES)
    assert meta.splits["train"].rows == 4_000
    out = capsys.readouterr().out
    assert "5,000 rows" in out
    assert f"{meta.planted['test']['auc']:.4f}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row", "5"], "unknown option --row, did you mean '--rows'?"),
        (["--rows", "many"], "argument --rows: invalid int value: 'many'"),
        (["--like", "kagle"], "invalid choice: 'kagle'"),
        (["--rows", "0"], "rows is 0, it must be at least 1"),
        (["--cap", "0"], "--cap is 0, it must be at least 1"),
    ],
)
def test_program_reports_mistakes_in_one_line(tmp_path, capsys, arguments, message):
    program = script("make_synthetic")
    try:
        status = program.main(["--output", str(tmp_path / "d"), *arguments])
    except SystemExit as stopped:
        status = stopped.code
    captured = capsys.readouterr().err
    assert status == 2
    assert captured.startswith("error: ")
    assert message in captured
    assert captured.count("\n") == 1


def test_calibration_recovers_a_distribution(kaggle, tmp_path):
    """Fitted to a synthetic raw sample, the profile comes out as the one it was drawn from."""
    calibrate = script("calibrate_synthetic")
    block, tokens = kaggle.rows(0, 20_000), Tokens(kaggle, seed=0)
    sample = pd.DataFrame({"label": block.labels.numpy()})
    for column, values, missing in zip(KAGGLE.dense, block.dense, block.missing, strict=True):
        sample[column.name] = np.where(missing, np.nan, values)
    for number, column in enumerate(KAGGLE.categorical):
        sample[column.name] = tokens.text(number, block.ids[number].numpy()).to_pylist()
    sample.to_csv(tmp_path / "raw.tsv", sep="\t", header=False, index=False, float_format="%d")
    output = tmp_path / "profile.json"
    assert calibrate.main([f"kaggle={tmp_path / 'raw.tsv'}", "--output", str(output)]) == 0
    fitted = profiles(output)["kaggle"]
    for column, again in zip(KAGGLE.categorical, fitted.categorical, strict=True):
        assert again.cardinality == column.cardinality
        assert again.missing == pytest.approx(column.missing, abs=0.01)
        assert again.missing_group == column.missing_group
        for rank in (1, 10, 100):
            share, wanted = (np.interp(rank, x.knots, x.cdf) for x in (again, column))
            assert share == pytest.approx(wanted, abs=0.02), column.name


@pytest.mark.slow
def test_calibration_draws_the_fit(tmp_path):
    synthetic.write(tmp_path / "d", rows=2_000, format="tsv")
    calibrate, image = script("calibrate_synthetic"), tmp_path / "fit.png"
    calibrate.plot(image, calibrate.read_sample(tmp_path / "d/train.txt"), KAGGLE)
    assert image.stat().st_size > 50_000


def test_calibration_names_a_bad_sample(tmp_path, capsys):
    calibrate, path, output = script("calibrate_synthetic"), tmp_path / "raw.tsv", tmp_path / "out"
    assert calibrate.main(["kagle=nowhere"]) == 2
    assert "must be kaggle=FILE or terabyte=FILE" in capsys.readouterr().err
    row = b"\t".join([b"0", *[b"1"] * 13, *[b"a"] * 26]) + b"\n"
    for content, message in (
        (b"", "I1 has no values"),
        (b"\xff\x00", "has no raw Criteo rows"),
        (row.replace(b"\t", b","), "I1 has no values"),
        (row.replace(b"1", b"x"), "could not convert string to float: 'x'"),
        (19 * row, "no value of C1 occurs in 20 rows; give more rows"),
    ):
        path.write_bytes(content)
        assert calibrate.main([f"kaggle={path}", "--output", str(output)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {path}")
        assert message in told
    assert not output.exists()


def test_interrupted_it_leaves_nothing(tmp_path):
    program = str(ROOT / "scripts/make_synthetic.py")
    command = [sys.executable, program, "--output", str(tmp_path / "data"), "--rows", "99999999"]
    command += ["--format", "tsv", "--cap", "9", "--threads", "1"]  # soon begun, and soon ended
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob(".synthetic-*/data/*")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
    assert process.returncode == 130
    assert errors.splitlines()[-1] == f"interrupted; nothing was left in {tmp_path / 'data'}"
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())

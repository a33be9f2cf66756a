"""Sample weights: from a column of a table to the loss and the metrics."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from dlrm.data.loader import BatchLoader
from dlrm.data.prepare.transform import Transform
from tests.kit import prepare_rows, write_rows


def write_table(path, rows=3000, lists=False):
    """Clicks that follow the item, but where the weight is 0 the opposite."""
    rng = np.random.default_rng(0)
    item, wrong = rng.integers(0, 20, rows), rng.random(rows) < 0.5
    columns = {
        "label": ((item < 10) ^ wrong).astype(int),
        "weight": np.where(wrong, 0.0, 500.0 + 1000 * (item % 2)),
        "row": np.arange(rows) * 1.0,
        "item": item.astype(str),
        "size": rng.normal(size=rows),
    }
    tags = {"tags": [["a", "b"][: i % 3] for i in range(rows)]} if lists else {}
    write_rows(path, columns | tags)
    return columns


def prepare(path, output, **options):
    content = {"weight": "weight", "columns": {"row": {"kind": "number", "transform": "none"}}}
    return prepare_rows(path, output, content | options)[0]


@pytest.mark.parametrize("lists", [False, True])
def test_every_sample_has_its_weight(tmp_path, lists, device):
    columns = write_table(tmp_path / "rows.parquet", lists=lists)
    meta = prepare(tmp_path / "rows.parquet", tmp_path / "out")
    assert meta.weight == "weight"
    assert "weight" not in meta.dense
    mean = columns["weight"][:2400].mean()
    assert Transform.load(tmp_path / "out").mean_weight == pytest.approx(mean)
    loader = BatchLoader(tmp_path / "out", "train", batch_size=128, shuffle=True, device=device)
    seen = 0
    for batch in loader:
        rows = batch.dense[meta.dense.index("row")].long().cpu().numpy()
        expected = columns["weight"][rows] / mean
        assert batch.weights.cpu().numpy() == pytest.approx(expected, rel=1e-6)
        seen += batch.size
    assert seen == 2400


def test_training_and_metrics_follow_the_weights(tmp_path, run):
    """Rows of weight 0 say the opposite: without weights there is nothing to learn."""
    write_table(tmp_path / "rows.parquet")
    rows, given = tmp_path / "rows.parquet", ("--weight", "weight")
    run("prepare_table", rows, "--output", tmp_path / "with", *given)
    options = {"weight": None, "columns": {"row": "drop", "weight": "drop"}}
    prepare(rows, tmp_path / "without", **options)
    small = ("--batch_size", 64, "--device", "cpu", "--output", tmp_path / "runs", "--epochs", 2)
    for name, low, high in (("with", 0.99, 1.0), ("without", 0.4, 0.6)):
        run("train", "--data", tmp_path / name, *small, "--name", name)
        told = run("evaluate", tmp_path / "runs" / name, tmp_path / name, "--device", "cpu").stdout
        auc = float(told.partition('"auc": ')[2].partition(",")[0])
        assert low <= auc <= high
    target = tmp_path / "scores.parquet"
    run("predict", tmp_path / "runs" / "with", tmp_path / "with", target, "--device", "cpu")
    assert pq.read_table(target).num_rows == 300


def test_weights_that_shift_probabilities_are_noted_and_accounted_for(tmp_path, run, capsys):
    """Weights of 16 for positives gave a mean probability of 0.129 where 0.009 was true."""
    labels = np.arange(4000) % 50 == 0
    city = np.array(list("abcd"))[np.random.default_rng(0).integers(0, 4, 4000)]
    columns = {"label": labels, "city": city, "weight": np.where(labels, 16.0, 1.0)}
    path = write_rows(tmp_path / "rows.parquet", columns)
    meta = prepare(path, tmp_path / "out", columns={})
    assert meta.weight_ratio == pytest.approx(16)
    noted = "note: the weight of positives is 16 times that of negatives"
    assert noted in capsys.readouterr().err
    prepare(path, tmp_path / "none", columns={"weight": "drop"}, weight=None)
    assert noted not in capsys.readouterr().err

    small = ("--batch_size", 64, "--device", "cpu", "--output", tmp_path / "runs", "--epochs", 3)
    for name, low, high in (("false", 0.1, 0.5), ("true", 0.001, 0.05)):
        given = ("--name", name, "--true_odds", name)
        run("train", "--data", tmp_path / "out", *small, *given)
        target = tmp_path / f"{name}.parquet"
        run("predict", tmp_path / "runs" / name, tmp_path / "out", target, "--device", "cpu")
        assert low < pq.read_table(target)["probability"].to_numpy().mean() < high
    refused = run("train", "--data", tmp_path / "none", *small, "--true_odds", "true", status=2)
    assert "--true_odds accounts for sample weights" in refused.stderr


@pytest.mark.parametrize(("heavy", "equal"), [(20, None), (2, "2"), (1, "1")])
def test_weights_of_a_few_rows_alone_are_noted(tmp_path, capsys, heavy, equal):
    weights = np.ones(1000)
    weights[:heavy] = 1e9
    columns = {"label": [0, 1] * 500, "city": ["a", "b"] * 500, "weight": weights}
    prepare(write_rows(tmp_path / "rows.parquet", columns), tmp_path / "out", columns={})
    told = capsys.readouterr().err
    noted = f"800 training rows say as much as {equal} of equal weight: check their unit"
    assert (noted in told) == ("so uneven" in told) == (equal is not None)


@pytest.mark.parametrize("value", ["missing", "-1", "inf", "1e39"])
def test_weights_that_are_none(tmp_path, value):
    path = tmp_path / "rows.csv"
    given = "" if value == "missing" else value
    lines = [f"{i % 2},{'ab'[i % 2]},{1 if i != 30 else given}" for i in range(60)]
    path.write_text("\n".join(["label,city,weight", *lines]) + "\n")
    reason = "inf is not a finite" if value == "inf" else "the weight is"
    with pytest.raises(ValueError, match=f"row 31, column 'weight': {reason}"):
        prepare(path, tmp_path / "out", columns={})
    path.write_text("\n".join(["label,city,weight", *(f"{i % 2},a,0" for i in range(60))]) + "\n")
    with pytest.raises(ValueError, match="all training rows have weight 0; correct"):
        prepare(path, tmp_path / "out", columns={})

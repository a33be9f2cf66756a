"""Runs whose loss stays finite and says that they have diverged, and poor ones that have not."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm.data import synthetic
from dlrm.training.held_out import DIVERGED
from tests.kit import latest_step, log_lines, metrics_of

TEXT = "training diverged, this state is not saved:"
ADAM = ["--optim.dense", "adam", "--optim.embeddings", "adam"]


def test_a_diverged_state_replaces_no_checkpoint_and_fails_the_run(run, train, tmp_path):
    train("run", *ADAM, "--optim.lr", "0.01", "--max_steps", "20", "--eval_every", "10")
    assert latest_step(tmp_path / "run") == 20
    far = ["--optim.lr", "1000", "--max_steps", "35"]
    done = run("train", "--resume", tmp_path / "run", *far, status=2)
    assert f"warning: {TEXT} at step 30 the log loss is " in done.stderr
    assert done.stderr.count(f"error: {TEXT}") == 1
    assert "lower --optim.lr" in done.stderr.splitlines()[-1]
    assert latest_step(tmp_path / "run") == 20
    assert not (tmp_path / "run" / "result.json").exists()
    run("train", "--resume", tmp_path / "run", "--max_steps", "35", "--optim.lr", "0.01")
    assert metrics_of(tmp_path / "run")["test/log_loss"] < 0.69


def test_it_is_seen_on_test_rows_if_there_are_no_others(train, tmp_path):
    unseen = tmp_path / "data"
    synthetic.write(unseen, rows=9000, cardinalities=[50] * 26, fractions=[0.9, 0, 0.1])
    done = train("run", *ADAM, "--optim.lr", "100", "--max_steps", "20", data=unseen, status=2)
    assert f"error: {TEXT} at step 20 the log loss is " in done.stderr


def test_a_model_that_collapsed_to_a_constant_says_so_once(train, tmp_path):
    """A rate so high that no unit of a layer is active any more, on any row."""
    far = [*ADAM, "--optim.lr", "6", "--optim.warmup_steps", "0", "--patience", "0"]
    done = train("run", *far, "--max_steps", "60", "--eval_every", "20")
    assert metrics_of(tmp_path / "run")["test/auc"] == 0.5
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert re.search(r"at step \d0 the model predicts 0\.\d+ for each of the 1,200 val ", warning)
    assert "lower --optim.lr" in warning


@pytest.mark.parametrize("label", [0, 1])
def test_labels_that_are_all_equal_are_pointed_out(label, train, tmp_path):
    """The model begins at a log loss of 2.2 if they are 1, and has not diverged."""
    same = tmp_path / "data"
    synthetic.write(same, rows=1000, cardinalities=[50] * 26, fractions=[0.8, 0.1, 0.1])
    for path in same.glob("*.parquet"):
        table = parquet.read_table(path)
        column = table.schema.get_field_index("label")
        field = table.schema.field(column)
        labels = pa.array([label] * len(table), field.type)
        parquet.write_table(table.set_column(column, field, labels), path)
    meta = json.loads((same / "meta.json").read_text())
    for split in meta["splits"].values():
        split["positives"] = split["rows"] * label
    (same / "meta.json").write_text(json.dumps(meta))
    done = train("run", "--max_steps", "1", data=same)
    assert f"warning: all train rows have the label {label}: look at" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            [*ADAM, "--optim.lr", "0.05", "--epochs", "40", "--patience", "0"],
            id="overfitted",
            marks=pytest.mark.slow,
        ),
        ["--emb", "hash", "--hash.rows", "2", "--tables.threshold", "0", "--eval_every", "1"],
        ["--batch_size", "1", "--max_steps", "30", "--eval_every", "1"],
    ],
)
def test_poor_runs_on_random_labels_have_not_diverged(options, train, tmp_path):
    """Memorized labels raise the log loss of validation as far as divergence does."""
    noise = tmp_path / "data"
    synthetic.write(noise, rows=1000, cardinalities=[500] * 26, fractions=[0.4, 0.3, 0.3])
    shuffle_labels(noise)
    done = train("run", *options, data=noise)
    assert "warning" not in done.stderr
    if "--epochs" in options:
        worst = max(line.get("val/log_loss", 0) for line in log_lines(tmp_path / "run"))
        assert worst > DIVERGED, "it is suspicious, but for its training rows"


def shuffle_labels(directory):
    """Give all rows labels that do not depend on their features."""
    for path in directory.glob("*.parquet"):
        table = parquet.read_table(path)
        labels = np.random.default_rng(0).permutation(table["label"].to_numpy())
        column = table.schema.get_field_index("label")
        table = table.set_column(column, table.schema.field("label"), pa.array(labels))
        parquet.write_table(table, path)

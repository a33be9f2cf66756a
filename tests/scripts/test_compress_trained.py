"""A trained model compressed, as the user meets it."""

import importlib
import json
from pathlib import Path

import pytest

from dlrm.data import synthetic

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture
def main(script):
    return script("compress_trained").main


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A trained run and its data."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    cardinalities = [800 if column % 5 == 0 else 20 + column for column in range(26)]
    synthetic.write(data, rows=4000, cardinalities=cardinalities, fractions=[0.7, 0, 0.3])
    options = ["--data", str(data), "--name", "run", "--device", "cpu", "--batch_size", "256"]
    options += ["--model.bottom_mlp", "[8]", "--model.top_mlp", "[8]", "--optim.lr", "0.03"]
    options += ["--epochs", "2", "--optim.warmup_steps", "5"]
    assert importlib.import_module("dlrm.commands.train").main(options) == 0
    return str(tmp_path / "runs" / "run"), str(data)


def test_every_kind_is_measured_at_every_size(main, run, tmp_path, capsys):
    result = tmp_path / "result.json"
    kinds = ["--kinds", "hash", "basis", "block"]
    status = main([run[0], *run, *kinds, "--ratios", "0.9", "5", "40", "--json", str(result)])
    assert status == 0
    rows = {(row["emb"], row["budget"]): row for row in json.loads(result.read_text())["results"]}
    trained = rows["trained", None]
    assert trained["auc"] > 0.55
    assert trained["seeds"] == 2
    for kind in ("hash", "basis", "block"):
        same = {name: trained[name] for name in ("auc", "log_loss", "accuracy", "bytes")}
        assert same.items() <= rows[kind, 0.9].items(), "nothing is compressed at 0.9x"
        assert 5 <= rows[kind, 5]["compression"] < 6.5
        assert rows[kind, 5]["auc_change"] == rows[kind, 5]["auc"] - trained["auc"]
    assert ("hash", 40) in rows
    assert ("block", 40) not in rows, "a weight per row is the least"
    assert "block at 40x: a budget of" in capsys.readouterr().out


def test_a_place_that_cannot_be_had_is_told_before_the_work(main, run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*run, "--json", str(tmp_path / "file" / "x.json")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert not told.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ["tt", "hsah"]}, "error: unknown embedding kind 'hsah', did you mean 'hash'?"),
        ({"run": "nowhere"}, "error: nowhere"),
    ],
)
def test_mistakes_are_one_line(main, run, change, message, capsys):
    capsys.readouterr()
    status = main([change.get("run", run[0]), run[1], "--kinds", *change.get("kinds", ["tt"])])
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)

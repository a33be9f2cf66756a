"""The programs run on machines without Triton and without what Windows lacks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm.export.programs import has_compiler

ROOT = Path(__file__).parents[2]
SPLIT = ["--split", "0.8", "0.1", "0.1"]


def run_elsewhere(*programs):
    """Run programs one after the other in one process without what only Linux has."""
    given = json.dumps([[str(word) for word in words] for words in programs])
    command = [sys.executable, ROOT / "tests" / "train" / "elsewhere.py", given]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_from_raw_rows_to_a_comparison(command, tmp_path):
    raw, data, runs = (tmp_path / name for name in ("raw", "data", "runs"))
    table = tmp_path / "table.csv"
    rows = (f"{i % 2},{i * 37 % 101},c{i % 3}\n" for i in range(300))
    table.write_text("label,price,city\n" + "".join(rows))
    train = ["train", *command("", data=data, output=runs), "--max_steps", "4"]
    done = run_elsewhere(
        ["scripts.make_synthetic", "--output", raw, "--format", "tsv", "--rows", "3000"],
        ["scripts.prepare_criteo", raw / "train.txt", "--output", data, *SPLIT],
        [*train, "--name", "tt", "--emb", "tt", "--tt.rank", "2"],
        [*train, "--name", "offload", "--emb", "offload", "--tables.threshold", "0"],
        ["train", "--resume", runs / "tt", "--max_steps", "8"],
        ["scripts.evaluate", runs / "tt", data],
        ["scripts.predict", runs / "tt", data, tmp_path / "scores.parquet"],
        ["scripts.compare", runs / "tt", runs / "offload"],
        ["scripts.prepare_table", table, "--output", tmp_path / "table", "--bad-rows", "skip"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("imported:\n"), "what was to be absent has been imported"
    result = json.loads((runs / "tt" / "result.json").read_text())
    assert 0 < result["metrics"]["test/auc"] < 1
    assert (tmp_path / "scores.parquet").stat().st_size


@pytest.mark.slow
def test_an_export_that_is_compiled(command, tmp_path, monkeypatch):
    # Without fcntl, PyTorch would wait for locks that other programs leave in its usual cache.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    run, made = tmp_path / "run", tmp_path / "export"
    train = ["train", *command("run", "--emb", "tt", "--tt.rank", "2"), "--max_steps", "2"]
    done = run_elsewhere(train, ["scripts.export", run, made])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (made / "model.pt2").stat().st_size
    assert (made / "model_cpu.pt2").exists() == has_compiler()


@pytest.mark.slow
def test_every_kind_trains(command, options):
    kinds = ["basis", "cafe", "drop", "hash", "paged", "qr", "robe"]
    trained = [["train", *command(k, *options(k), "--max_steps", "8")] for k in kinds]
    done = run_elsewhere(*trained)
    assert done.returncode == 0, done.stdout + done.stderr

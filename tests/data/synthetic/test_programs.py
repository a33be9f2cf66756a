"""The program that writes synthetic data."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrm.data.schema import KAGGLE_CARDINALITIES, Meta

ROOT = Path(__file__).parents[3]


def test_program_writes_and_reports(tmp_path, run):
    told = run("make_synthetic", "--output", tmp_path / "d", "--rows", 5000, "--cap", 100).stdout
    meta = Meta.read(tmp_path / "d")
    assert meta.cardinalities == tuple(min(size, 100) for size in KAGGLE_CARDINALITIES)
    assert meta.splits["train"].rows == 4_000
    assert "5,000 rows" in told
    assert f"{meta.planted['test']['auc']:.4f}" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "2M"], "argument --rows: is '2M', it must be a whole number"),
        (["--like", "kagle"], "invalid choice: 'kagle'"),
        (["--cap", "0"], "--cap is 0, it must be at least 1"),
        (["--format", "tsv", "--cardinalities", "5"], "there are 1 cardinalities, but a Criteo"),
        (["--format", "tsv", "--bag-sizes", "2"], "a Criteo TSV file has one id in a column"),
    ],
)
def test_program_reports_mistakes_in_one_line(tmp_path, arguments, message, run):
    told = run("make_synthetic", "--output", tmp_path / "d", *arguments, status=2).stderr
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_interrupted_it_leaves_nothing(tmp_path):
    program = str(ROOT / "scripts/make_synthetic.py")
    command = [sys.executable, program, "--output", str(tmp_path / "data"), "--rows", "99999999"]
    command += ["--format", "tsv", "--cap", "9", "--threads", "1"]  # soon begun, and soon ended
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("data.tmp/*")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
    assert process.returncode == 130
    assert errors.splitlines()[-1] == f"interrupted; nothing was left in {tmp_path / 'data'}"
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())

"""The programs that write synthetic data and fit its distributions."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlrm.data.schema import KAGGLE_CARDINALITIES, Meta
from dlrm.data.synthetic.distributions import profiles

ROOT = Path(__file__).parents[3]
KAGGLE = profiles()["kaggle"]


def test_program_writes_and_reports(tmp_path, capsys, script):
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
        (["--format", "csv"], "invalid choice: 'csv'"),
        (["--format", "tsv", "--cardinalities", "5"], "there are 1 cardinalities, but a Criteo"),
        (["--format", "tsv", "--bag-sizes", "2"], "a Criteo TSV file has one id in a column"),
    ],
)
def test_program_reports_mistakes_in_one_line(tmp_path, capsys, arguments, message, script):
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


def test_calibration_recovers_a_distribution(kaggle, tmp_path, script):
    """Fitted to a synthetic raw sample, the profile comes out as the one it was drawn from."""
    calibrate = script("calibrate_synthetic")
    made, tokens = kaggle.rows(0, 20_000), script("make_synthetic").Tokens(kaggle, seed=0)
    sample = pd.DataFrame({"label": made.labels.numpy()})
    for column, values, missing in zip(KAGGLE.dense, made.dense, made.missing, strict=True):
        sample[column.name] = np.where(missing, np.nan, values)
    for number, column in enumerate(KAGGLE.categorical):
        sample[column.name] = tokens.text(number, made.ids[number].numpy()).to_pylist()
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


def test_calibration_names_a_bad_sample(tmp_path, capsys, script):
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

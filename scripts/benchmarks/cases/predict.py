"""Rows per second of scripts/predict.py, and milliseconds of a few rows in Python.

    python scripts/benchmarks/run.py predict --device cpu --output benchmarks/predict.json
    python scripts/benchmarks/run.py predict --output benchmarks/predict_h200.json

On a CPU the rows are synthetic: raw rows of Criteo with the cardinalities of the whole Kaggle file,
and a CSV with ten numbers and ten texts. Both models have the default sizes and few steps of
training. The time of the program includes its start, the loading of the run and the writing of
Parquet.

On a GPU the rows are prepared, and as many as in Criteo Kaggle, with tables of the full size. The
program runs several times; the first compiles kernels. ``rows_per_second_while_scoring`` leaves out
the start and the loading of the run, but not the reading and writing of rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

import dlrm
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, META_FILE, Meta, Split
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.cases.prepare import make_csv, make_raw
from scripts.benchmarks.programs import run_program

SMALL = "--rows 3000 --repeats 1 --like demo"
LATENCY_ROWS = (1, 1024)
REPEATS = 30
MAKE, TRAIN = "scripts/make_synthetic.py", "train.py"


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--rows", type=count_arg, help="rows to score (default: 500,000, on a GPU 45,840,617)")
    add("--repeats", type=count_arg, default=3, help="of the program, on a GPU")
    add("--like", default="kaggle", help="kind of rows to make on a GPU")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure the program on either device."""
    record.note(load_average=harness.LOAD_BEFORE)
    with tempfile.TemporaryDirectory() as directory:
        if options.device == "cpu":
            measure_on_cpu(options.rows or 500_000, Path(directory), record)
        else:
            measure_on_gpu(options, Path(directory), record)


def measure_on_cpu(count: int, work: Path, record: harness.Record) -> None:
    """Raw and prepared rows, of Criteo and of a CSV."""
    for kind in ("criteo", "table"):
        run, raw, data = make_run(kind, count, work / kind)
        for rows in (raw, data):
            form = "prepared" if (rows / META_FILE).is_file() else "raw"
            record.add(
                {"data": kind, "rows": form, **throughput(run, rows, work, "cpu")}, to="runs"
            )
        for count_of_few in LATENCY_ROWS:
            found = latency(run, raw, count_of_few)
            record.add({"data": kind, "rows": count_of_few, **found}, to="latencies")


def measure_on_gpu(options: argparse.Namespace, work: Path, record: harness.Record) -> None:
    """Prepared rows of Criteo with full-size tables, in fp32 and in bf16."""
    few, data, like = work / "few", work / "data", ("--like", options.like)
    run_program(MAKE, *like, "--output", few, "--rows", 20_000)  # tables of the same size
    rows = options.rows or 45_840_617
    run_program(MAKE, *like, "--output", data, "--rows", rows, "--fractions", 0, 0, 1)
    for precision in ("fp32", "bf16"):
        arguments = "--data", few, "--name", precision, "--precision", precision
        run_program(TRAIN, *arguments, "--output", work, "--max_steps", 3)
        for repeat in range(options.repeats):
            described = {"data": "criteo", "precision": precision, "repeat": repeat}
            found = throughput(work / precision, data, work, options.device)
            record.add({**described, **found}, to="runs")


def throughput(run: Path, rows: Path, work: Path, device: str) -> dict[str, Any]:
    """Score rows by the program."""
    output = work / "scores.parquet"
    done = run_program("scripts/predict.py", run, rows, output, "--device", device)
    count = pq.read_metadata(output).num_rows
    return {
        "count": count,
        "seconds": done.seconds,
        "rows_per_second": round(count / done.seconds),
        "rows_per_second_while_scoring": int(done.output.split()[-2].replace(",", "")),
        "core_seconds_per_million_rows": done.core_seconds / count * 1e6,
        "peak_memory_gb": done.peak_bytes / 1e9,
    }


def latency(run: Path, raw: Path, rows: int) -> dict[str, float]:
    """Milliseconds of a few rows that are in memory, by :func:`dlrm.load`."""
    model, frame = dlrm.load(run), read_frame(raw, rows)
    model.predict(frame)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        model.predict(frame)
        times.append((time.perf_counter() - started) * 1e3)
    return {"median_ms": statistics.median(times), "best_ms": min(times)}


def read_frame(raw: Path, rows: int) -> pd.DataFrame:
    """The first raw rows."""
    if raw.suffix == ".csv":
        return pd.read_csv(raw, nrows=rows)
    names = ["label", *CRITEO_DENSE, *CRITEO_CATEGORICAL]
    texts = dict.fromkeys(CRITEO_CATEGORICAL, str)
    return pd.read_csv(raw, sep="\t", names=names, dtype=texts, nrows=rows)


def make_run(kind: str, rows: int, work: Path) -> tuple[Path, Path, Path]:
    """A run, its raw rows, and all of them prepared as one split."""
    work.mkdir()
    if kind == "criteo":
        raw, program = make_raw(work / "raw", rows), "scripts/prepare_criteo.py"
    else:
        raw, program = make_csv(work / "raw.csv", rows), "scripts/prepare_table.py"
    data = work / "data"
    run_program(program, raw, "--output", data, "--split", 0.9, 0, 0.1)
    small = ("--max_steps", 3, "--device", "cpu", "--eval_every", 3, "--output", work)
    run_program(TRAIN, "--data", data, "--name", "run", *small)

    meta = Meta.read(data)
    parts = meta.splits.values()
    whole = Split(
        files=tuple(file for part in parts for file in part.files),
        rows=sum(part.rows for part in parts),
        positives=sum(part.positives for part in parts),
    )
    replace(meta, splits={"test": whole}).write(data)
    return work / "run", raw, data

"""Rows per second of scripts/predict.py, and milliseconds of a few rows in Python.

    python scripts/benchmarks/benchmark_predict.py --output benchmarks/predict.json
    python scripts/benchmarks/benchmark_predict.py --device cuda --output predict_gpu.json

On the CPU, the rows are synthetic: raw rows of Criteo with the cardinalities of the whole Kaggle
file, and a CSV with ten numbers and ten texts. Both models have the default sizes and few steps of
training. The time of the program counts its start, the loading of the run and the writing of
Parquet; core seconds are those of all threads, and depend less on what else the machine does.

On a GPU, the rows are prepared, and as many as in Criteo Kaggle, with tables of the full size. The
program runs several times; at first it compiles kernels. ``rows_per_second_while_scoring`` leaves
out the start and the loading of the run, not the reading and writing of rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

import dlrm
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, META_FILE, Meta, Split
from dlrm.utils.program import Parser, count_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.benchmarks.cases.prepare import make_csv, make_raw

ROOT = Path(__file__).parents[2]
LATENCY_ROWS = (1, 1024)
REPEATS = 30


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON file."""
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    rows = "rows to score (default: 500,000, on a GPU 45,840,617)"
    parser.add_argument("--rows", type=count_arg, help=rows)
    parser.add_argument("--repeats", type=count_arg, default=3, help="of the program, on a GPU")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: print only)")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    runs: list[dict[str, Any]] = []
    latencies: list[dict[str, Any]] = []
    if options.device == "cuda":
        runs = list(on_gpu(options.rows or 45_840_617, options.repeats))
    else:
        on_cpu(options.rows or 500_000, runs, latencies)
    if options.output:
        result = {"load_average": load, "runs": runs, "latencies": latencies}
        harness.write(options.output, result)


def on_cpu(count: int, runs: list[dict[str, Any]], latencies: list[dict[str, Any]]) -> None:
    """Raw and prepared rows, of Criteo and of a table."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for kind in ("criteo", "table"):
            trained, raw, data = _train(kind, count, work / kind)
            for rows in (raw, data):
                what = "prepared" if (rows / META_FILE).is_file() else "raw"
                runs.append({"data": kind, "rows": what, **throughput(trained, rows, work, "cpu")})
                print(json.dumps(runs[-1]), flush=True)
            latencies += [{"data": kind, **found} for found in latency(trained, raw)]
            print(*map(json.dumps, latencies[-len(LATENCY_ROWS) :]), sep="\n", flush=True)


def on_gpu(count: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Prepared rows of Criteo with full-size tables, in fp32 and in bf16."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        make = ("scripts/make_synthetic.py", "--like", "kaggle", "--output")
        _run(*make, work / "few", "--rows", 20_000)  # tables of the same size
        _run(*make, work / "data", "--rows", count, "--fractions", 0, 0, 1)
        for precision in ("fp32", "bf16"):
            given = "--data", work / "few", "--name", precision, "--precision", precision
            _run("train.py", *given, "--output", work, "--max_steps", 3)
            for repeat in range(repeats):
                found = throughput(work / precision, work / "data", work, "cuda")
                yield {"data": "criteo", "precision": precision, "repeat": repeat, **found}
                print(json.dumps(found), flush=True)


def throughput(trained: Path, rows: Path, work: Path, device: str) -> dict[str, Any]:
    """Score rows by the program."""
    output = work / "scores.parquet"
    began = time.perf_counter()
    program = str(ROOT / "scripts" / "predict.py")
    command = [sys.executable, program, str(trained), str(rows), str(output), "--device", device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: predict.py: {os.waitstatus_to_exitcode(status)}")
    seconds, count = time.perf_counter() - began, pq.read_metadata(output).num_rows
    return {
        "count": count,
        "seconds": round(seconds, 2),
        "rows_per_second": round(count / seconds),
        "rows_per_second_while_scoring": int(said.split()[-2].replace(",", "")),
        "core_seconds_per_million_rows": round((usage.ru_utime + usage.ru_stime) / count * 1e6, 2),
        "peak_memory_gb": round(usage.ru_maxrss / 1e6, 2),
    }


def latency(trained: Path, raw: Path) -> list[dict[str, Any]]:
    """Milliseconds of a few rows that are in memory, by :func:`dlrm.load`."""
    model = dlrm.load(trained)
    found = []
    for rows in LATENCY_ROWS:
        frame = _frame(raw, rows)
        model.predict(frame)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            model.predict(frame)
            times.append((time.perf_counter() - began) * 1e3)
        median = round(statistics.median(times), 2)
        found.append({"rows": rows, "median_ms": median, "best_ms": round(min(times), 2)})
    return found


def _frame(raw: Path, rows: int) -> pd.DataFrame:
    if raw.suffix == ".csv":
        return pd.read_csv(raw, nrows=rows)
    names = ["label", *CRITEO_DENSE, *CRITEO_CATEGORICAL]
    texts = dict.fromkeys(CRITEO_CATEGORICAL, str)
    return pd.read_csv(raw, sep="\t", names=names, dtype=texts, nrows=rows)


def _train(kind: str, rows: int, work: Path) -> tuple[Path, Path, Path]:
    """A run, its raw rows, and all of them prepared as one split."""
    work.mkdir()
    if kind == "criteo":
        raw, program = make_raw(work / "raw", rows), "prepare_criteo"
    else:
        raw, program = make_csv(work / "raw.csv", rows), "prepare_table"
    data = work / "data"
    _run(f"scripts/{program}.py", raw, "--output", data, "--split", "0.9", "0", "0.1")
    small = ("--max_steps", 3, "--device", "cpu", "--eval_every", 3, "--output", work)
    _run("train.py", "--data", data, "--name", "run", *small)
    meta = Meta.read(data)
    parts = meta.splits.values()
    whole = Split(
        files=tuple(file for part in parts for file in part.files),
        rows=sum(part.rows for part in parts),
        positives=sum(part.positives for part in parts),
    )
    replace(meta, splits={"test": whole}).write(data)
    return work / "run", raw, data


def _run(program: str, *arguments: object) -> None:
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

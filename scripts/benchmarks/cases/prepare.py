"""Rows per second and peak memory from raw logs to Parquet, compared with a plain parse.

    python scripts/benchmarks/run.py prepare --output benchmarks/prepare_criteo.json
    python scripts/benchmarks/run.py prepare --csv --output benchmarks/prepare_table.json

The raw rows are synthetic, with the 26 cardinalities of the whole Kaggle file; each size is the
head of one file. The time is that of the whole program. The plain parse of the same rows is
``pyarrow.csv.read_csv`` with all threads, into numbers and strings that are dropped.

With ``--csv`` the rows are a CSV with ten numbers and ten texts, for scripts/prepare_table.py.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from dlrm.data.schema import Meta
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.programs import run_program

SMALL = "--rows 300"
PLAIN_ROWS = 1_000_000
# In processes of their own: the peak memory of a process counts what its parent held.
PLAIN_PARSE = """
import sys, time, pyarrow.csv
began = time.perf_counter()
reading = pyarrow.csv.ReadOptions(autogenerate_column_names=True)
parsing = pyarrow.csv.ParseOptions(delimiter=sys.argv[2])
table = pyarrow.csv.read_csv(sys.argv[1], reading, parsing)
print(table.num_rows / (time.perf_counter() - began))
"""
VALUES = (10, 50, 300, 1_000, 5_000, 20_000, 100_000, 500_000, 2_000_000, 10_000_000)
MAKE_CSV = """
import sys, numpy as np, pyarrow as pa, pyarrow.csv
path, rows, sizes = sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
rng, writer = np.random.default_rng(0), None
for first in range(0, rows, 500_000):
    count = min(500_000, rows - first)
    columns = {"label": (rng.random(count) < 0.25).astype(np.int8)}
    for i in range(10):
        columns[f"number_{i}"] = rng.lognormal(3, 2, count).round(3)
    for i, size in enumerate(sizes):  # log-uniform: the skew of real ids
        ids = np.exp(rng.random(count) * np.log(size)).astype(np.int64)
        columns[f"text_{i}"] = np.char.add("value ", ids.astype(str))
    table = pa.table(columns)
    writer = writer or pyarrow.csv.CSVWriter(path, table.schema)
    writer.write_table(table)
writer.close()
"""


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    sizes = [1_000_000, 5_000_000, 20_000_000, 45_840_617]
    add("--rows", type=count_arg, nargs="+", default=sizes, help="sizes to measure")
    add("--csv", action="store_true", help="a CSV with texts and numbers")
    add("--raw", type=Path, help="file of Criteo's rows to take; made if not given")
    add("--directory", type=Path, help="where to work, 600 bytes a row (default: a temporary one)")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every size.

    Raises:
        ValueError: ``--raw`` doesn't fit the other options.
    """
    raw, most = options.raw, max(options.rows)
    if raw and options.csv:
        raise ValueError("--raw has rows of Criteo: leave it out with --csv")
    if raw and not raw.is_file():
        raise ValueError(f"--raw {raw} is not a file")
    if raw and (lines := _lines(raw, most)) < most:
        raise ValueError(f"--raw {raw} has {lines} rows, fewer than --rows: lower that")

    if options.directory:
        options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        make = make_csv if options.csv else make_raw
        raw = raw or make(Path(work) / "raw", most)
        for rows in sorted(options.rows):
            record.add(measure_one(raw, rows, Path(work), options.csv), to="runs")


def measure_one(raw: Path, rows: int, work: Path, csv: bool) -> dict[str, Any]:
    """Prepare the first ``rows`` rows of ``raw``, with a plain parse before and after."""
    suffix, delimiter = (".csv", ",") if csv else (".tsv", "\t")
    head = _head(raw, rows + csv, work / f"{rows}{suffix}")  # a CSV has a header
    plain_head = _head(raw, min(rows, PLAIN_ROWS), work / f"plain{suffix}")

    output = work / "prepared"
    plain = [_plain_parse(plain_head, delimiter)]
    program = "scripts/prepare_table.py" if csv else "scripts/prepare_criteo.py"
    run = run_program(program, head, "--output", output)
    plain.append(_plain_parse(plain_head, delimiter))

    meta = Meta.read(output)
    assert sum(split.rows for split in meta.splits.values()) == rows
    written = sum(path.stat().st_size for path in output.glob("*.parquet"))
    result = {
        "rows": rows,
        "bytes_per_row": head.stat().st_size / rows,
        "ids": sum(meta.cardinalities),
        "seconds": run.seconds,
        "rows_per_second": round(rows / run.seconds),
        "core_seconds_per_million_rows": run.core_seconds / rows * 1e6,
        "peak_memory_gb": run.peak_bytes / 1e9,
        "bare_parse_rows_per_second": round(sum(plain) / len(plain)),
        "parquet_bytes_per_row": written / rows,
    }

    head.unlink()
    shutil.rmtree(output)
    return result


def make_raw(directory: Path, rows: int) -> Path:
    """Write synthetic raw rows like those of Kaggle's file; returns the file."""
    arguments = ("--like", "kaggle", "--format", "tsv", "--rows", rows, "--output", directory)
    run_program("scripts/make_synthetic.py", *arguments)
    return directory / "train.txt"


def make_csv(path: Path, rows: int) -> Path:
    """Write a CSV with ten numbers and ten texts; returns its path."""
    path = path.with_suffix(".csv")
    command = [sys.executable, "-c", MAKE_CSV, str(path), str(rows), *map(str, VALUES)]
    subprocess.run(command, check=True)
    return path


def _lines(raw: Path, most: int) -> int:
    with raw.open("rb") as source:
        return sum(1 for _ in islice(source, most))


def _head(raw: Path, rows: int, path: Path) -> Path:
    with raw.open("rb") as source, path.open("wb") as target:
        target.writelines(islice(source, rows))
    return path


def _plain_parse(raw: Path, delimiter: str) -> float:
    """Rows per second."""
    command = [sys.executable, "-c", PLAIN_PARSE, str(raw), delimiter]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

"""Rows per second and peak memory from raw logs to Parquet, compared with a plain parse.

    python scripts/benchmarks/benchmark_prepare.py --output benchmarks/prepare_criteo.json
    python scripts/benchmarks/benchmark_prepare.py --table --output benchmarks/prepare_table.json

The raw rows are synthetic, with the 26 cardinalities of the whole Kaggle file; each size is the
head of one file. The time is that of the whole program. The plain parse of the same rows is
``pyarrow.csv.read_csv`` with all threads, into numbers and strings that are dropped.

With ``--table`` it is a CSV with ten numbers and ten texts, and scripts/prepare_table.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dlrm.data.schema import Meta
from dlrm.training.benchmark import write
from dlrm.utils.program import Parser, count_arg

SCRIPTS = Path(__file__).parents[1]
BARE_ROWS = 1_000_000
BARE_PARSE = """
import sys, time, pyarrow.csv
began = time.perf_counter()
reading = pyarrow.csv.ReadOptions(autogenerate_column_names=True)
parsing = pyarrow.csv.ParseOptions(delimiter=sys.argv[2])
table = pyarrow.csv.read_csv(sys.argv[1], reading, parsing)
print(table.num_rows / (time.perf_counter() - began))
"""
TABLE_SIZES = (10, 50, 300, 1_000, 5_000, 20_000, 100_000, 500_000, 2_000_000, 10_000_000)
MAKE_TABLE = """
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON file."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--rows",
        type=count_arg,
        nargs="+",
        default=[1_000_000, 5_000_000, 20_000_000, 45_840_617],
        help="sizes to measure (default: 1, 5, 20 million and the rows of Kaggle)",
    )
    parser.add_argument("--table", action="store_true", help="a CSV with texts and numbers")
    parser.add_argument("--raw", type=Path, help="raw file to take the rows of; made if not given")
    parser.add_argument(
        "--directory", type=Path, help="where to work, 600 bytes a row (default: a temporary one)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write (default: print only)")
    options = parser.parse_args(argv)
    if options.raw and not options.raw.is_file():
        parser.error(f"--raw {options.raw} is not a file")
    if options.raw and (lines := _lines(options.raw, max(options.rows))) < max(options.rows):
        parser.error(f"--raw {options.raw} has {lines} rows, fewer than --rows: lower that")
    if options.raw and options.table:
        parser.error("--raw has rows of Criteo: leave it out with --table")
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        raw = options.raw
        if options.table:
            raw = make_table(Path(work) / "raw.csv", max(options.rows))
        elif raw is None:
            raw = make_raw(Path(work) / "raw", max(options.rows))
        runs = [measure(raw, rows, Path(work), options.table) for rows in sorted(options.rows)]
    for run in runs:
        print(json.dumps(run))
    if options.output:
        write(options.output, {"runs": runs})


def measure(raw: Path, rows: int, work: Path, table: bool) -> dict[str, Any]:
    """Prepare the first ``rows`` rows of ``raw``, with a bare parse before and after."""
    suffix, delimiter = (".csv", ",") if table else (".tsv", "\t")
    head = _head(raw, rows + table, work / f"{rows}{suffix}")  # a table has a header
    bare_head = _head(raw, min(rows, BARE_ROWS), work / f"bare{suffix}")
    output = work / "prepared"
    bare = [_bare_parse(bare_head, delimiter)]
    seconds, usage = _prepare(head, output, "prepare_table" if table else "prepare_criteo")
    bare.append(_bare_parse(bare_head, delimiter))
    meta = Meta.read(output)
    assert sum(split.rows for split in meta.splits.values()) == rows
    result = {
        "rows": rows,
        "bytes_per_row": round(head.stat().st_size / rows, 1),
        "ids": sum(meta.cardinalities),
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "core_seconds_per_million_rows": round((usage.ru_utime + usage.ru_stime) / rows * 1e6, 2),
        "peak_memory_gb": round(usage.ru_maxrss / 1e6, 2),
        "bare_parse_rows_per_second": round(sum(bare) / len(bare)),
        "parquet_bytes_per_row": round(
            sum(path.stat().st_size for path in output.glob("*.parquet")) / rows, 1
        ),
    }
    head.unlink()
    shutil.rmtree(output)
    return result


# Each in a process of its own: the peak memory of a process counts what its parent held.


def make_raw(directory: Path, rows: int) -> Path:
    """Write synthetic raw rows like those of Kaggle's file; returns the file."""
    command = [sys.executable, str(SCRIPTS / "make_synthetic.py"), "--like", "kaggle"]
    options = ["--format", "tsv", "--rows", str(rows), "--output", str(directory)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return directory / "train.txt"


def make_table(path: Path, rows: int) -> Path:
    """Write a CSV with ten numbers and ten texts; returns its path."""
    command = [sys.executable, "-c", MAKE_TABLE, str(path), str(rows), *map(str, TABLE_SIZES)]
    subprocess.run(command, check=True)
    return path


def _lines(raw: Path, most: int) -> int:
    with raw.open("rb") as source:
        return sum(1 for _ in islice(source, most))


def _head(raw: Path, rows: int, path: Path) -> Path:
    with raw.open("rb") as source, path.open("wb") as target:
        target.writelines(islice(source, rows))
    return path


def _prepare(raw: Path, output: Path, program: str) -> tuple[float, Any]:
    """Seconds that the program takes, and what it used."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, SCRIPTS / f"{program}.py", raw, "--output", output],
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {program}.py: {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - began, usage


def _bare_parse(raw: Path, delimiter: str) -> float:
    """Rows per second."""
    command = [sys.executable, "-c", BARE_PARSE, str(raw), delimiter]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()

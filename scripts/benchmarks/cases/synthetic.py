"""Time scripts/make_synthetic.py, the whole program, on this machine.

    python scripts/benchmarks/run.py synthetic --devices cpu cuda --output FILE

Also compares the bytes made on each device and counts the values of each table that occur.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dlrm.data.schema import Meta
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.programs import run_program

SMALL = "--rows 2000 --tsv-rows 100"


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--devices", nargs="+", choices=("cpu", "cuda"), default=["cpu"])
    add("--rows", type=count_arg, default=45_840_617)
    add("--tsv-rows", type=count_arg, default=4_000_000, help="rows of the TSV run")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Make rows on each device, and some as TSV."""
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        for device in options.devices:
            record.add(make(made / device, device, "parquet", options.rows), to="runs")
        same = len({run["sha256"] for run in record["runs"]}) == 1
        record.note(same_bytes_on_all_devices=same)
        record.add(make(made / "tsv", options.devices[0], "tsv", options.tsv_rows), to="runs")
        record.note(values_seen=values_seen(made / options.devices[0]))


def make(output: Path, device: str, form: str, rows: int) -> dict[str, Any]:
    """Make ``rows`` rows like Kaggle's in a process of its own; returns what it took."""
    given = ("--like", "kaggle", "--rows", rows, "--format", form, "--device", device)
    run = run_program("scripts/make_synthetic.py", *given, "--output", output)
    files = sorted(path for path in output.iterdir() if path.name != "meta.json")
    return {
        "device": device,
        "format": form,
        "rows": rows,
        "seconds": run.seconds,
        "rows_per_second": round(rows / run.seconds),
        "rows_per_core_second": round(rows / run.core_seconds),
        "bytes": sum(path.stat().st_size for path in files),
        "peak_rss_bytes": run.peak_bytes,
        "sha256": checksum(files),
    }


def checksum(files: Sequence[Path]) -> str:
    """SHA-256 of the files' contents one after another."""
    total = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                total.update(piece)
    return total.hexdigest()


def values_seen(directory: Path) -> dict[str, list[int]]:
    """How many rows of each table occur in the data, and how many it has."""
    meta = Meta.read(directory)
    files = [directory / file for split in meta.splits.values() for file in split.files]
    result = {}
    for column in meta.categorical:
        seen = np.zeros(column.cardinality, dtype=bool)
        for file in files:
            seen[pq.read_table(file, columns=[column.name])[column.name].to_numpy()] = True
        result[column.name] = [int(seen.sum()), column.cardinality]
    return result

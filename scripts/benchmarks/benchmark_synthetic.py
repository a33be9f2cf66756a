"""Time scripts/make_synthetic.py, the whole program, on this machine; results as JSON.

    python scripts/benchmarks/benchmark_synthetic.py --devices cpu cuda --output FILE

Also compares the bytes made on each device and counts the values of each table that occur.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dlrm.data.schema import Meta
from dlrm.training.benchmark import write
from dlrm.utils.program import Parser, count_arg

SCRIPT = Path(__file__).parents[1] / "make_synthetic.py"


def time_run(output: Path, device: str, format: str, rows: int) -> dict[str, Any]:
    """Make ``rows`` rows like Kaggle's in a process of its own; what it took."""
    options = ["--like", "kaggle", "--rows", str(rows), "--format", format, "--device", device]
    start, cpu_before = time.perf_counter(), os.times()
    if subprocess.run([sys.executable, str(SCRIPT), *options, "--output", str(output)]).returncode:
        raise SystemExit(2)  # it has printed the reason
    seconds, cpu = time.perf_counter() - start, os.times()
    cpu_seconds = sum(cpu[2:4]) - sum(cpu_before[2:4])  # of child processes, user and system
    files = sorted(path for path in output.iterdir() if path.name != "meta.json")
    return {
        "device": device,
        "format": format,
        "rows": rows,
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "rows_per_core_second": round(rows / cpu_seconds),
        "bytes": sum(path.stat().st_size for path in files),
        # Of the largest process so far, in kilobytes on Linux.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
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
    """Per table: how many of its rows occur in the data, and how many it has."""
    meta = Meta.read(directory)
    files = [directory / file for split in meta.splits.values() for file in split.files]
    result = {}
    for column in meta.categorical:
        seen = np.zeros(column.cardinality, dtype=bool)
        for file in files:
            seen[pq.read_table(file, columns=[column.name])[column.name].to_numpy()] = True
        result[column.name] = [int(seen.sum()), column.cardinality]
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), default=["cpu"])
    parser.add_argument("--rows", type=count_arg, default=45_840_617, help="(default: %(default)s)")
    parser.add_argument(
        "--tsv-rows",
        type=count_arg,
        default=4_000_000,
        help="rows of the TSV run (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        runs = [time_run(made / device, device, "parquet", args.rows) for device in args.devices]
        result = {
            "runs": [*runs, time_run(made / "tsv", args.devices[0], "tsv", args.tsv_rows)],
            "same_bytes_on_all_devices": len({run["sha256"] for run in runs}) == 1,
            "values_seen": values_seen(made / args.devices[0]),
        }
    write(args.output, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

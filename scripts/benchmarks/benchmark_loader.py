"""Rows per second from Parquet to batches, compared with the bounds that no loader can exceed.

    python scripts/benchmarks/benchmark_loader.py --output benchmarks/loader.json

The bounds, on the same data with as many threads: reading the row groups with pyarrow, and a plain
copy of as many bytes as the batches hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from dlrm.data import synthetic
from dlrm.data.criteo import CriteoLoader
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import Meta
from dlrm.training.benchmark import write
from dlrm.utils.device import pick_device
from dlrm.utils.program import Parser, count_arg, exit_status


def rates(rows: int, run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Rows per second of ``run`` over its repeats, and the CPU time of all threads per row.

    The CPU time tells what a run costs on a machine that has other things to do as well.
    """
    seconds, cpu = [], []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    return {
        "median": round(rows / statistics.median(seconds)),
        "least": round(rows / max(seconds)),
        "most": round(rows / min(seconds)),
        "cpu_ns_per_row": round(1e9 * statistics.median(cpu) / rows, 1),
    }


def read_alone(directory: Path, threads: int) -> None:
    """Decode all row groups of the training split and drop them."""
    reader = RowGroupReader(directory, Meta.read(directory))
    with ThreadPoolExecutor(threads) as pool:
        for group in reader.row_groups("train"):
            pool.submit(reader.read_table, group)


def copy_alone(rows: int, bytes_per_row: int, threads: int) -> None:
    """Copy as many bytes as the batches of ``rows`` rows hold, 4,096 rows at a time."""
    source = np.ones((256, 4096 * bytes_per_row), np.uint8)  # of a window's size: in no cache
    with ThreadPoolExecutor(threads) as pool:
        for batch in range(rows // 4096):
            pool.submit(source[batch % len(source)].copy)


def consume(loader: CriteoLoader) -> None:
    """Take all batches of an epoch of its own, and wait until the last has arrived."""
    loader.set_epoch(loader.epoch + 1)
    for _ in loader:
        pass
    if loader.device.type == "cuda":
        torch.cuda.synchronize(loader.device)


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All rates on the training split of a prepared directory."""
    device = pick_device(options.device)
    meta = Meta.read(directory)
    rows = meta.splits["train"].rows
    first = pq.read_metadata(directory / meta.splits["train"].files[0]).row_group(0)
    bytes_per_row = 4 * (1 + len(meta.dense) + len(meta.categorical))
    repeats = options.repeats
    floors = {
        "pyarrow_read": lambda: read_alone(directory, options.readers),
        "plain_copy": lambda: copy_alone(rows, bytes_per_row, options.readers),
    }
    runs = [(size, shuffle) for size in options.batch_sizes for shuffle in (True, False)]
    with tqdm(total=len(floors) + len(runs), disable=None) as progress:
        result: dict[str, Any] = {"floors": {}, "loader": []}
        for name, run in floors.items():
            result["floors"][name] = rates(rows, run, repeats)
            progress.update()
        for size, shuffle in runs:
            loader = CriteoLoader(
                directory,
                "train",
                batch_size=size,
                shuffle=shuffle,
                readers=options.readers,
                device=device,
            )
            rate = rates(rows, partial(consume, loader), repeats)
            result["loader"].append(
                {"batch_size": size, "shuffle": shuffle, "rows_per_second": rate}
            )
            progress.update()
    result["data"] = {
        "rows": rows,
        "columns": [len(meta.dense), len(meta.categorical)],
        "bytes_per_row_in_batches": bytes_per_row,
        "bytes_per_row_on_disk": round(_size(directory, meta) / rows, 1),
        "rows_per_row_group": first.num_rows,
        "compression": first.column(0).compression,
    }
    return result


def _size(directory: Path, meta: Meta) -> int:
    return sum((directory / name).stat().st_size for name in meta.splits["train"].files)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the JSON file; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, help="prepared directory; made if not given")
    parser.add_argument(
        "--rows", type=count_arg, default=4_000_000, help="rows to make without --data"
    )
    parser.add_argument(
        "--batch-sizes", type=count_arg, nargs="+", default=[4096, 65536], help="per run"
    )
    parser.add_argument(
        "--readers", type=count_arg, default=2, help="reader threads, of the floors too"
    )
    parser.add_argument("--repeats", type=count_arg, default=5, help="epochs per figure")
    parser.add_argument("--device", default="cpu", help="where batches go: cpu or cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: print only)")
    options = parser.parse_args(argv)
    return exit_status(lambda: measure_all(options))


def measure_all(options: argparse.Namespace) -> None:
    """Measure and write the figures."""
    with tempfile.TemporaryDirectory() as made:
        directory = options.data or Path(made) / "data"
        if options.data is None:
            synthetic.write(directory, rows=options.rows, fractions=(1.0, 0.0, 0.0))
        result = {"readers": options.readers, **measure(directory, options)}
    print(json.dumps(result, indent=2))
    if options.output:
        write(options.output, result)


if __name__ == "__main__":
    sys.exit(main())

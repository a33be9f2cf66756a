"""Rows per second from Parquet to batches, compared with the bounds that no loader can exceed.

    python scripts/benchmarks/benchmark_loader.py --output benchmarks/loader.json
    python scripts/benchmarks/benchmark_loader.py --multi-hot --rows 300000 --output bags.json

The bounds, on the same data with as many threads: reading the row groups with pyarrow, and a plain
copy of as many bytes as the batches hold.

With ``--multi-hot``: ids per second of MLPerf's 26 tables with 214 ids in a row, as 26 columns of
lists of fixed lengths, as lists of random lengths (as many ids), and as 214 columns of one id each.
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
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from dlrm.data import synthetic
from dlrm.data.loader import BatchLoader
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import MLPERF_BAG_SIZES, TERABYTE_CARDINALITIES, Categorical, Meta
from dlrm.data.synthetic.multi_hot import id_field, open_writer
from dlrm.data.threads import map_in_order
from dlrm.training.benchmark import write
from dlrm.utils.cpus import cpu_count
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


def consume(loader: BatchLoader) -> None:
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
            loader = BatchLoader(
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


def make_flat(directory: Path, output: Path) -> None:
    """The ids of the lists of a prepared directory, place by place, in a one-hot column each."""
    meta = Meta.read(directory)
    sizes = [size or 1 for size in meta.lengths]
    tables = [
        Categorical(name=f"{table.name}_{place}", cardinality=table.cardinality)
        for table, size in zip(meta.categorical, sizes, strict=True)
        for place in range(size)
    ]

    def flat(columns: list[np.ndarray]) -> list[pa.Array]:
        rows = len(columns[0])
        blocks = zip(columns, sizes, strict=True)
        return [pa.array(part) for ids, n in blocks for part in ids.reshape(rows, n).T.copy()]

    _rewrite(directory, output, tables, flat)


def make_ragged(directory: Path, output: Path) -> None:
    """Lists of the same ids, cut at random places: with an exponential distribution of lengths."""
    meta = Meta.read(directory)
    tables = [replace(table, bag_size=None) for table in meta.categorical]

    def ragged(columns: list[np.ndarray]) -> list[pa.Array]:
        made = []
        for number, (ids, table) in enumerate(zip(columns, tables, strict=True)):
            array = pa.array(ids.reshape(-1))
            if table.multi_hot:
                rows, random = len(ids), np.random.default_rng(number)
                inner = np.sort(random.integers(0, ids.size + 1, rows - 1))
                offsets = np.concatenate([[0], inner, [ids.size]]).astype(np.int32)
                array = pa.ListArray.from_arrays(offsets, array, type=id_field(table).type)
            made.append(array)
        return made

    _rewrite(directory, output, tables, ragged)


def _rewrite(
    directory: Path,
    output: Path,
    tables: Sequence[Categorical],
    convert: Callable[[list[np.ndarray]], list[pa.Array]],
) -> None:
    """Write the training split of a prepared directory with other columns of ids."""
    meta = Meta.read(directory)
    reader, split = RowGroupReader(directory, meta), meta.splits["train"]
    numbers = [pa.field(name, pa.float32(), nullable=False) for name in (meta.label, *meta.dense)]
    schema = pa.schema(numbers + [id_field(table) for table in tables])
    output.mkdir()

    def rewrite(file: str) -> None:
        with open_writer(output / file, schema, tables) as writer:
            for group in reader.open(directory / file):
                rows = reader.read(group)
                floats = [pa.array(column.astype(np.float32)) for column in rows.dense]
                labels = pa.array(rows.labels.astype(np.float32))
                columns = [labels, *floats, *convert(rows.ids)]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema), group.rows)

    for _ in map_in_order(rewrite, split.files, cpu_count()):
        pass
    replace(meta, categorical=tuple(tables), splits={"train": split}).write(output)


def measure_multi_hot(made: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ids per second of columns with lists and of one-hot columns, alternating."""
    sizes = list(MLPERF_BAG_SIZES)
    synthetic.write(
        made / "lists",
        rows=options.rows,
        like="terabyte",
        cardinalities=TERABYTE_CARDINALITIES,
        bag_sizes=sizes,
        fractions=(1.0, 0.0, 0.0),
    )
    make_flat(made / "lists", made / "flat")
    make_ragged(made / "lists", made / "ragged")
    ids, kinds = options.rows * sum(sizes), ("flat", "lists", "ragged")
    device = pick_device(options.device)
    result: dict[str, Any] = {"rows": options.rows, "ids_per_row": sum(sizes), "loader": []}
    for kind in kinds:
        meta, files = Meta.read(made / kind), made / kind
        read = rates(ids, partial(read_alone, files, options.readers), options.repeats)
        bytes_per_id = round(_size(files, meta) / ids, 2)
        result[kind] = {"pyarrow_read": read, "bytes_per_id_on_disk": bytes_per_id}
    orders: dict[str, dict[str, Any]] = {
        "shuffled": {"shuffle": True},  # on a GPU, only the first epoch reads the files
        "shuffled in windows": {"shuffle": True, "window": 8},
        "in order": {},
    }
    for size, order in product(options.batch_sizes, orders):
        loaders = {
            kind: BatchLoader(
                made / kind,
                "train",
                batch_size=size,
                readers=options.readers,
                device=device,
                **orders[order],
            )
            for kind in kinds
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats + 1):  # the first one fills caches
            for kind, loader in loaders.items():
                began = time.perf_counter()
                consume(loader)
                seconds[kind].append(time.perf_counter() - began)
        row: dict[str, Any] = {"batch_size": size, "order": order, "ids_per_second": {}}
        for kind in kinds:
            first, *later = seconds[kind]
            row["ids_per_second"][kind] = {
                "first_epoch": round(ids / first),
                "median": round(ids / statistics.median(later)),
                "least": round(ids / max(later)),
                "most": round(ids / min(later)),
            }
        flat = statistics.median(seconds["flat"][1:])
        for kind in ("lists", "ragged"):
            row[f"{kind}_to_flat"] = round(flat / statistics.median(seconds[kind][1:]), 3)
        result["loader"].append(row)
        print(json.dumps(row), flush=True)
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
    parser.add_argument("--multi-hot", action="store_true", help="measure columns with lists")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: print only)")
    options = parser.parse_args(argv)
    return exit_status(lambda: measure_all(options))


def measure_all(options: argparse.Namespace) -> None:
    """Measure and write the figures."""
    with tempfile.TemporaryDirectory() as made:
        result: dict[str, Any] = {"readers": options.readers}
        if options.multi_hot:
            result |= measure_multi_hot(Path(made), options)
        else:
            directory = options.data or Path(made) / "data"
            if options.data is None:
                synthetic.write(directory, rows=options.rows, fractions=(1.0, 0.0, 0.0))
            result |= measure(directory, options)
    print(json.dumps(result, indent=2))
    if options.output:
        write(options.output, result)


if __name__ == "__main__":
    sys.exit(main())

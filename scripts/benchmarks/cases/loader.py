"""Rows per second from Parquet to batches, compared with the bounds that no loader can exceed.

    python scripts/benchmarks/run.py loader --output benchmarks/loader.json
    python scripts/benchmarks/run.py loader --multi-hot --rows 300000 --output bags.json

The bounds, on the same data with as many threads: reading the row groups with pyarrow, and a plain
copy of as many bytes as the batches hold.

With ``--multi-hot``: ids per second of MLPerf's 26 tables with 214 ids in a row, as 26 columns of
lists of fixed lengths, as lists of random lengths (as many ids), and as 214 columns of one id each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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

from dlrm.data import synthetic
from dlrm.data.loader import BatchLoader
from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import MLPERF_BAG_SIZES, TERABYTE_CARDINALITIES, Categorical, Meta
from dlrm.data.synthetic.multi_hot import id_field, open_writer
from dlrm.data.threads import map_in_order
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness

SMALL = "--rows 1500 --repeats 1 --batch-sizes 500"
ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},  # on a GPU, only the first epoch reads the files
    "shuffled in windows": {"shuffle": True, "window": 8},
    "in order": {},
}


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--data", type=Path, help="prepared directory; made if not given")
    add("--rows", type=count_arg, default=4_000_000, help="rows to make without --data")
    add("--batch-sizes", type=count_arg, nargs="+", default=[4096, 65536])
    add("--readers", type=count_arg, default=2, help="reader threads, of the bounds too")
    add("--repeats", type=count_arg, default=5, help="epochs per figure")
    add("--multi-hot", action="store_true", help="measure columns with lists")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure rows, or ids in lists."""
    record.note(readers=options.readers)
    with tempfile.TemporaryDirectory() as made:
        if options.multi_hot:
            measure_lists(Path(made), options, record)
        else:
            directory = options.data or Path(made) / "data"
            if options.data is None:
                synthetic.write(directory, rows=options.rows, fractions=(1.0, 0.0, 0.0))
            measure_rows(directory, options, record)


def measure_rows(directory: Path, options: argparse.Namespace, record: harness.Record) -> None:
    """All rates on the training split of a prepared directory."""
    meta = Meta.read(directory)
    rows, repeats = meta.splits["train"].rows, options.repeats
    bytes_per_row = 4 * (1 + len(meta.dense) + len(meta.categorical))

    bounds = {
        "pyarrow_read": partial(read_alone, directory, options.readers),
        "plain_copy": partial(copy_alone, rows, bytes_per_row, options.readers),
    }
    record.note(floors={name: rates(rows, run, repeats) for name, run in bounds.items()})

    for size, shuffle in product(options.batch_sizes, (True, False)):
        loader = open_loader(directory, size, options, shuffle=shuffle)
        rate = rates(rows, partial(consume, loader), repeats)
        row = {"batch_size": size, "shuffle": shuffle, "rows_per_second": rate}
        record.add(row, to="loader")

    first = pq.read_metadata(directory / meta.splits["train"].files[0]).row_group(0)

    described = {
        "rows": rows,
        "columns": [len(meta.dense), len(meta.categorical)],
        "bytes_per_row_in_batches": bytes_per_row,
        "bytes_per_row_on_disk": _size(directory, meta) / rows,
        "rows_per_row_group": first.num_rows,
        "compression": first.column(0).compression,
    }
    record.note(data=described)


def measure_lists(made: Path, options: argparse.Namespace, record: harness.Record) -> None:
    """Ids per second of columns with lists and of one-hot columns, alternating."""
    forms = make_forms(made, options.rows)
    ids = options.rows * sum(MLPERF_BAG_SIZES)
    record.note(rows=options.rows, ids_per_row=sum(MLPERF_BAG_SIZES))

    for form, directory in forms.items():
        read = rates(ids, partial(read_alone, directory, options.readers), options.repeats)
        size = _size(directory, Meta.read(directory)) / ids
        record.note(**{form: {"pyarrow_read": read, "bytes_per_id_on_disk": size}})

    for size, order in product(options.batch_sizes, ORDERS):
        loaders = {
            form: open_loader(directory, size, options, **ORDERS[order])
            for form, directory in forms.items()
        }
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        for _, (form, loader) in product(range(options.repeats + 1), loaders.items()):
            began = time.perf_counter()
            consume(loader)
            seconds[form].append(time.perf_counter() - began)

        row: dict[str, Any] = {"batch_size": size, "order": order, "ids_per_second": {}}
        medians = {form: statistics.median(times[1:]) for form, times in seconds.items()}
        for form, (first, *later) in seconds.items():  # the first one fills caches
            row["ids_per_second"][form] = {
                "first_epoch": round(ids / first),
                "median": round(ids / medians[form]),
                "least": round(ids / max(later)),
                "most": round(ids / min(later)),
            }
        for form in ("lists", "ragged"):
            row[f"{form}_to_flat"] = medians["flat"] / medians[form]
        record.add(row, to="loader")


def open_loader(
    directory: Path, size: int, options: argparse.Namespace, **order: Any
) -> BatchLoader:
    """A loader of the training split."""
    order |= {"readers": options.readers, "device": options.device}
    return BatchLoader(directory, "train", batch_size=size, **order)


def rates(rows: int, run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Rows per second of ``run`` over its repeats, and the CPU time of all threads per row.

    The CPU time says what a run costs on a machine that has other things to do as well.
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
        "cpu_ns_per_row": 1e9 * statistics.median(cpu) / rows,
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


def make_forms(made: Path, rows: int) -> dict[str, Path]:
    """The same ids as one-hot columns, as lists, and as lists that are cut at random places."""
    forms = {name: made / name for name in ("flat", "lists", "ragged")}
    synthetic.write(
        forms["lists"],
        rows=rows,
        like="terabyte",
        cardinalities=TERABYTE_CARDINALITIES,
        bag_sizes=list(MLPERF_BAG_SIZES),
        fractions=(1.0, 0.0, 0.0),
    )
    meta = Meta.read(forms["lists"])
    columns = [
        replace(table, name=f"{table.name}_{position}", bag_size=None, multi_hot=False)
        for table in meta.categorical
        for position in range(table.bag_size or 1)
    ]
    rewrite(forms["lists"], forms["flat"], columns, flattened)
    columns = [replace(table, bag_size=None) for table in meta.categorical]
    rewrite(forms["lists"], forms["ragged"], columns, cut)
    return forms


def flattened(number: int, table: Categorical, ids: np.ndarray) -> Iterator[pa.Array]:
    """A column for each place of the lists of a table."""
    yield from map(pa.array, ids.reshape(len(ids), -1).T.copy())


def cut(number: int, table: Categorical, ids: np.ndarray) -> Iterator[pa.Array]:
    """The lists of a table with an exponential distribution of lengths."""
    values = pa.array(ids.reshape(-1))
    if not table.multi_hot:
        yield values
        return
    inner = np.sort(np.random.default_rng(number).integers(0, ids.size + 1, len(ids) - 1))
    offsets = np.concatenate([[0], inner, [ids.size]]).astype(np.int32)
    yield pa.ListArray.from_arrays(
        offsets, values, type=id_field(replace(table, bag_size=None)).type
    )


def rewrite(
    directory: Path,
    output: Path,
    tables: Sequence[Categorical],
    convert: Callable[[int, Categorical, np.ndarray], Iterator[pa.Array]],
) -> None:
    """Write the training split of a prepared directory with other columns of ids."""
    meta = Meta.read(directory)
    reader, split = RowGroupReader(directory, meta), meta.splits["train"]
    numbers = [pa.field(name, pa.float32(), nullable=False) for name in (meta.label, *meta.dense)]
    schema = pa.schema(numbers + [id_field(table) for table in tables])
    output.mkdir()

    def rewrite_file(file: str) -> None:
        with open_writer(output / file, schema, tables) as writer:
            for group in reader.open(directory / file):
                rows = reader.read(group)
                floats = [rows.labels, *rows.dense]
                columns = [pa.array(values.astype(np.float32)) for values in floats]
                for number, (table, ids) in enumerate(zip(meta.categorical, rows.ids, strict=True)):
                    columns += convert(number, table, ids)
                writer.write_table(pa.Table.from_arrays(columns, schema=schema), group.rows)

    for _ in map_in_order(rewrite_file, split.files, cpu_count()):
        pass
    replace(meta, categorical=tuple(tables), splits={"train": split}).write(output)


def _size(directory: Path, meta: Meta) -> int:
    return sum((directory / name).stat().st_size for name in meta.splits["train"].files)

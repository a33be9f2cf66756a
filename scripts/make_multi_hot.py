"""Give the rows of a prepared one-hot directory several ids in each column, by MLPerf's rule.

    python scripts/make_multi_hot.py data/terabyte --output data/mlperf
    python scripts/make_multi_hot.py data/demo --output data/bags --bag-sizes 3 1 20 ...

The bag of a row is its own id and others, which are drawn from the whole table once for each id.
The other columns and the splits stay as they are. The same options give the same ids.
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from dlrm.data.column_values import read_ids
from dlrm.data.parquet import RowGroupReader, named_column
from dlrm.data.schema import MLPERF_BAG_SIZES, Categorical, Meta
from dlrm.data.synthetic.multi_hot import (
    group_rows,
    id_array,
    id_field,
    open_writer,
    with_bag_sizes,
)
from dlrm.data.threads import map_in_order
from dlrm.utils.atomic import atomic_directory
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg


def convert(
    directory: Path,
    output: Path,
    bag_sizes: Sequence[int],
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Meta:
    """Write the rows of a prepared one-hot directory with bags; an error leaves nothing behind.

    Args:
        directory: the prepared directory.
        output: directory to create; it may exist if it is empty.
        bag_sizes: ids of a bag of each categorical column, in their order.
        seed: seed of the draws.
        threads: files written at a time; by default one per core.
        progress: called with the number of rows just written, by several threads.

    Returns:
        The meta data of ``output``.

    Raises:
        FileNotFoundError: the directory or one of its files is missing.
        ValueError: a file is damaged, a column is multi-hot already or has a table of more than
            2^31 rows, an argument is out of range, or ``output`` is not empty.
    """
    meta = Meta.read(directory)
    tables = with_bag_sizes(meta.categorical, bag_sizes)
    if seed < 0:
        raise ValueError(f"seed is {seed}, it must not be negative")
    reader = RowGroupReader(directory, meta)
    with atomic_directory(output) as temporary:

        def write(file: str) -> None:
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            _write(reader, file, temporary / file, tables, seed, progress)

        files = [file for split in meta.splits.values() for file in split.files]
        for _ in map_in_order(write, files, threads or cpu_count()):
            pass
        source = {"source": "scripts/make_multi_hot.py", "bag_sizes": list(bag_sizes), "seed": seed}
        made = replace(
            meta,
            categorical=tables,
            options={**source, "one_hot": dict(meta.options)},
            fingerprint=None,
        )
        made.write(temporary)
    return made


def _write(
    reader: RowGroupReader,
    file: str,
    path: Path,
    tables: Sequence[Categorical],
    seed: int,
    progress: Callable[[int], object],
) -> None:
    """Write the rows of one file with bags."""
    source = reader.directory / file
    one_hot_schema = pq.read_schema(source).remove_metadata()
    fields = {name: one_hot_schema.field(name) for name in reader.columns}
    schema = pa.schema(list((fields | {t.name: id_field(t) for t in tables}).values()))
    with open_writer(path, schema, tables) as writer:
        for row_group in reader.open(source):
            rows = reader.read_table(row_group)
            columns = {name: rows[name] for name in reader.columns}
            for feature, (table, one_hot) in enumerate(
                zip(tables, reader.meta.categorical, strict=True)
            ):
                column = named_column(rows, row_group, table.name)
                ids = read_ids(*column, one_hot, table.cardinality).astype(np.int64)
                columns[table.name] = id_array(
                    torch.from_numpy(ids), table, feature=feature, seed=seed
                )
            made = pa.Table.from_arrays(list(columns.values()), schema=schema)
            writer.write_table(made, group_rows(tables))
            progress(row_group.rows)


def make(args: argparse.Namespace) -> None:
    """Write the data and print a summary."""
    rows = sum(split.rows for split in Meta.read(args.data).splits.values())
    with tqdm(total=rows, unit="row", unit_scale=True, disable=None) as bar:

        def progress(done: int) -> None:
            with bar.get_lock():
                bar.update(done)

        meta = convert(
            args.data,
            args.output,
            args.bag_sizes,
            seed=args.seed,
            threads=args.threads,
            progress=progress,
        )
    ids = sum(length or 0 for length in meta.lengths)
    print(f"{args.output}: {rows:,} rows with {ids} ids of {len(meta.tables)} tables in each")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("data", type=path_arg, metavar="DIR", help="prepared directory with one-hot columns")
    add("--output", type=path_arg, required=True, metavar="DIR", help="empty directory to create")
    sizes = list(MLPERF_BAG_SIZES)
    text = "ids of each column in a row (default: the 214 of MLPerf's 26 tables)"
    add("--bag-sizes", type=int, nargs="+", metavar="L", default=sizes, help=text)
    add("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    add("--threads", type=count_arg, help="files written at a time (default: one per core)")
    args = parser.parse_args(argv)
    return exit_status(lambda: make(args), f"interrupted; nothing was left in {args.output}")


if __name__ == "__main__":
    sys.exit(main())

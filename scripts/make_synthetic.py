"""Write synthetic Criteo data of any size, with labels from a known model.

    python scripts/make_synthetic.py --output data/demo
    python scripts/make_synthetic.py --output data/kaggle --like kaggle
    python scripts/make_synthetic.py --output data/mlperf --like mlperf --rows 1000000 --cap 100000
    python scripts/make_synthetic.py --output raw --like kaggle --rows 1000000 --format tsv

The same options give the same bytes on every device.
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from tqdm import tqdm

from dlrm.data import synthetic
from dlrm.data.schema import META_FILE, MLPERF_BAG_SIZES, Meta
from dlrm.data.synthetic.distributions import hashed, profiles
from dlrm.data.synthetic.generator import GeneratedRows, Generator
from dlrm.data.synthetic.label_model import BINS
from dlrm.data.synthetic.multi_hot import GROUP_ROWS
from dlrm.data.synthetic.writers import Job, Written, split_of, tally, write_parquet
from dlrm.data.threads import map_in_order
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

TSV_FILE, TSV_META_FILE = "train.txt", "synthetic.json"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The meaning of a value of ``--like``."""

    profile: str
    rows: int
    cap: int | None = None
    fractions: tuple[float, float, float] | None = None
    bag_sizes: tuple[int, ...] | None = None


PRESETS = {
    "demo": Preset(
        profile="kaggle",
        rows=synthetic.DEMO_ROWS,
        cap=synthetic.DEMO_CAP,
        fractions=synthetic.DEMO_FRACTIONS,
    ),
    "kaggle": Preset(profile="kaggle", rows=45_840_617),
    "terabyte": Preset(profile="terabyte", rows=100_000_000, cap=40_000_000),
    "mlperf": Preset(
        profile="terabyte", rows=10_000_000, cap=40_000_000, bag_sizes=MLPERF_BAG_SIZES
    ),
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program with status 2 for a wrong one."""
    parser = Parser(__doc__)

    # The kind of data, and where.
    what = "directory to create; it must not contain anything"
    parser.add_argument("--output", type=path_arg, required=True, metavar="DIR", help=what)
    parser.add_argument(
        "--like",
        choices=PRESETS,
        default="demo",
        help="demo: 300,000 rows, Kaggle's 26 tables with at most 20,000 rows each, split "
        "80/10/10. kaggle: 45,840,617 rows, 26 tables with 33.8 M rows in total. terabyte: 100 M "
        "of the 4.4 billion rows, 26 tables with 204 M rows in total (ids modulo 40 M). mlperf: "
        "10 M rows with these tables and the 214 ids of MLPerf's DLRM-DCNv2 in each, 3 GB "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--format",
        choices=("parquet", "tsv"),
        default="parquet",
        help="parquet: ready for training. tsv: raw data as from Criteo, for prepare_criteo.py; a "
        "single train.txt, which --split days, or the same fractions, divide into the same splits "
        "(default: %(default)s)",
    )
    _add_sizes(parser)
    _add_labels(parser)

    of_device = "device that generates the rows; auto: a GPU if there is one (default: %(default)s)"
    devices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", choices=devices, default="auto", help=of_device)
    of_threads = "files written at a time (default: one per core)"
    parser.add_argument("--threads", type=int, default=cpu_count(), help=of_threads)
    return parser.parse_args(argv)


def _add_sizes(parser: Parser) -> None:
    add = parser.add_argument
    add("--rows", type=count_arg, help="number of rows, over all splits (default: that of --like)")
    of_tables = "rows of each table (default: those of --like)"
    add("--cardinalities", type=int, nargs="+", metavar="V", help=of_tables)
    bags = "ids of each table in a row, by MLPerf's rule (default: one, or those of --like)"
    add("--bag-sizes", type=int, nargs="+", metavar="L", help=bags)
    cap = "rows of a table at most; larger tables keep their most frequent values"
    add("--cap", type=int, help=cap)
    text = "shares of the splits (default: the reference protocol: six of seven days for training, "
    text += "the first half of the last day for test and the second for validation)"
    add("--fractions", type=float, nargs=3, metavar=("TRAIN", "VAL", "TEST"), help=text)


def _add_labels(parser: Parser) -> None:
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of everything random (default: %(default)s)")
    add("--auc", type=float, default=0.80, help="best possible AUC (default: %(default)s)")
    add("--positives", type=float, default=0.256, help="share of label 1 (default: %(default)s)")
    drift = "how much the effects of ids change over the rows, in units of these effects "
    add("--drift", type=float, default=0.0, help=f"{drift}(default: %(default)s)")


def make(args: argparse.Namespace) -> tuple[Meta, int]:
    """Write the data of the options; returns the meta data and the number of rows."""
    preset = PRESETS[args.like]
    rows = preset.rows if args.rows is None else args.rows
    cap = preset.cap if args.cap is None and args.cardinalities is None else args.cap
    if cap is not None and cap < 1:
        raise ValueError(f"--cap is {cap}, it must be at least 1")
    columns = profiles()[preset.profile].categorical
    sizes = args.cardinalities or [column.cardinality for column in columns]
    bag_sizes = args.bag_sizes or (None if args.cardinalities else preset.bag_sizes)

    # A file of Criteo has 26 columns of one id.
    tsv = args.format == "tsv"
    if tsv and bag_sizes:
        raise ValueError("a Criteo TSV file has one id in a column: write bags as Parquet")
    if tsv and len(sizes) != len(columns):
        raise ValueError(
            f"there are {len(sizes)} cardinalities, but a Criteo TSV file has {len(columns)} "
            "columns C1..C26; write Parquet for another number"
        )

    with tqdm(total=rows, unit="row", unit_scale=True, disable=None) as bar:

        def progress(done: int) -> None:
            with bar.get_lock():
                bar.update(done)

        meta = synthetic.write(
            args.output,
            rows=rows,
            like=preset.profile,
            bag_sizes=bag_sizes,
            cardinalities=[min(size, cap or size) for size in sizes],
            fractions=args.fractions or preset.fractions,
            seed=args.seed,
            auc=args.auc,
            positives=args.positives,
            drift=args.drift,
            device=None if args.device == "auto" else args.device,
            threads=args.threads,
            progress=progress,
            writer=write_tsv if tsv else write_parquet,
            meta_file=TSV_META_FILE if tsv else META_FILE,
        )
    return meta, rows


def write_tsv(directory: Path, job: Job) -> Written:
    """Write all rows in order as one raw TSV file, in chunks, of which several are made at a time.

    Returns the same as :func:`~dlrm.data.synthetic.writers.write_parquet`.
    """
    tokens, splits = Tokens(job.generator, job.recipe.seed), job.recipe.splits()
    chunks = [
        (split, range(start, min(start + GROUP_ROWS, rows.stop)))
        for split, rows in splits.items()
        for start in range(rows.start, rows.stop, GROUP_ROWS)
    ]

    def encode(chunk: tuple[str, range]) -> tuple[bytes, np.ndarray]:
        rows = job.generator.rows(chunk[1].start, chunk[1].stop)
        return _tsv(rows, tokens), tally(rows)

    counts = {split: np.zeros((2, BINS), dtype=np.int64) for split in splits}
    with open(directory / TSV_FILE, "wb") as file:
        results = map_in_order(encode, chunks, job.recipe.threads)
        for (split, rows), (text, added) in zip(chunks, results, strict=True):
            file.write(text)
            counts[split] += added
            job.progress(len(rows))
    return {split: split_of([TSV_FILE], counts[split]) for split in splits}, counts


class Tokens:
    """The raw value of each id: 32 bits as 8 hex digits, different for different ids.

    The ids of all columns are numbered consecutively, and a bijection of 32-bit integers (the
    finalizer of MurmurHash3) scatters these numbers.
    """

    def __init__(self, generator: Generator, seed: int) -> None:
        columns = generator.categorical
        sizes = [column.cardinality for column in columns]
        self.missing = [column.missing_rank if column.missing else None for column in columns]
        self.offsets = np.cumsum([0, *sizes])
        self.key = np.uint32(int(hashed(seed, 5, 1)) & 0xFFFFFFFF)

    def values(self, column: int, ids: np.ndarray) -> np.ndarray:
        """Raw values of ``ids [B]`` of a column, uint32 ``[B]``."""
        x = (ids + self.offsets[column]).astype(np.uint32) ^ self.key
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    def text(self, column: int, ids: np.ndarray) -> pa.Array:
        """Raw values of ``ids [B]`` as 8 hex digits, null for missing."""
        digits = self.values(column, ids).astype(">u4").tobytes().hex().encode()
        offsets = np.arange(0, 8 * len(ids) + 1, 8, dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(digits)]
        if (missing := self.missing[column]) is not None:
            buffers[0] = pa.py_buffer(np.packbits(ids != missing, bitorder="little"))
        return pa.Array.from_buffers(pa.string(), len(ids), buffers)


def _tsv(rows: GeneratedRows, tokens: Tokens) -> bytes:
    """Label, integers and tokens, separated by tabs; missing values are empty."""
    columns = [pa.array(rows.labels.cpu().numpy())]
    for values, missing in zip(rows.dense.cpu(), rows.missing.cpu(), strict=True):
        columns.append(pa.array(values.numpy(), mask=missing.numpy()))
    for column, ids in enumerate(rows.ids.cpu()):
        columns.append(tokens.text(column, ids.numpy()))
    table = pa.Table.from_arrays(columns, names=[str(number) for number in range(len(columns))])
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    buffer = BytesIO()
    pa.csv.write_csv(table, buffer, options)
    return buffer.getvalue()


def make_and_report(args: argparse.Namespace) -> None:
    """Write the data and print a summary."""
    start = time.perf_counter()
    meta, rows = make(args)
    seconds = time.perf_counter() - start
    print(f"{args.output}: {rows:,} rows, tables with {sum(meta.cardinalities):,} rows in total")
    print(f"{'split':6}{'rows':>12}{'positives':>11}{'best AUC':>10}{'log loss':>10}")
    for name, split in meta.splits.items():
        best = meta.planted[name]
        print(
            f"{name:6}{split.rows:12,}{split.positives / max(split.rows, 1):11.4f}"
            f"{best.get('auc', float('nan')):10.4f}{best.get('log_loss', float('nan')):10.4f}"
        )
    print(f"{seconds:.1f} s, {rows / seconds:,.0f} rows/s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = parse_args(argv)
    return exit_status(
        lambda: make_and_report(args), f"interrupted; nothing was left in {args.output}"
    )


if __name__ == "__main__":
    sys.exit(main())

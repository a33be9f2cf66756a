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

from tqdm import tqdm

from dlrm.data import synthetic
from dlrm.data.schema import MLPERF_BAG_SIZES, Meta
from dlrm.data.synthetic.distributions import profiles
from dlrm.utils.program import Parser, exit_status, path_arg


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
    add = parser.add_argument
    add(
        "--output",
        type=path_arg,
        required=True,
        metavar="DIR",
        help="directory to create; it must not contain anything",
    )
    add(
        "--like",
        choices=PRESETS,
        default="demo",
        help="demo: 300,000 rows, Kaggle's 26 tables with at most 20,000 rows each, split "
        "80/10/10. kaggle: 45,840,617 rows, 26 tables with 33.8 M rows in total. terabyte: 100 M "
        "of the 4.4 billion rows, 26 tables with 204 M rows in total (ids modulo 40 M). mlperf: "
        "10 M rows with these tables and the 214 ids of MLPerf's DLRM-DCNv2 in each, 3 GB "
        "(default: %(default)s)",
    )

    # Sizes
    add("--rows", type=int, help="number of rows, over all splits (default: that of --like)")
    add(
        "--cardinalities",
        type=int,
        nargs="+",
        metavar="V",
        help="rows of each table (default: those of --like)",
    )
    add(
        "--bag-sizes",
        type=int,
        nargs="+",
        metavar="L",
        help="ids of each table in a row, by MLPerf's rule (default: one, or those of --like)",
    )
    add(
        "--cap",
        type=int,
        help="rows of a table at most; larger tables keep their most frequent values",
    )
    add(
        "--fractions",
        type=float,
        nargs=3,
        metavar=("TRAIN", "VAL", "TEST"),
        help="shares of the splits (default: the reference protocol: six of seven days for "
        "training, the first half of the last day for test and the second for validation)",
    )

    # Labels
    add("--seed", type=int, default=0, help="seed of everything random (default: %(default)s)")
    add("--auc", type=float, default=0.80, help="best possible AUC (default: %(default)s)")
    add("--positives", type=float, default=0.256, help="share of label 1 (default: %(default)s)")
    add(
        "--drift",
        type=float,
        default=0.0,
        help="how much the effects of ids change over the rows, in units of these effects "
        "(default: %(default)s)",
    )

    # Files
    add(
        "--format",
        choices=("parquet", "tsv"),
        default="parquet",
        help="parquet: ready for training. tsv: raw data as from Criteo, for prepare_criteo.py; a "
        "single train.txt, which --split days, or the same fractions, divide into the same splits "
        "(default: %(default)s)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device that generates the rows; auto: a GPU if there is one (default: %(default)s)",
    )
    add("--threads", type=int, help="files written at a time (default: one per core)")
    return parser.parse_args(argv)


def make(args: argparse.Namespace) -> tuple[Meta, int]:
    """Write the data of the options; returns the meta data and the number of rows."""
    preset = PRESETS[args.like]
    rows = preset.rows if args.rows is None else args.rows
    cap = preset.cap if args.cap is None and args.cardinalities is None else args.cap
    if cap is not None and cap < 1:
        raise ValueError(f"--cap is {cap}, it must be at least 1")
    sizes = args.cardinalities or [c.cardinality for c in profiles()[preset.profile].categorical]
    with tqdm(total=rows, unit="row", unit_scale=True, disable=None) as bar:

        def progress(done: int) -> None:
            with bar.get_lock():
                bar.update(done)

        meta = synthetic.write(
            args.output,
            rows=rows,
            like=preset.profile,
            bag_sizes=args.bag_sizes or (None if args.cardinalities else preset.bag_sizes),
            cardinalities=[min(size, cap or size) for size in sizes],
            fractions=args.fractions or preset.fractions,
            seed=args.seed,
            auc=args.auc,
            positives=args.positives,
            drift=args.drift,
            format=args.format,
            device=None if args.device == "auto" else args.device,
            threads=args.threads,
            progress=progress,
        )
    return meta, rows


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

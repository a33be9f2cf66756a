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
from collections.abc import Sequence

from tqdm import tqdm

from dlrm.data.schema import MLPERF_BAG_SIZES, Meta
from dlrm.data.synthetic.multi_hot import convert
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg


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
    add(
        "--bag-sizes",
        type=int,
        nargs="+",
        metavar="L",
        default=list(MLPERF_BAG_SIZES),
        help="ids of each column in a row (default: the 214 of MLPerf's 26 tables)",
    )
    add("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    add("--threads", type=count_arg, help="files written at a time (default: one per core)")
    args = parser.parse_args(argv)
    return exit_status(lambda: make(args), f"interrupted; nothing was left in {args.output}")


if __name__ == "__main__":
    sys.exit(main())

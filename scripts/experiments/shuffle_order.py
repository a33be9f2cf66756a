"""The cost of the order of the training rows: test AUC by the row groups that are mixed.

    python scripts/experiments/shuffle_order.py --data data/log --windows 8 all

``all`` leaves ``--loader.window`` out: a permutation of all rows, where they fit into memory. The
effect shows on logs in the order of time with many more row groups than the other windows.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from dlrm.data.schema import Meta
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.runner import INTERRUPTED, Runner, RunSpec, require_rows

ALL = "all"


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=path_arg, required=True, help="prepared directory")
    add("--windows", nargs="+", default=["8", ALL], help=f"row groups to mix, or {ALL}")
    add("--seeds", type=count_arg, default=3, help="runs for each window")
    add("--runs", type=path_arg, default=Path("runs/shuffle_order"), help="directory for the runs")
    add("--jobs", type=count_arg, default=1, help="number of runs at a time")
    add("--options", nargs="*", default=[], help="options of train.py, e.g. epochs=2")
    add("--json", type=path_arg, help="also write the results to this JSON file")
    return parser


def compare(options: Namespace) -> None:
    """Train a model for each window and seed, and print the test AUC."""
    meta = Meta.read(options.data)
    for split in ("train", "test"):
        require_rows(options.data, meta, split)
    files = [options.data / name for name in meta.splits["train"].files]
    groups = sum(pq.read_metadata(file).num_row_groups for file in files)

    common = ["--checkpoint=false", *(f"--{option}" for option in options.options)]
    runner = Runner(options.runs, options.jobs, common)
    names = {w: [f"window_{w}_seed_{s}" for s in range(options.seeds)] for w in options.windows}

    runs = []
    for seed in range(options.seeds):
        for window in options.windows:
            own = [] if window == ALL else [f"--loader.window={window}"]
            runs.append(RunSpec(names[window][seed], [f"--seed={seed}", *own]))
    if impossible := runner.train(runs, options.data):
        raise ValueError(impossible[0])

    print(f"{meta.splits['train'].rows:,} training rows in {groups} row groups")
    results = []
    for window in options.windows:
        auc = [runner.metrics(name)["test/auc"] for name in names[window]]
        spread = float(np.std(auc, ddof=1)) if len(auc) > 1 else 0.0
        results.append({"window": window, "auc": auc, "mean": float(np.mean(auc)), "std": spread})
        print(f"window {window:>5}: AUC {np.mean(auc):.5f} +- {spread:.5f}")

    if options.json:
        rows = meta.splits["train"].rows
        report = {"data": options.data.name, "training_rows": rows, "row_groups": groups}
        harness.write(options.json, report | {"options": options.options, "results": results})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: compare(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())

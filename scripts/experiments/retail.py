"""From the retail package to a trained, compressed and compared model: what ``make retail`` runs.

    python scripts/experiments/retail.py

Prepares the data (``make_retail.py``), and compares dense tables with compressed ones at equal
bytes (``frontier.py``). With a GPU: all products, every ratio and three seeds, with the learning
rate of each kind chosen on the validation weeks. Without one: a tenth of the products, at 10x and
100x, one seed and rates that are known. An interrupted comparison is resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dlrm.utils.program import Parser, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts import make_retail
from scripts.experiments import frontier

CONFIG = Path(__file__).parents[2] / "configs" / "retail.yaml"
ON_GPU = ["--kinds", "auto", "robe", "cafe", "hash", "drop", "tt", "--ratios", "10", "100", "1000"]
ON_GPU += ["--rates", "0.001", "0.002", "0.004", "--rates-at", "100"]
ON_CPU = ["--kinds", "auto", "robe", "drop", "--ratios", "10", "100", "--seeds", "1"]
ON_CPU += ["--lr", "auto=0.004", "robe=0.004", "drop=0.004", "--no-timing"]
SMALL_BATCH = "batch_size=2048"  # a tenth of the rows, in about as many steps


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=path_arg, default=Path("data/retail"), help="directory to prepare")
    add("--runs", type=path_arg, default=Path("runs/retail"), help="directory for the runs")
    add("--json", type=path_arg, help="also write the results to this JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    status = make_retail.main(["--output", str(options.data)])
    if status:
        return status
    given = ["--data", str(options.data), "--config", str(CONFIG), "--runs", str(options.runs)]
    given += ["--plot", str(options.runs / "frontier.png")]
    given += ["--json", str(options.json)] if options.json else []
    if torch.cuda.is_available():
        return frontier.main([*given, "--validation", str(options.data), *ON_GPU])
    return frontier.main([*given, *ON_CPU, "--options", SMALL_BATCH])


if __name__ == "__main__":
    sys.exit(main())

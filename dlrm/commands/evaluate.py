"""Evaluate a trained model: ``dlrm evaluate RUN DATA``.

Prints the metrics as JSON, and with --importance a table of the columns to stderr.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from dlrm.data.groups import read_groups
from dlrm.distributed.world import World
from dlrm.training.evaluation import TrainedModel
from dlrm.training.importance import importance_table
from dlrm.training.metrics import finite
from dlrm.training.plots import importance_figure
from dlrm.utils.atomic import save_figure
from dlrm.utils.device import pick_device
from dlrm.utils.messages import print_error
from dlrm.utils.program import Parser, add_run, add_scoring, count_arg, exit_status, figure_arg


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add_run(parser)
    parser.add_argument("data", metavar="DATA", help="prepared directory with meta.json")
    parser.add_argument("--split", default="test", help="split to evaluate on")

    # What is measured besides the metrics.
    grouped = "column of the data, such as a user: also measure AUC within each of its values, the "
    grouped += "mean (GAUC) and the worst and best groups (default: none)"
    parser.add_argument("--group", metavar="COLUMN", help=grouped)
    weighs = "also shuffle each column among the rows, five times, and report how much AUC and log "
    weighs += "loss are lost, on this number of random rows (default: no; without a number, 100000)"
    parser.add_argument(
        "--importance", metavar="ROWS", nargs="?", const=100_000, type=count_arg, help=weighs
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows and permutations")
    bars = "with --importance, also draw it: PNG, SVG or PDF (default: no)"
    parser.add_argument("--plot", type=figure_arg, metavar="FILE", help=bars)

    add_scoring(parser, "as in the evaluations of the run")
    return parser


def evaluate(options: Namespace) -> None:
    """Print the metrics as JSON."""
    if options.plot and not options.importance:
        raise ValueError("--plot draws what --importance finds: give it too, or leave --plot out")
    trained = TrainedModel.load(
        options.checkpoint,
        options.data,
        options.split,
        device=pick_device(options.device),
        batch_size=options.batch_size,
        allow_outside=options.allow_outside,
        last=options.last,
    )

    # All rows, then the columns on some of them.
    split, meta = options.split, trained.loader.meta
    groups = read_groups(options.data, meta, [split], options.group).get(split)
    values = finite(trained.evaluate(groups=groups))
    if groups is not None and (groups.of_rows < 0).all():
        print_error(
            f"note: no row is in a group, as the values of {options.group!r} are missing or unseen "
            f"in training; in data prepared with columns: {{{options.group}: pass}} new ones are"
        )
    result = {"split": split, "rows": trained.loader.rows, **values}

    if options.importance:
        found = trained.importance(options.importance, options.seed)
        result["importance"] = {name: finite(values) for name, values in found.items()}
        print(importance_table(found), file=sys.stderr)
        if options.plot:
            save_figure(importance_figure(found), options.plot, dpi=150)
    print(json.dumps(result, indent=2, default=str))


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    if not World.from_environment().first:  # under torchrun, one process prints the metrics
        return 0
    options = arguments().parse_args(argv)
    return exit_status(lambda: evaluate(options))

"""Reproduce TT-Rec: quality, size and speed of tensor-train embeddings on Criteo Kaggle.

    python scripts/reproduce_tt_rec.py --ratios-only
    python scripts/reproduce_tt_rec.py --data data/kaggle

``--data`` is a directory that was written by ``prepare_criteo.py`` or ``make_synthetic.py``. The
largest tables are stored in tensor-train format at several ranks, and at one of the ranks also with
a cache of the most used rows. These models are compared with a dense model, over several seeds.
Each run is a run of ``train.py``. With ``--fine-tune STEPS``, the first dense run is also
compressed, and trained for that number of steps. The time of a step is measured separately, after
all runs. Finished runs are not repeated, and the JSON file is written whenever one has finished:
after a kill the same command continues.

Reference: Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
Models", MLSys 2021, arXiv 2101.11714.
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm.data.schema import Meta
from dlrm.training.run_directory import has_checkpoint
from dlrm.utils.program import Parser, count_arg, exit_status, positive_arg

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.runner import (
    INTERRUPTED,
    Runner,
    RunSpec,
    add_run_arguments,
    require_rows,
    step_speed,
)
from scripts.experiments.tt_rec_grid import Cell, fine_tuned_cells, grid_cells, print_ratios
from scripts.experiments.tt_rec_report import draw, render, summarize

Runs = dict[str, list[RunSpec]]
"""The runs of each cell."""


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", help="prepared directory")
    add("--ratios-only", action="store_true", help="only print the compression ratios of the paper")
    config = "configs/criteo_kaggle_large_batch.yaml"
    add("--config", default=config, help="configuration of the runs: a YAML file for train.py")

    # The models
    tables = "how many tables, the largest ones, to store in tensor-train format"
    add("--tables", nargs="+", type=count_arg, default=[3, 5, 7], help=tables)
    add("--ranks", nargs="+", type=count_arg, default=[8, 16, 32, 64], help="TT ranks")
    caches = "cache sizes, as shares of the rows of these tables"
    add("--caches", nargs="*", type=share, default=[1e-4, 1e-3, 1e-2], help=caches)
    cached = {"metavar": ("TABLES", "RANK"), "default": [7, 32]}
    at = "number of tables and rank of the models with a cache"
    add("--cache-at", nargs=2, type=count_arg, help=at, **cached)

    # Their training
    rate = "learning rate of the TT embeddings (default: that of the configuration)"
    add("--tt-lr", type=positive_arg, help=rate)
    steps = "also compress the first dense model, and train it for this number of steps"
    add("--fine-tune", type=count_arg, default=0, metavar="STEPS", help=steps)
    add("--fine-tune-lr", type=positive_arg, default=5e-4, help="learning rate of these steps")
    add_run_arguments(parser, "tt_rec")
    return parser


def share(text: str) -> float:
    """The ``type`` of an option that is a number above 0 and at most 1."""
    value = positive_arg(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, it must be a share, at most 1")
    return value


def runs_of(cell: Cell, options: argparse.Namespace, meta: Meta) -> list[RunSpec]:
    """The runs of a cell, one per seed."""
    cell_options = cell.options(meta.cardinalities)
    if cell.tables and options.tt_lr:
        cell_options.append(f"--optim.embeddings_lr={options.tt_lr}")
    runs = [RunSpec(f"{cell}-{n}", [*cell_options, f"--seed={n}"]) for n in range(options.seeds)]
    if not cell.tables and options.fine_tune:
        runs[0].options.append("--checkpoint=true")
    return runs


def fine_tuning(cell: Cell, options: argparse.Namespace, meta: Meta) -> RunSpec:
    """The run that compresses the first dense model to a cell and trains it further."""
    rate = options.fine_tune_lr
    tuning = [
        *cell.options(meta.cardinalities),
        f"--init_from={(options.runs / 'dense-0').resolve()}",
        *(f"--max_steps={options.fine_tune}", "--seed=1000", "--optim.fine_tune=1"),
        *(f"--optim.lr={rate}", f"--optim.embeddings_lr={rate}", "--optim.warmup_steps=0"),
        *("--optim.decay_start=0", f"--optim.decay_steps={options.fine_tune}"),
    ]
    return RunSpec(f"fitted-{cell}", tuning)


def train_all(
    options: argparse.Namespace, runner: Runner, meta: Meta, save: Callable[[Runs], object]
) -> tuple[Runs, list[str]]:
    """Train the runs that are missing.

    Args:
        options: of the command line.
        runner: trains them.
        meta: of the data.
        save: given the runs of each cell whenever some of them have finished.

    Returns:
        The runs of each cell, and why some of them are impossible.
    """
    runs = {str(cell): runs_of(cell, options, meta) for cell in grid_cells(options)}
    by_seed = zip(*runs.values(), strict=True)
    in_order = [run for same_seed in by_seed for run in same_seed]
    impossible = runner.train(in_order, options.data, lambda: save(runs))
    if options.fine_tune:
        dense = options.runs / "dense-0"
        if not has_checkpoint(dense):
            raise ValueError(
                f"{dense} has no checkpoint, which --fine-tune starts from: remove it, so that it "
                "is trained again"
            )
        cells = fine_tuned_cells(options)
        tuned = {f"fitted-{cell}": [fine_tuning(cell, options, meta)] for cell in cells}
        impossible += runner.train([run for (run,) in tuned.values()], options.data)
        runs |= tuned
    return runs, impossible


def summary_of(runs: Runs, runner: Runner) -> pd.DataFrame | None:
    """The summary of the runs that have finished; None before the first dense one."""
    finished = {
        cell: [name for name, _ in specs if runner.finished(name)] for cell, specs in runs.items()
    }
    if not finished["dense"]:
        return None
    return summarize({cell: names for cell, names in finished.items() if names}, runner)


def reproduce(options: argparse.Namespace) -> None:
    """Train the runs that are missing, compare all, and measure the time of their steps."""
    if not options.data:
        raise ValueError("--data is needed, or --ratios-only")
    meta = Meta.read(options.data)
    require_rows(options.data, meta, "test")

    common = [f"--config={options.config}", "--checkpoint=false", "--eval_every=2000000000"]
    common += [f"--{option}" for option in options.options]
    runner = Runner(options.runs, options.jobs, common)

    report = {
        "data": Path(options.data).name,
        "config": options.config,
        "options": options.options,
        "fine_tune": {"steps": options.fine_tune, "lr": options.fine_tune_lr},
        "best_possible": meta.planted.get("test"),
        "impossible": [],
    }

    def save(runs: Runs) -> None:
        if (partial := summary_of(runs, runner)) is not None:
            write_json(partial, options, report)

    runs, report["impossible"] = train_all(options, runner, meta, save)
    print(*report["impossible"], sep="\n")

    summary = summary_of(runs, runner)
    if summary is None:
        raise ValueError("the dense model could not be trained, for the reason above")
    publish(summary, options, report)

    if not options.no_timing:
        for line, cell in enumerate(summary["cell"]):
            if not cell.startswith("fitted"):
                speed = step_speed([*common, f"--data={options.data}", *runs[cell][0].options])
                summary.loc[line, list(speed)] = list(speed.values())
                write_json(summary, options, report)
        publish(summary, options, report)


def write_json(summary: pd.DataFrame, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the JSON file, if one is wanted: also of a part, as the rest may never come."""
    if options.json:
        results = json.loads(summary.to_json(orient="records"))
        harness.write(options.json, {**report, "results": results})


def publish(summary: pd.DataFrame, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print the table, and write the plot and the JSON file."""
    print(render(summary))
    if report["best_possible"]:
        print("metrics of the planted model, the best possible:", report["best_possible"])
    draw(summary, options.plot)
    write_json(summary, options, report)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    if options.ratios_only:
        print_ratios(options.tables, options.ranks)
        return 0
    return exit_status(lambda: reproduce(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())

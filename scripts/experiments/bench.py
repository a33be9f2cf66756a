"""Compare embedding kinds on the logs of ``bench_logs.py``: kinds, ratios and seeds on each log.

    python scripts/experiments/bench.py --logs data/bench --jobs 14 --options step=eager

Each run is a run of ``train.py`` at its default learning rates, several at a time, on one GPU if
there is one. The results are a table for each log next to those of boosted trees on the same rows,
one JSON file, and plots of AUC against memory, a panel for each log. ``_log_loss`` is added to the
name of the second plot, and ``_expected`` to that of a third one: it compares the rise of the log
loss that ``auto`` expects with the one that is found. Finished runs are not repeated, so an
interrupted comparison can be resumed. A kind may have another type: ``--kinds hash hash:int8``.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from dlrm.commands import compare
from dlrm.commands.figures import write_plot
from dlrm.data.frequencies import IdStatistics
from dlrm.data.schema import META_FILE, Meta
from dlrm.sparse_arch.auto import expected_loss
from dlrm.sparse_arch.table_plan import AUTO
from dlrm.training.tracking import read_result
from dlrm.utils.documents import read_json
from dlrm.utils.program import Parser, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.bench_logs import trees_file
from scripts.experiments.frontier import point, require_kinds
from scripts.experiments.runner import (
    INTERRUPTED,
    Runner,
    RunSpec,
    add_run_arguments,
    require_rows,
)

KINDS = ("auto", "tt", "robe", "robe:int8", "cafe", "hash", "hash:int8", "qr", "block", "drop")
RATIOS = (2, 10, 30, 100, 300, 1000)


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--logs", type=path_arg, default=Path("data/bench"), help="directory of prepared logs")
    add("--only", nargs="+", help="names of the logs to run (default: all)")
    add("--kinds", nargs="*", default=KINDS, help="kinds to compare with dense")
    add("--ratios", nargs="+", type=positive_arg, default=RATIOS, help="compression ratios")
    add_run_arguments(parser, "bench")
    return parser


def find_logs(directory: Path, only: Sequence[str] | None) -> list[Path]:
    """The prepared logs of a directory.

    Raises:
        ValueError: there is none, or one of those named is missing.
    """
    logs = sorted(path.parent for path in directory.glob(f"*/{META_FILE}"))
    if missing := sorted({*(only or ())} - {log.name for log in logs}):
        raise ValueError(
            f"{directory} has no prepared log {', '.join(missing)}: make it with bench_logs.py"
        )
    if not logs:
        raise ValueError(f"{directory} has no prepared log: make some with bench_logs.py")
    return [log for log in logs if only is None or log.name in only]


def runs_on(log: Path, options: Namespace) -> list[RunSpec]:
    """The runs on a log: of each kind and ratio, one for each seed."""
    rows = sum(Meta.read(log).cardinalities)
    points = [("dense", 1.0), *product(options.kinds, options.ratios)]
    runs = [point(*each, seed, None, rows) for each in points for seed in range(options.seeds)]
    data = f"--data={log.resolve()}"
    return [RunSpec(f"{log.name}-{name}", [*own, data]) for name, own in runs]


def expected_rise(log: Path, run: Path) -> float:
    """How much higher than with full tables ``auto`` expects the log loss of a run to be."""
    meta, result = Meta.read(log), read_result(run)
    ids = IdStatistics(log, meta)
    plan = [(own["kind"], own) for own in result["tables"].values()]
    dim = result["options"]["model"]["embedding_dim"]
    return expected_loss(plan, meta.cardinalities, dim, ids.counts(), ids.effects())


def draw_expected(results: list[dict[str, Any]], path: Path) -> None:
    """Plot the found rise of the log loss of ``auto`` against the expected one, log by log."""
    figure, panel = plt.subplots(layout="constrained")
    dense = {row["log"]: row["log loss"] for row in results if row["emb"] == "dense"}
    for log in sorted(dense):
        own = [row for row in results if row["log"] == log and "expected" in row]
        line = sorted((row["expected"], row["log loss"] - dense[log]) for row in own)
        panel.plot(*(zip(*line, strict=True) if line else ((), ())), "o-", label=log, ms=3)
    panel.axline((0, 0), slope=1, color="k", linewidth=0.5)
    panel.set(xlabel="expected rise of the log loss", ylabel="found on test rows")
    panel.legend()
    write_plot(figure, path)


def run_bench(options: Namespace) -> None:
    """Train the runs that are missing, then write the results of all."""
    require_kinds(options.kinds)
    logs = find_logs(options.logs, options.only)
    for log in logs:
        require_rows(log, Meta.read(log), "test")

    runs = {log: runs_on(log, options) for log in logs}
    common = ["--checkpoint=false", *(f"--{option}" for option in options.options)]
    runner = Runner(options.runs, options.jobs, common)
    impossible = runner.train([run for own in runs.values() for run in own])
    print(*impossible, sep="\n")
    log_of = {run.name: log for log, own in runs.items() for run in own}
    log_of = {name: log for name, log in log_of.items() if runner.finished(name)}
    if not log_of:
        raise ValueError("none of the runs is possible, for the reasons above")

    # A row for each kind and ratio on each log.
    summary = compare.summarize(compare.read([options.runs / name for name in log_of]))
    results = json.loads(summary.to_json(orient="records"))
    for row in results:
        log = log_of[row["run"]]
        row["log"] = log.name
        if row["emb"] == AUTO:
            row["expected"] = expected_rise(log, options.runs / row["run"])

    print(compare.render(summary))
    files = {log.name: trees_file(log) for log in logs}
    trees = {name: read_json(f)["results"][0] for name, f in files.items() if f.is_file()}
    for name, own in trees.items():
        print(f"trees on {name}: AUC {own['auc']:.4f}, log loss {own['log_loss']:.4f}")

    def plot(name: str) -> Path:
        return options.plot.with_stem(f"{options.plot.stem}{name}")

    compare.draw(summary, "AUC", plot(""))
    compare.draw(summary, "log loss", plot("_log_loss"))
    if AUTO in options.kinds:
        draw_expected(results, plot("_expected"))
    if options.json:
        report = {"options": options.options, "trees": trees, "impossible": impossible}
        harness.write(options.json, {**report, "results": results})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: run_bench(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())

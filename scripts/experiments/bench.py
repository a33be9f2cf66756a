"""Compare embedding kinds on the logs of ``bench_logs.py``: kinds, ratios and seeds on each log.

    python scripts/experiments/bench.py --logs data/bench --jobs 14 --options step=eager

Each run is a run of ``train.py`` at its default learning rates, several at a time, on one GPU if
there is one. The results are one JSON file, which has the mean and the spread of every point next
to those of boosted trees on the same rows, and one plot: AUC and log loss of test rows against the
compression ratio, a column of panels for each log. A second plot (``_expected`` is added to its
name) compares the rise of the log loss that ``auto`` expects with the one that is found. Finished
runs are not repeated, so an interrupted comparison can be resumed. A kind may have another type:
``--kinds hash hash:int8``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from dlrm.commands.figures import log_x_axis, write_plot
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
MEASURED = {
    "test/auc": "auc",
    "test/log_loss": "log_loss",
    "test/calibration": "calibration",
    "val/auc": "val_auc",
    "val/log_loss": "val_log_loss",
    "embeddings/bytes": "bytes",
    "embeddings/optimizer_bytes": "optimizer_bytes",
}
"""Metrics of a run, and their names in the results."""
PANELS = ("auc", "log_loss")


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


def runs_on(log: Path, options: Namespace) -> dict[tuple[str, float], list[RunSpec]]:
    """The runs of each kind and ratio on a log, one for each seed."""
    rows = sum(Meta.read(log).cardinalities)
    points = [("dense", 1.0), *product(options.kinds, options.ratios)]
    runs: dict[tuple[str, float], list[RunSpec]] = {}
    for kind, ratio in points:
        specs = [point(kind, ratio, seed, None, rows) for seed in range(options.seeds)]
        runs[kind, ratio] = [
            RunSpec(f"{log.name}-{name}", [*own, f"--data={log.resolve()}"]) for name, own in specs
        ]
    return runs


def summarize(
    log: str, kind: str, ratio: float, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Mean and spread of the finished runs of a point."""
    row: dict[str, Any] = {"log": log, "kind": kind, "ratio": ratio, "seeds": len(runs)}
    for metric, name in MEASURED.items():
        values = [run[metric] for run in runs if run.get(metric) is not None]
        if values:
            row[name] = fmean(values)
        if len(values) > 1 and not name.endswith("bytes"):
            row[f"{name} std"] = stdev(values)
    return row


def draw(results: list[dict[str, Any]], trees: Mapping[str, Any], path: Path) -> Figure:
    """Plot quality against the ratio: a column of panels for each log, a line for each kind."""
    logs = sorted({row["log"] for row in results})
    size = (3.5 * len(logs) + 1, 3.2 * len(PANELS))
    figure, axes = plt.subplots(
        len(PANELS), len(logs), figsize=size, layout="constrained", squeeze=False
    )

    # A line for each kind, and one for each of the two that have no ratio.
    kinds = sorted({row["kind"] for row in results} - {"dense"})
    for (row, metric), (column, log) in product(enumerate(PANELS), enumerate(logs)):
        panel, own = axes[row, column], [each for each in results if each["log"] == log]
        for number, kind in enumerate(kinds):
            line = sorted((r["ratio"], r[metric]) for r in own if r["kind"] == kind and metric in r)
            style = "o-" if number < 10 else "s--"  # there are ten colors
            panel.plot(*zip(*line, strict=True), style, color=f"C{number % 10}", label=kind, ms=3)
        for value in (r[metric] for r in own if r["kind"] == "dense" and metric in r):
            panel.axhline(value, color="k", label="dense")
        if log in trees:
            panel.axhline(trees[log][metric], color="gray", linestyle="--", label="trees")
        log_x_axis(panel, "compression")
        panel.set_title(f"{log}: {metric.replace('_', ' ')}")

    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    write_plot(figure, path)
    return figure


def expected_rise(log: Path, run: Path) -> float:
    """How much higher than with full tables ``auto`` expects the log loss of a run to be."""
    meta, result = Meta.read(log), read_result(run)
    ids = IdStatistics(log, meta)
    plan = [(own["kind"], own) for own in result["tables"].values()]
    dim = result["options"]["model"]["embedding_dim"]
    return expected_loss(plan, meta.cardinalities, dim, ids.counts(), ids.effects())


def draw_expected(results: list[dict[str, Any]], path: Path) -> Figure:
    """Plot the found rise of the log loss of ``auto`` against the expected one, log by log."""
    figure, panel = plt.subplots(layout="constrained")
    dense = {row["log"]: row["log_loss"] for row in results if row["kind"] == "dense"}
    for log in sorted(dense):
        own = [row for row in results if row["log"] == log and "expected" in row]
        line = sorted((row["expected"], row["log_loss"] - dense[log]) for row in own)
        panel.plot(*(zip(*line, strict=True) if line else ((), ())), "o-", label=log, ms=3)
    panel.axline((0, 0), slope=1, color="k", linewidth=0.5)
    panel.set(xlabel="expected rise of the log loss", ylabel="found on test rows")
    panel.legend()
    write_plot(figure, path)
    return figure


def run_bench(options: Namespace) -> None:
    """Train the runs that are missing, then write the results of all."""
    require_kinds(options.kinds)
    logs = find_logs(options.logs, options.only)
    for log in logs:
        require_rows(log, Meta.read(log), "test")
    points = {(log.name, *key): runs for log in logs for key, runs in runs_on(log, options).items()}
    files = {log.name: trees_file(log) for log in logs}
    trees = {name: read_json(f)["results"][0] for name, f in files.items() if f.is_file()}

    common = ["--checkpoint=false", *(f"--{option}" for option in options.options)]
    runner = Runner(options.runs, options.jobs, common)
    impossible = runner.train([run for runs in points.values() for run in runs])
    print(*impossible, sep="\n")

    results, best = [], defaultdict(list)
    for (name, kind, ratio), runs in points.items():
        done = [runner.metrics(run.name) for run in runs if runner.finished(run.name)]
        if done:
            results.append(summarize(name, kind, ratio, done))
            if kind == AUTO:
                first = next(run.name for run in runs if runner.finished(run.name))
                log = next(log for log in logs if log.name == name)
                results[-1]["expected"] = expected_rise(log, options.runs / first)
            best[name].append(results[-1])
    if not results:
        raise ValueError("none of the runs is possible, for the reasons above")

    for name, rows in best.items():
        print(f"\n{name}" + (f"  trees {_figures(trees[name])}" if name in trees else ""))
        for row in rows:
            print(f"  {row['kind']:10} {row['ratio']:6g}x  {_figures(row)}")
    draw(results, trees, options.plot)
    if AUTO in options.kinds:
        draw_expected(results, options.plot.with_stem(f"{options.plot.stem}_expected"))
    if options.json:
        report = {"options": options.options, "trees": trees, "impossible": impossible}
        harness.write(options.json, {**report, "results": results})


def _figures(row: Mapping[str, Any]) -> str:
    return f"AUC {row['auc']:.4f}, log loss {row['log_loss']:.4f}"


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: run_bench(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())

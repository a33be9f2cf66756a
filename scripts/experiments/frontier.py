"""Compare embedding kinds at equal memory: quality and throughput.

    python scripts/experiments/frontier.py --data data/sample --config configs/criteo_sample.yaml
    python scripts/experiments/frontier.py --data data/bench --jobs 14 --no-timing

Trains every kind at every compression ratio with several seeds. Each run is a run of ``train.py``,
and several share one GPU, if there is one. The results are a table, plots of AUC and of log loss
against memory (``--plot``; ``_log_loss`` is added to its name), one of speed (``_speed``), and a
JSON file. The time of a step is measured separately, after all runs.

With several prepared directories, or one that holds them, as ``bench_logs.py`` makes them, each has
a table and a panel of its own, next to the results of boosted trees on the same rows.

Learning rates are those of the program or the configuration, unless ``--lr tt=0.002 hash=0.006``
sets those of the embeddings of some kinds.

``drop`` is the baseline that every method should beat: it keeps the frequent rows, and all others
share one row. ``auto`` is the planner, which may mix kinds. ``tt+cache`` also keeps the most used
rows of tensor-train tables uncompressed: a tenth of the rows that dense tables of the same budget
would have. A kind may have another type: ``--kinds hash hash:int8``. It has the rate of the kind
without a type, unless ``--lr`` gives it another.

Finished runs are not repeated, so an interrupted comparison can be resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm.data.schema import META_FILE, Meta
from dlrm.embeddings import available
from dlrm.embeddings.common.budget import DTYPES
from dlrm.sparse_arch.table_plan import format_ratio
from dlrm.utils.documents import read_json
from dlrm.utils.messages import did_you_mean
from dlrm.utils.program import Parser, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from dlrm.commands import compare
from scripts.benchmarks import harness
from scripts.experiments.baseline_trees import trees_file
from scripts.experiments.runner import (
    INTERRUPTED,
    Runner,
    RunSpec,
    add_run_arguments,
    require_rows,
    step_speed,
)

CACHED = "tt+cache"
KINDS = ("auto", "tt", CACHED, "qr", "block", "hash", "drop", "robe", "cafe")


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    what = "prepared directories, or one that holds them"
    add("--data", nargs="+", type=path_arg, required=True, help=what)
    add("--config", help="configuration of the runs: a YAML file for train.py")
    add("--kinds", nargs="*", default=KINDS, help="kinds to compare with dense")
    ratios = [2, 10, 30, 100, 300, 1000]
    add("--ratios", nargs="+", type=positive_arg, default=ratios, help="compression ratios")

    text = "learning rates of the embeddings of some kinds, e.g. tt=0.002"
    add("--lr", nargs="+", default=[], metavar="KIND=RATE", type=known_rate, help=text)
    add_run_arguments(parser, "frontier")
    return parser


def known_rate(text: str) -> tuple[str, float]:
    """``tt=0.002`` as kind and rate."""
    kind, _, rate = text.partition("=")
    try:
        return kind, positive_arg(rate)
    except argparse.ArgumentTypeError:
        message = f"is {text!r}, it must be a kind and a rate, e.g. tt=0.002"
        raise argparse.ArgumentTypeError(message) from None


def point(kind: str, ratio: float, seed: int, rate: float | None, rows: int) -> RunSpec:
    """One run of a kind at a compression ratio.

    Args:
        kind, ratio, seed: what to train; ``dense`` has no budget. The kind may end in a type.
        rate: learning rate of the embeddings; None for that of the configuration.
        rows: number of rows of all dense tables together.
    """
    name, _, dtype = kind.partition(":")
    options = [f"--emb={'tt' if name == CACHED else name}", f"--seed={seed}"]
    options += [f"--tables.dtype={dtype}"] if dtype else []
    options += [f"--tt.cache_rows={round(rows / ratio / 10)}"] if name == CACHED else []
    options += [] if rate is None else [f"--optim.embeddings_lr={rate:g}"]
    run = kind.replace(":", "-")
    if name == "dense":
        return RunSpec(f"{run}-{seed}", options)
    budget = format_ratio(ratio)
    return RunSpec(f"{run}-{budget}-{seed}", [*options, f"--budget={budget}"])


def rate_of(kind: str, rates: Mapping[str, float]) -> float | None:
    """The learning rate of a kind, or else that of the kind without a type."""
    return rates.get(kind, rates.get(kind.partition(":")[0]))


def prepared(paths: Sequence[Path]) -> dict[str, Path]:
    """The prepared directories that the user named, and those in directories of them, by name."""
    found: dict[str, Path] = {}
    for path in paths:
        inside = sorted(meta.parent for meta in path.glob(f"*/{META_FILE}"))
        for each in [path] if (path / META_FILE).is_file() or not inside else inside:
            if found.setdefault(each.name, each) != each:
                raise ValueError(f"{found[each.name]} and {each} have one name: rename one of them")
    return found


def publish(
    summary: pd.DataFrame,
    options: argparse.Namespace,
    report: Mapping[str, Any],
) -> None:
    """Print the table, and write the plots and the JSON file.

    Args:
        summary: of the runs.
        options: of the program.
        report: what the JSON file has besides the results.
    """
    print(compare.render(summary))

    def plot(name: str) -> Path:
        return options.plot.with_stem(f"{options.plot.stem}{name}")

    compare.draw(summary, "AUC", options.plot)
    compare.draw(summary, "log loss", plot("_log_loss"))
    if not options.no_timing:
        compare.draw(summary, "samples/s", plot("_speed"))

    if options.json:
        results = json.loads(summary.to_json(orient="records"))
        harness.write(options.json, {**report, "results": results})


def require_kinds(kinds: Sequence[str]) -> None:
    """Check kinds, which may end in a type.

    Raises:
        ValueError: a kind or type is unknown.
    """
    valid = ["auto", CACHED, *available()]
    for each in kinds:
        kind, typed, dtype = each.partition(":")
        if kind not in valid:
            raise ValueError(f"unknown embedding kind {kind!r}{did_you_mean(kind, valid)}")
        if typed and dtype not in DTYPES:
            raise ValueError(
                f"{each} has an unknown type {dtype!r}{did_you_mean(dtype, DTYPES)}; a kind may "
                f"have one of {', '.join(DTYPES)}, e.g. {kind}:int8"
            )


def check(options: argparse.Namespace, data: Mapping[str, Path]) -> None:
    """Check the options.

    Raises:
        ValueError: one of them is invalid.
    """
    for path in data.values():
        require_rows(path, Meta.read(path), "test")
    require_kinds([*options.kinds, *dict(options.lr)])


def runs_on(
    data: Path, options: argparse.Namespace, rates: Mapping[str, float], prefix: str
) -> list[RunSpec]:
    """The runs on prepared data: of each kind and ratio, one for each seed."""
    rows, data_flag = sum(Meta.read(data).cardinalities), f"--data={data.resolve()}"
    points = [("dense", 1.0), *product(options.kinds, options.ratios)]
    runs = [
        point(kind, ratio, seed, rate_of(kind, rates), rows)
        for seed in range(options.seeds)
        for kind, ratio in points
    ]
    return [RunSpec(f"{prefix}{name}", [*run_options, data_flag]) for name, run_options in runs]


def compare_kinds(options: argparse.Namespace) -> None:
    """Train the runs that are missing, then compare all."""
    data = prepared(options.data)
    check(options, data)
    common = [f"--{option}" for option in options.options]
    if options.config:
        common.insert(0, f"--config={Path(options.config).resolve()}")
    runner = Runner(options.runs, options.jobs, common, results_only=True)

    rates = dict(options.lr)

    # All runs, by name.
    options_of: dict[str, list[str]] = {}
    data_of: dict[str, Path] = {}
    for name, path in data.items():
        runs = dict(runs_on(path, options, rates, f"{name}-" if len(data) > 1 else ""))
        options_of |= runs
        data_of |= dict.fromkeys(runs, path)
    impossible = runner.train([RunSpec(*run) for run in options_of.items()])
    print(*impossible, sep="\n")
    finished = [options.runs / name for name in options_of if runner.finished(name)]
    if not finished:
        raise ValueError("none of the runs is possible, for the reasons above")

    files = {name: trees_file(path) for name, path in data.items()}
    trees = {name: read_json(file)["results"][0] for name, file in files.items() if file.is_file()}
    for name, scores in trees.items():
        print(f"trees on {name}: AUC {scores['auc']:.4f}, log loss {scores['log_loss']:.4f}")
    first, *more = data.values()
    report = {
        "data": ", ".join(data),
        "config": options.config,
        "options": options.options,
        "embeddings_lr": rates,
        "best_possible": None if more else Meta.read(first).planted.get("test"),
        "trees": trees,
        "impossible": impossible,
    }

    table = compare.read(finished)
    summary = compare.summarize(table)
    summary["log"] = [data_of[name].name for name in summary["run"]]
    for metric in ("AUC", "log loss"):
        groups = table.groupby("group", sort=False)
        by_seed = {runs["run"].iloc[0]: runs[metric].tolist() for _, runs in groups}
        summary[f"{metric} by seed"] = summary["run"].map(by_seed)
    publish(summary, options, report)
    if not options.no_timing:
        for line, name in summary["run"].items():
            speed = step_speed([*common, *options_of[name]])
            summary.loc[line, ["samples/s", "samples/s std"]] = speed["samples/s"], None
        publish(summary, options, report)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: compare_kinds(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())

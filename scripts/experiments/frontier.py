"""Compare embedding kinds at equal bytes: quality and throughput against memory.

    python scripts/experiments/frontier.py --data data/sample --config configs/criteo_sample.yaml

Trains every kind at every compression ratio with several seeds, each run by ``train.py``, then
writes one table, two plots and one JSON. With ``--rates`` and ``--validation DIR`` the learning
rate of the embeddings is first chosen for each kind, by its AUC on the validation split of that
data; ``--lr tt=0.002 hash=0.006`` gives rates that are known. A step of every model is timed alone,
after all runs.

``drop``, which keeps the frequent rows and lets the rare ones share one, is the baseline that every
method must beat. ``auto`` is the planner, which may mix kinds. ``tt+cache`` keeps the most used
rows of a tensor train uncompressed as well: a tenth of the rows that dense tables of the same
budget would have. Runs that have finished are not repeated, so an interrupted comparison goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path

import pandas as pd

from dlrm.data.schema import Meta
from dlrm.embeddings import available
from dlrm.sparse_arch.table_plan import format_ratio
from dlrm.training import benchmark
from dlrm.utils.messages import did_you_mean
from dlrm.utils.program import Parser, count_arg, exit_status, figure_arg, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for train.py and the other scripts
from scripts import compare
from scripts.experiments.runner import Pool, Run, require_rows, step_speed

CACHED = "tt+cache"
KINDS = ("auto", "tt", CACHED, "qr", "block", "hash", "drop", "robe", "cafe")


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--data", required=True, help="prepared directory")
    parser.add_argument("--config", help="YAML of the runs, as for train.py")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="beside dense")
    ratios = [2, 10, 30, 100, 300, 1000]
    parser.add_argument(
        "--ratios", nargs="+", type=positive_arg, default=ratios, help="of compression"
    )
    parser.add_argument("--seeds", type=count_arg, default=3, help="runs per point (default: 3)")
    parser.add_argument(
        "--rates", nargs="+", type=positive_arg, help="learning rates to choose from"
    )
    parser.add_argument(
        "--rates-at", type=positive_arg, default=10, help="ratio of the runs that choose"
    )
    parser.add_argument("--validation", help="prepared directory with a validation split")
    parser.add_argument(
        "--lr",
        nargs="+",
        default=[],
        metavar="KIND=RATE",
        type=known_rate,
        help="learning rates of the embeddings that are known",
    )
    parser.add_argument(
        "--runs", type=path_arg, default=Path("runs/frontier"), help="where runs go"
    )
    parser.add_argument("--jobs", type=count_arg, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--no-timing", action="store_true", help="leave out the step times")
    parser.add_argument(
        "--plot",
        type=figure_arg,
        default=Path("frontier.png"),
        help="PNG, SVG or PDF to draw; that of the speed lies beside it",
    )
    parser.add_argument("--json", type=path_arg, help="where the result is written as JSON")
    parser.add_argument("--options", nargs="*", default=[], help="more options, as epochs=2")
    return parser


def known_rate(text: str) -> tuple[str, float]:
    """``tt=0.002`` as kind and rate."""
    kind, _, rate = text.partition("=")
    try:
        return kind, positive_arg(rate)
    except argparse.ArgumentTypeError:
        message = f"is {text!r}, it must be a kind and a rate, as tt=0.002"
        raise argparse.ArgumentTypeError(message) from None


def point(kind: str, ratio: float, seed: int, rate: float | None, rows: int) -> Run:
    """One run of a kind at a ratio; ``rows`` of all dense tables together."""
    options = [f"--emb={'tt' if kind == CACHED else kind}", f"--seed={seed}"]
    options += [f"--tt.cache_rows={round(rows / ratio / 10)}"] if kind == CACHED else []
    options += [] if rate is None else [f"--optim.embeddings_lr={rate:g}"]
    if kind == "dense":
        return f"dense-{seed}", options
    return f"{kind}-{format_ratio(ratio)}-{seed}", [*options, f"--budget={format_ratio(ratio)}"]


def choose_rates(options: argparse.Namespace, pool: Pool) -> tuple[dict[str, float], list[str]]:
    """The rate of each kind with the best AUC on validation, at one ratio, two seeds; and why some
    of these runs could not be done."""
    rows = sum(Meta.read(options.validation).cardinalities)
    tried: dict[tuple[str, float], list[Run]] = {}
    for kind in ("dense", *options.kinds):
        if kind in dict(options.lr):
            continue
        for rate in options.rates:
            runs = [point(kind, options.rates_at, seed, rate, rows) for seed in range(2)]
            tried[kind, rate] = [(f"rate-{rate:g}-{name}", given) for name, given in runs]
    impossible = pool.train([run for runs in tried.values() for run in runs], options.validation)
    chosen: dict[str, tuple[float, float]] = {}
    for (kind, rate), runs in tried.items():
        found = [pool.metrics(name)["val/auc"] for name, _ in runs if pool.done(name)]
        if None in found:
            raise ValueError(
                f"{options.validation} has rows of one label alone in its val split, which no rate "
                "can be chosen by: prepare it with more"
            )
        if found:
            chosen[kind] = max(chosen.get(kind, (0.0, 0.0)), (sum(found) / len(found), rate))
    return {kind: rate for kind, (_, rate) in chosen.items()}, impossible


def publish(summary: pd.DataFrame, options: argparse.Namespace, report: dict[str, object]) -> None:
    """Print the table, draw the plots and write the JSON."""
    print(compare.render(summary))
    compare.draw(summary, "AUC", options.plot)
    speed = options.plot.with_stem(f"{options.plot.stem}_speed")
    compare.draw(summary, "samples/s", speed)
    if options.json:
        results = json.loads(summary.to_json(orient="records"))
        benchmark.write(options.json, {**report, "results": results})


def compare_kinds(options: argparse.Namespace) -> None:
    """Train what is missing, then compare."""
    meta = Meta.read(options.data)
    require_rows(options.data, meta, "test")
    if options.validation:
        require_rows(options.validation, Meta.read(options.validation), "val")
    valid = ["auto", CACHED, *available()]
    for kind in (*options.kinds, *dict(options.lr)):
        if kind not in valid:
            raise ValueError(f"unknown embedding kind {kind!r}{did_you_mean(kind, valid)}")
    if bool(options.rates) != bool(options.validation):
        raise ValueError("--rates and --validation go together")
    common = ["--checkpoint=false", *(f"--{option}" for option in options.options)]
    if options.config:
        common.insert(0, f"--config={Path(options.config).resolve()}")
    pool = Pool(options.runs, options.jobs, common)
    rates, impossible = choose_rates(options, pool) if options.rates else ({}, [])
    rates |= dict(options.lr)
    rows = sum(meta.cardinalities)
    todo = [point("dense", 1, seed, rates.get("dense"), rows) for seed in range(options.seeds)]
    for seed, ratio, kind in product(range(options.seeds), options.ratios, options.kinds):
        todo.append(point(kind, ratio, seed, rates.get(kind), rows))
    impossible += pool.train(todo, options.data)
    print(*impossible, sep="\n")
    done = [options.runs / name for name in dict(todo) if pool.done(name)]
    if not done:
        raise ValueError("none of the runs could be done, for the reasons above")
    summary = compare.summarize(compare.read(done))
    report = {
        "data": Path(options.data).name,
        "config": options.config,
        "options": options.options,
        "embeddings_lr": rates,
        "best_possible": meta.planted.get("test"),
        "impossible": impossible,
    }
    publish(summary, options, report)
    if not options.no_timing:
        given = dict(todo)
        for line, run in summary["run"].items():
            alone = step_speed([*common, f"--data={options.data}", *given[run]])
            summary.loc[line, ["samples/s", "samples/s std"]] = alone["samples/s"], None
        publish(summary, options, report)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    again = "interrupted; the same command goes on where it was"
    return exit_status(lambda: compare_kinds(options), again)


if __name__ == "__main__":
    sys.exit(main())

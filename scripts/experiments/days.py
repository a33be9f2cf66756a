"""Compare embedding kinds over days: each day is evaluated before a model is trained on it.

    python scripts/experiments/days.py --tables data/bench/tables --json benchmarks/days_h200.json

Each log is cut into parts of equal size in the order of its rows, the days, which ``train.py
--follow`` reads. The logs are tables of ``bench_logs.py`` and ``drift``, a synthetic one: there,
new ids come all the time, old ones fade, and what ids say about the label changes.

========== ========================================================================================
dense      a vocabulary of all days, so it knows the ids of the future
first      dense tables with a vocabulary of the first day; all other values share a row
cafe, hash the vocabulary of all days, in 1, 10 and 100 times fewer bytes than dense
dynamic    hashed ids, in the same bytes: rows of 8 bits, ``dynamic:fp32`` of 32
========== ========================================================================================

A kind may name other ids and more options: ``dynamic:fp32@all,dynamic.admit=2``.

The result is the AUC of each day, and the mean over days as the *progressive* AUC, in one JSON
file and one plot. Finished runs are not repeated, so an interrupted comparison can be resumed.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from numpy.typing import NDArray

from dlrm.data.schema import HASHED, META_FILE, Categorical, Meta, Split
from dlrm.kernels.dynamic.hashing import mix
from dlrm.training.tracking import read_result
from dlrm.utils.atomic import save_figure
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts import prepare_table
from scripts.benchmarks import harness
from scripts.experiments.runner import INTERRUPTED, Runner, RunSpec, add_run_arguments

DRIFT = "drift"  # the synthetic log
LOGS = ("retail", "sample", DRIFT)
ALL, FIRST, HASHES = "all", "first", "hashes"  # of which days a vocabulary has the ids, or of none
KINDS = ("first", "hash", "cafe", "cafe:int8", "dynamic", "dynamic:fp32")
FEWER = (1, 10, 100)  # times fewer bytes than dense
Ids = Callable[[NDArray[np.int32]], NDArray[np.integer]]


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--tables", type=path_arg, default=Path("data/bench/tables"), help="directory of tables")
    add("--only", nargs="+", default=LOGS, help="names of the logs to run")
    add("--days", type=count_arg, default=8, help="parts of each log")
    add("--rows", type=count_arg, help="rows of each log, the first ones (default: all)")
    add("--kinds", nargs="+", default=KINDS, help="kinds to compare with dense")
    add("--ratios", nargs="+", type=positive_arg, default=FEWER, help="compression ratios")
    add("--work", type=path_arg, default=Path("runs/days_logs"), help="directory for the days")
    add_run_arguments(parser, "days")
    return parser


# Logs -----------------------------------------------------------------------------------------


def drifting(rows: int = 400_000, seed: int = 0) -> pa.Table:
    """A log whose ids come and fade, and mean something else after a while."""
    random = np.random.default_rng(seed)
    time = np.arange(rows) / rows
    logit = np.full(rows, -1.5)
    columns: dict[str, Any] = {}

    # Columns whose ids are born one after another; recent ones are used most.
    groups = {}
    for name, births, lag, tail, weight in (
        ("ad", 20_000, 100, 1.1, 0.7),
        ("item", 60_000, 600, 0.9, 0.6),
        ("user", 30_000, 3_000, 0.8, 0.6),
    ):
        age = (random.pareto(tail, rows) * lag).clip(max=10**6).astype(np.int64)
        ids = (time * births).astype(np.int64) - age + 10**6
        groups[name] = ids % 16
        columns[name] = ids
        logit += weight * random.standard_normal(10**6 + births)[ids]

    # Users like groups of items, and what sites and categories say turns within the log.
    logit += 0.6 * random.standard_normal((16, 16))[groups["user"], groups["item"]]
    for name, values, weight in (("site", 5_000, 0.5), ("category", 300, 0.5), ("hour", 24, 0.2)):
        ids = (random.pareto(0.8, rows) * values / 50).astype(np.int64) % values
        turn = random.uniform(0, 2 * np.pi, values)[ids]
        columns[name] = ids
        logit += weight * np.cos(turn + np.pi * time) * 2**0.5

    columns["price"] = random.lognormal(size=rows)
    logit -= 0.3 * np.log(columns["price"])
    columns["label"] = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.uint8)
    return pa.table(columns)


def prepare_log(name: str, options: Namespace) -> Path:
    """Prepare all rows of a log, with a vocabulary of all days; returns the directory."""
    directory: Path = options.work / name
    whole = directory / "whole"
    if (whole / META_FILE).is_file():
        return directory

    if name == DRIFT:
        table = drifting()
        kinds = {c: "number" if c == "price" else "category" for c in table.column_names}
        content: dict[str, Any] = {"columns": kinds | {"label": "label"}}
    else:
        table = pq.read_table(options.tables / f"{name}.parquet")
        content = yaml.safe_load((options.tables / f"{name}.yaml").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    raw, config = directory / "rows.parquet", directory / "rows.yaml"
    pq.write_table(table.slice(0, options.rows), raw)

    # Hashed ids have no rates, so that no kind has them here.
    split = {"train": "1", "val": "0", "test": "0"}
    config.write_text(yaml.safe_dump({**content, "split": split, "rates": False}))
    with redirect_stdout(StringIO()):
        if prepare_table.main([str(raw), "--output", str(whole), "--config", str(config)]):
            raise ChildProcessError(f"{name} could not be prepared, as said above")
    return directory


def cut(directory: Path, days: int) -> int:
    """Write the days of a prepared log, with each sort of ids; returns the bytes of dense rows."""
    meta = Meta.read(directory / "whole")
    rows = pq.read_table(directory / "whole" / "train.parquet").combine_chunks()
    bounds = np.linspace(0, len(rows), days + 1).astype(int)

    for sort in (ALL, FIRST, HASHES):
        columns, ids_of = {}, {}
        for number, column in enumerate(meta.categorical):
            first = rows[column.name][: bounds[1]].to_numpy()
            made = new_ids(sort, number, column, first)
            columns[column.name], ids_of[column.name] = made

        for day in range(days):
            rows_of_day = rows.slice(bounds[day], bounds[day + 1] - bounds[day])
            path = directory / sort / f"{day + 1:03}"
            if not (path / META_FILE).is_file():
                write_day(path, meta, rows_of_day, tuple(columns.values()), ids_of)
    return 4 * sum(meta.cardinalities)


def new_ids(
    sort: str, number: int, column: Categorical, first: NDArray[np.int32]
) -> tuple[Categorical, Ids]:
    """A column with another sort of ids, and what gives them.

    Args:
        sort: ``all`` keeps the ids of the vocabulary of all days.
        number: of the column.
        column: with these ids.
        first: those of the first day.
    """
    if sort == ALL:
        return column, np.asarray
    if sort == HASHES:

        def hashed(ids: NDArray[np.int32]) -> NDArray[np.int64]:
            keys = torch.from_numpy(ids.astype(np.int64)) + (number << 40)
            return mix(keys).numpy() % HASHED

        seen = len(np.unique(first))
        return replace(column, cardinality=HASHED, oov_id=None, values=seen), hashed

    # In order of falling frequency; the last id is that of all other values.
    counts = np.bincount(first, minlength=column.cardinality)
    order = np.argsort(-counts, kind="stable")
    seen = int((counts > 0).sum())
    of_id = np.full(column.cardinality, seen, np.int32)
    of_id[order[:seen]] = np.arange(seen)
    return replace(column, cardinality=seen + 1, oov_id=seen), of_id.__getitem__


def write_day(
    path: Path, meta: Meta, rows: pa.Table, columns: tuple[Categorical, ...], ids: dict[str, Ids]
) -> None:
    """Write a day as a preparation does."""
    made = {name: rows[name] for name in (meta.label, *meta.dense)}
    made |= {name: pa.array(ids_of(rows[name].to_numpy())) for name, ids_of in ids.items()}
    fields = [pa.field(name, values.type, nullable=False) for name, values in made.items()]
    path.mkdir(parents=True, exist_ok=True)
    table = pa.table(list(made.values()), schema=pa.schema(fields))
    pq.write_table(table, path / "train.parquet")
    positives = int(rows[meta.label].to_numpy().sum())
    splits = {"train": Split(files=("train.parquet",), rows=len(rows), positives=positives)}
    Meta(dense=meta.dense, categorical=columns, splits=splits, label=meta.label).write(path)


# Runs -----------------------------------------------------------------------------------------


def runs_on(log: str, dense_bytes: int, options: Namespace) -> dict[str, dict[str, Any]]:
    """The runs on a log, by their names."""
    runs = {}
    plain = ["dense", *(kind for kind in options.kinds if kind == FIRST)]
    compressed = [kind for kind in options.kinds if kind not in plain]
    points = [(kind, 1.0) for kind in plain] + list(product(compressed, options.ratios))
    for seed, (kind, ratio) in product(range(options.seeds), points):
        name, *more = kind.split(",")
        name, _, sort = name.partition("@")
        emb, _, dtype = name.partition(":")
        sort = sort or {"dynamic": HASHES, FIRST: FIRST}.get(emb, ALL)
        flags = [f"--follow={(options.work / log / sort).resolve()}", f"--seed={seed}"]
        flags += [f"--emb={'dense' if emb == FIRST else emb}", *(f"--{o}" for o in more)]
        flags += [f"--tables.dtype={dtype}"] if dtype else []
        flags += [] if kind in plain else [f"--budget={int(dense_bytes / ratio)}"]
        run = {"log": log, "kind": kind, "ratio": ratio, "seed": seed, "given": flags}
        runs[re.sub(r"[^\w.]+", "-", f"{log}-{kind}-{ratio:g}-{seed}")] = run
    return runs


def row_of(run: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The result of a finished run."""
    result = read_result(directory)
    days = [day["auc"] for day in result["days"] if "auc" in day]
    figures = {"bytes": int(result["metrics"]["embeddings/bytes"]), "auc": float(np.mean(days))}
    return {name: run[name] for name in ("log", "kind", "ratio", "seed")} | figures | {"days": days}


def summarize(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean over seeds of each kind and ratio, and how far it is from dense."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["log"], row["kind"], row["ratio"]), []).append(row)

    # Runs of the same seed see the same rows in the same order.
    summary = []
    for (log, kind, ratio), rows in groups.items():
        scores = [row["auc"] for row in rows]
        dense = [row["auc"] for row in groups.get((log, "dense", 1.0), [])]
        summary.append(
            {
                "log": log,
                "kind": kind,
                "ratio": ratio,
                "bytes": rows[0]["bytes"],
                "auc": float(np.mean(scores)),
                "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
                "above dense": float(np.mean(scores) - np.mean(dense)) if dense else None,
                "days": np.mean([row["days"] for row in rows], 0).tolist(),
            }
        )
    return summary


def draw(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot AUC against the day at the middle ratio, and the mean against the ratio, log by log."""
    logs = list(dict.fromkeys(row["log"] for row in summary))
    kinds = list(dict.fromkeys(row["kind"] for row in summary))
    ratios = sorted({row["ratio"] for row in summary if row["kind"] not in ("dense", "first")})
    middle = ratios[len(ratios) // 2] if ratios else 1.0
    figure, panels = plt.subplots(
        2, len(logs), figsize=(4 * len(logs), 6.5), layout="constrained", squeeze=False
    )

    # Kinds that do not depend on the ratio are horizontal lines.
    for column, log in enumerate(logs):
        by_day, by_ratio = panels[:, column]
        for number, kind in enumerate(kinds):
            rows = [row for row in summary if (row["log"], row["kind"]) == (log, kind)]
            alone = kind in ("dense", "first")
            style: dict[str, Any] = {"color": f"C{number}", "label": kind}
            for row in rows:
                if alone or row["ratio"] == middle:
                    by_day.plot(range(2, len(row["days"]) + 2), row["days"], "o-", ms=3, **style)
            if alone and rows:
                by_ratio.axhline(rows[0]["auc"], ls="--", **style)
            elif rows:
                line = sorted((row["ratio"], row["auc"], row["spread"] or 0) for row in rows)
                by_ratio.errorbar(*zip(*line, strict=True), fmt="o-", ms=3, **style)

        by_day.set(title=log, xlabel=f"day, at {middle:g}x fewer bytes", ylabel="AUC")
        by_ratio.set(xscale="log", xlabel="times fewer bytes than dense", ylabel="progressive AUC")
    panels[0, 0].legend(fontsize="small")
    save_figure(figure, path, dpi=150)
    plt.close(figure)


def compare_days(options: Namespace) -> None:
    """Train the runs that are missing, then write the results of all."""
    runs: dict[str, dict[str, Any]] = {}
    common = [f"--{option}" for option in options.options]
    dim = next((int(o.split("=")[1]) for o in options.options if "embedding_dim=" in o), 16)
    for log in options.only:
        directory = prepare_log(log, options)
        runs |= runs_on(log, dim * cut(directory, options.days), options)

    runs = dict(sorted(runs.items(), key=lambda item: item[1]["seed"]))
    common = ["--follow_wait=0", "--checkpoint=false", *common]
    runner = Runner(options.runs, options.jobs, common)
    record = harness.Record(options.json)

    def report() -> list[dict[str, Any]]:
        """Write what has finished."""
        results = [row_of(run, options.runs / n) for n, run in runs.items() if runner.finished(n)]
        summary = summarize(results)
        settings = {"options": options.options, "days": options.days}
        record.note(**settings, results=results, summary=summary)
        return summary

    print(*runner.train([RunSpec(name, run["given"]) for name, run in runs.items()], save=report))
    summary = report()
    for row in sorted(summary, key=lambda row: (row["log"], row["ratio"], -row["auc"])):
        print("{log:8} {ratio:5g}x {bytes:12,} {auc:.5f} {above dense:+.5f} {kind}".format(**row))
    draw(summary, options.plot)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(partial(compare_days, options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())

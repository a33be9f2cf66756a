"""Compare runs in a table, and in a plot of quality against memory.

``python scripts/compare.py runs/*`` groups the runs that differ only in their seed. It shows the
mean of each group and, from two seeds on, the standard deviation. If several runs of a group have
the same seed, only the first one counts. The table lists the options that differ between groups of
the same kind, and the data if it differs between any groups. Directories without a finished run are
reported and left out.
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dlrm.config.schema import HOUSEKEEPING
from dlrm.embeddings import available
from dlrm.training.tracking import RESULT, log_figures, read_result, without
from dlrm.utils.atomic import atomic_write
from dlrm.utils.messages import print_error, printable
from dlrm.utils.program import Parser, exit_status, figure_arg, path_arg

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the other scripts
from scripts.experiments.report import log_x_axis, mean_and_std, write_plot

METRICS = {
    "test/auc": "AUC",
    "test/log_loss": "log loss",
    "test/accuracy": "accuracy",
    "test/normalized_entropy": "NE",
    "embeddings/bytes": "MB",
    "embeddings/compression": "ratio",
    "speed/samples_per_second": "samples/s",
}
FORMATS = {
    "AUC": ".4f",
    "log loss": ".4f",
    "accuracy": ".4f",
    "NE": ".4f",
    "MB": ",.2f",
    "ratio": ".1f",
    "samples/s": ",.0f",
}

QUALITY = ("AUC", "log loss", "accuracy", "NE")
LOSSES = ("log loss", "NE")  # lower is better


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=path_arg, help="run directories")
    parser.add_argument(
        "--plot",
        type=figure_arg,
        default=Path("compare.png"),
        help="plot to write: PNG, SVG or PDF",
    )
    parser.add_argument("--metric", choices=QUALITY, default="AUC", help="metric of the plot")
    parser.add_argument("--json", type=path_arg, help="also write the table to this JSON file")
    parser.add_argument(
        "--tensorboard",
        type=path_arg,
        metavar="DIR",
        help="also add the plot to TensorBoard as a run in this directory, e.g. runs/comparison",
    )
    return parser


def read(runs: list[Path]) -> pd.DataFrame:
    """One row per finished run: its group, kind and metrics.

    Raises:
        FileNotFoundError: no directory has a ``result.json``.
        ValueError: a ``result.json`` was not written by ``train.py``.
    """
    rows = []
    seen: set[tuple[str, object]] = set()
    finished = [run for run in runs if (run / RESULT).is_file()]
    if others := [str(run) for run in runs if run not in finished]:
        reason = f"no {RESULT} in {', '.join(others)}: not a run directory, or not finished"
        if not finished:
            raise FileNotFoundError(reason)
        print_error(f"left out: {reason}")
    for run in finished:
        result = read_result(run)
        options = _group_options(result)
        group, seed = json.dumps(options, sort_keys=True), result["options"].get("seed")
        if (group, seed) in seen:
            print_error(f"left out: {run} repeats the seed of an earlier run")
            continue
        seen.add((group, seed))
        names = {"run": run.name, "emb": _kind(options), "budget": options.get("budget") or ""}
        values = {label: result["metrics"].get(name) for name, label in METRICS.items()}
        rows.append({**names, "group": group, **values})
    table = pd.DataFrame(rows).astype(dict.fromkeys(METRICS.values(), float))
    table["MB"] /= 1e6
    return table


def _group_options(result: dict[str, Any]) -> dict[str, Any]:
    """What the runs of a group have in common: options that change results, and the data."""
    options = without(result["options"], {"seed", *HOUSEKEEPING})
    if "data" in options:
        options["data"] = str(Path(options["data"]))  # without a trailing slash
    if "rows" in result:  # the data may have been made again in the same place
        options["rows"] = result["rows"]
    return options


def _kind(options: dict[str, Any]) -> str:
    """The embedding kind. ``tt`` with a cache counts as a kind of its own."""
    cached = options["emb"] == "tt" and options.get("tt", {}).get("cache_rows")
    return "tt+cache" if cached else options["emb"]


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of each group of runs, best first."""
    groups = table.groupby("group", sort=False)
    summary = groups[["run", "emb", "budget"]].first()
    summary["options"] = _differing_options(summary)
    summary["seeds"] = groups.size()
    for label in METRICS.values():
        summary[label] = groups[label].mean()
        summary[f"{label} std"] = groups[label].std()
    return summary.reset_index(drop=True).sort_values("AUC", ascending=False)


def _differing_options(summary: pd.DataFrame) -> pd.Series:
    """The options of each group that differ between groups of its kind, except the budget.

    The data is included if any two groups differ in it, because results on different data can't be
    compared.
    """
    flats = [pd.json_normalize(json.loads(group)).astype(object) for group in summary.index]
    flat = pd.concat(flats).set_axis(summary.index)  # dtype object, so that 7 does not become 7.0
    data = flat.filter(regex=r"^(data$|rows\.)")
    different_data = {name for name in data if data[name].dropna().map(str).nunique() > 1}
    texts = {}
    for kind, groups in summary.groupby("emb"):
        own = flat.loc[groups.index].dropna(axis=1, how="all")
        of_tables = own.filter(regex=r"^tables\.kinds\.").to_numpy().ravel()
        used = {str(kind).partition("+")[0], *of_tables}
        unused = tuple(f"{other}." for other in available().keys() - used)
        own = own.map(str)
        names = [
            name
            for name in own.columns
            if (own[name].nunique() > 1 or name in different_data)
            and name != "budget"
            and not name.startswith(unused)
        ]
        for group, options in own[names].iterrows():
            texts[group] = " ".join(f"{name}={value}" for name, value in options.items())
    return pd.Series(texts)


def render(summary: pd.DataFrame) -> str:
    """The summary as a text table."""
    shown = summary[["run", "emb", "budget", "seeds"]].map(printable)
    for label, form in FORMATS.items():
        stds = summary[f"{label} std"] if label in QUALITY else None
        shown[label] = mean_and_std(summary[label], stds, form)
    if summary["options"].any():
        shown["options"] = summary["options"].map(printable)
    return shown.to_string(index=False)


def draw(summary: pd.DataFrame, metric: str, path: Path) -> Figure:
    """Plot quality or speed against memory, one line per kind, with error bars over seeds."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    shown = summary.dropna(subset=metric).sort_values("MB")
    others = [kind for kind in sorted(set(shown["emb"])) if kind != "dense"]
    for kind, points in shown.groupby("emb"):
        dense = kind == "dense"
        second = not dense and others.index(kind) >= 10  # there are ten colors
        axes.errorbar(
            points["MB"],
            points[metric],
            yerr=points[f"{metric} std"].fillna(0.0),
            fmt="k*" if dense else "s--" if second else "o-",
            markersize=11 if dense else 5,
            zorder=3 if dense else 2,
            capsize=3,
            label=kind,
        )
        if dense:
            best = points[metric].min() if metric in LOSSES else points[metric].max()
            axes.axhline(best, color="gray", linestyle="--", linewidth=0.8)
    log_x_axis(axes, "embedding memory (MB)")
    axes.set_ylabel(f"test {metric}" if metric in QUALITY else metric)
    if metric not in QUALITY:
        axes.yaxis.set_major_formatter(EngFormatter())
    figure.legend(*axes.get_legend_handles_labels(), title="--emb", loc="outside right center")
    write_plot(figure, path)
    return figure


def compare(options: Namespace) -> None:
    """Print the table and write the plot."""
    summary = summarize(read(options.runs))
    print(render(summary))
    figure = draw(summary, options.metric, options.plot)
    print(f"plot in {options.plot}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(options.json) as temporary:
            summary.to_json(temporary, orient="records", indent=2)
    if options.tensorboard:
        log_figures(options.tensorboard, {f"comparison/{options.metric}": figure})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())

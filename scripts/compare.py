"""Compare runs in one table and one plot of quality against bytes.

``python scripts/compare.py runs/*`` groups runs that differ in their seed alone and gives the mean
and, from two seeds on, the standard deviation over them; of runs that repeat a seed the first
counts. Options in which groups of one kind differ are shown, the data where any differ in it. What
else lies there, runs that have not finished too, is named and left out.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from dlrm.config.schema import HOUSEKEEPING
from dlrm.embeddings import available
from dlrm.training.tracking import RESULT, log_figures, without
from dlrm.utils.atomic import atomic_write, save_figure
from dlrm.utils.program import Parser, exit_status, figure_arg, path_arg

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
LOSSES = ("log loss", "NE")  # the lower the better


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=path_arg, help="run directories")
    parser.add_argument(
        "--plot", type=figure_arg, default=Path("compare.png"), help="PNG, SVG or PDF to draw"
    )
    parser.add_argument("--metric", choices=QUALITY, default="AUC", help="what the plot shows")
    parser.add_argument("--json", type=path_arg, help="also write the table as JSON")
    parser.add_argument(
        "--tensorboard",
        type=path_arg,
        metavar="DIR",
        help="also show the plot in TensorBoard, as a run of this name, such as runs/comparison",
    )
    return parser


def read(runs: list[Path]) -> pd.DataFrame:
    """One row per finished run: its group, kind and metrics.

    Raises:
        FileNotFoundError: no directory has a ``result.json``.
        ValueError: one that holds no result.
    """
    rows = []
    seen: set[tuple[str, object]] = set()
    finished = [run for run in runs if (run / RESULT).is_file()]
    if others := [str(run) for run in runs if run not in finished]:
        rule = f"no {RESULT} in {', '.join(others)}: no run directory, or not finished"
        if not finished:
            raise FileNotFoundError(rule)
        print(f"left out: {rule}", file=sys.stderr)
    for run in finished:
        path = run / RESULT
        try:
            result = json.loads(path.read_text())
            given = result["options"]
            options = without(given, {"seed", *HOUSEKEEPING})
            if "data" in options:
                options["data"] = str(Path(options["data"]))  # without a slash behind it
            if "rows" in result:  # data may have been made anew in one place
                options["rows"] = result["rows"]
            values = {label: result["metrics"].get(name) for name, label in METRICS.items()}
            kind = _kind(options)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no result of train.py: {error!r}") from None
        group = json.dumps(options, sort_keys=True)
        if (group, given.get("seed")) in seen:
            print(f"left out: {run} repeats the seed of a run before it", file=sys.stderr)
            continue
        seen.add((group, given.get("seed")))
        rows.append(
            {
                "run": run.name,
                "emb": kind,
                "budget": options.get("budget") or "",
                "group": group,
                **values,
            }
        )
    table = pd.DataFrame(rows).astype(dict.fromkeys(METRICS.values(), float))
    table["MB"] /= 1e6
    return table


def _kind(options: dict[str, Any]) -> str:
    """The embedding kind, ``tt`` with a cache being one of its own."""
    cached = options["emb"] == "tt" and options.get("tt", {}).get("cache_rows")
    return "tt+cache" if cached else options["emb"]


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and spread of each group of runs, best first."""
    labels = list(METRICS.values())
    groups = table.groupby("group", sort=False)
    summary = groups[["run", "emb", "budget"]].first()
    summary["options"] = _differing(summary)
    summary["seeds"] = groups.size()
    for label in labels:
        summary[label] = groups[label].mean()
        summary[f"{label} std"] = groups[label].std()
    return summary.reset_index(drop=True).sort_values("AUC", ascending=False)


def _differing(summary: pd.DataFrame) -> pd.Series:
    """The options of each group in which those of its kind differ, the budget aside; and the data
    where any two groups differ, for on other data no kind is better or worse than another."""
    flats = [pd.json_normalize(json.loads(group)).astype(object) for group in summary.index]
    flat = pd.concat(flats).set_axis(summary.index)  # of objects: 7 beside None is no 7.0
    of_data = flat.filter(regex=r"^(data$|rows\.)")
    several = {name for name in of_data if of_data[name].dropna().map(str).nunique() > 1}
    told = {}
    for kind, groups in summary.groupby("emb"):
        own = flat.loc[groups.index].dropna(axis=1, how="all")
        of_tables = own.filter(regex=r"^tables\.kinds\.").to_numpy().ravel()
        used = {str(kind).partition("+")[0], *of_tables}
        others = [f"{other}." for other in available().keys() - used]
        own = own.map(str)
        names = [
            name
            for name in own.columns
            if (own[name].nunique() > 1 or name in several)
            and name != "budget"
            and not name.startswith(tuple(others))
        ]
        for group, options in own[names].iterrows():
            told[group] = " ".join(f"{name}={value}" for name, value in options.items())
    return pd.Series(told)


def render(summary: pd.DataFrame) -> str:
    """The summary as a text table, ``mean ± std`` where there are several seeds."""
    shown = summary[["run", "emb", "budget", "seeds"]].copy()
    for label, form in FORMATS.items():
        spread = summary[f"{label} std"]
        shown[label] = [
            f"{mean:{form}}" + (f" ± {std:{form}}" if std == std and label in QUALITY else "")
            for mean, std in zip(summary[label], spread, strict=True)
        ]
    if summary["options"].any():
        shown["options"] = summary["options"]
    return shown.to_string(index=False)


def draw(summary: pd.DataFrame, metric: str, path: Path) -> Figure:
    """Quality or speed against bytes, one line per kind, with error bars over seeds."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    shown = summary.dropna(subset=metric).sort_values("MB")
    others = [kind for kind in sorted(set(shown["emb"])) if kind != "dense"]
    for kind, points in shown.groupby("emb"):
        dense = kind == "dense"
        again = not dense and others.index(kind) >= 10  # there are ten colors
        axes.errorbar(
            points["MB"],
            points[metric],
            yerr=points[f"{metric} std"].fillna(0.0),
            fmt="k*" if dense else "s--" if again else "o-",
            markersize=11 if dense else 5,
            zorder=3 if dense else 2,
            capsize=3,
            label=kind,
        )
        if dense:
            best = points[metric].min() if metric in LOSSES else points[metric].max()
            axes.axhline(best, color="gray", linestyle="--", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("embedding memory (MB)")
    axes.set_ylabel(f"test {metric}" if metric in QUALITY else metric)
    if metric not in QUALITY:
        axes.yaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), title="--emb", loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=150)
    plt.close(figure)
    return figure


def compare(options: Namespace) -> None:
    """Print the table and draw the plot."""
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

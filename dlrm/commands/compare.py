"""Compare runs in a table, and in a plot of quality against memory.

``dlrm compare runs`` groups the runs that differ only in their seed. It shows the
mean of each group and, from two seeds on, the standard deviation. If several runs of a group have
the same seed, only the first one counts. Runs on different data have tables and plots of their own.
A table lists the options that differ between the groups, and those of tables that differ between
groups of the same kind, unless they are at their default. Directories without a finished run are
reported and left out.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dlrm.commands.figures import log_x_axis, mean_and_std, write_plot
from dlrm.config.options import changed_options
from dlrm.embeddings import available
from dlrm.training.run_directory import CONFIG
from dlrm.training.tracking import RESULT, log_figures, read_result
from dlrm.utils.atomic import atomic_write
from dlrm.utils.messages import print_error, printable
from dlrm.utils.program import Parser, exit_status, figure_arg, path_arg

METRICS = {
    "test/auc": ("AUC", ".4f"),
    "test/log_loss": ("log loss", ".4f"),
    "test/accuracy": ("accuracy", ".4f"),
    "test/normalized_entropy": ("NE", ".4f"),
    "test/calibration": ("calibration", ""),
    "val/auc": ("val AUC", ""),
    "val/log_loss": ("val log loss", ""),
    "embeddings/bytes": ("MB", ",.2f"),
    "embeddings/compression": ("ratio", ".1f"),
    "embeddings/optimizer_bytes": ("optimizer bytes", ""),
    "speed/samples_per_second": ("samples/s", ",.0f"),
}
"""The label of each metric, and its format in the table, if it is there."""
LABELS = [label for label, _ in METRICS.values()]

QUALITY = ("AUC", "log loss", "accuracy", "NE")
LOSSES = ("log loss", "NE")  # lower is better
IN_COLUMNS = ("data", "emb", "budget")
ACROSS = 3  # panels of a plot in a row


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=path_arg, help="runs, or directories with runs")
    plot = "plot to write: PNG, SVG or PDF"
    add("--plot", type=figure_arg, default=Path("compare.png"), help=plot)
    add("--metric", choices=QUALITY, default="AUC", help="metric of the plot")
    add("--json", type=path_arg, help="also write the table to this JSON file")
    board = "also add the plot to TensorBoard as a run in this directory, e.g. runs/comparison"
    add("--tensorboard", type=path_arg, metavar="DIR", help=board)
    return parser


def read(runs: list[Path]) -> pd.DataFrame:
    """One row per finished run: its group, kind and metrics.

    Raises:
        FileNotFoundError: no directory has a ``result.json``.
        ValueError: a ``result.json`` was not written by ``train.py``.
    """
    runs = [run for path in runs for run in _runs_in(path)]
    finished = [run for run in runs if (run / RESULT).is_file()]
    if unfinished := [str(run) for run in runs if run not in finished]:
        reason = f"no {RESULT} in {', '.join(unfinished)}: not a run directory, or not finished"
        if not finished:
            raise FileNotFoundError(reason)
        print_error(f"left out: {reason}")

    # Runs of a group have the same data and options, except for the seed.
    rows = []
    seen: set[tuple[str, object]] = set()
    results = [read_result(run) for run in finished]
    data = _name_data([_identity(result) for result in results])
    for run, result, name in zip(finished, results, data, strict=True):
        options = changed_options(result["options"], available())
        seed = result["options"].get("seed")
        same = {key: value for key, value in options.items() if key not in ("seed", "data")}
        same |= {"data": name, "emb": result["options"]["emb"]}
        group = json.dumps(same, sort_keys=True)
        if (group, seed) in seen:
            print_error(f"left out: {run} repeats the seed of an earlier run")
            continue
        seen.add((group, seed))

        names = {"run": run.name, "data": name, "emb": _kind(result["options"], options)}
        names |= {"budget": options.get("budget") or "", "group": group}
        values = {label: result["metrics"].get(name) for name, (label, _) in METRICS.items()}
        rows.append({**names, **values})

    table = pd.DataFrame(rows).astype(dict.fromkeys(LABELS, float))
    table["MB"] /= 1e6
    return table


def _runs_in(path: Path) -> list[Path]:
    """The run of a path; of a directory with runs, all of them, finished or not."""
    if (path / RESULT).is_file():
        return [path]
    inside = {file.parent for name in (CONFIG, RESULT) for file in path.glob(f"*/{name}")}
    return sorted(inside) or [path]


def _identity(result: dict[str, Any]) -> tuple[str, str, str]:
    """The identity of the data of a run: its name, rows and preparation.

    Copies of a prepared directory are the same data. Where the preparation is unknown, as in runs
    of earlier versions, the path counts instead.
    """
    path = Path(result["options"].get("data", "data"))
    rows = {split: counts[0] for split, counts in result.get("rows", {}).items()}
    text = ", ".join(f"{count:,} {split}" for split, count in rows.items() if count)
    preparation = result.get("preparation") or f"at {path}"
    return path.name, text, f"{preparation} {result.get('rows')}"


def _name_data(identities: Sequence[tuple[str, str, str]]) -> list[str]:
    """A name for each data set, with a number if its name and rows do not tell it from others."""
    names = []
    for name, rows, preparation in identities:
        alike = [*dict.fromkeys(same for *about, same in identities if about == [name, rows])]
        number = f" #{alike.index(preparation) + 1}" if len(alike) > 1 else ""
        names.append(f"{name}{number} ({rows} rows)" if rows else f"{name}{number}")
    return names


def _kind(options: dict[str, Any], changed: dict[str, Any]) -> str:
    """The embedding kind, with the type of its rows if that is not the default. ``tt`` with a cache
    counts as a kind of its own.
    """
    cached = options["emb"] == "tt" and options.get("tt", {}).get("cache_rows")
    kind = "tt+cache" if cached else options["emb"]
    return f"{kind} {changed['tables.dtype']}" if changed.get("tables.dtype") else kind


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of each group of runs, by data set, best first."""
    groups = table.groupby("group", sort=False)
    summary = groups[["run", "data", "emb", "budget"]].first()
    summary["options"] = _differing_options(summary)
    summary["seeds"] = groups.size()
    for label in LABELS:
        summary[label] = groups[label].mean()
        summary[f"{label} std"] = groups[label].std()
    return summary.reset_index(drop=True).sort_values(["data", "AUC"], ascending=[True, False])


def _differing_options(summary: pd.DataFrame) -> pd.Series:
    """The options of each group that differ between the groups on the same data; those of tables,
    such as ``tt.rank``, between the groups of the same kind.

    Options at their defaults and those that have a column are left out. Names are short where that
    is clear.
    """
    groups = [json.loads(str(group)) for group in summary.index]
    options = pd.DataFrame(groups, index=summary.index, dtype=object).sort_index(axis=1)
    options = options.drop(columns=[*IN_COLUMNS], errors="ignore").map(_compact, na_action="ignore")

    # An option differs if the groups to compare with have several values of it, or none.
    data, kinds = summary["data"], summary["emb"]
    for name in options:
        of_table = str(name).partition(".")[0] in ("tables", *available())
        rivals = options[name].groupby([data, kinds] if of_table else data)
        options[name] = options[name].where(rivals.transform("nunique", dropna=False) > 1)
    shown = options.dropna(axis=1, how="all")

    leaf_of = {str(name): str(name).rpartition(".")[2] for name in shown}
    leaves = Counter([*available(), *leaf_of.values()])
    short = {name: leaf for name, leaf in leaf_of.items() if leaves[leaf] == 1}
    rows = shown.rename(columns=short).iterrows()
    texts = {
        group: " ".join(f"{name}={value}" for name, value in row.dropna().items())
        for group, row in rows
    }
    return pd.Series(texts, dtype=object)


def _compact(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{each}" for name, each in value.items()) + "}"
    return str(value).replace(" ", "")


def render(summary: pd.DataFrame) -> str:
    """The summary as text, a table for each data set."""
    shown = summary[["run", "emb", "budget", "seeds"]].map(printable)
    for label, form in filter(all, METRICS.values()):
        stds = summary[f"{label} std"] if label in QUALITY else None
        shown[label] = mean_and_std(summary[label], stds, form)
    shown["options"] = summary["options"].map(printable)
    tables = []
    for data, rows in shown.groupby(summary["data"]):
        empty = [column for column in ("budget", "options") if not rows[column].any()]
        tables.append(f"{printable(data)}\n{rows.drop(columns=empty).to_string(index=False)}")
    return "\n\n".join(tables)


def draw(summary: pd.DataFrame, metric: str, path: Path) -> Figure:
    """Plot quality or speed against memory, one line per kind, with error bars over seeds.

    Each data set has axes of its own.
    """
    # A grid of axes, as many as there are data sets.
    sets = sorted(set(summary["data"]))
    across = min(len(sets), ACROSS)
    lines = ceil(len(sets) / across)
    size = (2 + 7 * across, 5 * lines)
    figure, grid = plt.subplots(lines, across, figsize=size, layout="constrained", squeeze=False)
    panels = list(grid.flat)[: len(sets)]
    for unused in list(grid.flat)[len(sets) :]:
        unused.remove()

    # A kind has the same color in all of them.
    kinds = sorted(set(summary["emb"]) - {"dense"})
    for axes, data in zip(panels, sets, strict=True):
        _draw_data(axes, summary[summary["data"] == data], metric, kinds)
        if len(sets) > 1:
            axes.set_title(data)

    # One legend names each kind once.
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), title="--emb", loc="outside right center")
    write_plot(figure, path)
    return figure


def _draw_data(axes: Axes, summary: pd.DataFrame, metric: str, kinds: Sequence[str]) -> None:
    """Plot the runs on one data set; ``kinds`` are all of them except dense."""
    shown = summary.dropna(subset=metric).sort_values("MB")
    for kind, points in shown.groupby("emb"):
        dense = kind == "dense"

        position = 0 if dense else kinds.index(kind)
        second = position >= 10  # there are ten colors
        axes.errorbar(
            points["MB"],
            points[metric],
            yerr=points[f"{metric} std"].fillna(0.0),
            fmt="*" if dense else "s--" if second else "o-",
            color="k" if dense else f"C{position}",
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

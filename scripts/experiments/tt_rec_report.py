"""The table and the plot of the TT-Rec experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from dlrm.commands.figures import log_x_axis, mean_and_std, write_plot
from scripts.experiments.runner import Runner

METRICS = {
    "test/accuracy": "accuracy",
    "test/auc": "AUC",
    "test/log_loss": "log loss",
    "test/normalized_entropy": "NE",
}
FITTED = {"accuracy": "fitted accuracy", "auc": "fitted AUC"}
FORMATS = {
    **dict.fromkeys(("accuracy", "AUC", "log loss", "NE"), ".4f"),
    **{"loss, %": ".3f", "MB": ",.2f", "ratio": ".1f", "step, ms": ".3f", "samples/s": ",.0f"},
    **dict.fromkeys(FITTED.values(), ".4f"),
}
AXES = {"loss, %": "accuracy below dense (percentage points)", "step, ms": "training step (ms)"}


def summarize(names: dict[str, list[str]], runner: Runner) -> pd.DataFrame:
    """One row per cell: means and deviations over seeds, and the accuracy lost against dense.

    Args:
        names: the finished runs of each cell; those of "dense" are the baseline.
        runner: gives their metrics.
    """
    baseline = {
        _seed(name, "dense"): runner.metrics(name)["test/accuracy"] for name in names["dense"]
    }

    rows = []
    for cell, name in ((cell, name) for cell, runs in names.items() for name in runs):
        metrics, seed = runner.metrics(name), _seed(name, cell)
        row: dict[str, Any] = {"cell": cell}
        row |= {label: metrics[metric] for metric, label in METRICS.items()}
        if seed in baseline:  # the dense run of the same seed, which may have failed
            row["loss, %"] = 100 * (baseline[seed] - metrics["test/accuracy"])
        row |= {"MB": metrics["embeddings/bytes"] / 1e6, "ratio": metrics["embeddings/compression"]}
        if "fitted/accuracy" in metrics:
            row |= {label: metrics[f"fitted/{key}"] for key, label in FITTED.items()}
        rows.append(row)

    groups = pd.DataFrame(rows).groupby("cell", sort=False)
    spread = groups[[*METRICS.values(), "loss, %"]].std().add_suffix(" std")
    return groups.mean().join(spread).assign(seeds=groups.size()).reset_index()


def _seed(name: str, cell: str) -> str:
    """The seed of a run; that of a compressed model is the seed of the dense run, 0."""
    return "0" if name == cell else name.removeprefix(f"{cell}-")


def render(summary: pd.DataFrame) -> str:
    """The summary as a text table."""
    shown = summary[["cell", "seeds"]].copy()
    for label, form in FORMATS.items():
        if label in summary:
            shown[label] = mean_and_std(summary[label], summary.get(f"{label} std"), form)
    return shown.to_string(index=False)


def draw(summary: pd.DataFrame, path: Path) -> None:
    """Plot the lost accuracy and, if it was measured, the time of a step against compression."""
    labels = [label for label in AXES if label in summary]
    figure, panels = plt.subplots(
        1, len(labels), figsize=(6.5 * len(labels), 5), layout="constrained", squeeze=False
    )
    for axes, label in zip(panels[0], labels, strict=True):
        _draw_points(axes, summary, label)
        log_x_axis(axes, "compression of all embeddings", "{x:g}x")
        axes.margins(x=0.1)
        axes.set_ylabel(AXES[label])
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        title="next to each point: its rank, or the share of rows in its cache",
        loc="outside lower center",
        ncols=6,
    )
    write_plot(figure, path)


def _draw_points(axes: Axes, summary: pd.DataFrame, label: str) -> None:
    """Plot one column of the summary against compression.

    The points are not connected: as the rank grows, both coordinates can rise and fall.
    """
    axes.axhline(summary[label][0], color="gray", linestyle="--", label="dense")
    parts = summary["cell"].str.extract(r"^(fitted-)?tt(\d+)-r(\d+)(-c)?([\d.e-]+)?$").fillna("")

    colors = {tables: f"C{color}" for color, tables in enumerate(sorted(set(parts[1])))}
    for (fitted, tables, cached), points in summary.groupby([parts[0], parts[1], parts[3]]):
        if not tables or points[label].isna().all():
            continue

        stds = points.get(f"{label} std")
        axes.errorbar(
            points["ratio"],
            points[label],
            yerr=None if fitted or stds is None else stds.fillna(0.0),
            fmt="x" if fitted else ("s" if cached else "o"),
            color="black" if fitted else colors[tables],
            markerfacecolor="white" if cached else None,
            capsize=3,
            label="_" if fitted else f"{tables} tables" + (" with a cache" if cached else ""),
        )

        texts = points[["ratio", label]].join(parts[[2, 4]])
        for ratio, value, rank, size in () if fitted else texts.itertuples(index=False):
            text = f"{100 * float(size):g}%" if cached else rank
            axes.annotate(text, (ratio, value), (4, 3), textcoords="offset points", fontsize=8)

    if parts[0].any():
        axes.plot([], [], "kx", label="dense, compressed and fine-tuned")

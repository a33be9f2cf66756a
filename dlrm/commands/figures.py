"""Tables and plots of results that several programs write."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dlrm.utils.atomic import save_figure


def mean_and_std(means: pd.Series, stds: pd.Series | None, form: str) -> list[str]:
    """Table cells such as ``0.7812 ± 0.0003``.

    Args:
        means: a NaN is shown as ``-``.
        stds: left out where it is NaN, as for a single seed; None leaves out all.
        form: format of both numbers.
    """
    cells = ["-" if pd.isna(mean) else f"{mean:{form}}" for mean in means]
    if stds is None:
        return cells
    pairs = zip(cells, stds, strict=True)
    return [cell if pd.isna(std) else f"{cell} ± {std:{form}}" for cell, std in pairs]


def log_x_axis(axes: Axes, label: str, ticks: str = "{x:g}") -> None:
    """Make the x-axis logarithmic, with plain numbers at 1, 2 and 5, and add a grid."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(ticks)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def write_plot(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the suffix of ``path``, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=150)
    plt.close(figure)

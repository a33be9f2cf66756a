"""Plots of scores: their reliability, and how they are distributed. TensorBoard shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm.training.importance import Importance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 20  # of the reliability plot, each of as many samples
BINS = 50  # of the plot of scores


@dataclass(frozen=True, kw_only=True)
class Plots:
    """Two plots of the scores of a split, binned where the scores are."""

    split: str
    reliability: NDArray[np.float64]
    """Mean probability and share of positives of samples in order of score, ``[2, points]``."""
    shares: NDArray[np.float64]
    """Shares of the negatives and of the positives in each bin of probability, ``[2, BINS]``."""
    highest: float
    """The end of the last bin, the highest probability; the first one begins at 0."""

    @classmethod
    @torch.inference_mode()
    def of(cls, split: str, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Plots:
        """Bin the samples of a split: ``logits``, ``labels`` and any ``weights``, each ``[n]``."""
        probability, order = torch.sigmoid(logits.double()).sort()
        positive = labels[order].double()
        weight = torch.ones_like(positive) if weights is None else weights[order].double()

        def sums(bins: Tensor, count: int, *values: Tensor) -> NDArray[np.float64]:
            empty = probability.new_zeros(len(values), count)
            return empty.index_add_(1, bins, torch.stack(values)).cpu().numpy()

        points = min(POINTS, len(order))
        part = torch.arange(len(order), device=order.device) * points // len(order)
        total, *of_points = sums(part, points, weight, weight * probability, weight * positive)
        highest = float(probability[-1]) or 1.0
        bins = (probability / highest * BINS).long().clamp(max=BINS - 1)
        counts = sums(bins, BINS, weight * (1 - positive), weight * positive)
        return cls(
            split=split,
            reliability=np.stack(of_points)[:, total > 0] / total[total > 0],
            shares=counts / np.maximum(counts.sum(1, keepdims=True), 1e-300),
            highest=highest,
        )

    def figures(self) -> dict[str, Figure]:
        """The plots by their TensorBoard tags."""
        reliability, axes = _figure("", "")
        self.draw_reliability(axes)
        scores, axes = _figure("", "")
        self.draw_scores(axes)
        return {f"reliability/{self.split}": reliability, f"scores/{self.split}": scores}

    def draw_reliability(self, axes: Axes) -> None:
        """Plot the share of positives against the mean probability."""
        end = float(self.reliability.max())
        axes.plot([0, end], [0, end], "--", color="gray", label="calibrated")
        axes.plot(*self.reliability, "o-", label=f"{self.split} rows")
        axes.set(xlabel="probability", ylabel="share of positives")
        axes.legend()

    def draw_scores(self, axes: Axes) -> None:
        """Plot how the probabilities of each class are distributed."""
        edges = np.linspace(0, self.highest, BINS + 1)
        for label, shares in enumerate(self.shares):
            axes.stairs(shares, edges, fill=True, alpha=0.5, label=f"label {label}")
        axes.set(xlabel="probability", ylabel="share of rows of the class")
        axes.legend()


@dataclass(frozen=True, kw_only=True)
class DayPlots:
    """How good a model was on each day before it was trained on it."""

    days: Sequence[Mapping[str, Any]]
    """``day``, the name, and ``auc``, ``log_loss`` and the like of each; None for an undefined
    one."""

    def figures(self) -> dict[str, Figure]:
        """The plots by their TensorBoard tags."""
        found = {}
        for name, title in (("auc", "AUC"), ("log_loss", "log loss")):
            figure, axes = _figure("day", title)
            points = [(str(day["day"]), day[name]) for day in self.days if day[name] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o-")
            axes.set_xticks([*range(0, len(points), -(-len(points) // 8) or 1)])
            axes.tick_params(axis="x", rotation=30)
            found[f"days/{name}"] = figure
        return found


def report_figure(entries: Iterable[Mapping[str, Any]], plots: Plots | None) -> Figure:
    """Plot the curves that a run logged, and the scores of some rows.

    Args:
        entries: of ``metrics.jsonl``.
        plots: of the rows; None without any.
    """
    logged = list(entries)
    figure, panels = _panels(2 if plots is None else 4)

    for axes, title, names in (
        (panels[0], "log loss", {"train/loss": "training", "val/log_loss": "validation"}),
        (panels[1], "AUC", {"val/auc": "validation", "test/auc": "test"}),
    ):
        for name, label in names.items():
            points = [(each["step"], each[name]) for each in logged if name in each]
            if points:
                axes.plot(
                    *zip(*points, strict=True), "." if len(points) == 1 else ".-", label=label
                )
        axes.set(xlabel="step", ylabel=title)
        if axes.lines:
            axes.legend()

    if plots is not None:
        plots.draw_reliability(panels[2])
        plots.draw_scores(panels[3])
    return figure


def importance_figure(found: Importance) -> Figure:
    """Bars of the log loss that each column saves, the most important one on top."""
    names = list(found)[::-1]
    saved, spread = ([found[n][m] for n in names] for m in ("log_loss", "log_loss_std"))
    figure, axes = _figure("log loss gained if shuffled", "", height=1 + 0.2 * len(names))
    axes.barh(names, saved, xerr=spread)
    return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):  # by a notebook, though pyplot does not know it
        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    figure = ShownFigure((4 * count, 3.2), dpi=100, layout="constrained")
    return figure, list(figure.subplots(1, count))


def _figure(x: str, y: str, height: float = 3.6) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure((4.8, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    return figure, axes

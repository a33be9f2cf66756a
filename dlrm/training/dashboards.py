"""TensorBoard's pages: the order of its charts, the custom scalars, and HParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard.summary import hparams

LOSS = "Log_loss"
AUC = "AUC"
CURVES = ("train", "val", "day")  # splits that are measured again and again
RESULT = "Result"  # what is measured once

OVERVIEW: dict[str, dict[str, tuple[str, ...]]] = {
    "quality": {
        "log loss": (f"{LOSS}/train", f"{LOSS}/val", f"{LOSS}/day"),
        "AUC": (f"{AUC}/val", f"{AUC}/day"),
        "calibration": ("val/calibration",),
    },
    "speed": {
        "samples per second": ("speed/samples_per_second",),
        "data wait share": ("speed/data_wait_share",),
    },
    "memory": {
        "bytes": ("embeddings/bytes",),
        "compression": ("embeddings/compression",),
        "peak bytes": ("memory/",),
    },
    "training": {
        "gradient norms": ("train/gradient_norm/",),
        "learning rates": ("lr/",),
    },
    "caches of rows": {
        "hit rate": ("cache/hit_rate",),
        "rows in and out": ("cache/admitted", "cache/evicted"),
    },
}
"""Charts of the custom scalars page by category, each with the tags, or prefixes of tags, that it
shows."""

RESULTS = (
    *("test/auc", "test/log_loss", "embeddings/compression", "embeddings/bytes"),
    "speed/samples_per_second",
)
"""Columns of metrics on the HParams page, which opens with the first five."""

OPTIONS = ("emb", "budget", "data", "seed")
"""Columns of options there. One more column holds all others that differ from their defaults."""


def tag(name: str) -> str:
    """The tag of a number. TensorBoard orders charts by tag, capitals first: the curves of AUC and
    log loss, then the points that are their results, then everything else.
    """
    group, _, metric = name.partition("/")
    best = "_best_possible" if metric.startswith("best_possible_") else ""
    metric = metric.removeprefix("best_possible_")
    if metric not in ("auc", "loss", "log_loss"):
        return name
    title = AUC if metric == "auc" else LOSS
    return f"{title}/{group}" if group in CURVES else f"{RESULT}/{title}_{group}{best}"


def layout() -> dict[str, dict[str, list[Any]]]:
    """The page of custom scalars, as ``SummaryWriter.add_custom_scalars`` takes it."""
    return {
        category: {
            title: ["Multiline", [f"^{tag}" for tag in tags]] for title, tags in charts.items()
        }
        for category, charts in OVERVIEW.items()
    }


def hparams_row(
    options: Mapping[str, Any], changed: Mapping[str, Any], results: Mapping[str, float]
) -> Sequence[Any]:
    """A row of the HParams page.

    TensorBoard takes the columns of all runs from any one of them, so every run has the same.

    Args:
        options: of the run.
        changed: those that differ from their defaults, by full name.
        results: the final metrics.

    Returns:
        Summaries for the writer of event files.
    """
    shown = {name: options.get(name) for name in OPTIONS}
    shown = {name: x if type(x) is int else str(x or "") for name, x in shown.items()}
    rest = [f"{name}={x}" for name, x in changed.items() if name not in OPTIONS]
    metrics = {tag(name): results[name] for name in RESULTS if name in results}
    return hparams(shown | {"options": " ".join(rest)}, metrics)

"""The opening line of a run, and the summary of its final metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm.data.schema import Meta, Split
from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.optim.schedule import OTHERS
from dlrm.sparse_arch.table_plan import TablePlan, table_plan_by_name
from dlrm.training.profiling import PARTS
from dlrm.utils.messages import align_right, format_bytes, printable

COLUMNS = {
    "test/": "test",
    "val/": "val",
    "days/": "next day",
    "last/": "test, last step",
    "fitted/": "fitted",
    "test/best_possible_": "best possible",
}
"""Quality: the metrics that begin with each of these have a column, if there are any."""

QUALITY = (
    *("auc", "pr_auc", "group_auc", "group_auc_worst", "group_auc_best"),
    *("log_loss", "accuracy", "normalized_entropy", "calibration"),
)

FEW_STEPS = 20
"""With fewer, a model is about as good as before."""

TOO_GOOD = 0.999
"""Clicks are never predicted as well as this."""

WORDS = {
    "auc": "AUC",
    "pr_auc": "PR-AUC",
    "group_auc": "AUC by group",
    "group_auc_worst": "worst groups",
    "group_auc_best": "best groups",
    "gpu_peak": "GPU peak",
}

GROUPS = {
    "test": ("groups", "groups_of_one_class", "rows_without_group"),
    "embeddings": ("bytes", "compression", "optimizer_bytes"),
    "speed": ("samples_per_second", "train_seconds", "data_wait_share"),
    "seconds": ("total", *PARTS),
    "memory": ("process_peak", "gpu_peak"),
    "ids": ("found", "inserted", "evicted", "waiting", "not_placed"),
}
"""Other metrics, with one line for each group."""


def words(name: str) -> str:
    """The words of a metric: ``log loss`` for ``log_loss``."""
    return WORDS.get(name, name.replace("_", " "))


def with_unit(name: str, value: float) -> str:
    """The value of a metric, given by its full name, with its unit, for people."""
    if name.endswith("bytes") or name.endswith("_peak"):
        return format_bytes(value)
    if name.endswith("compression"):
        return f"{value:,.1f}x"
    if name.endswith("_seconds") or name.startswith("seconds/"):
        return f"{value:,.1f} s"
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:,.0f}"


def opening(
    kind: str, model: DLRM, splits: Mapping[str, Split], sizes: Mapping[str, float], steps: int
) -> str:
    """What is about to be trained, in one line, a warning of each split of equal labels, and a note
    if there are too few steps to learn from.

    Args:
        kind: of the embeddings.
        model: the model.
        splits: the rows, by name.
        sizes: ``embeddings/bytes`` and the like.
        steps: of all epochs.
    """
    dense = model.dense_parameters()
    rows = splits["train"].rows
    weights = sum(parameter.numel() for parameter in dense)
    cache = sizes.get("embeddings/cache_bytes", 0)
    ratio = sizes["embeddings/compression"]

    text = (
        f"{kind} on {dense[0].device}: {rows:,} training rows, {weights:,} dense weights, "
        f"embeddings {format_bytes(sizes['embeddings/bytes'])} "
        f"({ratio:.1f}x"
        f"{f', with a cache of {format_bytes(cache)}' if cache else ''}), "
        f"their optimizer {format_bytes(sizes['embeddings/optimizer_bytes'])}"
    )

    # Small tables are no matter of memory.
    full = sizes["embeddings/bytes"] * ratio
    if ratio > 1 and full < weights:
        text += f"\nnote: dense tables would take {format_bytes(full)}, next to MLPs of "
        text += f"{format_bytes(4 * weights)}: compressing them saves little (--emb dense)"

    # Splits of equal labels and runs of a few steps are seldom meant.
    for name, split in splits.items():
        if split.rows and split.positives in (0, split.rows):
            label = int(split.positives > 0)
            advice = f"they have no AUC; give {name} more rows"
            if name == "train":
                advice = "look at how labels were read"
            text += f"\nwarning: all {name} rows have the label {label}: {advice}"
    if steps < FEW_STEPS:
        text += f"\nnote: that is {steps} step{'s' * (steps != 1)}, too few to learn much: raise "
        text += "--epochs, or lower --batch_size"
    return text


def negatives(split: Split, rows: int) -> str:
    """One line on the training rows that ``--negatives`` keeps; empty if it keeps all.

    Args:
        split: all rows.
        rows: how many are trained on.
    """
    if rows == split.rows:
        return ""
    kept, all_negatives = rows - split.positives, split.rows - split.positives
    return (
        f"--negatives: {rows:,} training rows, all {split.positives:,} positives and {kept:,} of "
        f"{all_negatives:,} negatives, chosen by --seed, the same in every epoch; the loss "
        "accounts for it, so probabilities are those of all rows"
    )


def embedding_sizes(model: DLRM, optimizer: RowOptimizer, world: World) -> dict[str, float]:
    """Bytes of the embeddings, and of their optimizer state, which the ratio leaves out; and what
    became of the ids of dynamic tables. Every process must call this function, between steps.
    """
    # The shards of all processes, and replicas once.
    arch = model.sparse_arch
    local = optimizer.state_bytes(arch.local_parameters())
    here = optimizer.state_bytes(arch.parameters())
    state = here - local + sum(world.sizes(local, world.device))

    sizes = arch.sizes() | {"optimizer_bytes": float(state)}
    return {f"embeddings/{name}": size for name, size in sizes.items()} | arch.id_counts()


def about(meta: Meta, plan: TablePlan) -> dict[str, Any]:
    """The entries of ``result.json`` about the data and the tables of a run.

    Args:
        meta: of its data.
        plan: of its tables.
    """
    return {
        "tables": table_plan_by_name(meta.tables, meta.cardinalities, plan),
        "rows": meta.counts,
        "preparation": meta.preparation,
    }


def fine_tuning(lost: float, factor: float, fresh: bool) -> str:
    """How a trained model is trained on, in one line.

    Args:
        lost: validation AUC that fitting its tables cost; NaN if it is unknown.
        factor: on the learning rates.
        fresh: whether the tables were reinitialized, since they learn more from scratch.
    """
    cost = "" if math.isnan(lost) else f", which costs {lost:.4f} of validation AUC"
    kept = "; an epoch of new tables learns more, so they start from scratch" if fresh else ""
    return (
        f"tables fitted to those of the trained model{cost}{kept}: learning rates "
        f"x{factor:.2g} for embeddings, x{factor**OTHERS:.2g} for the rest (--optim.fine_tune)"
    )


def _quality(metrics: Mapping[str, float]) -> str:
    """The metrics of quality that are known, with a column for each of :data:`COLUMNS`."""

    def known(key: str) -> bool:
        return not math.isnan(metrics.get(key, math.nan))

    prefixes = [p for p in COLUMNS if any(known(p + name) for name in QUALITY)]
    names = [name for name in QUALITY if any(known(p + name) for p in prefixes)]
    if not names:
        return ""
    width = max(len(words(name)) for name in names)
    rows = [["", *(f" {COLUMNS[prefix]}" for prefix in prefixes)]]
    for name in names:
        texts = [f"{metrics[p + name]:.4f}" if known(p + name) else "" for p in prefixes]
        rows.append([words(name).ljust(width), *texts])
    return align_right(rows)


def summary(metrics: Mapping[str, float], directory: Path, *, kept: bool = True) -> str:
    """The final metrics of a run as a table, and where to look at them.

    Their words are those of their names, in ``metrics.jsonl`` and in TensorBoard.

    Args:
        metrics: of the run.
        directory: of the run.
        kept: whether checkpoints are saved, so that the best state is the result.
    """
    lines = []
    if quality := _quality(metrics):
        lines.append(quality)
    if "best_step" in metrics:
        what = "the result" if kept else "not kept without --checkpoint"
        lines.append(f"best validation    at step {metrics['best_step']:,.0f}, {what}")
    for group, names in GROUPS.items():
        logged = [(name, key) for name in names if (key := f"{group}/{name}") in metrics]
        if logged:
            texts = [f"{words(name)} {with_unit(key, metrics[key])}" for name, key in logged]
            lines.append(f"{group:<18} " + ", ".join(texts))
    if metrics.get("test/auc", 0) >= TOO_GOOD and "test/best_possible_auc" not in metrics:
        lines.append(
            "note: a test AUC this close to 1 is seldom true: was a column made from the label, or "
            "known only after it? Then leave it out"
        )
    shown, above = printable(directory), printable(directory.parent)
    lines.append(f"results in {shown}; tensorboard --logdir {above}")
    return "\n".join(lines)

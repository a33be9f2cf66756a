"""Checks of rows that have been read, before anything is learned of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from ...utils.messages import listing, print_error
from ..schema import SPLITS, Meta, Split
from .bad_rows import BadRowsRule
from .codes import LabelRule, label_rule
from .column_options import yaml_line
from .columns import ColumnPlan, Feature
from .spill import Spilled
from .splitting import Splitter

SKIPPED_WARNING, SKIPPED_ERROR = 0.01, 0.5  # shares of the rows
BY_CHANCE = 1e-3  # a split that lacks a class with less probability is refused
SCALED = {"kind": "number", "transform": "robust"}
UNEVEN = 100  # from one row of so many on, a few have nearly all the weight
FEW_ROWS = 100  # of splits that nobody expects much of


@dataclass
class ClassCounts:
    """The rows of a split by their label: ``[2]`` for 0 and 1."""

    rows: np.ndarray
    weights: np.ndarray
    """The sums of the sample weights; of rows without any, their number."""
    squares: float = 0.0
    """The sum of the squared sample weights."""

    def split(self, file: str) -> Split:
        """The description of the split, whose rows are in a file."""
        return Split(files=(file,), rows=int(self.rows.sum()), positives=int(self.rows[1]))

    @property
    def mean_weight(self) -> float:
        """The mean of the sample weights."""
        if not self.weights.any():
            raise ValueError("all training rows have weight 0; correct the weights")
        return float(self.weights.sum() / self.rows.sum())

    @property
    def weight_ratio(self) -> float | None:
        """The mean weight of the positives divided by that of the negatives, if it is not 1."""
        if not self.rows.all() or not self.weights.all():
            return None
        negative, positive = self.weights / self.rows
        ratio = float(positive / negative)
        return None if np.isclose(ratio, 1, rtol=1e-3) else ratio


def count_classes(
    spilled: Spilled, splitter: Splitter, label: str, weight: str | None
) -> dict[str, ClassCounts]:
    """Count the rows of each split by their label."""
    sums = np.zeros((3, 2 * len(SPLITS)))  # of 1, the weight and its square, by split and label
    for block in spilled.blocks:
        each = block.column(weight).to_numpy() if weight is not None else np.ones(block.rows)
        place = 2 * splitter.codes(block) + block.column(label).to_numpy()
        for power, counted in enumerate(sums):
            counted += np.bincount(place, each.astype(np.float64) ** power, len(counted))

    rows, weights, squares = sums.reshape(3, len(SPLITS), 2)
    return {
        name: ClassCounts(rows[at].astype(np.int64), weights[at], float(squares[at].sum()))
        for at, name in enumerate(SPLITS)
    }


def require_rows(spilled: Spilled, bad_rows: BadRowsRule, source: object, *, learns: bool) -> None:
    """Check that there are rows, and that few are left out: more may change what is learned. If
    nothing is learned of them, they may be none, as on a quiet day.

    Raises:
        ValueError: there are no rows, or more than half of them do not fit.
    """
    # Some rows, or none on a quiet day.
    bad, rows = spilled.bad, spilled.rows + spilled.bad.count
    if not rows and not learns:
        print_error(f"note: {source} has no rows, and so has the result")
        return
    if not rows:
        raise ValueError(f"{source} has no rows; give a table that has some")

    # Few of them may be left out.
    share = bad.count / rows
    if share <= SKIPPED_WARNING or (bad_rows == "skip-all" and spilled.rows):
        return

    kinds = ", ".join(f"{kind}: {count:,}" for kind, count in bad.kinds.items())
    problem = f"{bad.count:,} of {rows:,} rows do not fit ({kinds})"
    if share <= SKIPPED_ERROR:
        print_error(f"warning: {share:.1%} of the rows are left out: {problem}")
        return
    first = bad.first[0]
    remedy = f"; or keep only the other {spilled.rows:,} rows with --bad-rows skip-all"
    raise ValueError(
        f"{problem}; {first['file']}, row {first['row']:,}: {first['message']}"
        f"{remedy if spilled.rows else ''}"
    )


def require_both_classes(
    counts: Mapping[str, ClassCounts], plan: ColumnPlan, *, earlier: bool
) -> None:
    """Check that each split has positive and negative rows, unless it lacks one by chance. Rows
    that get ``earlier`` ids may be few, and only to be scored.

    Raises:
        ValueError: a split lacks a class.
    """
    total = np.sum([split.rows for split in counts.values()], axis=0)
    for name, split in counts.items():
        size = split.rows.sum()
        if not size or split.rows.all():
            continue
        value = int(split.rows[1] > 0)
        other = total[1 - value] / total.sum()
        problem = f"all {size:,} labels of the {name} split are {value}"

        # A few rows may have one class by chance, and so may those that are only scored.
        if earlier or (other and (1 - other) ** size > BY_CHANCE):
            if size >= FEW_ROWS:
                print_error(f"note: {problem}, so that no AUC can be computed of it")
            continue
        if other:
            raise ValueError(
                f"{problem}, and {other:.2%} of all labels are {1 - value}: for both in each "
                "split, use --split-by random if the rows are sorted by the label, or choose "
                "other shares or limits"
            )

        # All labels of the table are the same; a few rows are an example, and may be.
        rule = label_rule(plan.options, plan.label)
        if size >= FEW_ROWS or rule != LabelRule():
            raise ValueError(
                f"all {total.sum():,} labels are {value} (column {plan.label!r}, {rule}), and a "
                "model needs rows of both classes: say which values count as 1, as in --label "
                "'rating >= 4' or --positive yes"
            )


def note_weights(counts: ClassCounts) -> None:
    """Note that the weights of the training rows shift the probabilities of a model, and that a few
    rows have nearly all the weight: they alone count then, as in metrics."""
    rows, equal = counts.rows.sum(), counts.weights.sum() ** 2 / (counts.squares or np.inf)
    if 0 < equal < rows / UNEVEN:
        print_error(
            f"note: the weights are so uneven that {rows:,} training rows say as much as "
            f"{equal:,.0f} of equal weight: check their unit"
        )
    ratio = counts.weight_ratio
    if ratio is None:
        return
    share, weighted = (sums[1] / sums.sum() for sums in (counts.rows, counts.weights))
    print_error(
        f"note: the weight of positives is {ratio:.4g} times that of negatives, on average, so a "
        f"model's probabilities have a mean of {weighted:.4g}, where {share:.4g} of the training "
        "rows are positive; dlrm train --true_odds true makes them those of the rows"
    )


def note_features(features: Sequence[Feature], learned: Sequence[Mapping[str, Any]]) -> None:
    """Note columns of which nothing can be learned, and numbers far beyond the others.

    What was ``learned`` of a feature has ``empty`` if no training row has a value, and ``far``: how
    many numbers are limited, one of them, and what it counts as.

    Raises:
        ValueError: no feature has a value.
    """
    # Columns without any value.
    found = list(zip(features, learned, strict=True))
    empty = list(dict.fromkeys(each.column.name for each, facts in found if facts.get("empty")))
    if empty and all(facts.get("empty") for facts in learned):
        raise ValueError(
            f"no column has a value in any training row ({listing(empty)}); correct the table, or "
            "choose another split"
        )
    if empty:
        drop = dict.fromkeys(empty, "drop")
        lines = yaml.safe_dump(drop, default_flow_style=True, width=10**6, sort_keys=False)
        print_error(
            f"note: no value in any training row of {listing(empty)}: nothing is learned of later "
            f"values; columns: {lines.strip()} leaves out what has none"
        )

    # Numbers that are most likely wrong.
    for feature, facts in found:
        count, example, limit = facts.get("far") or (0, 0.0, 0.0)
        if count:
            print_error(
                f"note: {feature.name} has {count:,} number{'s' * (count != 1)} such as "
                f"{example:.4g}, far beyond the others: they count as {limit:.4g}; correct them, "
                f"or set {yaml_line(feature.name, SCALED)}"
            )


def note_left_out(numbers: Sequence[str], meta: Meta) -> None:
    """Note which of many numbers are left out, as they say nothing of the label."""
    if silent := [name for name in numbers if name not in meta.dense]:
        print_error(
            f"note: {len(silent):,} of {len(numbers):,} numbers are left out, on which the labels "
            f"of the training rows do not depend, alone or two together: {listing(silent)}; "
            f"{yaml_line(silent[0], 'number')} keeps one"
        )

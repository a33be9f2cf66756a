"""How well scores put positives before negatives: AUC, PR-AUC, and AUC by group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm.data.groups import Groups

SHARE = 10  # the worst and the best groups are a tenth of them


@dataclass(frozen=True, kw_only=True)
class Ties:
    """Samples of equal score (and group) added up, by rising group and score.

    Counts are integers, or float64 if the samples have weights.
    """

    positives: Tensor  # [T] weight of the positives of each tie
    negatives: Tensor  # [T]
    groups: Tensor | None  # [T]

    @classmethod
    def of(
        cls,
        scores: Tensor,
        labels: Tensor,
        weights: Tensor | np.ndarray | None = None,
        groups: Tensor | None = None,
    ) -> Ties:
        """Sort samples, all ``[n]`` on one device, and add up those of equal score."""
        order = scores.argsort()
        if groups is not None:
            order = order[groups[order].argsort(stable=True)]
            groups = groups[order]
        scores = scores[order]
        last = torch.ones_like(scores, dtype=torch.bool)  # of its equals
        last[:-1] = scores[1:] != scores[:-1]
        if groups is not None:
            last[:-1] |= groups[1:] != groups[:-1]
            groups = groups[last]

        positive = labels[order] > 0.5
        each = torch.stack([positive, ~positive])
        if weights is not None:
            each = each * torch.as_tensor(weights).to(scores).double()[order]
        ends = each.cumsum(1)[:, last]
        positives, negatives = ends.diff(prepend=ends.new_zeros(2, 1))
        return cls(positives=positives, negatives=negatives, groups=groups)


def roc_area(ties: Ties) -> float:
    """The area under the ROC curve of samples without groups, exactly (AUC).

    It is the share of pairs of a positive and a negative that are in the right order; a tie counts
    half, and a pair the product of its weights. Without weights all counts are integers, so the
    order of the samples makes no difference. NaN where fewer than two classes occur.
    """
    positives, negatives = ties.positives, ties.negatives
    below = 2 * negatives.cumsum(0) - negatives  # twice the negatives below, and half of a tie's
    ordered, pairs = (positives * below).sum(), positives.sum() * negatives.sum()
    return min(1.0, ordered.item() / (2 * pairs.item())) if pairs else math.nan  # not 1 + 2e-16


def precision_recall_area(ties: Ties) -> float:
    """The area under the curve of precision and recall of samples without groups.

    It is the average precision: the mean, over the positives, of the precision among the samples
    that score at least as high. NaN without positives.
    """
    positives, negatives = ties.positives.double(), ties.negatives.double()
    found = positives.flip(0).cumsum(0)  # from the highest score down
    taken = found + negatives.flip(0).cumsum(0)
    precision = (found / taken).nan_to_num()  # samples without weight
    total = positives.sum()
    return min(1.0, float((positives.flip(0) * precision).sum() / total)) if total else math.nan


@dataclass(frozen=True, kw_only=True)
class GroupAreas:
    """The AUC within each group of samples that has positives and negatives."""

    groups: Tensor  # [G] rising
    rows: Tensor  # [G] samples, or their weight
    areas: Tensor  # [G] float64
    one_class: int
    """Groups of one class, which have no AUC."""
    without_group: int
    """Samples that are in no group."""

    def metrics(self) -> dict[str, float]:
        """The mean AUC, each group counting as many times as it has samples (GAUC; Zhu et al., KDD
        2017), and the mean AUC of the worst and of the best tenth of the groups; NaN without
        groups. Also how many groups and samples were measured or left out.
        """
        values = dict.fromkeys(("group_auc", "group_auc_worst", "group_auc_best"), math.nan)
        if count := len(self.areas):
            ordered, tenth = self.areas.sort().values, -(-count // SHARE)
            shares = self.rows / self.rows.sum()
            values["group_auc"] = float((self.areas * shares).sum())
            values["group_auc_worst"] = float(ordered[:tenth].mean())
            values["group_auc_best"] = float(ordered[-tenth:].mean())
        counts = {"groups": count, "groups_of_one_class": self.one_class}
        counts["rows_without_group"] = self.without_group
        return values | {name: float(value) for name, value in counts.items()}

    def extremes(self, named: Groups, count: int = 5) -> dict[str, list[dict[str, object]]]:
        """The ``count`` groups of lowest and of highest AUC, by name, with their samples."""
        order = self.areas.argsort(stable=True)
        found = {}
        for name, chosen in (("worst", order[:count]), ("best", order.flip(0)[:count])):
            names = named.names(self.groups[chosen].tolist())
            columns = names, self.rows[chosen].tolist(), self.areas[chosen].tolist()
            keys = "group", "rows", "auc"
            found[name] = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
        return found


@torch.inference_mode()
def group_areas(
    scores: Tensor, labels: Tensor, weights: Tensor | None = None, *, groups: Groups
) -> GroupAreas:
    """Measure the AUC within each group.

    Args:
        scores: ``[n]``.
        labels: ``[n]``, 0 or 1, on the same device.
        weights: ``[n]`` of the samples. Default: all 1.
        groups: of the samples.
    """
    of_rows = torch.from_numpy(groups.of_rows).to(scores.device)
    inside = of_rows >= 0
    if weights is not None:
        weights = weights[inside]
    ties = Ties.of(scores[inside], labels[inside], weights, of_rows[inside])
    assert ties.groups is not None
    distinct, index = ties.groups.unique_consecutive(return_inverse=True)

    def by_group(values: Tensor) -> Tensor:
        return values.new_zeros(len(distinct)).index_add_(0, index, values)

    positives, negatives = by_group(ties.positives), by_group(ties.negatives)
    before = (negatives.cumsum(0) - negatives)[index]  # those of earlier groups
    below = 2 * (ties.negatives.cumsum(0) - before) - ties.negatives
    ordered, pairs = by_group(ties.positives * below), positives * negatives

    has_pairs = pairs > 0
    return GroupAreas(
        groups=distinct[has_pairs],
        rows=(positives + negatives)[has_pairs],
        areas=(ordered[has_pairs].double() / (2 * pairs[has_pairs])).clamp(0, 1),
        one_class=int((~has_pairs).sum()),
        without_group=int((~inside).sum()),
    )

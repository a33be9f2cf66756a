"""The label model of the synthetic data, from which the labels are drawn.

    logit = bias + scale * (dense effects + id effects + sum of <z_c, z_d> over pairs of columns)

The dense effects are smooth in log(x + 1). The ids of a column belong to a few hidden clusters,
each with an effect and a factor vector ``z`` of rank 4. Each frequent id adds an individual effect.
Rare ids share effects by a hash, at a lower scale, so they carry only little information.

The arithmetic uses fixed-point integers, so a row has the same label on every device. The
probability has one of 2^13 values, so the number of rows with each value gives the exact metrics of
the label model, the best that any model can reach.

With a drift, each effect of an id changes linearly over the rows with its own slope, as tastes and
prices change over the days of a log. In the middle row, the effects are those without drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.data.synthetic.distributions import Distribution, hashed

RANK = 4
CLUSTERS = 16
FREQUENT = 4096  # ids with their own effect; the others share the same number by a hash
RARE_SCALE = 0.5
TIME_POINT = 16  # fraction bits of the time
POINT, FACTOR_POINT = 12, 8  # fraction bits of effects and of factors
BIN_BITS, BINS = 8, 1 << 13  # 2^BIN_BITS probabilities per unit of the logit; logits up to 16

DENSE_SCALE, CLUSTER_SCALE, ID_SCALE, FACTOR_SCALE = 0.5, 0.45, 0.3, 0.16


class LabelModel:
    """Label model over the columns ``dense`` and ``categorical``.

    :meth:`fit` fits scale and bias to pilot rows, to get a given expected AUC and share of
    positives for any columns.

    Args:
        dense, categorical: the columns.
        seed: seed of all effects.
        device: device of the rows.
        drift: standard deviation of the slopes, divided by that of the effects of single ids.
    """

    def __init__(
        self,
        dense: Sequence[Distribution],
        categorical: Sequence[Distribution],
        *,
        seed: int,
        device: torch.device | str,
        drift: float = 0.0,
    ) -> None:
        random = np.random.Generator(np.random.PCG64([seed, 2]))
        effects = [_smooth_effect(column, random) for column in dense]
        starts = np.cumsum([0, *map(len, effects)])[:-1]
        self.dense_effects = torch.from_numpy(np.concatenate(effects)).to(device)
        self.dense_starts = torch.from_numpy(starts).to(device)[:, None]  # [N, 1]

        self.id_tables = torch.cat([_id_effects(random) for _ in categorical]).to(device)
        self.drift = drift
        if drift:
            slopes = np.random.Generator(np.random.PCG64([seed, 6])).normal(
                size=(len(self.id_tables), 1), scale=drift * ID_SCALE * (1 << POINT)
            )
            rounded = torch.from_numpy(np.rint(slopes).astype(np.float32)).to(device)
            self.id_tables = torch.cat([self.id_tables, rounded], dim=1)
        self.id_starts = torch.arange(len(categorical), device=device)[:, None] * 2 * FREQUENT
        self.id_keys = hashed(seed, 3, len(categorical)).to(device)[:, None]  # [F, 1]

        # Until :meth:`fit`, scale and bias change nothing.
        self.scale = 1 << 16
        self.bias = 0
        odds = (np.arange(BINS) + 0.5 - BINS / 2) / (1 << BIN_BITS)
        self.probabilities = 1 / (1 + np.exp(-odds))  # [BINS]
        self.thresholds = torch.from_numpy(np.rint(self.probabilities * 2**31).astype(np.int64))
        self.thresholds = self.thresholds.to(device)

    def score(self, dense: Tensor, ids: Tensor, time: Tensor | None = None) -> Tensor:
        """Logit of rows before scale and bias, fixed point, int64 ``[B]``: of dense values ``[N,
        B]``, 0 for missing and negative ones, ids ``[F, B]``, and for a drift the time ``[B]``, -1
        to 1 in fixed point; all int64.
        """
        shared = ((ids * -0x61C8864680B583EB).bitwise_xor_(self.id_keys) >> 40) & (FREQUENT - 1)
        rare = (FREQUENT - 1 - ids) >> 63  # all bits set for a rare id
        rows = ids + (shared + FREQUENT - ids).bitwise_and_(rare) + self.id_starts
        # Integers below 2^24 as float32: the sum is exact in any order.
        total = F.embedding_bag(rows.t().contiguous(), self.id_tables, mode="sum").long()
        factors = total[:, 1 : 1 + RANK]
        effects = self.dense_effects.index_select(0, (dense + self.dense_starts).view(-1))
        pairs = (factors * factors).sum(1) >> (2 * FACTOR_POINT - POINT + 1)
        single = total[:, 0]
        if self.drift and time is not None:
            single = single + (total[:, -1] * time >> TIME_POINT)
        return single + effects.view_as(dense).sum(0) + pairs

    def bins(self, score: Tensor) -> Tensor:
        """Index of the probability of each row, int64 ``[B]`` in ``[0, BINS)``."""
        logit = (score * self.scale >> 16) + self.bias
        return ((logit >> (POINT - BIN_BITS)) + BINS // 2).clamp_(0, BINS - 1)

    def labels(self, bins: Tensor, noise: Tensor) -> Tensor:
        """Labels drawn with the probabilities of ``bins``, from 63-bit ``noise``; uint8 ``[B]``."""
        return ((noise >> 32) < self.thresholds.index_select(0, bins)).to(torch.uint8)

    def fit(self, scores: Tensor, *, auc: float, positives: float) -> None:
        """Set scale and bias such that pilot rows, with these scores int64 ``[B]``, have the given
        expected AUC of the true probabilities and share of positives."""
        values = np.sort(scores.cpu().numpy()) / (1 << POINT)
        mean = values.mean()
        values -= mean
        low, high = 0.0, 64.0 / max(values.std(), 1e-9)
        for _ in range(30):
            scale = (low + high) / 2
            bias = _bias(values * scale, positives)
            probability = 1 / (1 + np.exp(-(values * scale + bias)))
            low, high = (scale, high) if expected_auc(probability) < auc else (low, scale)
        self.scale = round(scale * 65536)
        self.bias = round((bias - scale * mean) * (1 << POINT))


def _bias(logits: np.ndarray, positives: float) -> float:
    """The bias with which the mean probability is the share of positives."""
    low, high = -40.0, 40.0
    for _ in range(40):
        bias = (low + high) / 2
        mean = (1 / (1 + np.exp(-(logits + bias)))).mean()
        low, high = (bias, high) if mean < positives else (low, bias)
    return bias


def _smooth_effect(column: Distribution, random: np.random.Generator) -> np.ndarray:
    """Effect of each value of a dense column: a step and a bump in log(x + 1); int64."""
    x = np.log1p(np.arange(column.lowest + column.values))
    step, bump = random.normal(size=2) * DENSE_SCALE
    middle, top = np.log1p(np.interp([0.5, 0.85], column.cdf, column.knots))
    width = max(top - middle, 0.5)
    effect = step * np.tanh((x - middle) / width) + bump * np.exp(-(((x - top) / width) ** 2))
    return np.rint(effect * (1 << POINT)).astype(np.int64)


def _id_effects(random: np.random.Generator) -> Tensor:
    """Effects and factors of a column's ids: integers, float32 ``[2 * FREQUENT, 1 + RANK]``."""
    weight = random.uniform(0.3, 1.7)
    cluster = random.integers(CLUSTERS, size=2 * FREQUENT)
    shared = random.normal(size=CLUSTERS) * CLUSTER_SCALE * weight
    factors = np.rint(random.normal(size=(CLUSTERS, RANK)) * FACTOR_SCALE * (1 << FACTOR_POINT))
    effect = shared[cluster] + random.normal(size=2 * FREQUENT) * ID_SCALE * weight
    effect[FREQUENT:] *= RARE_SCALE

    # Half the square of the sum over columns contains each pair once, and half the square of each
    # column, which is subtracted here.
    square = np.square(factors).sum(1)[cluster] // (1 << (2 * FACTOR_POINT - POINT + 1))
    table = np.empty((2 * FREQUENT, 1 + RANK), dtype=np.float32)
    table[:, 0] = np.rint(effect * (1 << POINT)) - square
    table[:, 1:] = factors[cluster]
    return torch.from_numpy(table)


def expected_auc(probability: np.ndarray) -> float:
    """Expected AUC of scores with the probabilities ``probability [B]``, in ascending order."""
    below = np.cumsum(1 - probability) - (1 - probability) / 2
    return float((probability * below).sum() / (probability.sum() * (1 - probability).sum()))


def best_metrics(counts: np.ndarray, probabilities: np.ndarray) -> Mapping[str, float]:
    """Metrics of the true ``probabilities [BINS]``, in ascending order, on the drawn labels, of
    which ``counts [2, BINS]`` says how many rows have each: ``auc``, ``log_loss``,
    ``normalized_entropy``, ``accuracy`` and ``positives`` (a share). An empty mapping if all rows
    have one label.
    """
    negative, positive = counts.astype(np.float64)
    rows, positives = counts.sum(), positive.sum()
    if positives in (0, rows):
        return {}
    below = np.cumsum(negative) - negative / 2
    base = positives / rows
    loss = -(positive @ np.log(probabilities) + negative @ np.log1p(-probabilities)) / rows
    entropy = -(base * math.log(base) + (1 - base) * math.log(1 - base))
    hits = np.where(probabilities >= 0.5, positive, negative).sum()
    return {
        "auc": float(positive @ below / (positives * (rows - positives))),
        "log_loss": float(loss),
        "normalized_entropy": float(loss / entropy),
        "accuracy": float(hits / rows),
        "positives": float(base),
    }

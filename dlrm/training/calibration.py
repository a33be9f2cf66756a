"""Calibration of a trained model: the average of its scores, and their spread.

The average is off after each step, by a tenth and more, as a step moves all scores together; one on
the few rows of a last batch moves them most. On training rows it is known what it should be. Where
a model knows these by heart, with the ids that occur in them alone, an average that is right there
was 20% too high on later rows. What it should be on later rows nobody knows: their share of
positives is another one each week. If they are like training rows, it is the same as there. So the
average is moved half as far as that takes, from where it is right on training rows.

The spread is too wide on later rows, the more so the better a model knows its training rows by
heart; validation rows tell by which factor. None of this changes the order of the scores.

Reference: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017 (temperature scaling).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LIMITS = 0.25, 2.0  # of the factor; a model that is further off has diverged
LARGEST_SHIFT = 2.0
FURTHEST = 0.5  # from the average on training rows; later rows that are further off are others
PRIOR = 100.0  # rows that speak for a factor of 1
STEPS = 20  # of Newton's method; the losses are convex


@torch.inference_mode()
def fit_calibration(seen: Sequence[Tensor], later: Sequence[Tensor] | None) -> tuple[float, float]:
    """The scale and shift of logits with the least log loss.

    Args:
        seen: logits and labels of training rows, ``[n]``, and their weights if there are any.
        later: those of validation rows; None if there are none: the scale is 1.

    Returns:
        Scale and shift. They move the average to where it is right on ``seen`` and, half as far as
        that takes, to the same average of ``later``; and scale the distance from it so that the
        loss on ``later`` is least.
    """
    logits, labels, weights = _in_double(*seen)
    average = (weights * labels).sum() / weights.sum()
    move = _shift_to(average, logits, weights)
    if later is None:
        return 1.0, float(move)
    logits, labels, weights = _in_double(*later)
    move += (_shift_to(average, logits, weights) - move).clamp(-FURTHEST, FURTHEST) / 2

    # The spread: the scale of distances from the average with the least loss on later rows. The
    # prior pulls it to 1 where these are few.
    logits = logits + move
    center = torch.logit((weights * logits.sigmoid()).sum() / weights.sum(), eps=1e-9)
    distance = logits - center
    scale = torch.ones_like(center)
    for _ in range(STEPS):
        found = (center + scale * distance).sigmoid()
        slope = (weights * (found - labels) * distance).sum() + PRIOR * (scale - 1)
        curvature = (weights * found * (1 - found) * distance**2).sum() + PRIOR
        scale = (scale - slope / curvature).clamp(*LIMITS)
    return float(scale), float(scale * move + center * (1 - scale))


def _shift_to(average: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    """The shift of logits at which the scores have an average, by Newton's method."""
    move = torch.zeros_like(average)
    for _ in range(STEPS):
        found = (logits + move).sigmoid()
        curvature = (weights * found * (1 - found)).sum() + 1e-9
        step = (weights * (found - average)).sum() / curvature
        move = (move - step.clamp(-1, 1)).clamp(-LARGEST_SHIFT, LARGEST_SHIFT)
    return move


def by_class(labels: Tensor, share: float, weights: Tensor | None = None) -> Tensor:
    """Weights, on top of those given, with which the positives are ``share`` of the rows."""
    found = float(labels.double().mean())
    weights = torch.ones_like(labels) if weights is None else weights
    return weights * torch.where(labels > 0.5, share / found, (1 - share) / (1 - found))


def _in_double(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and weights, by default 1."""
    logits = logits.double()
    weights = torch.ones_like(logits) if weights is None else weights.double()
    return logits, labels.double(), weights

"""Calibration of a trained model on its validation rows, by temperature scaling.

A model that has learned its training rows by heart is too sure on later ones: the order of its
scores is good, and their log loss is not. One factor on the distance of each logit from the average
makes good for that. It changes no order, so AUC stays the same.

Reference: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = 0.25, 2.0  # of the factor; a model that is further off has diverged
PRIOR = 100.0  # rows that speak for a factor of 1
STEPS = 20  # of Newton's method; the loss is convex


@torch.inference_mode()
def fit_calibration(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[float, float]:
    """The scale and shift of the logits with the least log loss on some rows.

    Args:
        logits: ``[n]``.
        labels: ``[n]``, 0 or 1.
        weights: ``[n]`` of the rows. Default: all 1.

    Returns:
        The factor on the distance from the average, and the shift that keeps the average, that is
        the logit of the mean probability, where it is.
    """
    logits, labels = logits.double(), labels.double()
    weights = torch.ones_like(logits) if weights is None else weights.double()
    center = torch.logit((weights * logits.sigmoid()).sum() / weights.sum(), eps=1e-9)
    distance = logits - center

    scale = torch.ones_like(center)
    for _ in range(STEPS):
        found = (center + scale * distance).sigmoid()
        slope = (weights * (found - labels) * distance).sum() + PRIOR * (scale - 1)
        curvature = (weights * found * (1 - found) * distance**2).sum() + PRIOR
        scale = (scale - slope / curvature).clamp(*LIMITS)
    return float(scale), float(center * (1 - scale))

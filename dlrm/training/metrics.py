"""Quality of predicted click probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm.data.batch import Batch
from dlrm.training.ranking import Ties, precision_recall_area, roc_area

REMEDY = "lower --optim.lr, or set --optim.warmup_steps or --optim.clip_norm"
"""For a model that has diverged."""


@torch.inference_mode()
def classification(
    logits: Tensor | np.ndarray,
    labels: Tensor | np.ndarray,
    weights: Tensor | np.ndarray | None = None,
) -> dict[str, float]:
    """Metrics of samples, computed where the logits are.

    Args:
        logits: ``[n]`` scores before the sigmoid.
        labels: ``[n]``, 0 or 1, on the same device.
        weights: ``[n]`` of the samples: every mean and share is a weighted one. Default: all 1.

    Returns:
        ``auc`` (exact; NaN where only one class occurs), ``pr_auc`` (average precision; NaN without
        positives), ``accuracy`` at probability 0.5,
        ``log_loss`` in nats, ``normalized_entropy`` (log loss over the entropy of the share of
        positives; He et al., ADKDD 2014) and ``calibration`` (mean prediction over that share).

    Raises:
        ValueError: there are no samples, shapes differ, labels are outside [0, 1], logits are not
            finite, or all weights are 0.
    """
    # Samples that nothing can be said of are refused.
    logits, labels = torch.as_tensor(logits).double(), torch.as_tensor(labels).double()
    if logits.dim() != 1 or labels.shape != logits.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}, both must "
            "be [n]: flatten a column of logits, [n, 1]"
        )
    if len(logits) == 0:
        raise ValueError("there are no samples to measure")
    if not ((labels >= 0) & (labels <= 1)).all():
        raise ValueError("labels must be in [0, 1]: write -1 and 1 as 0 and 1")
    require_finite_logits(logits)

    # Means, and the areas under two curves, for which the samples are sorted once.
    mean = _mean_of(weights, logits)
    loss, base = log_loss(logits, labels, weights), mean(labels)
    entropy = float("nan")
    if 0.0 < base < 1.0:
        entropy = -(base * math.log(base) + (1 - base) * math.log1p(-base))

    ties = Ties.of(logits, labels, weights)
    return {
        "auc": roc_area(ties),
        "pr_auc": precision_recall_area(ties),
        "accuracy": mean(((logits > 0) == (labels > 0.5)).double()),
        "log_loss": loss,
        "normalized_entropy": loss / entropy,
        "calibration": mean(sigmoid(logits)) / base if base else float("nan"),
    }


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | np.ndarray | None = None) -> float:
    """The ``log_loss`` of :func:`classification` alone, which takes no sort."""
    logits, labels = logits.double(), labels.double()
    # log(1 + exp(-|x|)) + max(x, 0) - x y: exact where the probability rounds to 0 or 1
    losses = torch.logaddexp(logits.new_zeros(()), logits) - logits * labels
    return _mean_of(weights, logits)(losses)


def _mean_of(weights: Tensor | np.ndarray | None, like: Tensor) -> Callable[[Tensor], float]:
    """The function that takes the mean of values, weighted if there are weights."""
    if weights is None:
        return lambda values: float(values.mean())
    tensor = torch.as_tensor(weights).to(like)
    if tensor.shape != like.shape:
        raise ValueError(f"weights have shape {tuple(tensor.shape)}, logits {tuple(like.shape)}")
    if not tensor.sum() > 0:
        raise ValueError("all samples have weight 0: correct the weights, or leave them out")
    return lambda values: float((values * tensor).sum() / tensor.sum())


class RunningMean:
    """The mean of 0-d tensors, summed where they are: adding one does not wait for the device.

    Args:
        device: of the tensors.

    Attributes:
        total: their sum, always the same memory, so that a captured step can add to it.
        count: how many there are.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.count = 0

    def take(self) -> Tensor:
        """The mean of what was added since the last call; NaN if nothing was."""
        mean = self.total / self.count
        self.total.zero_()
        self.count = 0
        return mean

    def state(self) -> tuple[float, int]:
        """Sum and count, for a checkpoint; waits for the device."""
        return float(self.total), self.count

    def load(self, state: tuple[float, int]) -> None:
        """Go on from a :meth:`state`."""
        self.total.fill_(state[0])
        self.count = state[1]


def require_finite(loss: float, step: int) -> None:
    """Raise if training has diverged.

    Raises:
        ValueError: the loss is not finite.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at step {step}: {REMEDY}")


def require_finite_logits(logits: Tensor) -> None:
    """Raise if the outputs of a model are not finite.

    Raises:
        ValueError: a logit is not finite.
    """
    if not logits.isfinite().all():
        raise ValueError(f"the model's outputs are not finite: training diverged; {REMEDY}")


def sigmoid(logits: Tensor) -> Tensor:
    """Probabilities of logits, in float64."""
    return torch.sigmoid(logits.double())


@torch.inference_mode()
def predict(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False
) -> tuple[Tensor, ...]:
    """Logits and labels of all samples, in order; the model's mode is restored afterwards.

    Args:
        model: maps ``(dense, ids, offsets)`` to logits.
        batches: on the model's device.
        bf16: run in bfloat16 autocast, as in training.

    Returns:
        ``logits [n]`` and ``labels [n]``, float32, on the model's device; and ``weights [n]`` if
        the batches have them.
    """
    training = model.training
    model.eval()
    logits, labels, weights = [], [], []
    try:
        for batch in batches:
            device = batch.labels.device.type
            with torch.autocast(device, torch.bfloat16, bf16):
                logits.append(model(batch.dense, batch.ids, batch.offsets).float())
            labels.append(batch.labels)
            if batch.weights is not None:
                weights.append(batch.weights)
    finally:
        model.train(training)
    if not logits:
        return torch.zeros(0), torch.zeros(0)
    return tuple(torch.cat(parts) for parts in (logits, labels, weights) if parts)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON can't represent, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }

"""Quality of predicted click probabilities."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.compiler import set_stance

from dlrm.data.batch import Batch


def classification(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """AUC, accuracy, log loss, normalized entropy and calibration.

    Args:
        logits: ``[n]`` scores before the sigmoid.
        labels: ``[n]``, 0 or 1.

    Returns:
        ``auc`` (exact; NaN where only one class occurs), ``accuracy`` at probability 0.5,
        ``log_loss`` in nats, ``normalized_entropy`` (log loss over the entropy of the share of
        positives; He et al., ADKDD 2014) and ``calibration`` (mean prediction over that share).

    Raises:
        ValueError: no samples, or logits that are not finite.
    """
    logits = logits.astype(np.float64)
    if len(logits) == 0:
        raise ValueError("there are no samples to measure")
    if not np.isfinite(logits).all():
        raise ValueError(
            "the model's outputs are not finite: training diverged; lower --optim.lr or set "
            "--optim.warmup_steps or --optim.clip_norm"
        )
    # log(1 + exp(-|x|)) + max(x, 0) - x y: exact where the probability rounds to 0 or 1
    loss = np.logaddexp(0.0, logits) - logits * labels
    base = float(labels.mean())
    both = 0.0 < base < 1.0
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base)) if both else float("nan")
    return {
        "auc": float(roc_auc_score(labels, logits)) if both else float("nan"),
        "accuracy": float(((logits > 0) == (labels > 0.5)).mean()),
        "log_loss": float(loss.mean()),
        "normalized_entropy": float(loss.mean() / entropy),
        "calibration": float(sigmoid(logits).mean() / base) if base else float("nan"),
    }


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities of logits, in float64 and without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


@torch.inference_mode()
def predict(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels of all samples, in order; the model's mode is restored afterwards.

    Args:
        model: maps ``(dense, ids, offsets)`` to logits.
        batches: on the model's device.
        bf16: run in bfloat16 autocast, as in training.

    Returns:
        ``logits [n]`` and ``labels [n]``, float32.
    """
    training = model.training
    model.eval()
    logits, labels = [], []
    try:
        for batch in batches:
            device = batch.labels.device.type
            with torch.autocast(device, torch.bfloat16, bf16), set_stance("force_eager"):
                logits.append(model(batch.dense, batch.ids, batch.offsets).float())
            labels.append(batch.labels)
    finally:
        model.train(training)
    if not logits:
        return np.zeros(0, np.float32), np.zeros(0, np.float32)
    return torch.cat(logits).cpu().numpy(), torch.cat(labels).cpu().numpy()

"""Train and compress deep learning recommendation models (DLRM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    import torch

    from dlrm.training.predictor import Predictor

__version__ = "0.1.0"


def load(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", last: bool = False
) -> Predictor:
    """A trained model that scores raw rows; see :class:`dlrm.training.predictor.Predictor`.

    Args:
        path: run directory, or a checkpoint in it.
        device: where to predict.
        last: of a run, take the latest checkpoint, not the best.
    """
    from dlrm.training.predictor import Predictor  # importing dlrm stays light

    return Predictor.load(path, device=device, last=last)

"""Train and compress deep learning recommendation models (DLRM)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlrm.utils import startup

if TYPE_CHECKING:
    import os

    import torch

    from dlrm.commands.fit import fit as fit
    from dlrm.model import DLRM as DLRM
    from dlrm.training.predictor import Predictor

__version__ = "0.1.0"

_LATE = {"fit": "dlrm.commands.fit", "DLRM": "dlrm.model"}
"""What is imported when it is used: importing dlrm stays light."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'dlrm' has no attribute {name!r}")
    if "torch" not in sys.modules:  # whose threads read the environment when it is imported
        startup.bound_spinning()
    return getattr(import_module(_LATE[name]), name)


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

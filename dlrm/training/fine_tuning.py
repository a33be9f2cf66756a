"""Learning rates for a trained model whose tables were fitted to other kinds.

A table that lost nothing is in its second epoch, in which large rates overfit. One that lost much
has to learn again, at full rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dlrm.data.fingerprint import require_same_ids
from dlrm.data.schema import Meta
from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.training.checkpoint import load_model

LEAST = 0.1  # the factor if nothing was lost
LOST = 0.02  # validation AUC from which on it is 1


class Trained(NamedTuple):
    """A trained model to start from."""

    model: DLRM
    data: str
    """The data that it was trained on, as named in its configuration."""


def fit(model: DLRM, path: str, data: str, meta: Meta, world: World) -> Trained:
    """Fit a model to a trained one: the MLPs are copied, the tables fitted.

    Args:
        model: the new model.
        path: run directory or checkpoint of the trained one.
        data: the prepared directory to train on.
        meta: what describes it.
        world: the processes, all of which call this function.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, does not fit, or its ids stand for other values.
    """
    trained, state = load_model(path, world.device, world=world)
    require_same_ids(data, meta, state.fingerprint, path)
    model.load_trained(trained)
    return Trained(trained, str(state.config.get("data")))


def auc_lost(trained: Mapping[str, float], fitted: Mapping[str, float]) -> float:
    """AUC that fitting the tables cost; NaN without metrics, so without validation rows."""
    return trained.get("auc", math.nan) - fitted.get("auc", math.nan)


def rate_factor(lost: float, before: str, now: str) -> float:
    """The factor f on the learning rates: f for embeddings, f squared for the rest.

    Args:
        lost: validation AUC that fitting the tables cost; NaN, if it is unknown, counts as 0.
        before: the data that the model was trained on.
        now: the data to train on. Other rows are no second epoch: the factor is 1.
    """
    if Path(before).resolve() != Path(now).resolve():
        return 1.0
    return min(1.0, max(LEAST, lost / LOST))

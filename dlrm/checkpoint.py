"""The state of a run on disk, whole or not at all.

A checkpoint is self-contained: it holds the recipe of the model (the arguments of ``DLRM``), so
that a trained model is loaded without the data or the configuration it came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm.files import whole
from dlrm.model import DLRM

LATEST, BEST = "latest.pt", "best.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path`` under a temporary name first, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def find(path: str | Path) -> Path:
    """The checkpoint that ``path`` means: a file, or a run directory's latest one.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    file = path / "checkpoints" / LATEST if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is no checkpoint: name a run's directory or a file in its checkpoints/"
        )
    return file


def way_on(directory: Path | None) -> str:
    """How to go on after an interruption of the run in ``directory``; None if it had none yet."""
    if directory and (directory / "checkpoints" / LATEST).exists():
        return f"go on with --resume {directory}"
    return "there was no checkpoint yet" + (f" in {directory}" if directory else "")


def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read the checkpoint of a run.

    Args:
        path: as for :func:`find`.
        device: where its tensors go.
        recipe: the model that it must be of; any if None.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is not a checkpoint of this program, or of another model.
    """
    file = find(path)
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} can't be read as a checkpoint: {error}") from None
    if not isinstance(state, dict) or "recipe" not in state:
        raise ValueError(f"{file} is not a checkpoint of this program")
    saved = state["recipe"]
    changed = [name for name in recipe or {} if recipe and recipe[name] != saved.get(name)]
    if changed:
        raise ValueError(
            f"{file} is of a model with another {', '.join(changed)}: resume with the data and the "
            "options of the model that the run began with, or start a new run"
        )
    return state


def load_model(path: str | Path, device: torch.device | str = "cpu") -> tuple[DLRM, dict[str, Any]]:
    """The trained model of a checkpoint, in evaluation mode, and the configuration of its run.

    Raises:
        FileNotFoundError, ValueError: as :func:`load`.
    """
    state = load(path, device)
    model = DLRM(**state["recipe"]).to(device)
    model.load_state_dict(state["model"])
    return model.eval(), yaml.safe_load(state["config"])

"""The files of a run, and the checkpoint that a path refers to."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from dlrm.utils.atomic import atomic_write

CONFIG = "config.yaml"
LATEST, BEST = "latest", "best"  # links to checkpoints
ABOUT = "about.pt"  # what a checkpoint stores next to its tensors


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that ``path`` names: its own directory, or the latest one of a run.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    path = Path(path)
    found = path if (path / ABOUT).is_file() else path / "checkpoints" / LATEST
    if not (found / ABOUT).is_file():
        if (path / CONFIG).is_file():
            raise FileNotFoundError(f"{path} has no checkpoint yet: remove it and start again")
        raise FileNotFoundError(
            f"{path} is not a checkpoint: name a run directory or one in its checkpoints/"
        )
    return found


def run_directory(path: str | Path) -> Path:
    """The directory of the run that a checkpoint belongs to; see :func:`find_checkpoint`.

    Raises:
        FileNotFoundError: there is no checkpoint, or it does not belong to a run.
    """
    directory = find_checkpoint(path).parent
    if len(directory.parts) < 2:  # a relative path does not name its parent
        directory = Path.cwd() / directory
    if directory.name != "checkpoints":
        raise FileNotFoundError(f"{path} is not in a run: name one in the checkpoints/ of a run")
    return directory.parent


def write_config(run: Path, options: str) -> None:
    """Write the options of a run, as YAML, into its directory."""
    with atomic_write(run / CONFIG) as temporary:
        temporary.write_text(options)


def has_checkpoint(run: Path) -> bool:
    """Whether a run has written a checkpoint."""
    return (run / "checkpoints" / LATEST).exists()


def new_name(kind: str) -> str:
    """A name for a run of an embedding kind, by the time."""
    return f"{kind}-{datetime.now():%Y%m%d-%H%M%S-%f}"


def new_or_resumed(new: Path, resume: str | None) -> Path:
    """The directory of a run: ``new``, or that of the checkpoint to resume.

    Raises:
        ValueError: a run of this name exists.
    """
    if resume:
        return run_directory(resume)
    if new.exists():
        rest = f"--resume {new}" if has_checkpoint(new) else "remove it"
        raise ValueError(f"{new} exists: choose another --name, or {rest}")
    return new


def resume_hint(directory: Path | None, *, saving: bool = True) -> str:
    """How to resume the run in ``directory``; None if it has no directory yet."""
    if directory and has_checkpoint(directory):
        return f"resume with --resume {directory}"
    if not saving:
        return "nothing was saved, as --checkpoint is false"
    return "there was no checkpoint yet" + (f" in {directory}" if directory else "")

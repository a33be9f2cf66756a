"""Where a run keeps its files, and which checkpoint a path means."""

from __future__ import annotations

from pathlib import Path

LATEST, BEST = "latest", "best"


ABOUT = "about.pt"


CONFIG = "config.yaml"  # of a run


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that ``path`` means: its directory, or a run directory's latest one.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    found = path if (path / ABOUT).is_file() else path / "checkpoints" / LATEST
    if not (found / ABOUT).is_file():
        if (path / CONFIG).is_file():
            raise FileNotFoundError(f"{path} has no checkpoint yet: remove it, and start it again")
        raise FileNotFoundError(
            f"{path} is no checkpoint: name a run's directory or one in its checkpoints/"
        )
    return found


def run_directory(path: str | Path) -> Path:
    """The directory of the run of a checkpoint; see :func:`find_checkpoint`.

    Raises:
        FileNotFoundError: there is none, or it lies in no run.
    """
    directory = find_checkpoint(path).parent
    if len(directory.parts) < 2:  # what it lies in is not part of the path
        directory = Path.cwd() / directory
    if directory.name != "checkpoints":
        raise FileNotFoundError(f"{path} lies in no run: name one in a run's checkpoints/")
    return directory.parent


def has_checkpoint(run: Path) -> bool:
    """Whether a run has written a checkpoint."""
    return (run / "checkpoints" / LATEST).exists()


def new_or_resumed(new: Path, resume: str | None) -> Path:
    """Of a run: ``new``, or that of the checkpoint that it goes on from.

    Raises:
        ValueError: there is a run of this name.
    """
    if resume:
        return run_directory(resume)
    if new.exists():
        rest = f"--resume {new}" if has_checkpoint(new) else "remove it"
        raise ValueError(f"{new} exists: choose another --name, or {rest}")
    return new


def resume_hint(directory: Path | None) -> str:
    """How to go on after an interruption of the run in ``directory``; None if it had none yet."""
    if directory and has_checkpoint(directory):
        return f"go on with --resume {directory}"
    return "there was no checkpoint yet" + (f" in {directory}" if directory else "")

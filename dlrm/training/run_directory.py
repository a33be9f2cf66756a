"""The files of a run: which checkpoints it has, and the lock of the process that writes them."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.utils.atomic import atomic_write, hold
from dlrm.utils.documents import read_yaml, refuse_pipe
from dlrm.utils.links import refuse_links_out
from dlrm.utils.messages import listing, require_local

if TYPE_CHECKING:
    from filelock import FileLock

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"  # of a checkpoint
PREPARATION = "preparation"  # what raw rows are prepared with
LATEST, BEST = "latest", "best"  # name checkpoints of the index
LOCK, HOLDER = ".lock", ".lock.json"

_NAME = re.compile(r"step_(\d+)(\+*)")


def step_of(path: Path) -> tuple[int, int] | None:
    """A key that orders the checkpoints of a run by step; None for other names."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), len(match[2])) if match and len(match[1]) < 16 else None


def checkpoints(run: Path) -> dict[Path, int]:
    """The steps of the checkpoints of a run, the newest first. Other files and directories are left
    out.
    """
    keys = {
        path: key
        for path in _entries(run / CHECKPOINTS)
        if (key := step_of(path)) and path.is_dir() and not path.is_symlink()
    }
    return {path: keys[path][0] for path in sorted(keys, key=keys.__getitem__, reverse=True)}


def is_run(path: Path) -> bool:
    """Whether a path is the directory of a run, even of one without checkpoints."""
    return (path / CHECKPOINTS).is_dir() or (path / CONFIG).is_file()


def named(path: str | Path) -> tuple[Path | None, str]:
    """The run that a path belongs to, and which of its checkpoints the path names.

    Returns:
        The run; None for a checkpoint that lies elsewhere. And ``latest``, also for a run;
        ``best``; or the name of the checkpoint.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the run has a link that leads out of it.
    """
    require_local(path)
    path = Path(path)
    inside = path.absolute().parent.name == CHECKPOINTS
    run, which = _run_around(path) if inside else None, path.name
    is_one = (path / MANIFEST).exists()
    if not is_one and is_run(path):
        run, which = path, LATEST
    elif not is_one:  # a damaged one, or a name from the index
        is_checkpoint = which in (LATEST, BEST) or (step_of(path) and os.path.lexists(path))
        if not inside or not is_checkpoint:
            runs = [str(inner) for inner in _entries(path) if is_run(inner)]
            hint = f", such as {listing(runs[::-1], 5)}" if runs else " or one in its checkpoints/"
            raise FileNotFoundError(f"{path} is not a checkpoint: name a run directory{hint}")
    if run is not None:
        refuse_links_out(run)
    return run, which


def run_directory(path: str | Path) -> Path:
    """The directory of the run that a path stands for, or that a checkpoint belongs to.

    Raises:
        FileNotFoundError: there is no checkpoint, or it does not belong to a run.
        ValueError: as :func:`named`.
    """
    run, _ = named(path)
    if run is None:
        raise FileNotFoundError(f"{path} is not in a run: name one in the checkpoints/ of a run")
    return run


def _run_around(checkpoint: Path) -> Path:
    # A relative path may not name its parents.
    if len(checkpoint.parts) > 2:
        return checkpoint.parent.parent
    return checkpoint.absolute().parent.parent


def _entries(directory: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(directory.iterdir())
    return []


def write_config(run: Path, options: str) -> None:
    """Write the options of a run, as YAML, into its directory."""
    with atomic_write(run / CONFIG) as temporary:
        temporary.write_text(options)


def saved_options(resumed: str | None) -> list[str]:
    """The options of the run that is resumed, as its file; none for a new one.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: there is a pipe or a device where a run has files.
    """
    if not resumed:
        return []
    run = run_directory(resumed)
    for path in _entries(run):
        refuse_pipe(path)
    return [f"--config={run / CONFIG}"]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, so that its name is free; returns the new one."""
    aside = path.with_name(f"{path.name}.aside")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}+")
    return path.rename(aside)


def has_checkpoint(run: Path) -> bool:
    """Whether a run has written a checkpoint."""
    return any((path / MANIFEST).is_file() for path in checkpoints(run))


def new_name(kind: str) -> str:
    """A name for a run of an embedding kind, by the time."""
    return f"{kind}-{datetime.now():%Y%m%d-%H%M%S-%f}"


def resume_hint(directory: Path | None, *, saving: bool = True) -> str:
    """How to resume the run in ``directory``; None if it has no directory yet."""
    if directory and has_checkpoint(directory):
        return f"resume with --resume {directory}"
    if not saving:
        return "nothing was saved, as --checkpoint is false"
    return "there was no checkpoint yet" + (f" in {directory}" if directory else "")


def write_to(directory: Path, work: Callable[[], object]) -> None:
    """Call ``work``, which writes to a run directory that is locked.

    Raises:
        ValueError: the directory was removed or renamed meanwhile.
    """
    try:
        work()
    except FileNotFoundError as error:
        if (directory / HOLDER).exists():
            raise
        raise ValueError(
            f"{directory} was removed or renamed while the run was being written to it: start the "
            "run again"
        ) from error


def nothing_to_resume(run: Path) -> str:
    """Say what a run without a checkpoint holds, and what to do."""
    names = [path.name for path in _entries(run / CHECKPOINTS)]
    found = [name for name in names if not name.endswith((".tmp", ".json"))]
    if found:
        return f"{run} has no checkpoint, only {', '.join(found)} in {CHECKPOINTS}/"
    with suppress(OSError, ValueError, LookupError, TypeError):
        if read_yaml(run / CONFIG)["checkpoint"] is False:
            return (
                f"{run} has no checkpoint, as it was trained with --checkpoint false: to have the "
                "model, train it again without that option, under another --name"
            )
    return f"{run} has no checkpoint yet: remove it and start again"


class RunLock:
    """The directory of a run, held by one writer at a time.

    The kernel releases the lock when its process ends, however it ends.

    Args:
        directory: of the run; a new one is created.
        new: whether this is a new run, so that the directory must not exist.
        patience: seconds to wait for another process that holds the run and may be ending.

    Raises:
        ValueError: the directory exists, another process holds it, or a link leads out of it.
    """

    def __init__(self, directory: Path, *, new: bool = False, patience: float = 0) -> None:
        self._directory = directory
        refuse_links_out(directory)
        if new:
            found = self._others()
            if directory.exists() and (found or not (directory / LOCK).exists()):
                raise ValueError(f"{directory} exists: choose another --name{self._rest(found)}")

        # Others may hold the lock, or make the directory meanwhile.
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        lock = hold(
            directory / LOCK,
            lambda: f"{directory} is being written by {self._holder()}: wait for it or end it",
            patience,
        )
        self.release = weakref.finalize(self, _release, lock, directory, made)
        """Let others write; also called when this object is deleted."""
        # A fork might call it at its exit; the kernel releases the lock anyway.
        self.release.atexit = False  # type: ignore[misc]
        if new and (found := self._others()):  # made by another process meanwhile
            self.release()
            raise ValueError(f"{directory} exists: choose another --name{self._rest(found)}")

        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with atomic_write(directory / HOLDER) as temporary:
            temporary.write_text(json.dumps(holder))

    def _others(self) -> set[str]:
        """Names in the directory besides the lock, which a killed process may have left."""
        return {path.name for path in _entries(self._directory)} - {LOCK, HOLDER}

    def _rest(self, found: set[str]) -> str:
        """Say what else may be done about a directory that exists. It must not be removed if there
        is, or might be, a checkpoint in it.
        """
        if has_checkpoint(self._directory):
            return f", or --resume {self._directory}"
        kept = _entries(self._directory / CHECKPOINTS)
        unknown = found and not found & {CONFIG, METRICS}
        lost = unknown or any(not path.name.endswith((".tmp", ".json")) for path in kept)
        return "" if lost else ", or remove it"

    def _holder(self) -> str:
        try:
            found = json.loads((self._directory / HOLDER).read_text()[:1000])
            since = f"{datetime.fromtimestamp(found['since']):%Y-%m-%d %H:%M:%S}"
            return f"process {int(found['pid'])} on {str(found['host'])!r:.80} since {since}"
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return "another process"


def _release(lock: FileLock, directory: Path, made: list[Path]) -> None:
    """Let others write. Directories that were made for a run that wrote nothing are removed."""
    if not lock.is_locked:
        return
    (directory / HOLDER).unlink(missing_ok=True)
    if made and {path.name for path in _entries(directory)} == {LOCK}:
        (directory / LOCK).unlink()
        with suppress(OSError):
            for path in made:
                path.rmdir()
    lock.release()

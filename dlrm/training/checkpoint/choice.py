"""Which checkpoint a path stands for, if some are damaged or removed meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dlrm.training import run_directory
from dlrm.training.checkpoint.manifest import Manifest
from dlrm.training.checkpoint.manifest_json import LIMITS, manifest_from_json
from dlrm.training.checkpoint.tensor_files import open_regular
from dlrm.training.run_directory import BEST, LATEST, MANIFEST, OLD_ABOUT

ATTEMPTS = 20  # to read a checkpoint of a run that removes old ones meanwhile


def reason(error: Exception) -> str:
    """An error in one line; that of a file names it."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
    return f"{name}: {text}" if name else text


def choose(path: Path, best: bool, refused: dict[str, str]) -> tuple[Path, Manifest] | Exception:
    """The checkpoint that a path stands for, and its manifest; or the error to raise.

    Args:
        path: as the user gave it; links are followed now.
        best: of a run, prefer the best checkpoint to the latest.
        refused: damaged checkpoints and why, which get more here; those that are gone are dropped.
    """
    for name in [name for name in refused if not Path(name).exists()]:
        del refused[name]
    try:
        for _ in range(ATTEMPTS):
            run, gone = run_directory.named_run(path), False
            for candidate in _candidates(path, run, best):
                if str(candidate) in refused:
                    continue
                try:
                    return candidate, _read_manifest(candidate)
                except (ValueError, OSError) as error:
                    if candidate.exists() and not run_directory.link_target(candidate):
                        refused[str(candidate)] = reason(error)
                    else:  # removed by its run, or a link that has been switched since
                        gone = True
            if not gone:
                return _nothing_intact(path, run, refused)
    except OSError as error:
        return error
    return changing(path)


def changing(path: Path) -> ValueError:
    """The error that a checkpoint is never there for long enough to be read."""
    return ValueError(f"{path} changes all the time: wait until its run has ended")


def _candidates(path: Path, run: Path | None, best: bool) -> list[Path]:
    """What may be opened, in this order."""
    if run is None:
        return [run_directory.link_target(path) or path]
    links = [BEST, LATEST] if best and path == run else [LATEST]
    directory = run / run_directory.CHECKPOINTS
    linked = [_target(directory / link) for link in links]
    if links[0] == BEST and not os.path.lexists(directory / BEST):
        linked.insert(0, _best_of(run))
    return list(dict.fromkeys([*filter(None, linked), *run_directory.checkpoints(run)]))


def _target(link: Path) -> Path | None:
    """What a link names, or the directory that a copy of the run has in its place."""
    return link if run_directory.is_copy(link) else run_directory.link_target(link)


def _best_of(run: Path) -> Path | None:
    """The best checkpoint of a copy without links, if the newest one knows its name."""
    for newest in run_directory.checkpoints(run)[:1]:
        with suppress(ValueError, OSError):
            best = newest.with_name(_read_manifest(newest).state.best_name or newest.name)
            return best if run_directory.step_of(best) and best.is_dir() else None
    return None


def _read_manifest(directory: Path) -> Manifest:
    if not (directory / MANIFEST).exists() and (directory / OLD_ABOUT).exists():
        raise ValueError("it was written by an earlier version of this program: train again")
    with open_regular(directory / MANIFEST) as file:
        text = file.read(LIMITS.size + 1)
    try:
        return manifest_from_json(text)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None


def _nothing_intact(path: Path, run: Path | None, refused: Mapping[str, str]) -> Exception:
    if not refused:
        return FileNotFoundError(run_directory.nothing_to_resume(run or path))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    if run is not None:
        return ValueError(f"{run} has no intact checkpoint: {reasons}")
    why, others = refused.get(str(path)) or next(iter(refused.values())), []
    with_run = path.absolute().parent
    if with_run.name == run_directory.CHECKPOINTS:
        others = [p for p in run_directory.checkpoints(with_run.parent) if str(p) not in refused]
    names = ", ".join(other.name for other in others if other.name != path.name)
    return ValueError(
        f"{path} can't be read as a checkpoint: {why}" + (f"; there are {names}" if names else "")
    )

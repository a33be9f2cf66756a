"""Which checkpoint a path stands for, if some are damaged or removed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from dlrm.training import run_directory
from dlrm.training.checkpoint.index import (
    INDEX,
    Entry,
    Index,
    best_known_to,
    old_index,
    read_index,
    read_manifest,
)
from dlrm.training.checkpoint.manifest import Manifest
from dlrm.training.run_directory import BEST, CHECKPOINTS, LATEST

ATTEMPTS = 20  # to read a checkpoint of a run that removes old ones meanwhile


def reason(error: Exception) -> str:
    """An error in one line; that of a file names it."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
    return f"{name}: {text}" if name else text


def choose(path: Path, best: bool, refused: dict[str, str]) -> tuple[Path, Manifest] | Exception:
    """The checkpoint that a path stands for, and its manifest; or the error to raise.

    Args:
        path: as the user gave it.
        best: of a run, prefer the best checkpoint to the latest.
        refused: damaged checkpoints and why, which get more here.
    """
    try:
        run, which = run_directory.named(path)
        if run is None or which not in (LATEST, BEST):
            return _only(path, run, refused)
        for _ in range(ATTEMPTS):
            tried = dict(refused)
            index = _index_of(run, tried)
            found = _first(run, index, which, best, tried)
            settled = found and tried == refused
            if settled or _index_of(run, tried) == index:  # else its run has gone on
                refused.update(tried)
                return found or _nothing_intact(path, run, refused)
    except (OSError, ValueError) as error:
        return error
    return changing(path)


def changing(path: Path) -> ValueError:
    """The error that a checkpoint is never there for long enough to be read."""
    return ValueError(f"{path} changes all the time: wait until its run has ended")


def _index_of(run: Path, refused: dict[str, str]) -> Index:
    """The index of a run, or what its checkpoints say if it has none that can be read."""
    try:
        return read_index(run) or old_index(run)
    except (ValueError, OSError) as error:
        refused[str(run / CHECKPOINTS / INDEX)] = reason(error)
        return old_index(run)


def _only(
    path: Path, run: Path | None, refused: dict[str, str]
) -> tuple[Path, Manifest] | Exception:
    """The one checkpoint that a path names."""
    if str(path) not in refused:
        try:
            return path, read_manifest(path)
        except (ValueError, OSError) as error:
            refused[str(path)] = reason(error)
    others = run_directory.checkpoints(run) if run else []
    names = [each.name for each in others if each.name != path.name and str(each) not in refused]
    return ValueError(
        f"{path} can't be read as a checkpoint: {refused[str(path)]}"
        + (f"; there are {', '.join(names)}" if names else "")
    )


def _first(
    run: Path, index: Index, which: str, best: bool, refused: dict[str, str]
) -> tuple[Path, Manifest] | None:
    """The first of the checkpoints that may stand for a run that can be read."""
    for entry, is_known in _entries(run, index, which, best):
        candidate = run / CHECKPOINTS / entry.name
        if str(candidate) in refused:
            continue
        try:
            manifest = read_manifest(candidate)
            entry.require(manifest)
            return candidate, manifest
        except (ValueError, OSError) as error:
            if is_known or candidate.exists():  # else its run has removed it
                refused[str(candidate)] = reason(error)
    return None


def _entries(run: Path, index: Index, which: str, best: bool) -> Iterator[tuple[Entry, bool]]:
    """Yield the candidates for a run in order, and whether each must be there."""
    if best or which == BEST:
        if entry := best_of(run, index):
            yield entry, True
        if which == BEST:
            return
    if index.latest:
        yield index.latest, True
    known = index.latest.run if index.latest else None
    for path in run_directory.checkpoints(run):
        step, _ = run_directory.step_of(path) or (0, 0)
        yield Entry(name=path.name, run=known, step=step), False


def best_of(run: Path, index: Index) -> Entry | None:
    """The best checkpoint of a run: as the latest one says, or if that can't be read, its index."""
    if index.latest:
        with suppress(ValueError, OSError):
            manifest = read_manifest(run / CHECKPOINTS / index.latest.name)
            index.latest.require(manifest)
            known = manifest.run, manifest.state.best_step
            if index.best is None or (index.best.run, index.best.step) != known:
                return best_known_to(index.latest, manifest)
    return index.best


def _nothing_intact(path: Path, run: Path, refused: Mapping[str, str]) -> Exception:
    if not refused and path.name == BEST and run_directory.has_checkpoint(run):
        return FileNotFoundError(f"{run} has no best checkpoint: it was not validated yet")
    if not refused:
        return FileNotFoundError(run_directory.nothing_to_resume(run))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    return ValueError(f"{path} has no intact checkpoint: {reasons}")

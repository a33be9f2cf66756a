"""Which checkpoints a path stands for: some may be damaged, or removed meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlrm.training import run_directory
from dlrm.training.checkpoint.index import (
    INDEX,
    Entry,
    Index,
    best_known_to,
    read_index,
    read_manifest,
    rebuilt_index,
)
from dlrm.training.run_directory import BEST, CHECKPOINTS, LATEST


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoints that a path may stand for."""

    path: Path
    """As the user gave it."""
    run: Path | None
    candidates: dict[Path, Entry | None]
    """The first choice first, each with what its manifest must say; None: anything."""
    index: Index | None = None
    """Of the run; None for a path that names a single checkpoint."""
    damaged_index: Mapping[str, str]
    """The file of the index and what is wrong with it, if anything is."""

    def is_current(self) -> bool:
        """Whether the run has written no other checkpoint since."""
        return self.index is None or self.run is None or _index_of(self.run, {}) == self.index

    def error(self, refused: Mapping[str, str]) -> Exception:
        """The error that no candidate can be read; ``refused`` has the reasons by path."""
        path, run = self.path, self.run
        if self.index is None:
            others = run_directory.checkpoints(run) if run else []
            names = ", ".join(each.name for each in others if each.name != path.name)
            text = f"{path} can't be read as a checkpoint: {refused[str(path)]}"
            return ValueError(text + (f"; there are {names}" if names else ""))
        if refused:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            return ValueError(f"{path} has no intact checkpoint: {reasons}")
        assert run is not None
        if path.name == BEST and run_directory.has_checkpoint(run):
            return FileNotFoundError(f"{run} has no best checkpoint: it was not validated yet")
        return FileNotFoundError(run_directory.nothing_to_resume(run))


def choose(path: Path, best: bool) -> Choice | Exception:
    """The checkpoints that a path may stand for; or the error to raise.

    Args:
        path: as the user gave it.
        best: of a run, prefer the best checkpoint to the latest.
    """
    try:
        run, which = run_directory.named(path)
        if run is None or which not in (LATEST, BEST):
            return Choice(path=path, run=run, candidates={path: None}, damaged_index={})

        damage: dict[str, str] = {}
        index = _index_of(run, damage)
        entries = [_best_of(run, index)] if best or which == BEST else []
        if which != BEST:
            known = index.latest.run if index.latest else None
            steps = run_directory.checkpoints(run)
            entries.append(index.latest)
            entries += [Entry(name=path.name, run=known, step=steps[path]) for path in steps]
    except (OSError, ValueError) as error:
        return error

    candidates: dict[Path, Entry | None] = {}
    for entry in filter(None, entries):
        candidates.setdefault(run / CHECKPOINTS / entry.name, entry)
    return Choice(path=path, run=run, candidates=candidates, index=index, damaged_index=damage)


def _index_of(run: Path, damage: dict[str, str]) -> Index:
    """The index of a run, or what its checkpoints say if it has none that can be read."""
    try:
        return read_index(run) or rebuilt_index(run)
    except (ValueError, OSError) as error:
        damage[str(run / CHECKPOINTS / INDEX)] = reason(error)
        return rebuilt_index(run)


def _best_of(run: Path, index: Index) -> Entry | None:
    """The best checkpoint of a run: as the latest one says, or if that can't be read, its index."""
    if index.latest:
        with suppress(ValueError, OSError):
            manifest = read_manifest(run / CHECKPOINTS / index.latest.name)
            index.latest.require(manifest)
            return best_known_to(index.latest, manifest.state)
    return index.best


def reason(error: Exception) -> str:
    """An error in one line; that of a file names it."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
    return f"{name}: {text}" if name else text

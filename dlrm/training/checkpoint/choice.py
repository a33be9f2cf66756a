"""Which checkpoint a path stands for, if some are damaged or removed meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dlrm.training import run_directory
from dlrm.training.checkpoint.manifest import Manifest, RunState
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
            for candidate in _candidates(path, run, best, refused):
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


def best_known(checkpoint: Path, state: RunState) -> Path | None:
    """The best checkpoint that a run had when it wrote another one; None if it is not there.

    Args:
        checkpoint: the other one, which may be the best itself.
        state: what it holds.
    """
    name = state.best_name or (checkpoint.name if state.best_step == state.steps else "")
    if Path(name).name != name or not run_directory.step_of(Path(name)):
        return None
    best = checkpoint.with_name(name)
    return best if best.is_dir() else None


def _candidates(path: Path, run: Path | None, best: bool, refused: dict[str, str]) -> list[Path]:
    """What may be opened, in this order. A link that is wrong is refused."""
    if run is None:
        return [run_directory.link_target(path) or path]
    linked = [_target(run / run_directory.CHECKPOINTS / LATEST)]
    if best and path == run:
        linked.insert(0, _best_of(run, refused))
    return list(dict.fromkeys([*filter(None, linked), *run_directory.checkpoints(run)]))


def _target(link: Path) -> Path | None:
    """What a link names, or the directory that a copy of the run has in its place."""
    return link if run_directory.is_copy(link) else run_directory.link_target(link)


def _best_of(run: Path, refused: dict[str, str]) -> Path | None:
    """The best checkpoint: the one that the newest knows, else what the link names.

    The link may be missing in a copy, and lead elsewhere by mistake.
    """
    link, known = run / run_directory.CHECKPOINTS / BEST, None
    linked = _target(link)
    for newest in run_directory.checkpoints(run)[:1]:
        with suppress(ValueError, OSError):
            known = best_known(newest, _read_manifest(newest).state)
    if known and known != linked and os.path.lexists(link) and not run_directory.is_copy(link):
        named = linked.name if linked else "no checkpoint"
        refused[str(link)] = f"it names {named}, and the best one is {known.name}"
    return known or linked


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

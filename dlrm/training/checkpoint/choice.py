"""Which checkpoints a path stands for: some may be damaged, or removed meanwhile.

The latest checkpoint of a run is its newest one. Its manifest names the best one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrm.training import run_directory
from dlrm.training.checkpoint.manifest import Manifest
from dlrm.training.checkpoint.manifest_json import read_manifest
from dlrm.training.run_directory import BEST, LATEST


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The step and the run that the manifest of a checkpoint must have."""

    step: int
    run: str | None = None
    """The id of its run; None: any."""

    def require(self, manifest: Manifest) -> None:
        """Check that a manifest is that of this checkpoint.

        Raises:
            ValueError: another one has taken its place.
        """
        if self.run not in (None, manifest.run):
            raise ValueError("it is a checkpoint of another run")
        if self.step != manifest.state.steps:
            raise ValueError(f"it is of step {manifest.state.steps:,}, not {self.step:,}")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoints that a path may stand for."""

    path: Path
    """As the user gave it."""
    run: Path | None
    candidates: dict[Path, Expected | None]
    """The first choice first, each with what its manifest must say; None: anything."""
    known: dict[Path, int] | None = None
    """The checkpoints of the run; None for a path that names a single one."""

    def is_current(self) -> bool:
        """Whether the run has written no other checkpoint since."""
        if self.run is None or self.known is None:
            return True
        return self.known == run_directory.checkpoints(self.run)

    def error(self, refused: Mapping[str, str]) -> Exception:
        """The error that no candidate can be read; ``refused`` has the reasons by path."""
        path, run = self.path, self.run
        if self.known is None:
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
            return Choice(path=path, run=run, candidates={path: None})
        known = run_directory.checkpoints(run)
        wanted = best_of(known) if best or which == BEST else {}
    except (OSError, ValueError) as error:
        return error

    candidates: dict[Path, Expected | None] = {**wanted}
    if which != BEST:
        for newest, step in known.items():
            candidates.setdefault(newest, Expected(step=step))
    return Choice(path=path, run=run, candidates=candidates, known=known)


def best_of(known: Mapping[Path, int]) -> dict[Path, Expected]:
    """The best checkpoint of a run, which may be lost; none if none was validated.

    The newest one that can be read knows which one was the best when it was written: maybe itself.
    Those that can't be read come before it, as one of them may have been better.

    Args:
        known: its checkpoints and their steps, the newest first.
    """
    damaged: dict[Path, Expected] = {}
    for newest, step in known.items():
        try:
            manifest = read_manifest(newest)
        except (OSError, ValueError):
            damaged[newest] = Expected(step=step)
            continue
        state = manifest.state
        if state.best_step < 0:
            return damaged
        itself = newest.name if state.best_step == state.steps else f"step_{state.best_step}"
        best = newest.with_name(state.best_name or itself)
        return damaged | {best: Expected(run=manifest.run, step=state.best_step)}
    return damaged


def reason(error: Exception) -> str:
    """An error in one line; that of a file names it."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
    return f"{name}: {text}" if name else text

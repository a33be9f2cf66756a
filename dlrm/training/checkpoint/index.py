"""``checkpoints/index.json``: which checkpoints of a run are the latest and the best one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dlrm.training.checkpoint.manifest import CheckpointName, Count, Manifest, RunState
from dlrm.training.checkpoint.manifest_json import LIMITS, manifest_from_json
from dlrm.training.checkpoint.tensor_files import open_regular
from dlrm.training.run_directory import CHECKPOINTS, MANIFEST, checkpoints
from dlrm.utils.atomic import atomic_write, sync_directory
from dlrm.utils.documents import parse_json
from dlrm.utils.validation import Number, validate

INDEX = "index.json"
MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint of a run."""

    name: CheckpointName
    """Of its directory, next to the index."""
    run: str | None
    """The id of its run; None if it is unknown."""
    step: Count
    metric: Number | None = None
    """Its validation AUC."""

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
class Index:
    """The latest and the best checkpoint of a run directory, and its job."""

    latest: Entry | None = None
    best: Entry | None = None
    job: str | None = None
    """The job of torchrun that writes the run; see :class:`~dlrm.distributed.world.World`."""


def read_index(run: Path) -> Index | None:
    """The index of a run; None if it has none.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    try:
        with open_regular(run / CHECKPOINTS / INDEX) as file:
            text = file.read(MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return validate(Index, parse_json(text.decode()))
    except ValueError as error:
        raise ValueError(f"{INDEX}: {error}") from None


def write_index(run: Path, index: Index) -> None:
    """Replace the index of a run; what it names is on disk.

    Raises:
        OSError: it can't be written. The old one is unchanged.
    """
    directory = run / CHECKPOINTS
    directory.mkdir(exist_ok=True)
    with atomic_write(directory / INDEX) as temporary, temporary.open("w") as file:
        file.write(json.dumps(asdict(index), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def rebuilt_index(run: Path) -> Index:
    """The index of a run that has lost it.

    The newest checkpoint that can be read knows which one was the best when it was written.
    """
    for newest in checkpoints(run):
        with suppress(OSError, ValueError):
            manifest = read_manifest(newest)
            latest = Entry(name=newest.name, run=manifest.run, step=manifest.state.steps)
            return Index(latest=latest, best=best_known_to(latest, manifest.state))
    return Index()


def best_known_to(latest: Entry, state: RunState) -> Entry | None:
    """The best checkpoint of a run when it wrote another one, which may be the best itself.

    Args:
        latest: the other one.
        state: of the run in it.
    """
    if state.best_step < 0:
        return None
    name = state.best_name or f"step_{state.best_step}"
    if state.best_step == state.steps:
        name = latest.name
    return Entry(name=name, run=latest.run, step=state.best_step, metric=state.best)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    with open_regular(directory / MANIFEST) as file:
        text = file.read(LIMITS.size + 1)
    try:
        return manifest_from_json(text)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None

"""Writing a checkpoint: completely or not at all, by any number of processes."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrm.distributed.world import World
from dlrm.training import run_directory
from dlrm.training.checkpoint.errors import one_line, quiet
from dlrm.training.checkpoint.manifest import Manifest, RunState, StoredFile, StoredTensor
from dlrm.training.checkpoint.manifest_json import manifest_to_json
from dlrm.training.checkpoint.parts import Parts, SavePlanner
from dlrm.training.checkpoint.tensor_files import TensorFileWriter
from dlrm.training.run_directory import BEST, LATEST, MANIFEST
from dlrm.utils.atomic import atomic_write


def save(
    directory: Path,
    parts: Parts,
    state: RunState,
    *,
    run: str,
    best: bool = False,
    keep: int = 2,
    world: World | None = None,
) -> None:
    """Write a checkpoint under a temporary name, rename it, and point links to it.

    Afterwards, older checkpoints are removed; other files in the directory are left alone. Every
    process must call this function.

    Args:
        directory: the ``checkpoints/`` of a run, which gets a checkpoint ``step_N``.
        parts: the tensors.
        state: everything else; the first process writes its own.
        run: the id of the run.
        best: whether this is the best one so far.
        keep: number of checkpoints to keep next to the best one.
        world: the processes of the run; None for one process.

    Raises:
        OSError: it can't be written. Earlier checkpoints are unchanged.
    """
    world = world or World()
    name = f"step_{state.steps}"
    temporary = directory / f"{name}.tmp"
    if world.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        while (directory / name).exists():  # from before the run was resumed
            name += "+"
    world.wait()

    def finish(tensors: dict[str, StoredTensor], files: dict[str, StoredFile]) -> None:
        with (temporary / MANIFEST).open("wb") as file:
            last = None if best else run_directory.link_target(directory / BEST)
            own = replace(state, best_name=last.name if last else None)
            written = Manifest(run=run, files=files, tensors=tensors, state=own)
            file.write(manifest_to_json(written))
            file.flush()
            os.fsync(file.fileno())

    about = {"format": "pt", "run": run, "step": str(state.steps)}
    try:
        with quiet():
            dcp.save(
                parts.tensors,
                storage_writer=TensorFileWriter(temporary, about, finish),
                planner=SavePlanner(),
                no_dist=world.size == 1,
            )
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise one_line(error, f"{directory / name} can't be written", OSError) from None
    if world.first:
        _sync(temporary)
        temporary.replace(directory / name)
        for link in [BEST] * best + [LATEST]:  # best first: what is latest has its best
            point(directory / link, name)
        _sync(directory)
        _remove_old(directory, keep)
    world.wait()


def point(link: Path, name: str) -> None:
    """Make ``link`` name a checkpoint next to it.

    It is a symbolic link, or where these can't be made, as on Windows without a privilege, a text
    file with the name.
    """
    if run_directory.is_copy(link):
        run_directory.set_aside(link)
    with atomic_write(link) as new:
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(name)
        except (OSError, NotImplementedError):
            new.write_text(name)


def _remove_old(directory: Path, keep: int) -> None:
    """Remove all but the last checkpoints, those that links name, and what is not the run's."""
    links = (run_directory.link_target(directory / link) for link in (LATEST, BEST))
    kept = {path.name for path in links if path}
    found = run_directory.checkpoints(directory.parent)
    newest = {(run_directory.step_of(path) or (0,))[0]: path for path in reversed(found)}
    kept |= {newest[step].name for step in sorted(newest, reverse=True)[:keep]}
    for old in found:
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)
    for old in directory.glob("step_*.tmp"):
        if old.is_dir() and run_directory.step_of(old.with_suffix("")):
            shutil.rmtree(old, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Let the names in a directory be on disk."""
    try:
        file = os.open(directory, os.O_RDONLY)
    except PermissionError:  # Windows opens no directories
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)

"""Checkpoints: written completely or not at all, by any number of processes, read by any other.

A checkpoint is a directory: the tensors of the model and the optimizers in safetensors files, and
``manifest.json`` with everything else and a digest of every tensor. That includes the specification
of the model (the arguments of ``DLRM``), so a trained model can be loaded without its data or
configuration, and the state of the training loop. Nothing in it is ever unpickled. ``latest`` and
``best`` are links to such directories.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import plan_for_this_machine
from dlrm.training import run_directory
from dlrm.training.checkpoint_choice import ATTEMPTS, changing, choose, reason
from dlrm.training.manifest import (
    MANIFEST,
    Manifest,
    RunState,
    StoredFile,
    StoredTensor,
)
from dlrm.training.manifest_json import manifest_to_json
from dlrm.training.parts import LoadPlanner, Parts, SavePlanner
from dlrm.training.run_directory import BEST, LATEST
from dlrm.training.tensor_files import (
    TensorFileReader,
    TensorFiles,
    TensorFileWriter,
)
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
        with _quiet():
            dcp.save(
                parts.tensors,
                storage_writer=TensorFileWriter(temporary, about, finish),
                planner=SavePlanner(),
                no_dist=world.size == 1,
            )
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _cause(error, f"{directory / name} can't be written", OSError) from None
    if world.first:
        _sync(temporary)
        temporary.replace(directory / name)
        for link in [BEST] * best + [LATEST]:  # best first: what is latest has its best
            point(directory / link, name)
        _sync(directory)
        _remove_old(directory, keep)
    world.wait()


def point(link: Path, name: str) -> None:
    """Make ``link`` a link to a checkpoint next to it."""
    with atomic_write(link) as new:
        new.unlink(missing_ok=True)
        new.symlink_to(name)


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
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning that there is only one process, and logged tracebacks."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    finally:
        logger.setLevel(level)


def _cause(error: BaseException, what: str, kind: Callable[[str], Exception]) -> BaseException:
    """An error of one line for one that several processes may have caused."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    chains = [list(_chain(failure[0])) for failure in failures] or [list(_chain(error))]
    causes = [cause for chain in chains for cause in chain]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return KeyboardInterrupt()
    system = [cause.strerror or str(cause) for cause in causes if isinstance(cause, OSError)]
    lines = [line for line in str(chains[0][0]).splitlines() if line.strip()]
    why = system[-1] if system else lines[-1] if lines else repr(chains[0][0])
    return kind(f"{what}: {why}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Checkpoint:
    """A checkpoint whose files are open and whose digests have been compared.

    :meth:`open` finds and reads it once; nothing here looks at a path again. So all that is taken
    from it belongs together, even if a run removes it meanwhile.
    """

    def __init__(self, path: Path, manifest: Manifest, files: TensorFiles) -> None:
        self.path = path
        self.run, self.state = manifest.run, manifest.state
        self._manifest, self._files = manifest, files

    @classmethod
    def open(cls, path: str | Path, *, best: bool = False, world: World | None = None) -> Self:
        """Open a checkpoint and verify it. Every process must call this function.

        If ``path`` is a run, or its link ``latest``, and that checkpoint is damaged, the newest
        intact one is opened, and a warning names both.

        Args:
            path: directory of a run, or one of its ``checkpoints/``.
            best: of a run, open the best checkpoint, if there is one, and not the latest.
            world: the processes, each of which verifies its share; None for one process.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is damaged, or was not written by this program.
        """
        world = world or World()
        refused: dict[str, str] = {}
        for _ in range(ATTEMPTS):
            chosen = world.from_first(lambda: choose(Path(path), best, refused))
            if isinstance(chosen, Exception):
                raise chosen
            directory, manifest = chosen
            found, why = None, None
            try:
                files = TensorFiles(directory, manifest)
                found = cls(directory, manifest, files)
                files.verify(world.rank, world.size)
            except (ValueError, OSError) as error:
                why = reason(error)
            whys = [one for one in world.from_all(why) if one]
            if found and not whys:
                if refused and world.first:
                    for name, damage in refused.items():
                        print(f"warning: {name} is damaged: {damage}", file=sys.stderr)
                    print(f"warning: {directory} is read instead", file=sys.stderr)
                return found
            if found:
                found.close()
            refused[str(directory)] = whys[0]
        raise changing(Path(path))

    def load(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        groups: bool = False,
        world: World | None = None,
    ) -> None:
        """Load the tensors into a model and optimizers. Every process must call this function.

        Args:
            model, optimizers: what to restore.
            groups: also restore the learning rates and seeds of the optimizers.
            world: the processes of the run; None for one process.

        Raises:
            ValueError: it is of a different model or optimizer.
        """
        parts = Parts(model, optimizers)
        if groups:
            parts.require_rules(self.state.groups)
        self.load_parts(parts, world=world)
        parts.restore(self.state.groups if groups else ())

    def load_parts(self, parts: Parts, *, world: World | None = None) -> None:
        """Load the tensors of ``parts`` in place; see :meth:`load`."""
        try:
            with _quiet():
                dcp.load(
                    parts.tensors,
                    storage_reader=TensorFileReader(self._manifest, self._files),
                    planner=LoadPlanner(flatten_state_dict=False),
                    no_dist=world is None or world.size == 1,
                )
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise _cause(error, f"{self.path} can't be loaded", ValueError) from None

    def require_spec(self, spec: Mapping[str, Any]) -> None:
        """Check that the model is the one that a specification describes.

        Raises:
            ValueError: it is a different model.
        """
        changed = [name for name, value in spec.items() if value != self.state.model.get(name)]
        if changed:
            raise ValueError(
                f"{self.path} is of a model with a different {', '.join(changed)}: resume with the "
                "data and the model options of that run, or start a new run"
            )

    def build_model(self, device: torch.device | str = "cpu") -> DLRM:
        """The trained model, in evaluation mode.

        Tables on devices that this machine lacks are put on ``device``.

        Raises:
            ValueError: the specification is not that of a model, or of another one.
        """
        try:
            spec = {**self.state.model, "plan": plan_for_this_machine(self.state.model["plan"])}
            self._require_size(spec)
            model = DLRM(**spec).to(device)
        except Exception as error:  # whatever an option of a wrong type leads to
            text = " ".join(str(error).split())
            raise ValueError(f"{self.path}: its model can't be built: {text:.300}") from None
        self.load(model)
        return model.eval()

    def _require_size(self, spec: Mapping[str, Any]) -> None:
        """Refuse a model that is larger than what is stored of it, before it takes memory."""
        flat = [("dense", {}) if kind == "paged" else (kind, own) for kind, own in spec["plan"]]
        with torch.device("meta"):
            state = DLRM(**{**spec, "plan": flat}).state_dict()
        described = sum(math.prod(value.size()) for value in state.values())
        tensors = self._manifest.tensors.items()
        stored = sum(math.prod(t.shape) for name, t in tensors if name.startswith("model."))
        if described != stored:
            raise ValueError(f"its model has {described:,} numbers, its tensors {stored:,}")

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    last: bool = False,
    world: World | None = None,
) -> tuple[DLRM, RunState]:
    """The trained model of a checkpoint, in evaluation mode, and the state of its run.

    Args:
        path: as for :meth:`Checkpoint.open`; of a run, the best checkpoint is taken.
        device: where to put it.
        last: of a run, take the latest checkpoint.
        world: the processes, all of which call this function; None for one process.

    Raises:
        FileNotFoundError, ValueError: as :meth:`Checkpoint.open` and
            :meth:`Checkpoint.build_model`.
    """
    with Checkpoint.open(path, best=not last, world=world) as found:
        return found.build_model(device), found.state

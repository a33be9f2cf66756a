"""The checkpoints of one run: those that it writes, and the one from which it goes on."""

from __future__ import annotations

import base64
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlrm.data.loader import BatchLoader
from dlrm.distributed.world import World
from dlrm.training import restarts, run_directory
from dlrm.training.checkpoint.choice import best_known
from dlrm.training.checkpoint.manifest import LoaderState, Progress, RunState
from dlrm.training.checkpoint.parts import Parts
from dlrm.training.checkpoint.reader import Checkpoint
from dlrm.training.checkpoint.writer import point, save
from dlrm.training.run_directory import BEST, CHECKPOINTS, LATEST, MANIFEST, RunLock
from dlrm.utils.messages import print_error

PATIENCE = 30  # seconds to wait for the end of an earlier attempt of the same job


class RunCheckpoints:
    """The directory of a run, held until this process leaves the world, and its checkpoints.

    Every process must make one, and call its methods.

    Args:
        new: directory of the run if it is a new one.
        resume: a run, or one of its checkpoints, to go on from; None for a new run.
        world: the processes of the run.
        keep: number of checkpoints to keep next to the best one.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the new run exists, another process holds the run, or it is damaged.
    """

    def __init__(self, new: Path, resume: str | None, world: World, *, keep: int = 2) -> None:
        self._world, self._keep = world, keep
        self._lock: RunLock | None = None
        self.saved = -1  # step of the last checkpoint
        world.before_leaving(self.release)

        def hold() -> tuple[Path, str | None]:
            directory, found = restarts.choose_run(new, resume, world.job)
            own = restarts.is_own(directory, world.job)
            patience = PATIENCE if own else 0
            self._lock = RunLock(directory, new=not (found or own), patience=patience)
            return directory, found

        self.directory, found = world.from_first(hold)
        self.resumed = Checkpoint.open(found, world=world) if found else None
        self._run = self.resumed.run if self.resumed else secrets.token_hex(16)

    def begin(self) -> None:
        """Name the job of torchrun in the directory."""
        restarts.begin(self.directory, self._world, resumed=self.resumed is not None)

    def release(self) -> None:
        """Let other processes write to the run."""
        if self._lock:
            self._lock.release()

    def attach(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: BatchLoader,
        *,
        spec: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Name the parts whose state is saved and restored.

        Args:
            model, optimizers, loader: the parts.
            spec: the arguments of the model.
            config: the configuration of the run, nested as in its file.
        """
        self._model, self._optimizers, self._loader = model, list(optimizers), loader
        self.spec, self.config = dict(spec), dict(config)

    def save(self, progress: Progress, *, unused: int) -> None:
        """Write a checkpoint.

        Args:
            progress: of the run; this method adds the states of the loader and of the random number
                generator.
            unused: samples of the loader that were not used; see its ``state_dict``.

        Raises:
            OSError: it can't be written. Earlier checkpoints are unchanged.
        """
        parts = Parts(self._model, self._optimizers)
        loader = self._loader.state_dict(unused=unused)
        loader["order"]["batch_size"] *= self._world.size  # that of all processes
        loader["order"]["footers"] = self._loader.footers()
        own = {
            "loader": LoaderState(**loader),
            "random": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        }
        state = RunState(
            **vars(progress) | own,
            model=self.spec,
            config=self.config,
            groups=parts.groups(),
            fingerprint=self._loader.meta.fingerprint,
        )
        target, keep = self.directory / CHECKPOINTS, self._keep
        better = progress.best_step == progress.steps
        save(target, parts, state, run=self._run, best=better, keep=keep, world=self._world)
        self.saved = state.steps

    def restore(self, batch_size: int) -> Progress:
        """Go on from the checkpoint that was opened; returns the progress of the run.

        Args:
            batch_size: samples per step, over all processes.

        Raises:
            ValueError: it is of another model, optimizer, data or batch size.
        """
        assert self.resumed
        path, state = self.resumed.path, self.resumed.state
        random = state.random_state()
        if state.loader is None or random is None or len(random) != len(torch.get_rng_state()):
            raise ValueError(f"{path} has no state of a training run: use --init_from")
        known = None not in (state.fingerprint, here := self._loader.meta.fingerprint)
        if known and here != state.fingerprint:
            raise ValueError(
                f"{path} can't be resumed: the data was prepared again, and its ids stand for "
                "other values; restore the data of the run, or start a new one"
            )
        loader = asdict(state.loader)
        if (there := loader["order"].get("batch_size")) != batch_size:
            unequal = f"batch_size is {batch_size} here and {there!r:.50} in the state"
            raise ValueError(f"{unequal}: resume with the same --batch_size")
        if self._world.first and "footers" in loader["order"]:
            self._compare_files(loader["order"]["footers"])
        loader["order"]["batch_size"] = self._loader.batch_size
        self.resumed.load(self._model, self._optimizers, groups=True, world=self._world)
        self._loader.load_state_dict(loader)
        try:
            torch.set_rng_state(random)
        except RuntimeError as error:
            raise ValueError(f"{path} has a damaged random state: {error}") from None
        self.resumed.close()
        self.saved = state.steps
        if self._world.first:
            _go_back(path, state)
        return state.progress

    def _compare_files(self, footers: str) -> None:
        """Warn if the training files were written again since the checkpoint was."""
        if footers != self._loader.footers():
            print_error(
                f"warning: the files of the training rows in {self.config['data']} are "
                "not those that the run has read so far: unless they hold the same rows, restore "
                "them, or start a new run"
            )

    def load_best(self, model: nn.Module) -> dict[str, float]:
        """Load the weights of the best checkpoint into the model of the run.

        Returns:
            Its validation metrics.
        """
        with Checkpoint.open(self.directory, best=True, world=self._world) as best:
            best.load(model, world=self._world)
            return best.state.validated[1]


def _go_back(path: Path, state: RunState) -> None:
    """Make a checkpoint the latest one of its run, and set aside those of later steps."""
    directory, run = path.parent, path.parent.parent
    if path.name in (LATEST, BEST):  # of a copy that has followed links
        own = directory / f"step_{state.steps}"
        if own.exists():
            run_directory.set_aside(own)
        path = path.rename(own)
    later = [p for p in run_directory.checkpoints(run) if _steps(p) > state.steps]
    if run_directory.link_target(directory / LATEST) != path:
        point(directory / LATEST, path.name)
    best = run_directory.link_target(directory / BEST)
    copied = run_directory.is_copy(directory / BEST) and (directory / BEST / MANIFEST).is_file()
    missing = state.best_step >= 0 and not copied
    known = best_known(path, state)
    if missing and (best is None or best in later):
        point(directory / BEST, (known or path).name)
    elif missing and known and best and best != known:
        print(
            f"warning: {directory / BEST} is damaged: it named {best.name}, and names the best "
            f"one, {known.name}, again",
            file=sys.stderr,
        )
        point(directory / BEST, known.name)
    for old in later:
        aside = run_directory.set_aside(old)
        print(
            f"note: the run goes on from {path.name}; {old.name} is set aside as {aside.name}",
            file=sys.stderr,
        )


def _steps(path: Path) -> int:
    return (run_directory.step_of(path) or (0, 0))[0]

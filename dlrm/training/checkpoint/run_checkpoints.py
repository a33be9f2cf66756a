"""The checkpoints of one run: those that it writes, and the one from which it resumes."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlrm.distributed.world import World
from dlrm.training import restarts, run_directory
from dlrm.training.checkpoint.choice import best_of, reason
from dlrm.training.checkpoint.manifest import LoaderState, Progress, RunState
from dlrm.training.checkpoint.manifest_json import read_manifest
from dlrm.training.checkpoint.parts import Parts
from dlrm.training.checkpoint.reader import Checkpoint
from dlrm.training.checkpoint.timer import CheckpointTimer
from dlrm.training.checkpoint.writer import CheckpointWriter
from dlrm.training.loaders import TrainingData
from dlrm.training.run_directory import CHECKPOINTS, RunLock
from dlrm.utils.messages import print_error

PATIENCE = 30  # seconds to wait for the end of an earlier attempt of the same job


class RunCheckpoints:
    """The directory of a run, held until this process leaves the world, and its checkpoints.

    Every process must make one, and call its methods.

    Args:
        new: directory of the run if it is a new one.
        resume: a run, or one of its checkpoints, to resume; None for a new run.
        world: the processes of the run.
        keep: number of checkpoints to keep next to the best one.
        every: steps or time between checkpoints; see :class:`CheckpointTimer`.

    Attributes:
        directory: of the run.
        resumed: the checkpoint to resume; None for a new run.
        writer: writes in the background.
        timer: says when a checkpoint is due.
        saved: step of the last checkpoint, or -1.
        run: id of the run, which its checkpoints have.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the new run exists, another process holds the run, or it is damaged.
    """

    def __init__(
        self, new: Path, resume: str | None, world: World, *, keep: int, every: str | None
    ) -> None:
        self._world = world
        self._lock: RunLock | None = None
        self.saved = -1
        world.before_leaving(self.release, keep=True)  # what is being written is completed

        def hold() -> tuple[Path, str | None, bool]:
            directory, found, restarted = restarts.choose_run(new, resume, world.job)
            patience = PATIENCE if restarted else 0
            self._lock = RunLock(directory, new=not (found or restarted), patience=patience)
            return directory, found, restarted

        self.directory, found, self._own = world.from_first(hold)
        self.resumed = Checkpoint.open(found, world=world) if found else None
        new_id = world.from_first(lambda: secrets.token_hex(16))
        self.run = self.resumed.run if self.resumed else new_id
        self.timer = CheckpointTimer(every, world, self.resumed.state.steps if self.resumed else 0)
        self.writer = CheckpointWriter(self.directory, self.run, world, keep)

    @property
    def batch_size(self) -> int | None:
        """Samples per step of the run that is resumed, if its checkpoint says so."""
        loader = self.resumed.state.loader if self.resumed else None
        size = loader.order.get("batch_size") if loader else None
        return size if isinstance(size, int) and size > 0 else None

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader: TrainingData,
        spec: Mapping[str, Any],
        config: Mapping[str, Any],
        batch_size: int,
    ) -> Progress:
        """Name the parts whose state is saved, restore that of a resumed run, and get ready to
        write.

        Args:
            model, optimizers, loader: the parts.
            spec: the arguments of the model.
            config: the configuration of the run, nested as in its file.
            batch_size: samples per step, over all processes.

        Returns:
            The progress of the run.

        Raises:
            ValueError: the checkpoint is of another model, optimizer, data or batch size.
        """
        self._model, self._optimizers, self._loader = model, list(optimizers), loader
        self.spec, self.config = dict(spec), dict(config)
        progress = self._restore(self.resumed, batch_size) if self.resumed else Progress()
        if self._world.first:
            self._clean_up()
        return progress

    def _clean_up(self) -> None:
        """Remove what a killed process left half written, and note the job of torchrun."""
        if self._own and not self.resumed:
            restarts.clear(self.directory)

        for old in (self.directory / CHECKPOINTS).glob("step_*.tmp"):
            if old.is_dir() and run_directory.step_of(old.with_suffix("")):
                shutil.rmtree(old, ignore_errors=True)

        restarts.note_job(self.directory, self._world.job)

    def release(self) -> None:
        """Let other processes write to the run, when what is being written is on disk."""
        if hasattr(self, "writer"):
            self.writer.close()
        if self._lock:
            self._lock.release()

    def save(self, progress: Progress, *, unused: int, last: bool) -> None:
        """Begin to write a checkpoint.

        Args:
            progress: of the run; this method adds the state of the loader.
            unused: samples of the loader that were not used; see its ``state_dict``.
            last: whether training ends with it.

        Raises:
            OSError: one can't be written. Earlier checkpoints are unchanged.
        """
        parts = Parts(self._model, self._optimizers)
        loader = self._loader.state_dict(unused=unused)
        loader["order"]["batch_size"] *= self._world.size  # that of all processes
        loader["order"]["footers"] = self._loader.footers()
        state = RunState(
            **vars(progress) | {"loader": LoaderState(**loader)},
            model=self.spec,
            config=self.config,
            groups=parts.groups(),
            fingerprint=self._loader.meta.fingerprint,
        )
        best = progress.best_step == progress.steps
        self.writer.save(parts, state, best=best, last=last)
        self.saved = state.steps

    def _restore(self, resumed: Checkpoint, batch_size: int) -> Progress:
        """Continue from a checkpoint; see :meth:`begin`."""
        path, state = resumed.path, resumed.state

        # It must be a state of a run on this data.
        if state.loader is None:
            raise ValueError(f"{path} has no state of a training run: use --init_from")
        known = None not in (state.fingerprint, here := self._loader.meta.fingerprint)
        if known and here != state.fingerprint:
            raise ValueError(
                f"{path} can't be resumed: the data was prepared again, and its ids stand for "
                "other values; restore the data of the run, or start a new one"
            )

        # The position is stored for the batches of all processes together.
        loader = asdict(state.loader)
        if (there := loader["order"].get("batch_size")) != batch_size:
            unequal = f"batch_size is {batch_size} here and {there!r:.50} in the state"
            raise ValueError(f"{unequal}: resume with the same --batch_size")
        loader["order"]["batch_size"] = self._loader.batch_size

        resumed.load(self._model, self._optimizers, groups=True, world=self._world)
        self._loader.load_state_dict(loader)
        if self._world.first and "footers" in loader["order"]:
            self._compare_files(loader["order"]["footers"])
        resumed.close()
        self.saved = state.steps

        # The best checkpoint may be lost.
        progress = state.progress
        self.writer.best = self._world.from_first(lambda: _go_back(path, state.steps))
        if self.writer.best is None:
            progress.best_step, progress.best = -1, -math.inf
        return progress

    def _compare_files(self, footers: str) -> None:
        """Warn if the training files were written again since the checkpoint was."""
        if footers != self._loader.footers():
            print_error(
                f"warning: the files of the training rows in {self.config['data']} are "
                "not those that the run has read so far: unless they hold the same rows, restore "
                "them, or start a new run"
            )

    def load_best(self, model: nn.Module, step: int) -> dict[str, float] | None:
        """Load the weights of the best checkpoint into the model of the run.

        Args:
            model: of the run.
            step: of the best checkpoint.

        Returns:
            Its validation metrics; None, after a warning, if it is not there any more.
        """
        self.writer.wait()
        name = self._world.from_first(lambda: self.writer.best) or f"step_{step}"
        path = self.directory / CHECKPOINTS / name
        try:
            best = Checkpoint.open(path, world=self._world)
            if (best.run, best.state.steps) != (self.run, step):
                raise ValueError(f"{path} is not the checkpoint of step {step:,} of this run")
        except (ValueError, OSError) as error:
            if self._world.first:
                print_error(f"warning: the best state is lost, the last one is the result: {error}")
            return None

        with best:
            best.load(model, world=self._world)
            return best.state.validated[1]


def _go_back(path: Path, step: int) -> str | None:
    """Set the checkpoints of a run aside that are later than the one that is resumed; returns the
    name of the best checkpoint that this one knows, if it is still there.
    """
    best = None
    for lost, expected in best_of({path: step}).items():
        try:
            expected.require(read_manifest(lost))
            best = lost.name
        except (ValueError, OSError) as error:
            print_error(
                f"warning: the best checkpoint, {lost}, is lost: {reason(error)}; the run "
                "continues without it"
            )

    # Later ones are of steps that will be trained again.
    newest_first = run_directory.checkpoints(path.parent.parent)
    for later in takewhile(lambda each: each.name != path.name, newest_first):
        aside = run_directory.set_aside(later)
        print_error(
            f"note: the run continues from {path.name}; {later.name} is set aside as {aside.name}"
        )
    return best

"""Checkpoints: written completely or not at all, by any number of processes, read by any other.

A checkpoint is a directory: the tensors of the model and the optimizers in safetensors files, and
``manifest.json`` with everything else and a digest of every tensor. That includes the specification
of the model (the arguments of ``DLRM``), so a trained model can be loaded without its data or
configuration, and the state of the training loop. Nothing in it is ever unpickled. ``latest`` and
``best`` are links to such directories.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dlrm.distributed.world import World
from dlrm.kernels.update.rules import make_rule
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import plan_for_this_machine
from dlrm.training import run_directory
from dlrm.training.manifest import (
    MANIFEST,
    MAX_BYTES,
    Group,
    Manifest,
    RunState,
    StoredFile,
    StoredTensor,
)
from dlrm.training.run_directory import BEST, LATEST, OLD_ABOUT
from dlrm.training.tensor_files import (
    TensorFileReader,
    TensorFiles,
    TensorFileWriter,
    open_regular,
)
from dlrm.utils.atomic import atomic_write
from dlrm.utils.local_shards import LocalShards

Values = dict[str, Tensor | LocalShards]
_ATTEMPTS = 20  # to read a checkpoint of a run that removes old ones meanwhile


class Parts:
    """The tensors of a model and its optimizers by name, the same for any number of processes.

    Args:
        model: parameter ``p`` is called ``model.p``, and buffers likewise.
        optimizers: the state ``sum`` of parameter ``p`` is called ``optimizer.p.sum``.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._states = [optimizer.state_dict() for optimizer in self._optimizers]
        self._values: Values = model.state_dict()
        self.tensors: Values = {f"model.{name}": value for name, value in self._values.items()}
        names = {parameter: name for name, parameter in model.named_parameters()}
        states: dict[tuple[str, bool], dict[str, Tensor]] = {}
        for optimizer, saved in zip(self._optimizers, self._states, strict=True):
            owned = [(p, group) for group in optimizer.param_groups for p in group["params"]]
            for index, state in saved["state"].items():
                parameter, group = owned[index]
                kept = make_rule(group["rule"]).states
                for name, tensor in state.items():
                    per_row = kept.get(name, False)
                    states.setdefault((name, per_row), {})[names[parameter]] = tensor
        parted = {name: m for name, m in model.named_modules() if hasattr(m, "shards")}
        for (name, per_row), tensors in states.items():
            for path, module in parted.items():
                own = {n: tensors.pop(f"{path}.{n}", None) for n, _ in module.named_parameters()}
                if None not in own.values():
                    whole_state = module.shards(own, per_row=per_row)
                    self.tensors[f"optimizer.{path}.weight.{name}"] = whole_state
            for path, tensor in tensors.items():
                self.tensors[f"optimizer.{path}.{name}"] = tensor

    def groups(self) -> tuple[tuple[Group, ...], ...]:
        """What is saved of the parameter groups of each optimizer."""
        return tuple(
            tuple(
                Group(
                    rule=group["rule"],
                    lr=float(group["lr"]),
                    seed=int(group["seed"]) if "seed" in group else None,
                )
                for group in state["param_groups"]
            )
            for state in self._states
        )

    def require_rules(self, groups: Sequence[Sequence[Group]]) -> None:
        """Check saved parameter groups against those of the optimizers.

        Raises:
            ValueError: they are of other optimizers.
        """
        own = self.groups()
        if [len(inner) for inner in own] != [len(inner) for inner in groups]:
            raise ValueError("the saved optimizers have other parameter groups than these")
        for here, there in zip(sum(own, ()), (g for inner in groups for g in inner), strict=True):
            if here.rule != there.rule:
                raise ValueError(
                    f"the saved optimizer is {there.rule}, this one is {here.rule}: resume "
                    "with the optimizers of that run"
                )

    def restore(self, groups: Sequence[Sequence[Group]] = ()) -> None:
        """Copy the loaded :attr:`tensors` into the model and the optimizers.

        Args:
            groups: saved parameter groups; none keeps the current ones.
        """
        for value in self.tensors.values():
            if isinstance(value, LocalShards):
                value.loaded()
        for name in self._values:
            self._values[name] = self.tensors[f"model.{name}"]
        self._model.load_state_dict(self._values)
        saved = zip(self._optimizers, self._states, groups or self.groups(), strict=True)
        for optimizer, state, options in saved:
            for group, old in zip(state["param_groups"], options, strict=True):
                # The other options keep the values of this run.
                group["lr"] = old.lr
                if old.seed is not None:
                    group["seed"] = torch.tensor(old.seed)
            optimizer.load_state_dict(state)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value if isinstance(value, Tensor) else value.__get_tensor_shard__(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As in the base class, but without copying or flattening values."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value if isinstance(value, Tensor) else value.__get_tensor_shard__(index)


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
            file.write(Manifest(run=run, files=files, tensors=tensors, state=own).to_json())
            file.flush()
            os.fsync(file.fileno())

    about = {"format": "pt", "run": run, "step": str(state.steps)}
    try:
        with _quiet():
            dcp.save(
                parts.tensors,
                storage_writer=TensorFileWriter(temporary, about, finish),
                planner=_SavePlanner(),
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
    def open(cls, path: str | Path, *, world: World | None = None) -> Self:
        """Open a checkpoint and verify it. Every process must call this function.

        If ``path`` is a run, or its link ``latest``, and that checkpoint is damaged, the newest
        intact one is opened, and a warning names both.

        Args:
            path: directory of a run, or one of its ``checkpoints/``.
            world: the processes, each of which verifies its share; None for one process.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is damaged, or was not written by this program.
        """
        world = world or World()
        refused: dict[str, str] = {}
        for _ in range(_ATTEMPTS):
            chosen = world.from_first(lambda: _choose(Path(path), refused))
            if isinstance(chosen, Exception):
                raise chosen
            directory, text = chosen
            found, why = None, None
            try:
                manifest = Manifest.from_json(text)
                files = TensorFiles(directory, manifest)
                found = cls(directory, manifest, files)
                files.verify(world.rank, world.size)
            except (ValueError, OSError) as error:
                why = _reason(error)
            whys = [one for one in world.from_all(why) if one]
            if found and not whys:
                if refused and world.first:
                    for name, reason in refused.items():
                        print(f"warning: {name} is damaged: {reason}", file=sys.stderr)
                    print(f"warning: {directory} is read instead", file=sys.stderr)
                return found
            if found:
                found.close()
            refused[str(directory)] = whys[0]
        raise _changing(Path(path))

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
                    planner=_LoadPlanner(flatten_state_dict=False),
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
        spec = self.state.model
        try:
            model = DLRM(**{**spec, "plan": plan_for_this_machine(spec["plan"])}).to(device)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RuntimeError,
            MemoryError,
        ) as error:
            text = " ".join(str(error).split())
            raise ValueError(f"{self.path}: its model can't be built: {text:.300}") from None
        self.load(model)
        return model.eval()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_model(
    path: str | Path, device: torch.device | str = "cpu", *, world: World | None = None
) -> tuple[DLRM, RunState]:
    """The trained model of a checkpoint, in evaluation mode, and the state of its run.

    Args:
        path: as for :meth:`Checkpoint.open`.
        device: where to put it.
        world: the processes, all of which call this function; None for one process.

    Raises:
        FileNotFoundError, ValueError: as :meth:`Checkpoint.open` and
            :meth:`Checkpoint.build_model`.
    """
    with Checkpoint.open(path, world=world) as found:
        return found.build_model(device), found.state


def _reason(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
    return f"{name}: {text}" if name else text


def _choose(path: Path, refused: dict[str, str]) -> tuple[Path, bytes] | Exception:
    """The checkpoint that a path stands for, and its manifest; or the error to raise.

    Args:
        path: as the user gave it; links are followed now.
        refused: damaged checkpoints and why, which get more here; those that are gone are dropped.
    """
    for name in [name for name in refused if not Path(name).exists()]:
        del refused[name]
    try:
        for _ in range(_ATTEMPTS):
            run, gone = run_directory.named_run(path), False
            for candidate in _candidates(path, run):
                if str(candidate) in refused:
                    continue
                try:
                    return candidate, _read_manifest(candidate)
                except (ValueError, OSError) as error:
                    if candidate.exists() and not run_directory.link_target(candidate):
                        refused[str(candidate)] = _reason(error)
                    else:  # removed by its run, or a link that has been switched since
                        gone = True
            if not gone:
                return _nothing_intact(path, run, refused)
    except OSError as error:
        return error
    return _changing(path)


def _changing(path: Path) -> ValueError:
    return ValueError(f"{path} changes all the time: wait until its run has ended")


def _candidates(path: Path, run: Path | None) -> list[Path]:
    """What may be opened, best first."""
    if run is None:
        return [run_directory.link_target(path) or path]
    latest = run_directory.link_target(run / run_directory.CHECKPOINTS / LATEST)
    others = [other for other in run_directory.checkpoints(run) if other != latest]
    return [*([latest] if latest else []), *others]


def _read_manifest(directory: Path) -> bytes:
    if not (directory / MANIFEST).exists() and (directory / OLD_ABOUT).exists():
        raise ValueError("it was written by an earlier version of this program: train again")
    with open_regular(directory / MANIFEST) as file:
        text = file.read(MAX_BYTES + 1)
    try:
        Manifest.from_json(text)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None
    return text


def _nothing_intact(path: Path, run: Path | None, refused: Mapping[str, str]) -> Exception:
    if not refused:
        return FileNotFoundError(run_directory.nothing_to_resume(run or path))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    if run is not None:
        return ValueError(f"{run} has no intact checkpoint: {reasons}")
    reason, others = refused.get(str(path)) or next(iter(refused.values())), []
    with_run = path.absolute().parent
    if with_run.name == run_directory.CHECKPOINTS:
        others = [p for p in run_directory.checkpoints(with_run.parent) if str(p) not in refused]
    names = ", ".join(other.name for other in others if other.name != path.name)
    return ValueError(
        f"{path} can't be read as a checkpoint: {reason}"
        + (f"; there are {names}" if names else "")
    )

"""Checkpoints: written completely or not at all, by any number of processes, read by any other.

A checkpoint is a directory: the tensors of the model and the optimizers in PyTorch's distributed
format, and ``about.pt`` with everything else. That includes the specification of the model (the
arguments of ``DLRM``), so a trained model can be loaded without its data or configuration, and the
state of the training loop. ``latest`` and ``best`` are links to such directories.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrm.distributed.world import World
from dlrm.kernels.update.rules import make_rule
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import plan_for_this_machine
from dlrm.training.run_directory import ABOUT, BEST, LATEST, find_checkpoint
from dlrm.utils.atomic import atomic_write
from dlrm.utils.local_shards import LocalShards

Values = dict[str, Tensor | LocalShards]


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

    def groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of the optimizers, without the parameters."""
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
            for state in self._states
        ]

    def restore(self, groups: list[list[dict[str, Any]]] | None = None) -> None:
        """Copy the loaded :attr:`tensors` into the model and the optimizers."""
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
                group.update({name: old[name] for name in ("rule", "lr", "seed") if name in old})
            optimizer.load_state_dict(state)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value if isinstance(value, Tensor) else value.__get_tensor_shard__(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As in the base class, but raise the cause of an error, for other processes to see."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            causes = (e for e in _chain(error) if isinstance(e, OSError | KeyboardInterrupt))
            raise next(causes, error) from None


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
    path: Path,
    parts: Parts,
    about: Mapping[str, Any],
    *,
    links: Iterable[str] = (LATEST,),
    world: World | None = None,
) -> None:
    """Write a checkpoint under a temporary name, rename it, and point links to it.

    Afterwards, checkpoints with such a name that no link points to are removed; other files in the
    directory are left alone. Every process must call this function.

    Args:
        path: where to write it: ``checkpoints/NAME_NUMBER`` in the directory of a run.
        parts: the tensors.
        about: everything else; the first process writes its own.
        links: names of links to this checkpoint.
        world: the processes of the run; None for one process.

    Raises:
        OSError: it can't be written. Earlier checkpoints are unchanged.
    """
    world = world or World()
    directory, name = path.parent, path.name
    temporary = directory / f"{name}.tmp"
    if world.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        while (directory / name).exists():  # from before the run was resumed
            name += "+"
    world.wait()
    try:
        with _without_warning():
            dcp.save(
                parts.tensors,
                storage_writer=_Writer(temporary),
                planner=_SavePlanner(),
                no_dist=world.size == 1,
            )
        if world.first:
            _write_about(temporary / ABOUT, about)
    except (CheckpointException, OSError) as error:
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)
        causes = _causes(error)
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            raise KeyboardInterrupt from None
        texts = [cause.strerror or str(cause) for cause in causes if isinstance(cause, OSError)]
        raise OSError(f"{path} can't be written: {(texts or [_reason(error)])[-1]}") from None
    if world.first:
        temporary.replace(directory / name)
        for link in links:
            with atomic_write(directory / link) as new:
                new.unlink(missing_ok=True)
                new.symlink_to(name)
        kept = {(directory / link).resolve().name for link in (LATEST, BEST)}
        stem = path.name.rstrip("0123456789")
        alike = re.compile(re.escape(stem) + r"\d+(\+*|\.tmp)")
        for old in sorted(directory.iterdir()):
            if alike.fullmatch(old.name) and not old.is_symlink() and old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
    world.wait()


def _write_about(path: Path, about: Mapping[str, Any]) -> None:
    packed = io.BytesIO()  # torch.save to a file hides why it can't be written
    torch.save(dict(about), packed)
    with path.open("wb") as file:
        file.write(packed.getbuffer())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress the warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _causes(error: BaseException) -> list[BaseException]:
    """The errors that caused an error, in all processes."""
    if not isinstance(error, CheckpointException):
        return [error]
    return [cause for failure in error.failures.values() for cause in _chain(failure[0])]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """The last line of the text of an error, which may contain a traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def about(path: str | Path, *, spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read what a checkpoint stores next to its tensors.

    Args:
        path: as for :func:`find_checkpoint`.
        spec: the specification that its model must have; None for any.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it was not written by this program, or is of a different model.
    """
    file = find_checkpoint(path) / ABOUT
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} can't be read as a checkpoint: {error}") from None
    if not isinstance(state, dict) or "recipe" not in state:
        raise ValueError(f"{file} was not written by this program")
    saved = state["recipe"]
    changed = [name for name, value in (spec or {}).items() if value != saved.get(name)]
    if changed:
        raise ValueError(
            f"{file} is of a model with a different {', '.join(changed)}: resume with the data and "
            "the model options of that run, or start a new run"
        )
    return state


def load(
    path: str | Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    groups: list[list[dict[str, Any]]] | None = None,
    world: World | None = None,
) -> None:
    """Load a checkpoint into a model and optimizers. Every process must call this function.

    Args:
        path: as for :func:`find_checkpoint`.
        model, optimizers: what to restore.
        groups: parameter groups of the optimizers, from :func:`about`; None keeps the current ones.
        world: the processes of the run; None for one process.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or of a different model or optimizer.
    """
    directory, parts = find_checkpoint(path), Parts(model, optimizers)
    for own, old in zip(parts.groups(), groups or [], strict=bool(groups)):
        for group, saved in zip(own, old, strict=True):
            if group["rule"] != saved["rule"]:
                raise ValueError(
                    f"the saved optimizer is {saved['rule']}, this one is {group['rule']}: resume "
                    "with the optimizers of that run"
                )
    reader = dcp.FileSystemReader(directory)
    try:
        reader.read_metadata()  # here, since the next call would log a traceback
        with _without_warning():
            dcp.load(
                parts.tensors,
                storage_reader=reader,
                planner=_LoadPlanner(flatten_state_dict=False),
                no_dist=world is None or world.size == 1,
            )
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        if any(isinstance(cause, KeyboardInterrupt) for cause in _causes(error)):
            raise KeyboardInterrupt from None
        raise ValueError(f"{directory} can't be read as a checkpoint: {_reason(error)}") from None
    parts.restore(groups)


def load_model(path: str | Path, device: torch.device | str = "cpu") -> tuple[DLRM, dict[str, Any]]:
    """The trained model of a checkpoint, in evaluation mode, and the configuration of its run.

    Tables on devices that this machine lacks are put on ``device``.

    Raises:
        FileNotFoundError, ValueError: as :func:`about` and :func:`load`.
    """
    state = about(path)
    spec = state["recipe"]
    model = DLRM(**spec | {"plan": plan_for_this_machine(spec["plan"])}).to(device)
    load(path, model)
    return model.eval(), yaml.safe_load(state["config"])

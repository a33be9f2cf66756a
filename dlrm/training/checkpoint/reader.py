"""Reading a checkpoint: one that is whole, whatever happens to its files meanwhile."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import plan_for_this_machine, without_speed
from dlrm.training.checkpoint.choice import Expected, choose, reason
from dlrm.training.checkpoint.manifest import Manifest, RunState
from dlrm.training.checkpoint.manifest_json import read_manifest
from dlrm.training.checkpoint.parts import Parts
from dlrm.training.checkpoint.tensor_files import TensorFiles

ATTEMPTS = 20  # to read a checkpoint of a run that removes old ones meanwhile


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
    def open(
        cls,
        path: str | Path,
        *,
        best: bool = False,
        world: World | None = None,
        meanwhile: Callable[[Self], object] | None = None,
    ) -> Self:
        """Open a checkpoint and verify it. Every process must call this function.

        If ``path`` is a run, or names its latest checkpoint, and that is damaged, the newest intact
        one is opened, and a warning names both.

        Args:
            path: directory of a run, or one of its ``checkpoints/``; ``checkpoints/latest`` and
                ``checkpoints/best`` stand for the newest one and for the best one.
            best: of a run, open the best checkpoint, if there is one, and not the latest.
            world: the processes, each of which verifies its share; None for one process.
            meanwhile: work with the checkpoint while it is verified. If it is damaged, that is
                what is reported, and the work is done again with another one.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is damaged, or was not written by this program.
        """
        world = world or World()
        for _ in range(ATTEMPTS):
            choice = world.from_first(lambda: choose(Path(path), best))
            if isinstance(choice, Exception):
                raise choice

            found, refused = None, dict[str, str]()
            for place, expected in choice.candidates.items():
                found, why = cls._open(place, expected, world, meanwhile)
                if found:
                    break
                refused[str(place)] = why

            # Its run may have removed what could not be read.
            if not refused or world.from_first(choice.is_current):
                if found is None:
                    raise choice.error(refused)
                if refused and world.first:
                    for name, damage in refused.items():
                        print(f"warning: {name} is damaged: {damage}", file=sys.stderr)
                    print(f"warning: {found.path} is read instead", file=sys.stderr)
                return found
            if found:
                found.close()
        raise ValueError(f"{path} changes all the time: wait until its run has ended")

    @classmethod
    def _open(
        cls,
        path: Path,
        expected: Expected | None,
        world: World,
        meanwhile: Callable[[Self], object] | None,
    ) -> tuple[Self | None, str]:
        """Open one checkpoint and verify it; or say why that is impossible for some process."""
        found, why, failed = None, "", None
        try:
            manifest = read_manifest(path)
            if expected:
                expected.require(manifest)
            files = TensorFiles(path, manifest)
            found = cls(path, manifest, files)

            verified = files.verify(world.rank, world.size)
            try:
                if meanwhile:
                    meanwhile(found)
            except ValueError as error:  # damage, which may be its cause, is reported instead
                failed = error
            verified()
        except (ValueError, OSError) as error:
            why = reason(error)

        # What one process finds counts for all of them.
        whys = [each for each in world.from_all(why) if each]
        if found and (whys or failed):
            found.close()
        if failed and not whys:
            raise failed
        return (None, whys[0]) if whys else (found, "")

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
        why = None
        try:
            self._files.read_into(parts.pieces())
        except (ValueError, OSError) as error:
            why = reason(error)
        whys = [each for each in (world or World()).from_all(why) if each]
        if whys:
            raise ValueError(f"{self.path} can't be loaded: {whys[0]}")

    def require_spec(self, spec: Mapping[str, Any]) -> None:
        """Check that the model is the one that a specification describes.

        Raises:
            ValueError: it is a different model.
        """
        wanted, saved = dict(spec), dict(self.state.model)
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            saved["plan"] = without_speed(saved["plan"])
            wanted["plan"] = without_speed(wanted["plan"])
        changed = [name for name, value in wanted.items() if value != saved.get(name)]
        if changed:
            raise ValueError(
                f"{self.path} is of a model with a different {', '.join(changed)}: resume with "
                "the data and the model options of that run (--emb, --budget, --tables.*, "
                "--model.*), or start a new run"
            )

    def build_model(self, device: torch.device | str = "cpu") -> DLRM:
        """The trained model, in evaluation mode.

        Tables on devices that this machine lacks are put on ``device``.

        Raises:
            ValueError: the specification is not that of a model, or of another one.
        """
        try:
            self._require_few_layers(self.state.model)
            spec = {**self.state.model, "plan": plan_for_this_machine(self.state.model["plan"])}
            self._require_size(spec)
            with torch.device(device), _Undrawn():  # a copy of tables would take a second
                model = DLRM(**spec)
            model.to(device)
        except Exception as error:  # whatever an option of a wrong type leads to
            text = " ".join(str(error).split())
            raise ValueError(f"{self.path}: its model can't be built: {text:.300}") from None
        self.load(model)
        return model.eval()

    def _require_few_layers(self, spec: Mapping[str, Any]) -> None:
        """Refuse a model with more layers or tables than are stored, before it takes time: a
        million layers cost as much as it likes who asks for them.
        """
        tensors = self._manifest.tensors
        layers = len(spec["bottom_mlp"]) + len(spec["top_mlp"])
        layers += spec["cross_layers"] if spec.get("interaction") == "dcn" else 0
        if layers > len(tensors):
            raise ValueError(f"it has {layers:,} layers, its files {len(tensors):,} tensors")

        tables = len(spec["num_embeddings"])
        numbers = self._numbers("model.sparse_arch.")
        if tables > numbers:
            raise ValueError(f"it has {tables:,} tables, its files {numbers:,} numbers of them")

    def _numbers(self, prefix: str) -> int:
        """How many numbers are stored in tensors whose names begin so."""
        tensors = self._manifest.tensors.items()
        return sum(math.prod(tensor.shape) for name, tensor in tensors if name.startswith(prefix))

    def _require_size(self, spec: Mapping[str, Any]) -> None:
        """Refuse a model that is larger than what is stored of it, before it takes memory."""
        flat = [("dense", {}) if kind == "paged" else (kind, rest) for kind, rest in spec["plan"]]
        with torch.device("meta"), _Undrawn():
            state = DLRM(**{**spec, "plan": flat}).state_dict()
        described = sum(math.prod(value.size()) for value in state.values())
        if described != (stored := self._numbers("model.")):
            raise ValueError(
                f"its model has {described:,} numbers, its tensors {stored:,}: it is damaged, or "
                "of another version of this program; use that version, or train again"
            )

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Undrawn(TorchFunctionMode):
    """Leave new weights as they are, as those of a checkpoint replace them: drawing takes seconds,
    and without memory it imports PyTorch's compiler.
    """

    _DRAWS = ("uniform_", "normal_", "kaiming_uniform_", "xavier_normal_")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if getattr(func, "__name__", "") in self._DRAWS:
            return keywords.get("tensor", args[0] if args else None)
        return func(*args, **keywords)


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
    models: list[DLRM] = []

    def build(found: Checkpoint) -> None:
        models[:] = [found.build_model(device)]

    with Checkpoint.open(path, best=not last, world=world, meanwhile=build) as found:
        return models[0], found.state

"""The tensors of a model and its optimizers, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dlrm.distributed.world import World
from dlrm.kernels.update.rules import make_rule
from dlrm.training.checkpoint.manifest import Group
from dlrm.training.checkpoint.tensor_files import Piece
from dlrm.utils.local_shards import LocalShards

Values = dict[str, Tensor | LocalShards]


class Parts:
    """The tensors of a model and its optimizers by name, the same for any number of processes.

    Args:
        model: a parameter or buffer ``p`` is called ``model.p``.
        optimizers: the state ``sum`` of parameter ``p`` is called ``optimizer.p.sum``.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._states = [optimizer.state_dict() for optimizer in self._optimizers]
        self._values: Values = model.state_dict()
        self.tensors: Values = {f"model.{name}": value for name, value in self._values.items()}

        # The states of the optimizers, by the name of the state and that of the parameter.
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

        # The states of sharded tables have the shards of their tables.
        parted = {name: m for name, m in model.named_modules() if hasattr(m, "shards")}
        for (name, per_row), tensors in states.items():
            for path, module in parted.items():
                full_names = {f"{path}.{n}": n for n, _ in module.named_parameters()}
                if full_names.keys() <= tensors.keys():  # else the optimizer has only some of them
                    found = {n: tensors.pop(full) for full, n in full_names.items()}
                    whole_state = module.shards(found, per_row=per_row)
                    self.tensors[f"optimizer.{path}.weight.{name}"] = whole_state
            for path, tensor in tensors.items():
                self.tensors[f"optimizer.{path}.{name}"] = tensor

    def pieces(self) -> list[Piece]:
        """The shards of the tensors that are here."""
        found = []
        for name, value in self.tensors.items():
            whole = {(0,) * len(value.size()): value} if isinstance(value, Tensor) else value.parts
            found += [Piece(name, tuple(offset), values) for offset, values in whole.items()]
        return found

    def own_pieces(self, world: World) -> list[Piece]:
        """The pieces that this process writes: each is written once, and all write about as much.

        Every process must call this method.
        """
        pieces = self.pieces()
        here = {(piece.name, piece.offset): piece.values.nbytes for piece in pieces}
        everywhere = world.from_all(here)
        sizes = {key: size for sizes_here in everywhere for key, size in sizes_here.items()}

        load, writers = [0] * world.size, {}
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            holders = [rank for rank, held in enumerate(everywhere) if key in held]
            writers[key] = min(holders, key=lambda rank: (load[rank], rank))
            load[writers[key]] += sizes[key]
        return [each for each in pieces if writers[each.name, each.offset] == world.rank]

    def sizes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each whole tensor."""
        return {name: (value.dtype, tuple(value.size())) for name, value in self.tensors.items()}

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
        ours = self.groups()
        if [len(inner) for inner in ours] != [len(inner) for inner in groups]:
            raise ValueError("the saved optimizers have other parameter groups than these")
        for here, there in zip(sum(ours, ()), (g for inner in groups for g in inner), strict=True):
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

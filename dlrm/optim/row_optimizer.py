"""Optimizers that update only the rows that a batch uses."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import deepcopy
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dlrm.kernels.dynamic.new_rows import row_states
from dlrm.kernels.lookup.paged import ReplicaParameter
from dlrm.kernels.offload.pinned_memory import zeros_in_same_memory
from dlrm.kernels.offload.row_cache import CachedRows, cached_rows, slots_for_update
from dlrm.kernels.update.dense import update_dense
from dlrm.kernels.update.in_backward import FusedUpdate, FusedUpdates
from dlrm.kernels.update.packed import packed_rows
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.kernels.update.rules import OPTIONS, Rule, make_rule
from dlrm.kernels.update.sparse import update_rows

# Without PyTorch's decorator, which imports its compiler at the first call: a second.
_add_param_group = unwrap(Optimizer.add_param_group)
_state_dict = unwrap(Optimizer.state_dict)


class RowOptimizer(Optimizer):
    """The rules of ``torch.optim`` for parameters with dense or sparse gradients.

    A sparse gradient (COO, one entry per look-up, as of the embeddings) updates only the rows that
    have entries. Equal ids are merged first, so a row used twice with gradients 1 and 10 moves by
    -11 under SGD with learning rate 1. Momentum and decay apply to a row only when it is used. A
    row used in every step moves as under ``torch.optim``, bias corrections included: steps are
    counted per row. A parameter with a dense gradient is updated in full. The learning rate is a
    tensor, so that a captured CUDA graph sees it change.

    Row-wise Adagrad keeps one accumulator per row, the sum of the mean squared gradients of the
    row.

    The state of bf16 parameters is in fp32 (in bf16, 256 + 1 is 256). They are updated with
    stochastic rounding, so that steps too small for bf16 count on average. So are packed rows of
    8 or 4 bits, :class:`~dlrm.kernels.update.packed.PackedParameter`; where some have 4, the
    accumulators of row-wise Adagrad are bf16 and rounded the same way.

    Args:
        params: parameters or parameter groups.
        rule: one of :data:`dlrm.optim.RULES`.
        lr: learning rate.
        stochastic: update bf16 parameters and packed rows with stochastic rounding; otherwise round
            to nearest.
        options: those of the rule, named as in ``torch.optim``; see
        ``dlrm.kernels.update.rules.OPTIONS``.

    Raises:
        ValueError: an unknown rule, an option of another rule, or a value out of range.

    Reference: Duchi et al., JMLR 2011 (Adagrad); Kingma and Ba, ICLR 2015 (Adam, Adamax);
    Loshchilov and Hutter, ICLR 2019 (AdamW); Zeiler, arXiv 1212.5701 (Adadelta).
    """

    zero_grad = unwrap(Optimizer.zero_grad)

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "adagrad",
        *,
        lr: float = 0.01,
        stochastic: bool = True,
        **options: Any,
    ) -> None:
        make_rule(rule, **options)
        self._stochastic, self._given = stochastic, options
        super().__init__(params, {"rule": rule, "lr": lr, **OPTIONS[rule], **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with the options of the group or else those of the optimizer."""
        rule = param_group.get("rule", self.defaults["rule"])
        make_rule(rule)
        for name, value in {**OPTIONS[rule], **self._given}.items():
            param_group.setdefault(name, value)  # the rule may differ from that of the others
        _add_param_group(self, param_group)
        group = self.param_groups[-1]
        lr = float(group["lr"])
        if not 0 <= lr < float("inf"):
            raise ValueError(f"the learning rate is {lr}, it must be finite, 0 or more")
        device = _device(group)
        group["lr"] = torch.tensor(lr, device=device)
        if any(map(self._rounds, group["params"])):
            group["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        for parameter in group["params"]:
            if group["rule"] == "sgd" and hasattr(parameter, "before_sgd"):
                parameter.before_sgd(parameter)
            states = self.state[parameter] = _new_state(parameter, _rule_of(group))
            if (reset_with_rows := row_states(parameter)) is not None:
                reset_with_rows[:] = states.values()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, sorter: RowSorter | None = None
    ) -> Any:
        """Apply the gradients.

        Args:
            closure: computes them and returns the loss, which this returns too.
            sorter: that of the look-ups, which sorted the rows of sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule, dense = _rule_of(group), []
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._update_rows(parameter, rule, group, sorter)
                elif parameter.grad is not None:
                    dense.append(parameter)
            for device in {parameter.device for parameter in dense}:
                here = [parameter for parameter in dense if parameter.device == device]
                self._update_dense(here, rule, group)
            if "seed" in group:  # without gradients too, so that all processes round replicas alike
                group["seed"].add_(1)
        return loss

    def _update_rows(
        self, parameter: Tensor, rule: Rule, group: dict[str, Any], sorter: RowSorter | None
    ) -> None:
        """Update the rows of a sparse gradient."""
        assert parameter.grad is not None
        rows, device = parameter.grad._indices()[0], parameter.device
        states = self._states(parameter, rule)
        with torch.cuda.device_of(parameter):  # kernels start on the current GPU
            update_rows(
                rule,
                parameter,
                rows,
                parameter.grad._values(),
                states,
                lr=rate_of(group).to(device),
                sorted_rows=sorter.result(parameter, rows) if sorter else None,
                cached=slots_for_update(parameter, states),
                seed=self._seed(group, [parameter]),
            )

    def _update_dense(self, parameters: list[Tensor], rule: Rule, group: dict[str, Any]) -> None:
        """Update parameters with dense gradients, in few launches."""
        for parameter in parameters:
            if packed_rows(parameter) is not None:
                raise ValueError("rows in int8 or int4 need sparse gradients: this one is dense")
            if (cached := cached_rows(parameter)) is not None:
                cached.release()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [self._states(parameter, rule) for parameter in parameters]
        with torch.cuda.device_of(parameters[0]):
            update_dense(
                rule,
                parameters,
                grads,
                states,
                lr=rate_of(group).to(parameters[0].device),
                seed=self._seed(group, parameters),
            )

    def _states(self, parameter: Tensor, rule: Rule) -> list[Tensor]:
        """The states of the rule for a parameter."""
        states = self.state[parameter]
        if states.keys() != rule.states.keys():
            raise ValueError(
                f"momentum became {rule.momentum} after the optimizer was created: keep it at 0, "
                "or above 0, from the start (for OneCycleLR set cycle_momentum=False)"
            )
        return list(states.values())

    def _seed(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> Tensor | None:
        """The seed of an update on one device; None if nothing is rounded."""
        if not any(map(self._rounds, parameters)):
            return None
        if "seed" not in group:
            raise ValueError(
                "parameters became bf16, int8 or int4 after their optimizer was created: cast them "
                "first"
            )
        seed: Tensor = group["seed"]
        return seed.to(parameters[0].device)

    def _rounds(self, parameter: Tensor) -> bool:
        """Whether a parameter is updated with stochastic rounding."""
        packed = packed_rows(parameter) is not None
        return self._stochastic and (packed or parameter.dtype == torch.bfloat16)

    @torch.no_grad()
    def reset_rows(self, parameter: Tensor, rows: Tensor) -> None:
        """Reset the state of rows that stand for other ids now: a cache slot has another owner."""
        for state in self.state[parameter].values():
            state[rows] = 0

    def state_bytes(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of the optimizer state of ``parameters``."""
        states = (self.state[parameter] for parameter in parameters if parameter in self.state)
        return sum(tensor.nbytes for state in states for tensor in state.values())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore states and rates in place, so that captured graphs see them, and whatever else
        the groups held, such as options and values of a ``torch`` scheduler.
        """
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the saved optimizer has other parameters than this one")

        for group, old in zip(self.param_groups, saved, strict=True):
            if (rule := old.get("rule", "one of torch.optim")) != group["rule"]:
                raise ValueError(f"the saved optimizer is {rule}, this is {group['rule']}")
            rate_of(group).fill_(float(old["lr"]))
            if "seed" in group and "seed" in old:
                group["seed"].copy_(old["seed"])

            for parameter, index in zip(group["params"], old["params"], strict=True):
                kept, given = self.state[parameter], state_dict["state"].get(index, {})
                if given.keys() != kept.keys():
                    raise ValueError(
                        f"the saved {old['rule']} keeps {', '.join(given) or 'nothing'}, this one "
                        f"{', '.join(kept) or 'nothing'}: resume with the same --optim.momentum"
                    )
                for name, tensor in kept.items():
                    if given[name].shape != tensor.shape:
                        raise ValueError(
                            f"the saved {name} has shape {tuple(given[name].shape)}, this "
                            f"optimizer's has {tuple(tensor.shape)}: it has other parameters"
                        )

                if (cached := cached_rows(parameter)) is not None:
                    cached.release()
                for name, tensor in kept.items():
                    tensor.copy_(given[name])

            in_place = {"params", "lr", "seed"}
            group.update({name: deepcopy(old[name]) for name in old.keys() - in_place})

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, after writing cached rows back to host memory."""
        for _, cached in _caches(self):
            cached.release()
        return _state_dict(self)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the base class returns only its own attributes."""
        for _, cached in _caches(self):
            cached.flush()
        own = {"_stochastic": self._stochastic, "_given": self._given}
        return {**super().__getstate__(), **own}


def apply_in_backward(
    optimizers: Iterable[RowOptimizer], only: Container[Tensor] | None = None
) -> FusedUpdates:
    """Let the backward pass update parameters itself where that saves writing their gradients.

    ::

        with apply_in_backward([optimizer]) as updates:
            loss(bag(ids, context=LookupContext(updates=updates))).backward()
        optimizer.step()  # all parameters that have a gradient
        optimizer.zero_grad()

    It applies to rows that Triton kernels look up once in the block, one for each id or in bags
    that are summed without weights. All other parameters have gradients as usual.

    Use it for steps that need no gradients: without clipping or norms, and without a sum over
    processes or several backward passes.

    Args:
        optimizers: those of the model's parameters.
        only: the parameters to which it may apply; None: to all.

    Raises:
        ValueError: a look-up after the backward pass of the block.
    """
    updates = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule = _rule_of(group)
            for parameter in group["params"]:
                allowed = only is None or parameter in only
                if allowed and parameter.grad is None:  # else gradients are being accumulated
                    states = list(optimizer.state[parameter].values())
                    update = FusedUpdate(
                        rule=rule,
                        lr=rate_of(group).to(parameter.device),
                        states=states,
                        seed=group.get("seed") if optimizer._rounds(parameter) else None,
                        cached=slots_for_update(parameter, states),
                    )
                    updates.append((parameter, update))
    return FusedUpdates(updates)


def _caches(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, CachedRows]]:
    """The parameters with a cache of rows, and the caches."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (cached := cached_rows(parameter)) is not None:
                yield parameter, cached


def _write_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step of another optimizer, which ignores caches: stop those of its parameters."""
    if isinstance(optimizer, RowOptimizer):
        return
    for parameter, cached in _caches(optimizer):
        if cached.active and parameter.grad is not None:
            cached.stop()


register_optimizer_step_pre_hook(_write_back)


def _wide(tensor: Tensor) -> torch.dtype:
    """The type of a parameter's state, or of a sum over a gradient: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _rule_of(group: dict[str, Any]) -> Rule:
    """The rule of a group, with the options that the group has now."""
    return make_rule(group["rule"], **{name: group[name] for name in OPTIONS[group["rule"]]})


def _device(group: dict[str, Any]) -> torch.device | None:
    """The device of a group's rate and seed: that of its first parameter, if it has one."""
    return next((parameter.device for parameter in group["params"]), None)


def rate_of(group: dict[str, Any]) -> Tensor:
    """The learning rate of a group; a number that someone set becomes a tensor."""
    if not isinstance(group["lr"], Tensor):
        group["lr"] = torch.tensor(float(group["lr"]), device=_device(group))
    rate: Tensor = group["lr"]
    return rate


def _new_state(parameter: Tensor, rule: Rule) -> dict[str, Tensor]:
    """Zeros for the states of the rule, which move with rows in host memory."""
    wide, row = _wide(parameter), (*parameter.shape[:1], *[1] * (parameter.dim() - 1))
    packed, cached = packed_rows(parameter), cached_rows(parameter)
    narrow = packed is not None and packed.format != 8
    if cached is not None:
        cached.start()
        return {
            name: cached.new_rows(1 if per_row else parameter.shape[1], wide)
            for name, per_row in rule.states.items()
        }
    return {
        name: zeros_in_same_memory(
            parameter,
            row if per_row else parameter.shape,
            torch.bfloat16 if narrow and name == "sum" and per_row else wide,
        )
        for name, per_row in rule.states.items()
    }


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, equal ids merged first; 0-d, on their first device.

    A ``ReplicaParameter`` has the gradient of another parameter and does not count.
    """
    norms: list[Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and not isinstance(parameter, ReplicaParameter):
            wide = _wide(grad)  # a norm in bf16 would be rounded to 8 bits
            norm = torch.linalg.vector_norm(_merged(grad) if grad.is_sparse else grad, dtype=wide)
            norms.append(norm.to(norms[0].device) if norms else norm)
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _merged(grad: Tensor) -> Tensor:
    """The rows of a sparse gradient with equal ids summed, padded with zeros to its entries.

    Unlike that of ``coalesce``, the shape does not depend on the ids, so that a CUDA graph can
    capture it.
    """
    rows, order = grad._indices()[0].sort()
    segment = torch.cat([rows.new_zeros(1), (rows.diff() != 0).cumsum(0)])[: len(rows)]
    values = grad._values()[order].to(_wide(grad))
    values = values.where((rows >= 0)[:, None], 0.0)  # the others are left out
    return torch.zeros_like(values).index_add_(0, segment, values)

"""Optimizers that update only the rows a batch touched, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.hints import nearest

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")


class RowOptimizer(torch.optim.Optimizer):
    """SGD, Adagrad, row-wise Adagrad or Adam for parameters with dense or sparse gradients.

    A sparse gradient (COO, one entry per look-up, as the embeddings give) updates the rows it
    names and no others; equal ids are merged first, so a row used twice with gradients 1 and 10
    moves by -11 under SGD with learning rate 1. A parameter with a dense gradient is updated in
    full. The learning rate is a tensor, so that a captured CUDA graph sees it change.

    Row-wise Adagrad keeps one accumulator per row, the running sum of the mean of the squared
    gradient over the row. Adam counts steps per row: a row's bias correction depends on its own
    updates, not on those of others.

    Args:
        params: parameters or parameter groups.
        rule: one of ``sgd``, ``adagrad``, ``rowwise_adagrad``, ``adam``.
        lr: learning rate.
        betas: decay of Adam's moments.
        eps: added to the denominator of Adagrad and Adam.

    Reference: Duchi et al., JMLR 2011 (Adagrad); Kingma and Ba, ICLR 2015 (Adam).
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "adagrad",
        *,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"unknown optimizer {rule!r}{nearest(rule, RULES)}")
        if lr < 0:
            raise ValueError(f"the learning rate is {lr}, it must not be negative")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "rule": rule})
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
            for parameter in group["params"]:
                self.state[parameter] = _new_state(parameter, rule)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    grad = parameter.grad.coalesce()
                    _update_rows(
                        parameter, grad.indices()[0], grad.values(), self.state[parameter], group
                    )
                else:
                    _update_all(parameter, parameter.grad, self.state[parameter], group)

    @torch.no_grad()
    def reset_rows(self, parameter: Tensor, rows: Tensor) -> None:
        """Forget the state of some rows, whose meaning has changed (a cache slot's new owner)."""
        for state in self.state[parameter].values():
            state[rows] = 0

    def state_bytes(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of optimizer state kept for ``parameters``."""
        states = (self.state[parameter] for parameter in parameters if parameter in self.state)
        return sum(tensor.nbytes for state in states for tensor in state.values())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore states and rates in place, so that a captured graph keeps seeing them."""
        saved = state_dict["param_groups"]
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the saved optimizer is of other parameters than this one")
        for group, old in zip(self.param_groups, saved, strict=True):
            if old["rule"] != group["rule"]:
                raise ValueError(f"the saved optimizer is {old['rule']}, this is {group['rule']}")
            group["lr"].fill_(float(old["lr"]))
            for parameter, index in zip(group["params"], old["params"], strict=True):
                for name, tensor in self.state[parameter].items():
                    tensor.copy_(state_dict["state"][index][name])


def _new_state(parameter: Tensor, rule: str) -> dict[str, Tensor]:
    row = (parameter.shape[0], *[1] * (parameter.dim() - 1)) if parameter.dim() else ()
    match rule:
        case "adagrad":
            return {"sum": torch.zeros_like(parameter)}
        case "rowwise_adagrad":
            return {"sum": parameter.new_zeros(row)}
        case "adam":
            return {
                "mean": torch.zeros_like(parameter),
                "square": torch.zeros_like(parameter),
                "steps": torch.zeros(row, dtype=torch.int32, device=parameter.device),
            }
    return {}


def _direction(grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """Advance ``state`` in place by ``grad`` and return what the rate multiplies."""
    match group["rule"]:
        case "adagrad":
            state["sum"].addcmul_(grad, grad)
            return grad / (state["sum"].sqrt() + group["eps"])
        case "rowwise_adagrad":
            dims = tuple(range(1, grad.dim()))
            state["sum"].add_(grad.square().mean(dims, keepdim=True) if dims else grad.square())
            return grad / (state["sum"].sqrt() + group["eps"])
        case "adam":
            beta1, beta2 = group["betas"]
            state["mean"].lerp_(grad, 1 - beta1)
            state["square"].lerp_(grad.square(), 1 - beta2)
            steps = state["steps"].add_(1)
            mean = state["mean"] / (1 - beta1**steps)
            return mean / ((state["square"] / (1 - beta2**steps)).sqrt() + group["eps"])
    return grad


def _update_all(
    parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    parameter.addcmul_(_direction(grad, state, group), group["lr"], value=-1)


def _update_rows(
    parameter: Tensor, rows: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    touched = {name: tensor.index_select(0, rows) for name, tensor in state.items()}
    parameter.index_add_(0, rows, _direction(grad, touched, group) * -group["lr"])
    for name, tensor in touched.items():
        state[name].index_copy_(0, rows, tensor)


class Schedule:
    """Linear warm-up, a plateau, then polynomial decay of the learning rates.

    Args:
        optimizers: their present rates are the peak rates.
        warmup: steps over which the rate rises linearly.
        decay_start: step at which the decay begins; None for never.
        decay_steps: steps over which the rate falls to zero.
        power: of the decay (2 in the reference recipe for large batches).
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        warmup: int = 0,
        decay_start: int | None = None,
        decay_steps: int = 1,
        power: float = 2.0,
    ) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._peaks = [float(group["lr"]) for group in self._groups]
        self._warmup, self._power = warmup, power
        self._decay_start, self._decay_steps = decay_start, decay_steps

    def factor(self, step: int) -> float:
        """The share of the peak rate at ``step``, counted from 0."""
        if step < self._warmup:
            return (step + 1) / self._warmup
        if self._decay_start is None or step < self._decay_start:
            return 1.0
        left = 1 - (step - self._decay_start) / self._decay_steps
        return max(left, 0.0) ** self._power

    def set(self, step: int) -> None:
        """Give every optimizer its rate for ``step``."""
        factor = self.factor(step)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"].fill_(peak * factor)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, equal ids merged first."""
    squares = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            values = grad.coalesce().values() if grad.is_sparse else grad
            squares.append(values.float().square().sum())
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

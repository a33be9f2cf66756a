"""The rules of the optimizers: their options, what they keep between steps, what they do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm.hints import nearest

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"eps": 1e-8, "weight_decay": 0.0},
    "rowwise_adagrad": {"eps": 1e-8, "weight_decay": 0.0},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    "adamax": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adadelta": {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
}
"""The options of each rule and their defaults, named as in ``torch.optim``."""

RULES = tuple(OPTIONS)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule with its options; what it has no use for is left at these values."""

    name: str
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    alpha: float = 0.0
    rho: float = 0.0

    def __post_init__(self) -> None:
        shares = {"betas[0]": self.betas[0], "betas[1]": self.betas[1]}
        shares |= {name: getattr(self, name) for name in ("momentum", "alpha", "rho")}
        for name, value in shares.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}, it must be in [0, 1)")
        for name in ("eps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, it must be finite, 0 or more")

    @property
    def states(self) -> dict[str, bool]:
        """What is kept for a parameter, by name: True is one number a row, False one a weight."""
        kept = {
            "adagrad": {"sum": False},
            "rowwise_adagrad": {"sum": True},
            "adam": {"mean": False, "square": False, "steps": True},
            "adamw": {"mean": False, "square": False, "steps": True},
            "rmsprop": {"square": False},
            "adamax": {"mean": False, "peak": False, "steps": True},
            "adadelta": {"square": False, "change": False},
        }.get(self.name, {})
        return {**kept, "momentum": False} if self.momentum else kept


def make_rule(name: str, **options: Any) -> Rule:
    """A rule by name.

    Args:
        name: one of :data:`RULES`.
        options: some of the rule's :data:`OPTIONS`; the others have their defaults.

    Raises:
        ValueError: an unknown rule, an option that it has no use for, or a value out of range.
    """
    if name not in OPTIONS:
        raise ValueError(f"unknown optimizer {name!r}{nearest(name, RULES)}")
    unused = [option for option in options if option not in OPTIONS[name]]
    if unused:
        raise ValueError(
            f"{name} has no use for {', '.join(unused)}; its options are {', '.join(OPTIONS[name])}"
        )
    return Rule(name=name, **{**OPTIONS[name], **options})


def round_stochastic(value: Tensor) -> Tensor:
    """fp32 as the bf16 above or below it, by a chance that makes it right on average."""
    chance = torch.randint_like(value, 1 << 16, dtype=torch.int32)
    rounded = ((value.view(torch.int32) + chance) & -65536).view(torch.float32)
    return rounded.where(value == value, value).bfloat16()  # what is added to a NaN may overflow


def advance(
    rule: Rule,
    values: list[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    lr: Tensor,
) -> None:
    """Apply a rule to several tensors, in place, an operation at a time for all of them.

    Args:
        rule: which.
        values: what to update, fp32 or wider, each ``[V, ...]``.
        grads: their gradients.
        states: for each what the rule keeps, in the order of ``rule.states``, ``[V, ...]`` or
            ``[V, 1, ...]``.
        lr: learning rate, 0-d.
    """
    moves = list(grads)
    kept = {name: [own[i] for own in states] for i, name in enumerate(rule.states)}
    if rule.weight_decay and rule.name == "adamw":
        torch._foreach_mul_(values, 1 - lr.double() * rule.weight_decay)
    elif rule.weight_decay:
        moves = list(torch._foreach_add(moves, values, alpha=rule.weight_decay))
    if rule.name != "sgd":
        moves = list(_RULES_TORCH[rule.name](rule, moves, kept))
    if rule.momentum:
        torch._foreach_mul_(kept["momentum"], rule.momentum)
        torch._foreach_add_(kept["momentum"], moves)
        moves = kept["momentum"]
    torch._foreach_sub_(values, torch._foreach_mul(moves, lr))


Kept = dict[str, list[Tensor]]


def _adagrad(rule: Rule, grads: list[Tensor], kept: Kept) -> Sequence[Tensor]:
    squares: Sequence[Tensor] = torch._foreach_mul(grads, grads)
    if rule.name == "rowwise_adagrad":
        squares = [
            square.mean(tuple(range(1, square.dim())), keepdim=True) if square.dim() > 1 else square
            for square in squares
        ]
    torch._foreach_add_(kept["sum"], list(squares))
    return torch._foreach_div(grads, _roots(kept["sum"], rule.eps))


def _rmsprop(rule: Rule, grads: list[Tensor], kept: Kept) -> Sequence[Tensor]:
    _blend(kept["square"], torch._foreach_mul(grads, grads), rule.alpha)
    return torch._foreach_div(grads, _roots(kept["square"], rule.eps))


def _adadelta(rule: Rule, grads: list[Tensor], kept: Kept) -> Sequence[Tensor]:
    _blend(kept["square"], torch._foreach_mul(grads, grads), rule.rho)
    above, below = (list(torch._foreach_add(kept[name], rule.eps)) for name in ("change", "square"))
    moves = torch._foreach_mul(torch._foreach_sqrt(torch._foreach_div(above, below)), grads)
    _blend(kept["change"], torch._foreach_mul(moves, moves), rule.rho)
    return moves


def _adam(rule: Rule, grads: list[Tensor], kept: Kept) -> Sequence[Tensor]:
    _blend(kept["mean"], grads, rule.betas[0])
    _blend(kept["square"], torch._foreach_mul(grads, grads), rule.betas[1])
    torch._foreach_add_(kept["steps"], 1)
    scaled = torch._foreach_div(kept["square"], _corrections(kept["steps"], rule.betas[1]))
    means = torch._foreach_div(kept["mean"], _corrections(kept["steps"], rule.betas[0]))
    return torch._foreach_div(means, _roots(scaled, rule.eps))


def _adamax(rule: Rule, grads: list[Tensor], kept: Kept) -> Sequence[Tensor]:
    _blend(kept["mean"], grads, rule.betas[0])
    torch._foreach_mul_(kept["peak"], rule.betas[1])
    torch._foreach_maximum_(kept["peak"], torch._foreach_add(torch._foreach_abs(grads), rule.eps))
    torch._foreach_add_(kept["steps"], 1)
    means = torch._foreach_div(kept["mean"], _corrections(kept["steps"], rule.betas[0]))
    return torch._foreach_div(means, kept["peak"])


def _blend(old: list[Tensor], new: Sequence[Tensor], keep: float) -> None:
    torch._foreach_lerp_(old, list(new), 1 - keep)


def _roots(squares: Sequence[Tensor], eps: float) -> list[Tensor]:
    roots = list(torch._foreach_sqrt(list(squares)))
    torch._foreach_add_(roots, eps)
    return roots


def _corrections(steps: list[Tensor], beta: float) -> list[Tensor]:
    """What divides a moment after so many steps."""
    return [-torch.expm1(count * math.log(beta or 1e-38)) for count in steps]


_RULES_TORCH = {
    "adagrad": _adagrad,
    "rowwise_adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "adam": _adam,
    "adamw": _adam,
    "adamax": _adamax,
}

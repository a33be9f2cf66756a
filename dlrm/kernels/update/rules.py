"""What the kernels that update weights share: Triton's part of :mod:`dlrm.kernels.update.rules`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm.utils.messages import did_you_mean


def hyper(rule: Rule) -> tuple[float, ...]:
    """The options of a rule as kernels take them."""
    keep = rule.alpha or rule.rho  # no rule has both
    betas = [(beta, 1 - beta, math.log(beta or 1e-38)) for beta in rule.betas]
    return (rule.eps, rule.weight_decay, rule.momentum, keep, 1 - keep, *betas[0], *betas[1])


@triton.jit
def one_minus_exp(x):
    """``1 - exp(x)`` for x <= 0, by its series where the difference would cancel."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, series, 1 - tl.exp(x))


@triton.jit
def rule_step(first, second, grad, count, hyper, RULE: tl.constexpr):
    """What a rule keeps of weights ``[K, B]``, brought up to date, and the step it gives.

    ``second`` and ``count [K]``, of updates so far with this one, are looked at by rules that have
    them. Neither sgd nor rowwise_adagrad, whose state is not one of weights, comes here.
    """
    eps, _, _, keep, rest, beta1, rest1, log1, beta2, rest2, log2 = hyper
    if RULE == "adagrad":
        first += grad * grad
        step = grad / (tl.sqrt_rn(first) + eps)
    elif RULE == "rmsprop":
        first = first * keep + grad * grad * rest
        step = grad / (tl.sqrt_rn(first) + eps)
    elif RULE == "adadelta":
        first = first * keep + grad * grad * rest
        step = tl.sqrt_rn(second + eps) / tl.sqrt_rn(first + eps) * grad
        second = second * keep + step * step * rest
    else:
        first = first * beta1 + grad * rest1
        mean = first / one_minus_exp(count * log1)[:, None]
        if RULE == "adamax":
            second = tl.maximum(second * beta2, tl.abs(grad) + eps)
            step = mean / second
        else:  # adam, adamw
            second = second * beta2 + grad * grad * rest2
            scale = one_minus_exp(count * log2)[:, None]
            step = mean / (tl.sqrt_rn(second / scale) + eps)
    return first, second, step


@triton.jit
def store_rounded(weight, at, element, value, mask, seed, ROUND: tl.constexpr):
    """Store fp32 as the weight's type; with ROUND to bf16 up or down by chance."""
    if ROUND:
        chance = tl.randint(tl.load(seed), element.to(tl.int32)).to(tl.int32) & 0xFFFF
        bits = (value.to(tl.int32, bitcast=True) + chance) & -65536  # upper half: the bf16
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    tl.store(weight + at, value.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def store_of_all(at, value, mask):
    """Store a number that every warp of a program has read, once all have read it.

    One of them stores it, and warps do not run in step: others would read the new number.
    """
    tl.debug_barrier()
    tl.store(at, value, mask=mask)


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
        raise ValueError(f"unknown optimizer {name!r}{did_you_mean(name, RULES)}")
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


def foreach_update(
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

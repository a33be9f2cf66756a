"""The rules of the optimizers: options, state, and one step in PyTorch and in Triton.

A new rule is one function decorated with :func:`_rule`, which is its step in PyTorch, and one
branch of :func:`rule_step` below. Everything else reads it from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dlrm.kernels import tl, triton
from dlrm.utils.messages import did_you_mean


def before_sgd(parameter: Tensor, prepare: Callable[[Tensor], None]) -> None:
    """Have an optimizer call ``prepare`` with the parameter before it moves it by plain SGD, whose
    steps depend on how weights are scaled."""
    parameter.before_sgd = prepare  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and the values of its options; those that it does not use stay at these defaults."""

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
        """The state of a parameter, by name: True is one number per row, False one per weight.

        The numbers per weight come first, then that of the row, then the momentum buffer.
        """
        definition = _DEFINITIONS[self.name]
        states = dict.fromkeys(definition.weight_states, False)
        if definition.row_state:
            states[definition.row_state] = True
        return {**states, "momentum": False} if self.momentum else states

    @property
    def kind(self) -> RuleKind:
        """The properties that kernels are compiled for."""
        definition = _DEFINITIONS[self.name]
        return RuleKind(
            name=self.name,
            weight_states=len(definition.weight_states),
            row_state=definition.row_state,
            momentum=self.momentum > 0,
            decay=self.weight_decay > 0,
            decoupled_decay=definition.decoupled_decay,
        )


def make_rule(name: str, **options: Any) -> Rule:
    """A rule by name.

    Args:
        name: one of :data:`RULES`.
        options: some of the rule's :data:`OPTIONS`; the others have their defaults.

    Raises:
        ValueError: an unknown rule, an option of another rule, or a value out of range.
    """
    if name not in OPTIONS:
        raise ValueError(f"unknown optimizer {name!r}{did_you_mean(name, RULES)}")
    unused = [option for option in options if option not in OPTIONS[name]]
    if unused:
        raise ValueError(
            f"{name} has no use for {', '.join(unused)}; its options are {', '.join(OPTIONS[name])}"
        )
    return Rule(name=name, **{**OPTIONS[name], **options})


# The rules in PyTorch -------------------------------------------------------------------------

States = dict[str, list[Tensor]]
"""By name, a list with the state of each parameter."""

TorchStep = Callable[[Rule, list[Tensor], States], Sequence[Tensor]]
"""From the gradients ``[V, ...]`` of several parameters to their steps, before the learning rate.
It updates the states, ``[V, ...]`` or per row ``[V, 1, ...]``, in place."""


@dataclass(frozen=True, kw_only=True)
class _Definition:
    """A rule without the values of its options."""

    options: dict[str, Any]
    """Defaults by name; the names are those of ``torch.optim``."""
    weight_states: tuple[str, ...] = ()
    """States with a number per weight, up to two."""
    row_state: Literal["sum", "steps"] | None = None
    """State with a number per row: the sum of its mean squared gradients, or its count of steps."""
    decoupled_decay: bool = False
    """Whether weight decay shrinks the weight itself and leaves the gradient alone."""
    torch_step: TorchStep


_DEFINITIONS: dict[str, _Definition] = {}


def _rule(name: str, *, options: dict[str, Any], **definition: Any) -> Callable[..., TorchStep]:
    """Define a rule by its step in PyTorch; arguments as of :class:`_Definition`."""

    def register(torch_step: TorchStep) -> TorchStep:
        _DEFINITIONS[name] = _Definition(options=options, torch_step=torch_step, **definition)
        return torch_step

    return register


@_rule("sgd", options={"momentum": 0.0, "weight_decay": 0.0})
def _sgd(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    return grads


@_rule("adagrad", options={"eps": 1e-8, "weight_decay": 0.0}, weight_states=("sum",))
def _adagrad(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    torch._foreach_add_(states["sum"], torch._foreach_mul(grads, grads))
    return torch._foreach_div(grads, _roots(states["sum"], rule.eps))


@_rule("rowwise_adagrad", options={"eps": 1e-8, "weight_decay": 0.0}, row_state="sum")
def _rowwise_adagrad(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    squares = torch._foreach_mul(grads, grads)
    means = [
        square.mean(tuple(range(1, square.dim())), keepdim=True) if square.dim() > 1 else square
        for square in squares
    ]
    torch._foreach_add_(states["sum"], means)
    return torch._foreach_div(grads, _roots(states["sum"], rule.eps))


_ADAM_STATES: dict[str, Any] = {"weight_states": ("mean", "square"), "row_state": "steps"}


@_rule(
    "adamw",
    options={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    decoupled_decay=True,
    **_ADAM_STATES,
)
@_rule("adam", options={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, **_ADAM_STATES)
def _adam(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    _blend(states["mean"], grads, rule.betas[0])
    _blend(states["square"], torch._foreach_mul(grads, grads), rule.betas[1])
    torch._foreach_add_(states["steps"], 1)
    squares = torch._foreach_div(states["square"], _corrections(states["steps"], rule.betas[1]))
    means = torch._foreach_div(states["mean"], _corrections(states["steps"], rule.betas[0]))
    return torch._foreach_div(means, _roots(squares, rule.eps))


@_rule(
    "rmsprop",
    options={"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    weight_states=("square",),
)
def _rmsprop(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    _blend(states["square"], torch._foreach_mul(grads, grads), rule.alpha)
    return torch._foreach_div(grads, _roots(states["square"], rule.eps))


@_rule(
    "adamax",
    options={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    weight_states=("mean", "peak"),
    row_state="steps",
)
def _adamax(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    _blend(states["mean"], grads, rule.betas[0])
    torch._foreach_mul_(states["peak"], rule.betas[1])
    magnitudes = torch._foreach_add(torch._foreach_abs(grads), rule.eps)
    torch._foreach_maximum_(states["peak"], magnitudes)
    torch._foreach_add_(states["steps"], 1)
    means = torch._foreach_div(states["mean"], _corrections(states["steps"], rule.betas[0]))
    return torch._foreach_div(means, states["peak"])


@_rule(
    "adadelta",
    options={"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    weight_states=("square", "change"),
)
def _adadelta(rule: Rule, grads: list[Tensor], states: States) -> Sequence[Tensor]:
    _blend(states["square"], torch._foreach_mul(grads, grads), rule.rho)
    above = torch._foreach_add(states["change"], rule.eps)
    below = torch._foreach_add(states["square"], rule.eps)
    steps = torch._foreach_mul(torch._foreach_sqrt(torch._foreach_div(above, below)), grads)
    _blend(states["change"], torch._foreach_mul(steps, steps), rule.rho)
    return steps


def _blend(old: list[Tensor], new: Sequence[Tensor], keep: float) -> None:
    torch._foreach_lerp_(old, list(new), 1 - keep)


def _roots(squares: Sequence[Tensor], eps: float) -> list[Tensor]:
    roots = list(torch._foreach_sqrt(list(squares)))
    torch._foreach_add_(roots, eps)
    return roots


def _corrections(steps: list[Tensor], beta: float) -> list[Tensor]:
    """The bias corrections of a moment: ``1 - beta ** count``."""
    return [-torch.expm1(count * math.log(beta or 1e-38)) for count in steps]


OPTIONS = {name: definition.options for name, definition in _DEFINITIONS.items()}
"""The options of each rule and their defaults, named as in ``torch.optim``."""

RULES = tuple(OPTIONS)


def foreach_update(
    rule: Rule,
    values: list[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    lr: Tensor,
) -> None:
    """Apply a rule to several tensors, in place, one operation at a time for all of them.

    Args:
        rule: the rule.
        values: what to update, fp32 or wider, ``[V, ...]`` each.
        grads: their gradients.
        states: the state of each, in the order of ``rule.states``, ``[V, ...]`` or ``[V, 1, ...]``.
        lr: learning rate, 0-d.
    """
    definition = _DEFINITIONS[rule.name]
    by_name = {name: [own[i] for own in states] for i, name in enumerate(rule.states)}
    steps = list(grads)
    if rule.weight_decay and definition.decoupled_decay:
        torch._foreach_mul_(values, 1 - lr.double() * rule.weight_decay)
    elif rule.weight_decay:
        steps = list(torch._foreach_add(steps, values, alpha=rule.weight_decay))
    steps = list(definition.torch_step(rule, steps, by_name))
    if rule.momentum:
        torch._foreach_mul_(by_name["momentum"], rule.momentum)
        torch._foreach_add_(by_name["momentum"], steps)
        steps = by_name["momentum"]
    torch._foreach_sub_(values, torch._foreach_mul(steps, lr))


# The rules in Triton --------------------------------------------------------------------------


class RuleKind(NamedTuple):
    """The properties of a rule that kernels are compiled for: their argument ``RULE``."""

    name: str
    weight_states: int
    row_state: str | None
    momentum: bool
    decay: bool
    decoupled_decay: bool


class Hyper(NamedTuple):
    """The values of a rule's options, as arguments of a kernel."""

    eps: float
    weight_decay: float
    momentum: float
    keep: float  # alpha or rho
    add: float  # 1 - keep
    keep1: float  # betas[0]
    add1: float
    log1: float
    keep2: float  # betas[1]
    add2: float
    log2: float


def hyper(rule: Rule) -> Hyper:
    """The values of a rule's options, as the kernels take them."""
    keep = rule.alpha or rule.rho  # no rule has both
    betas = [(beta, 1 - beta, math.log(beta or 1e-38)) for beta in rule.betas]
    return Hyper(
        rule.eps, rule.weight_decay, rule.momentum, keep, 1 - keep, *betas[0], *betas[1]
    )  # fmt: skip


@triton.jit
def decay_step(value, grad, lr, hyper, RULE: tl.constexpr):
    """Weights and gradients after weight decay."""
    if RULE.decay and RULE.decoupled_decay:
        value = value * (1 - lr * hyper.weight_decay)
    elif RULE.decay:
        grad = grad + hyper.weight_decay * value
    return value, grad


@triton.jit
def row_step(state, mean_square, RULE: tl.constexpr):
    """The state of rows, brought up to date, given the mean squared gradient of each."""
    if RULE.row_state == "sum":
        state += mean_square
    else:  # steps
        state += 1
    return state


@triton.jit
def rule_step(first, second, row, grad, hyper, RULE: tl.constexpr):
    """One step of a rule, before the learning rate.

    Args:
        first, second: the states of the weights ``[K, B]``; placeholders where the rule has none.
        row: the state of the rows after :func:`row_step`, ``[K]``, or a placeholder.
        grad: gradient, ``[K, B]``.

    Returns:
        The new ``first`` and ``second``, and the step.
    """
    step = grad

    # Rules that keep sums of squares.
    if RULE.name == "adagrad":
        first += grad * grad
        step = grad / (tl.sqrt_rn(first) + hyper.eps)
    elif RULE.name == "rowwise_adagrad":
        step = grad * (1 / (tl.sqrt_rn(row) + hyper.eps))[:, None]  # one division a row
    elif RULE.name == "rmsprop":
        first = first * hyper.keep + grad * grad * hyper.add
        step = grad / (tl.sqrt_rn(first) + hyper.eps)
    elif RULE.name == "adadelta":
        first = first * hyper.keep + grad * grad * hyper.add
        step = tl.sqrt_rn(second + hyper.eps) / tl.sqrt_rn(first + hyper.eps) * grad
        second = second * hyper.keep + step * step * hyper.add

    # Rules with a mean of gradients, whose bias is corrected by the steps of the row.
    elif RULE.name == "adamax":
        first = first * hyper.keep1 + grad * hyper.add1
        mean = first * (1 / _one_minus_exp(row * hyper.log1))[:, None]
        second = tl.maximum(second * hyper.keep2, tl.abs(grad) + hyper.eps)
        step = mean / second
    elif RULE.name == "adam" or RULE.name == "adamw":
        first = first * hyper.keep1 + grad * hyper.add1
        mean = first * (1 / _one_minus_exp(row * hyper.log1))[:, None]
        second = second * hyper.keep2 + grad * grad * hyper.add2
        square = second * (1 / _one_minus_exp(row * hyper.log2))[:, None]
        step = mean / (tl.sqrt_rn(square) + hyper.eps)
    else:
        tl.static_assert(RULE.name == "sgd", "rule_step has no branch for this rule")
    return first, second, step


@triton.jit
def _one_minus_exp(x):
    """``1 - exp(x)`` for x <= 0, by its series where the difference would cancel."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.1, series, 1 - tl.exp(x))


@triton.jit
def store_after_all_read(at, value, mask):
    """Store a number that every warp of the program has read, once all of them have.

    One warp stores it, and warps do not run in step: others would read the new number.
    """
    tl.debug_barrier()
    tl.store(at, value, mask=mask)

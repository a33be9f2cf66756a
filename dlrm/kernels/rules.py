"""What the kernels that update weights share: Triton's part of :mod:`dlrm.rules`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from dlrm.rules import Rule


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

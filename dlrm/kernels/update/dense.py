"""Update parameters with dense gradients, many of them in one launch.

The MLPs and the cores of tensor trains are dozens of small tensors: as a few PyTorch operations
over all of them their update took 21 and 37 us of a captured step of 250 us.

Bytes an update must move: the gradient once, the parameter and its state twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm.kernels import use_triton
from dlrm.kernels.update.rules import (
    Rule,
    foreach_update,
    hyper,
    make_rule,
    round_stochastic,
    rule_step,
    store_of_all,
    store_rounded,
)

TENSORS = 32  # of one launch: the kernel is compiled for their number
BLOCK = 1024


@triton.jit
def _update(
    weights, grads, states, starts, lengths, sizes, lr, hyper, seed,
    COUNT: tl.constexpr, RULE: tl.constexpr, MOMENTUM: tl.constexpr, DECAY: tl.constexpr,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a chunk of one tensor: a row, or where the rule knows no rows some elements."""
    pid = tl.program_id(0)
    STATES: tl.constexpr = len(states) // COUNT  # the first of every tensor, the second, ...
    param, grad, start, length, size = weights[0], grads[0], starts[0], lengths[0], sizes[0]
    if STATES > 0:
        state0 = states[0]
    if STATES > 1:
        state1 = states[COUNT]
    if STATES > 2:
        state2 = states[2 * COUNT]
    for k in tl.static_range(1, COUNT):
        mine = pid >= starts[k]
        param, grad = tl.where(mine, weights[k], param), tl.where(mine, grads[k], grad)
        start, length = tl.where(mine, starts[k], start), tl.where(mine, lengths[k], length)
        size = tl.where(mine, sizes[k], size)
        if STATES > 0:
            state0 = tl.where(mine, states[k], state0)
        if STATES > 1:
            state1 = tl.where(mine, states[COUNT + k], state1)
        if STATES > 2:
            state2 = tl.where(mine, states[2 * COUNT + k], state2)
    chunk = (pid - start).to(tl.int64)
    begin = chunk * length
    end = tl.minimum(begin + length, size)
    eps, decay, momentum, _, _, _, _, _, _, _, _ = hyper
    rate = tl.load(lr)
    count = chunk  # what has none looks at none
    if RULE == "rowwise_adagrad":
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, length, BLOCK):
            at = begin + first + tl.arange(0, BLOCK)
            g = tl.load(grad + at, mask=at < end, other=0.0).to(tl.float32)
            if DECAY:
                g += decay * tl.load(param + at, mask=at < end, other=0.0).to(tl.float32)
            total += g * g
        mean = tl.load(state0 + chunk) + tl.sum(total, 0) / length
        store_of_all(state0 + chunk, mean, None)
        root = tl.sqrt_rn(mean) + eps
    elif STATES > 2:
        count = tl.load(state2 + chunk) + 1
        store_of_all(state2 + chunk, count, None)
    count += tl.zeros((1,), count.dtype)
    for first in range(0, length, BLOCK):
        at = (begin + first + tl.arange(0, BLOCK))[None, :]
        mask = at < end
        step = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(param + at, mask=mask, other=0.0).to(tl.float32)
        if DECAY and RULE == "adamw":
            value = value * (1 - rate * decay)
        elif DECAY:
            step += decay * value
        if RULE == "rowwise_adagrad":
            step /= root
        elif RULE != "sgd":
            one = tl.load(state0 + at, mask=mask, other=0.0)
            two = one
            if RULE != "adagrad" and RULE != "rmsprop":
                two = tl.load(state1 + at, mask=mask, other=0.0)
            one, two, step = rule_step(one, two, step, count, hyper, RULE)
            tl.store(state0 + at, one, mask=mask)
            if RULE != "adagrad" and RULE != "rmsprop":
                tl.store(state1 + at, two, mask=mask)
        if MOMENTUM:  # kept behind the rule's other states
            buffer = state0 if RULE == "sgd" else state1
            step += momentum * tl.load(buffer + at, mask=mask, other=0.0)
            tl.store(buffer + at, step, mask=mask)
        store_rounded(param, at, at + start * BLOCK, value - rate * step, mask, seed, ROUND)


@torch.no_grad()
def update_dense(
    rule: str | Rule,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    *,
    lr: Tensor,
    seed: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Apply one optimizer step, in place, to parameters with dense gradients.

    Args:
        rule: one of ``dlrm.kernels.update.rules.RULES`` with its default options, or what
            ``make_rule`` gives. A row, of which some keep one number, is what shares a first index.
        parameters: of any shape, all on one device.
        grads: gradient of each, of its shape.
        states: of each parameter what the rule keeps, in the order of ``rule.states``, zeros at
            first: of its shape, or, where it is one number a row, ``[V, 1, ...]``.
        lr: learning rate, a 0-d tensor.
        seed: a 0-d int64 tensor: bf16 parameters are then rounded up or down by chance, without
            bias, and the seed moves on by one. Without it they are rounded to nearest.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: unknown rule, or not one gradient of its shape and one set of states per
            parameter.
    """
    rule = make_rule(rule) if isinstance(rule, str) else rule
    if not len(parameters) == len(grads) == len(states):
        raise ValueError(
            f"{len(parameters)} parameters, {len(grads)} gradients, {len(states)} states: give one "
            "of each per parameter"
        )
    for parameter, grad, kept in zip(parameters, grads, states, strict=True):
        if grad.shape != parameter.shape or len(kept) != len(rule.states):
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} has a gradient {tuple(grad.shape)} and "
                f"{len(kept)} states; {rule.name} needs one of its shape and {len(rule.states)}"
            )
    if not parameters:
        return
    # The kernel computes in fp32, and walks over memory.
    fits = all(p.dtype != torch.float64 and p.is_contiguous() for p in parameters)
    if not (fits and use_triton(parameters[0], impl)):
        update_whole_torch(rule, parameters, grads, states, lr=lr, stochastic=seed is not None)
        return
    alike: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if parameter.numel():
            alike.setdefault((parameter.dtype, grad.dtype), []).append(index)
    for members in alike.values():
        for first in range(0, len(members), TENSORS):
            some = members[first : first + TENSORS]
            kept = [states[i][j] for j in range(len(rule.states)) for i in some]
            _launch(rule, [parameters[i] for i in some], [grads[i] for i in some], kept, lr, seed)
    if seed is not None:
        seed.add_(1)


def _launch(
    rule: Rule,
    parameters: list[Tensor],
    grads: list[Tensor],
    states: list[Tensor],
    lr: Tensor,
    seed: Tensor | None,
) -> None:
    """Launch the update of parameters of one type."""
    sizes = [parameter.numel() for parameter in parameters]
    lengths = [BLOCK] * len(sizes)
    if any(rule.states.values()):
        rows = [len(parameter) if parameter.dim() else 1 for parameter in parameters]
        lengths = [size // count for size, count in zip(sizes, rows, strict=True)]
    chunks = [triton.cdiv(size, length) for size, length in zip(sizes, lengths, strict=True)]
    starts = [0, *accumulate(chunks)]
    _update[(starts[-1],)](
        tuple(parameters), tuple(grad.contiguous() for grad in grads), tuple(states),
        tuple(starts[:-1]), tuple(lengths), tuple(sizes), lr, hyper(rule), seed,
        COUNT=len(sizes), RULE=rule.name, MOMENTUM=rule.momentum > 0, DECAY=rule.weight_decay > 0,
        ROUND=seed is not None and parameters[0].dtype == torch.bfloat16,
        BLOCK=min(BLOCK, triton.next_power_of_2(max(lengths))),
    )  # fmt: skip


@torch.no_grad()
def update_whole_torch(
    rule: Rule,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    *,
    lr: Tensor,
    stochastic: bool = False,
) -> None:
    """:func:`update_dense` in PyTorch; bf16 parameters draw from torch's generator."""
    wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
    values = [parameter.to(dtype) for parameter, dtype in zip(parameters, wide, strict=True)]
    foreach_update(
        rule, values, [g.to(dtype) for g, dtype in zip(grads, wide, strict=True)], states, lr
    )
    for parameter, value in zip(parameters, values, strict=True):
        if value is not parameter:
            rounds = stochastic and parameter.dtype == torch.bfloat16
            parameter.copy_(round_stochastic(value) if rounds else value)

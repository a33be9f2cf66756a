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

from dlrm.hints import nearest
from dlrm.kernels import use_triton

RULES = ("sgd", "adagrad", "rowwise_adagrad")
TENSORS = 32  # of one launch: the kernel is compiled for their number
BLOCK = 1024


@triton.jit
def _update(
    weights, grads, sums, starts, lengths, sizes, lr, eps,
    COUNT: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a chunk of one tensor: a row, or where the rule knows no rows some elements."""
    pid = tl.program_id(0)
    param, grad, start, length, size = weights[0], grads[0], starts[0], lengths[0], sizes[0]
    if RULE != "sgd":
        state = sums[0]
    for k in tl.static_range(1, COUNT):
        mine = pid >= starts[k]
        param, grad = tl.where(mine, weights[k], param), tl.where(mine, grads[k], grad)
        start, length = tl.where(mine, starts[k], start), tl.where(mine, lengths[k], length)
        size = tl.where(mine, sizes[k], size)
        if RULE != "sgd":
            state = tl.where(mine, sums[k], state)
    chunk = (pid - start).to(tl.int64)
    begin = chunk * length
    end = tl.minimum(begin + length, size)
    rate = tl.load(lr)
    if RULE == "rowwise_adagrad":
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, length, BLOCK):
            at = begin + first + tl.arange(0, BLOCK)
            g = tl.load(grad + at, mask=at < end, other=0.0).to(tl.float32)
            total += g * g
        moment = tl.load(state + chunk) + tl.sum(total, 0) / length
        tl.store(state + chunk, moment)
        rate /= tl.sqrt_rn(moment) + eps
    for first in range(0, length, BLOCK):
        at = begin + first + tl.arange(0, BLOCK)
        mask = at < end
        step = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        if RULE == "adagrad":
            moment = tl.load(state + at, mask=mask, other=0.0) + step * step
            tl.store(state + at, moment, mask=mask)
            step /= tl.sqrt_rn(moment) + eps
        value = tl.load(param + at, mask=mask, other=0.0).to(tl.float32) - rate * step
        tl.store(param + at, value.to(param.dtype.element_ty), mask=mask)


@torch.no_grad()
def update_whole(
    rule: str,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    *,
    lr: Tensor,
    eps: float = 1e-8,
    impl: str | None = None,
) -> None:
    """Apply one optimizer step, in place, to parameters with dense gradients.

    Args:
        rule: ``sgd``, ``adagrad`` or ``rowwise_adagrad``; a row is what shares a first index.
        parameters: contiguous, of any shape.
        grads: gradient of each, of its shape.
        states: of each parameter: nothing for sgd, else one fp32 tensor, the sum of its squared
            gradients, or for rowwise_adagrad of their means over a row, one number a row.
        lr: learning rate, a 0-d tensor.
        eps: added to the root in the denominator.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: unknown rule, or not one gradient and one set of states per parameter.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}{nearest(rule, RULES)}")
    if not len(parameters) == len(grads) == len(states):
        raise ValueError(
            f"{len(parameters)} parameters, {len(grads)} gradients, {len(states)} states: give one "
            "of each per parameter"
        )
    if not parameters:
        return
    if not use_triton(parameters[0], impl):
        update_whole_torch(rule, parameters, grads, states, lr=lr, eps=eps)
        return
    alike: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
        if parameter.numel():
            alike.setdefault((parameter.dtype, grad.dtype), []).append(index)
    for members in alike.values():
        for first in range(0, len(members), TENSORS):
            some = members[first : first + TENSORS]
            sums = [state for i in some for state in states[i]]
            _launch(rule, [parameters[i] for i in some], [grads[i] for i in some], sums, lr, eps)


def _launch(
    rule: str,
    parameters: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    lr: Tensor,
    eps: float,
) -> None:
    """Launch the update of parameters of one type."""
    sizes = [parameter.numel() for parameter in parameters]
    lengths = [BLOCK] * len(sizes)
    if rule == "rowwise_adagrad":
        rows = [len(parameter) if parameter.dim() else 1 for parameter in parameters]
        lengths = [size // count for size, count in zip(sizes, rows, strict=True)]
    chunks = [triton.cdiv(size, length) for size, length in zip(sizes, lengths, strict=True)]
    starts = [0, *accumulate(chunks)]
    _update[(starts[-1],)](
        tuple(parameters), tuple(grad.contiguous() for grad in grads), tuple(sums),
        tuple(starts[:-1]), tuple(lengths), tuple(sizes), lr, eps,
        COUNT=len(sizes), RULE=rule, BLOCK=min(BLOCK, triton.next_power_of_2(max(lengths))),
    )  # fmt: skip


@torch.no_grad()
def update_whole_torch(
    rule: str,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    *,
    lr: Tensor,
    eps: float = 1e-8,
) -> None:
    """:func:`update_whole` in PyTorch."""
    for parameter, grad, state in zip(parameters, grads, states, strict=True):
        step = grad.to(torch.promote_types(parameter.dtype, torch.float32))
        for total in state:
            square = step.square()
            if rule == "rowwise_adagrad" and step.dim() > 1:
                square = square.flatten(1).mean(1).view_as(total)
            step = step / (total.add_(square).sqrt() + eps)
        parameter.copy_(parameter.to(step.dtype) - lr * step)

"""The mean binary cross entropy: one launch for its sum, and one for its gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import tl, triton, use_triton

BLOCK = 2048  # samples of a program


@triton.jit
def _sum(logits, labels, weights, partial, n, total, shift, BLOCK: tl.constexpr):
    """The sum of one block of losses, divided by ``total``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32) + shift
    label = tl.load(labels + at, mask=at < n, other=0.0)
    loss = tl.maximum(logit, 0.0) - logit * label + tl.log(1 + tl.exp(-tl.abs(logit)))
    if weights is not None:
        loss *= tl.load(weights + at, mask=at < n, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(at < n, loss, 0.0), 0) / total)


@triton.jit
def _gradient(grad, logits, labels, weights, to, n, total, shift, BLOCK: tl.constexpr):
    """The gradient of one block of logits, given that of the mean."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32) + shift
    value = tl.sigmoid(logit) - tl.load(labels + at, mask=at < n, other=0.0)
    value *= tl.load(grad) / total
    if weights is not None:
        value *= tl.load(weights + at, mask=at < n, other=0.0)
    tl.store(to + at, value.to(to.dtype.element_ty), mask=at < n)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, total: int, shift: float
    ) -> Tensor:
        ctx.save_for_backward(logits, labels, weights)
        ctx.sizes = sizes = len(logits), total, shift
        programs = triton.cdiv(len(logits), BLOCK)
        partial = torch.empty(programs, device=logits.device)
        _sum[(programs,)](logits, labels, weights, partial, *sizes, BLOCK=BLOCK)
        return partial.sum() if programs > 1 else partial[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, weights = ctx.saved_tensors
        found = torch.empty_like(logits)
        programs = triton.cdiv(len(logits), BLOCK // 8)
        _gradient[(programs,)](grad, logits, labels, weights, found, *ctx.sizes, BLOCK=BLOCK // 8)
        return found, None, None, None, None


def mean_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    odds: float = 1.0,
    total: int | None = None,
    *,
    impl: str | None = None,
) -> Tensor:
    """Mean binary cross entropy in fp32, ``[B]`` and ``[B]`` to a 0-d tensor.

    With ``weights [B]``, the loss of each sample is multiplied by its weight; the sum is divided by
    B, as the weights of a data set are 1 on average. If the samples are part of a larger batch,
    ``total`` is its size, by which the sum is divided instead.

    The odds of a positive among the samples, as they are chosen and weighted, may be ``odds`` times
    those among all rows. Then the loss is taken at ``logits + log(odds)``, and the logits
    themselves are those of all rows.
    """
    if not len(logits) or logits.dtype == torch.float64 or not use_triton(logits, impl):
        return mean_loss_torch(logits, labels, weights, odds, total)
    logits, labels = logits.contiguous(), labels.contiguous()
    weights = None if weights is None else weights.contiguous()
    total = total or len(logits)
    return _MeanLoss.apply(logits, labels, weights, total, math.log(odds))


def mean_loss_torch(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    odds: float = 1.0,
    total: int | None = None,
) -> Tensor:
    """:func:`mean_loss` in PyTorch."""
    logits = logits.float()
    if odds != 1:
        logits = logits + math.log(odds)
    loss = functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    return loss / (total or len(logits))

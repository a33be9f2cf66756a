"""Dot interaction: the dot products of all pairs of ``F + 1`` vectors, without the full matrix.

The vectors are read where they lie, the bottom MLP's and the embeddings, and the products are
written where the top MLP reads them: no concatenation, no ``[B, F + 1, F + 1]`` matrix, no gather.

Bytes a sample must move, at ``e`` bytes an element and ``P = F (F + 1) / 2`` pairs: forward
``(F + 1) D e`` in and ``(D + P) e`` out; backward both of those in and ``(F + 1) D e`` out.

Reference: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", arXiv 1906.00091.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import use_triton

CHUNK = 64  # columns of the vectors that are multiplied at a time


@triton.jit
def _load_vectors(bottom, embedded, vector, column, stride_f, F: tl.constexpr, D: tl.constexpr):
    """The bottom vector and the embeddings of one sample, in the bottom's type."""
    inside = column < D
    first = tl.load(bottom + column, mask=(vector == 0) & inside, other=0.0)
    others = (vector > 0) & (vector <= F) & inside
    rest = tl.load(embedded + (vector - 1) * stride_f + column, mask=others, other=0.0)
    return tl.where(vector == 0, first, rest.to(first.dtype))


@triton.jit
def _forward(
    bottom, embedded, out, batch, stride_bottom, stride_b, stride_f, stride_out,
    F: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sample: bottom vector, then the lower triangle of X X^T row by row, then zeros."""
    sample = tl.program_id(0).to(tl.int64)
    bottom += sample * stride_bottom
    embedded += sample * stride_b
    out += sample * stride_out
    vector = tl.arange(0, BLOCK_F)[:, None]
    products = tl.zeros((BLOCK_F, BLOCK_F), tl.float32)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)[None, :]
        x = _load_vectors(bottom, embedded, vector, column, stride_f, F, D)
        products = tl.dot(x, tl.trans(x), products, input_precision=PRECISION)
        tl.store(out + column, tl.load(bottom + column, mask=column < D), mask=column < D)
    other = tl.arange(0, BLOCK_F)[None, :]
    at = D + vector * (vector - 1) // 2 + other
    pair = (other < vector) & (vector <= F)
    tl.store(out + at, products.to(out.dtype.element_ty), mask=pair)
    PAIRS: tl.constexpr = F * (F + 1) // 2
    if WIDTH > D + PAIRS:
        padding = D + PAIRS + tl.arange(0, BLOCK_F)
        tl.store(out + padding, tl.zeros_like(padding).to(out.dtype.element_ty), padding < WIDTH)


@triton.jit
def _backward(
    bottom, embedded, grad, grad_bottom, grad_embedded, batch,
    stride_bottom, stride_b, stride_f, stride_grad,
    F: tl.constexpr, D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One sample: (G + G^T) X, where G holds the gradients of the pairs below the diagonal."""
    sample = tl.program_id(0).to(tl.int64)
    bottom += sample * stride_bottom
    embedded += sample * stride_b
    grad += sample * stride_grad
    grad_bottom += sample * D
    grad_embedded += sample * F * D
    vector = tl.arange(0, BLOCK_F)[:, None]
    other = tl.arange(0, BLOCK_F)[None, :]
    larger, smaller = tl.maximum(vector, other), tl.minimum(vector, other)
    at = D + larger * (larger - 1) // 2 + smaller
    both = tl.load(grad + at, mask=(larger != smaller) & (larger <= F), other=0.0)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)[None, :]
        inside = column < D
        x = _load_vectors(bottom, embedded, vector, column, stride_f, F, D)
        result = tl.dot(both, x, input_precision=PRECISION)
        passed = tl.load(grad + column, mask=(vector == 0) & inside, other=0.0)
        result += passed.to(tl.float32)
        to_bottom = result.to(grad_bottom.dtype.element_ty)
        tl.store(grad_bottom + vector * D + column, to_bottom, mask=(vector == 0) & inside)
        to_embedded = result.to(grad_embedded.dtype.element_ty)
        others = (vector > 0) & (vector <= F) & inside
        tl.store(grad_embedded + (vector - 1) * D + column, to_embedded, mask=others)


def _sizes(tables: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time sizes; fp32 multiplies as three tf32 products, whose error is that of fp32."""
    block_f = max(16, triton.next_power_of_2(tables + 1))
    return {
        "F": tables,
        "D": dim,
        "BLOCK_F": block_f,
        "BLOCK_D": max(16, min(CHUNK, triton.next_power_of_2(dim))),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": 1 if block_f <= 32 else 4,
    }


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: Tensor, embedded: Tensor, width: int) -> Tensor:
        batch, tables, dim = embedded.shape
        out = bottom.new_empty(batch, width)
        if batch:
            _forward[(batch,)](
                bottom, embedded, out, batch, bottom.stride(0), *embedded.stride()[:2], width,
                WIDTH=width, **_sizes(tables, dim, bottom.dtype),
            )  # fmt: skip
        ctx.save_for_backward(bottom, embedded)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bottom, embedded = ctx.saved_tensors
        batch, tables, dim = embedded.shape
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        grad_bottom = torch.empty(bottom.shape, dtype=bottom.dtype, device=bottom.device)
        grad_embedded = torch.empty(embedded.shape, dtype=embedded.dtype, device=bottom.device)
        if batch:
            _backward[(batch,)](
                bottom, embedded, grad, grad_bottom, grad_embedded, batch, bottom.stride(0),
                *embedded.stride()[:2], grad.stride(0), **_sizes(tables, dim, bottom.dtype),
            )  # fmt: skip
        return grad_bottom, grad_embedded, None


def dot_interaction(
    bottom: Tensor, embedded: Tensor, *, multiple: int = 1, impl: str | None = None
) -> Tensor:
    """The bottom vector, then the dot products of all pairs of the ``F + 1`` vectors.

    Args:
        bottom: output of the bottom MLP, ``[B, D]``, fp32 or bf16. Its type is the result's.
        embedded: ``[B, F, D]``, of the same or another type. Of both, only the last dimension
            must be contiguous.
        multiple: pad the width with zeros to a multiple of this. Matrix products of the tensor
            cores want rows that begin on 16 bytes.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, D + F (F + 1) / 2]``, rounded up: ``bottom``, then for every vector, the bottom's
        being number 0, its products with those before it.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    batch, tables, dim = embedded.shape
    if bottom.shape != (batch, dim):
        raise ValueError(
            f"bottom is {tuple(bottom.shape)} and embedded {tuple(embedded.shape)}; they must be "
            "[B, D] and [B, F, D]"
        )
    width = -(-(dim + tables * (tables + 1) // 2) // multiple) * multiple
    if not use_triton(bottom, impl):
        return dot_interaction_torch(bottom, embedded, multiple=multiple)
    bottom, embedded = (x if x.stride(-1) == 1 else x.contiguous() for x in (bottom, embedded))
    return _DotInteraction.apply(bottom, embedded, width)


def dot_interaction_torch(bottom: Tensor, embedded: Tensor, *, multiple: int = 1) -> Tensor:
    """:func:`dot_interaction` in PyTorch."""
    x = torch.cat([bottom[:, None], embedded.to(bottom.dtype)], dim=1)  # [B, F + 1, D]
    row, column = torch.tril_indices(x.shape[1], x.shape[1], -1, device=x.device)
    products = torch.bmm(x, x.transpose(1, 2))[:, row, column]
    out = torch.cat([bottom, products], dim=1)
    return functional.pad(out, (0, -out.shape[1] % multiple))

"""Dot interaction: the dot products of all pairs of ``F + 1`` vectors, without the full matrix.

The output of the bottom MLP and the embeddings are read in place, and the products are written
where the top MLP reads them: no concatenation, no ``[B, F + 1, F + 1]`` matrix, no gather.

Bytes per sample that must be moved, with ``e`` bytes per element and ``P = F (F + 1) / 2`` pairs:
forward ``(F + 1) D e`` in and ``(D + P) e`` out; backward both in and ``(F + 1) D e`` out.

Reference: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", arXiv 1906.00091.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import tl, triton, use_triton

CHUNK = 64  # columns, and in the backward pass also vectors, that are multiplied at a time
MOST_TABLES = 127  # of a sample's products that the registers of one program hold


@triton.jit
def load_vectors(bottom, parts, sample, position, column, SIZES: tl.constexpr, D: tl.constexpr):
    """Vectors of one sample, in the type of ``bottom``, whose own position is -1."""
    inside = column < D
    x = tl.load(bottom + column, mask=(position == -1) & inside, other=0.0)
    pointer, stride_b, stride_f = parts[0]
    base = pointer + sample * stride_b + position.to(tl.int64) * stride_f
    known = (position >= 0) & (position < SIZES[0])
    begin = SIZES[0]
    for part in tl.static_range(1, len(SIZES)):
        pointer, stride_b, stride_f = parts[part]
        mine = (position >= begin) & (position < begin + SIZES[part])
        at = sample * stride_b + (position - begin).to(tl.int64) * stride_f
        base = tl.where(mine, pointer + at, base)  # for one load of all of them
        known = known | mine
        begin += SIZES[part]
    return x + tl.load(base + column, mask=known & inside, other=0.0).to(x.dtype)


@triton.jit
def positions_of(order, vector, F: tl.constexpr):
    """Position of each vector among the parts: -1 for the bottom vector, ``F`` for padding."""
    if order is None:
        position = vector - 1
    else:
        position = tl.load(order + vector - 1, mask=(vector > 0) & (vector <= F), other=F)
        position = tl.where(vector == 0, -1, position.to(tl.int32))
    return position


@triton.jit
def _forward(
    bottom, parts, order, out, stride_bottom, stride_out,
    SIZES: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One sample: the bottom vector, then the lower triangle of X X^T row by row, then zeros."""
    sample = tl.program_id(0).to(tl.int64)
    bottom += sample * stride_bottom
    out += sample * stride_out
    vector = tl.arange(0, BLOCK_F)[:, None]
    position = positions_of(order, vector, F)
    products = tl.zeros((BLOCK_F, BLOCK_F), tl.float32)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)[None, :]
        x = load_vectors(bottom, parts, sample, position, column, SIZES, D)
        products = tl.dot(x, tl.trans(x), products, input_precision=PRECISION)
        tl.store(out + column, tl.load(bottom + column, mask=column < D), mask=column < D)
    other = tl.arange(0, BLOCK_F)[None, :]
    at = D + vector * (vector - 1) // 2 + other
    pair = (other < vector) & (vector <= F)
    tl.store(out + at, products.to(out.dtype.element_ty), mask=pair)
    for pad in tl.static_range(PAD):
        tl.store(out + D + F * (F + 1) // 2 + pad, 0.0)


@triton.jit
def _backward(
    bottom, parts, order, grad, grad_bottom, grad_parts, stride_bottom, stride_grad,
    SIZES: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One sample: (G + G^T) X, where G holds the gradients of the pairs below the diagonal."""
    sample = tl.program_id(0).to(tl.int64)
    bottom += sample * stride_bottom
    grad += sample * stride_grad
    grad_bottom += sample * D
    vector = tl.arange(0, BLOCK_F)[:, None]
    position = positions_of(order, vector, F)

    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)[None, :]
        inside = column < D

        # The products, a block of the vectors at a time.
        result = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
        for begin_k in tl.static_range(0, BLOCK_F, BLOCK_K):
            other = begin_k + tl.arange(0, BLOCK_K)
            larger = tl.maximum(vector, other[None, :])
            smaller = tl.minimum(vector, other[None, :])
            at = D + larger * (larger - 1) // 2 + smaller
            both = tl.load(grad + at, mask=(larger != smaller) & (larger <= F), other=0.0)
            place = positions_of(order, other[:, None], F)
            x = load_vectors(bottom, parts, sample, place, column, SIZES, D)
            result = tl.dot(both.to(x.dtype), x, result, input_precision=PRECISION)

        # Vector 0 is the bottom one; its gradient has a part of its own.
        first = (vector == 0) & inside
        result += tl.load(grad + column, mask=first, other=0.0).to(tl.float32)
        value = result.to(grad_bottom.dtype.element_ty)
        tl.store(grad_bottom + vector * D + column, value, mask=first)

        # The others belong to groups of tables, and are stored together.
        base = grad_parts[0] + (sample * SIZES[0] + position) * D
        known = (position >= 0) & (position < SIZES[0])
        begin = SIZES[0]
        for part in tl.static_range(1, len(SIZES)):
            mine = (position >= begin) & (position < begin + SIZES[part])
            pointer = grad_parts[part] + (sample * SIZES[part] + position - begin) * D
            base = tl.where(mine, pointer, base)
            known = known | mine
            begin += SIZES[part]
        tl.store(base + column, result.to(base.dtype.element_ty), mask=known & inside)


def _sizes(parts: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments.

    fp32 is multiplied as three tf32 products, which have the error of fp32, or with
    ``torch.set_float32_matmul_precision("high")`` as one, with a thousand times the error.
    """
    tables, dim = sum(part.shape[1] for part in parts), parts[0].shape[2]
    block_f = max(16, triton.next_power_of_2(tables + 1))
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {
        "SIZES": tuple(part.shape[1] for part in parts),
        "F": tables,
        "D": dim,
        "BLOCK_F": block_f,
        "BLOCK_D": max(16, min(CHUNK, triton.next_power_of_2(dim))),
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": 1 if block_f <= 32 else 4,
        "num_stages": 3 if block_f <= 32 else 1,  # shared memory
    }


def with_strides(parts: Sequence[Tensor]) -> tuple[tuple[Tensor, int, int], ...]:
    """The parts ``[B, F_i, D]`` as :func:`load_vectors` reads them."""
    return tuple((part, part.stride(0), part.stride(1)) for part in parts)


def check_vectors(bottom: Tensor, parts: Sequence[Tensor], order: Tensor | None) -> None:
    """Raise unless the arguments of :func:`dot_interaction` fit each other."""
    shape = tuple(bottom.shape)
    fits = [part.dim() == 3 and part.shape[::2] == shape for part in parts]
    if len(shape) != 2 or not parts or not all(fits):
        raise ValueError(
            f"bottom is {shape} and embedded {[tuple(part.shape) for part in parts]}; they "
            "must be [B, D] and [B, F, D]"
        )
    vectors = sum(part.shape[1] for part in parts)
    if order is not None and order.shape != (vectors,):
        raise ValueError(
            f"order has shape {tuple(order.shape)}, it must be [{vectors}]: one for each embedding"
        )


def readable(bottom: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """The bottom vector and the parts as kernels read them: these are of one type."""
    alike = len({part.dtype for part in parts}) == 1
    vectors = [bottom, *(part if alike else part.to(bottom.dtype) for part in parts)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in vectors]


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bottom: Tensor, order: Tensor | None, multiple: int, *parts: Tensor
    ) -> Tensor:
        tables = sum(part.shape[1] for part in parts)
        width = bottom.shape[1] + tables * (tables + 1) // 2
        pad = -width % multiple
        out = bottom.new_empty(len(bottom), width + pad)
        if len(bottom):
            _forward[(len(bottom),)](
                bottom, with_strides(parts), order, out, bottom.stride(0), width + pad,
                PAD=pad, **_sizes(parts, bottom.dtype),
            )  # fmt: skip
        ctx.save_for_backward(bottom, order, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bottom, order, *parts = ctx.saved_tensors
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        grad_bottom, *grad_parts = (x.new_empty(x.shape) for x in (bottom, *parts))
        sizes = _sizes(parts, bottom.dtype)
        if len(bottom):
            _backward[(len(bottom),)](
                bottom, with_strides(parts), order, grad, grad_bottom, tuple(grad_parts),
                bottom.stride(0), grad.stride(0), BLOCK_K=min(CHUNK, sizes["BLOCK_F"]), **sizes,
            )  # fmt: skip
        return grad_bottom, None, None, *grad_parts


def dot_interaction(
    bottom: Tensor,
    embedded: Tensor | Sequence[Tensor],
    *,
    order: Tensor | None = None,
    multiple: int = 1,
    impl: str | None = None,
) -> Tensor:
    """The bottom vector, then the dot products of all pairs of the ``F + 1`` vectors.

    Args:
        bottom: output of the bottom MLP, ``[B, D]``, fp32 or bf16; the result has its type.
        embedded: the embeddings, ``[B, F, D]``, or several ``[B, F_i, D]`` that are concatenated;
            of the same or another type. Only the last dimension of the inputs must be contiguous.
        order: ``[F]``; embedding ``f`` is number ``order[f]`` of the concatenated ``embedded``.
            None: the embeddings are in order.
        multiple: pad the width with zeros to a multiple of this. Tensor cores need rows that are
            aligned to 16 bytes.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, D + F (F + 1) / 2]``, padded: ``bottom``, then for every vector its products with
        those before it, of which ``bottom`` is the first.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    parts = [embedded] if isinstance(embedded, Tensor) else list(embedded)
    check_vectors(bottom, parts, order)
    vectors = sum(part.shape[1] for part in parts)
    if not use_triton(bottom, impl) or vectors > MOST_TABLES:
        return dot_interaction_torch(bottom, parts, order=order, multiple=multiple)
    bottom, *parts = readable(bottom, parts)
    order = None if order is None else order.contiguous()
    return _DotInteraction.apply(bottom, order, multiple, *parts)


def dot_interaction_torch(
    bottom: Tensor,
    embedded: Tensor | Sequence[Tensor],
    *,
    order: Tensor | None = None,
    multiple: int = 1,
) -> Tensor:
    """:func:`dot_interaction` in PyTorch."""
    x = embedded if isinstance(embedded, Tensor) else torch.cat(list(embedded), dim=1)
    x = x if order is None else x.index_select(1, order)
    x = torch.cat([bottom[:, None], x.to(bottom.dtype)], dim=1)  # [B, F + 1, D]
    row, column = torch.tril_indices(x.shape[1], x.shape[1], -1, device=x.device)
    pairs = row * x.shape[1] + column
    products = torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, pairs)
    out = torch.cat([bottom, products], dim=1)
    return functional.pad(out, (0, -out.shape[1] % multiple))

"""Pool bags of vectors that lie one bag after another, such as rows that were widened.

Bytes that must be moved: a vector read per look-up, and one written per bag.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import triton, use_triton
from dlrm.kernels.lookup.bags import (
    BAGS,
    CHUNK,
    TILE,
    check_bags,
    pool,
    pool_backward,
    pool_max,
)
from dlrm.kernels.lookup.tables import tiling
from dlrm.utils.bags import Bags

_AS_THEY_ARE = (None,) * 6  # nothing leads from an id to another row


class _PoolBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        scale: Tensor | None,
        offsets: Tensor,
        tables: int,
        mode: str,
        dtype: torch.dtype | None,
    ) -> Tensor:
        bags, dim = offsets.numel() - 1, vectors.shape[1]
        shape = (bags // tables, tables, dim)
        out = vectors.new_empty(shape, dtype=dtype or vectors.dtype)
        index = torch.arange(len(vectors), device=vectors.device)
        chosen = None
        if mode == "max":
            chosen = torch.empty(shape, dtype=torch.int64, device=vectors.device)
        if bags and mode == "max":
            grid, sizes = tiling(bags, dim, TILE)
            pool_max[grid](
                index, offsets, _AS_THEY_ARE, vectors, None, out, None, chosen,
                bags, bags // tables, F=tables, FORMAT=0, **sizes,
            )  # fmt: skip
        elif bags:
            block_d = triton.next_power_of_2(dim)
            block = max(1, BAGS // block_d)
            pool[triton.cdiv(bags, block),](
                index, offsets, _AS_THEY_ARE, vectors, None, scale, out, (None, None),
                bags, bags // tables, F=tables, D=dim, BLOCK=block, BLOCK_D=block_d, CHUNK=CHUNK,
                MEAN=mode == "mean", FORMAT=0, num_warps=1,
            )  # fmt: skip
        ctx.save_for_backward(vectors, scale, offsets, index, chosen)
        ctx.tables, ctx.mode = tables, mode
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, scale, offsets, index, chosen = ctx.saved_tensors
        bags, dim = offsets.numel() - 1, vectors.shape[1]
        values = torch.zeros_like(vectors)  # what lies beyond the last bag has no gradient
        grad_scale = torch.zeros_like(scale) if ctx.needs_input_grad[1] else None
        grid, sizes = tiling(bags, dim, TILE)
        if bags:
            pool_backward[grid](
                grad.contiguous(), offsets, index, vectors, None, scale, chosen, values, grad_scale,
                bags, bags // ctx.tables, F=ctx.tables, MODE=ctx.mode, FORMAT=0, **sizes,
            )  # fmt: skip
        return values, grad_scale, *[None] * 4


def pool_bags(
    vectors: Tensor,
    bags: Bags,
    tables: int,
    *,
    mode: str = "sum",
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """Pool a bag of vectors per table and sample.

    Args:
        vectors: those of all bags, table by table, ``[nnz, D]``; what lies beyond the last bag is
            left out.
        bags: offsets and weights of the vectors, one for each id (not checked). Weights need mode
            sum and get a gradient.
        tables: how many there are.
        mode: sum, mean or max; an empty bag gives zeros. The gradient of max goes to the first of
            equal entries.
        dtype: of the result, whose sums are taken in fp32; None: that of the vectors.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, tables, D]``.

    Raises:
        ValueError: as :func:`~dlrm.kernels.lookup.bags.lookup_bags`.
    """
    check_bags(vectors, tables, bags, mode)
    if not use_triton(vectors, impl):
        out = pool_bags_torch(vectors, bags, tables, mode)
        return out.to(dtype or out.dtype)
    bags = bags.contiguous()
    return _PoolBags.apply(vectors.contiguous(), bags.weights, bags.offsets, tables, mode, dtype)


def pool_bags_torch(vectors: Tensor, bags: Bags, tables: int, mode: str = "sum") -> Tensor:
    """:func:`pool_bags` in PyTorch."""
    batch = bags.count // tables
    index = torch.arange(len(vectors), device=vectors.device)
    pooled = functional.embedding_bag(
        index, vectors, bags.offsets, mode=mode, per_sample_weights=bags.weights,
        include_last_offset=True,
    )  # fmt: skip
    return pooled.view(tables, batch, vectors.shape[1]).transpose(0, 1)

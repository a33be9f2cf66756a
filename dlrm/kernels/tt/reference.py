"""Tensor-train look-ups in plain PyTorch: the reference for the kernels, also used on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.kernels.tt.layout import TTShape
from dlrm.utils.bags import Bags

_GROUP = 4  # rows that are multiplied by one copy of a slice


def tt_vectors_torch(
    cores: Sequence[Tensor], shape: TTShape, tables: Tensor, ids: Tensor
) -> Tensor:
    """:func:`~dlrm.kernels.tt.tt_vectors` in plain PyTorch.

    Equal ids are looked up once, and ids with equal first digits share the product of the first
    cores. The host waits for the number of unique ids, so a CUDA graph can't capture this.
    """
    q, ranks = shape.q, shape.ranks
    steps = _chain(shape, tables, ids)
    slices, children = steps[0]
    rows = cores[0].index_select(0, slices).index_select(0, children)

    for k, (slices, children) in enumerate(steps[1:], 1):
        height, width = prod(q[:k]), q[k] * ranks[k + 1]
        matrices = cores[k].view(-1, ranks[k], width).index_select(0, slices)
        rows = rows.view(len(slices), _GROUP * height, ranks[k])
        narrow = width < _GROUP * height
        products = _NarrowProduct.apply(rows, matrices) if narrow else torch.bmm(rows, matrices)
        rows = products.view(len(slices) * _GROUP, height * width).index_select(0, children)
    return rows.view(*ids.shape, prod(q))


def _chain(shape: TTShape, tables: Tensor, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The steps that multiply the slices of ids from the first core to the last one.

    Returns:
        For each core, a slice of every group of ``_GROUP`` products (of every product, for the
        first core), and the product that every factor of the next step is; for the last core, that
        of every id.
    """
    core_offsets, p = shape.core_offsets(), shape.p
    heights = p.prod(1)
    ends = heights.cumsum(0)
    starts = ends - heights

    # From the last digit to the first: ids without it are the prefixes of the step before. Ids and
    # prefixes are numbered from the start of their table, so a number stands for both.
    key = ids.to(torch.int64).reshape(-1)
    key = key + starts[tables.to(torch.int64).expand(ids.shape).reshape(-1)]
    key, children = key.unique(return_inverse=True)
    steps = []
    for k in reversed(range(p.shape[1])):
        table = torch.searchsorted(ends, key, right=True)
        local = key - starts[table]
        prefix = local // p[table, k]
        slices = core_offsets[table, k] + local - prefix * p[table, k]
        if k == 0:
            steps.append((slices, children))
            break

        # Unused places of a group repeat product 0 of the step before; nobody reads the result.
        place, groups = _group(slices)
        steps.append((groups, place[children]))
        key, parents = (starts[table] + prefix).unique_consecutive(return_inverse=True)
        children = place.new_zeros(len(groups) * _GROUP).index_copy_(0, place, parents)
    return steps[::-1]


def _group(slices: Tensor) -> tuple[Tensor, Tensor]:
    """Put products of one slice into groups of ``_GROUP``, so that a slice is read less often.

    Returns:
        The place of each product in the groups, and the slice of each group.
    """
    counts = torch.bincount(slices)
    groups = (counts + _GROUP - 1) // _GROUP  # of each slice
    shift = (groups.cumsum(0) - groups) * _GROUP - (counts.cumsum(0) - counts)
    order = slices.argsort()
    place = torch.empty_like(slices)
    place[order] = torch.arange(len(slices), device=slices.device) + shift[slices[order]]
    return place, torch.repeat_interleave(groups)


class _NarrowProduct(torch.autograd.Function):
    """``[n, Q, r] @ [n, r, c]`` for small ``c``.

    CPUs multiply a batch of narrow matrices two to three times as fast when they are transposed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        product = torch.bmm(matrices.transpose(1, 2), rows.transpose(1, 2))
        return product.transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, matrices = ctx.saved_tensors
        d_matrices = torch.bmm(grad.transpose(1, 2), rows).transpose(1, 2)
        return torch.bmm(grad, matrices.transpose(1, 2)), d_matrices.contiguous()


def tt_bags_torch(
    cores: Sequence[Tensor],
    shape: TTShape,
    bags: Bags,
    mode: str,
) -> Tensor:
    """:func:`~dlrm.kernels.tt.tt_bags` in plain PyTorch."""
    tables = shape.p.shape[0]
    batch = bags.count // tables
    lengths = bags.offsets.diff()
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    vectors = tt_vectors_torch(cores, shape, bag // max(batch, 1), bags.ids[: len(bag)])
    if bags.weights is not None:
        vectors = vectors * bags.weights[: len(bag), None]
    out = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, bag, vectors)
    if mode == "mean":
        out = out / lengths.clamp(min=1)[:, None]
    return out.view(tables, batch, vectors.shape[1])

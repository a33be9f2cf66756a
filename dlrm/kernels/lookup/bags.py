"""Pool bags of rows of tables that are concatenated in one weight, all in one launch.

The gradient of the weight is an uncoalesced sparse COO tensor with one entry per look-up, whose
values repeat the gradient of its bag: see :mod:`dlrm.kernels.lookup.tables`.

Bytes that must be moved: a row and an id read per look-up, a row written per bag.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, require_integers, tl, triton, use_triton
from dlrm.kernels.lookup.tables import row_gradient, row_of, tiling
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.utils.messages import did_you_mean

MODES = ("sum", "mean", "max")
TILE = 1024  # elements of a tile


@triton.jit
def _pool(
    ids, offsets, tables, weight, scale, out, flat, chosen, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Pool one bag per table and sample; ``chosen`` receives the look-ups that gave the maxima.

    ``tables`` has the ``starts``, ``modulo`` and ``last`` of :func:`row_of`.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    table = k % F
    bag = table.to(tl.int64) * batch + k // F
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    length = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    column = tl.arange(0, BLOCK_D)[None, :]
    total = tl.full((BLOCK, BLOCK_D), float("-inf") if MODE == "max" else 0.0, tl.float32)
    first = tl.full((BLOCK, BLOCK_D), -1, tl.int64)
    for step in range(tl.max(length, 0)):
        live = step < length
        at = begin + step
        row = row_of(tl.load(ids + at, mask=live, other=0), table, tables[0], tables[1], tables[2])
        if flat is not None:
            tl.store(flat + at, row, mask=live)
        mask = live[:, None] & (column < D)
        value = tl.load(weight + row[:, None] * D + column, mask=mask, other=0.0).to(tl.float32)
        if MODE == "max":
            better = mask & ((value > total) | (first < 0))
            total = tl.where(better, value, total)
            first = tl.where(better, at[:, None], first)
        elif scale is not None:
            total += value * tl.load(scale + at, mask=live, other=0.0).to(tl.float32)[:, None]
        else:
            total += value
    if MODE == "mean":
        total /= tl.maximum(length, 1).to(tl.float32)[:, None]
    if MODE == "max":
        total = tl.where(first < 0, 0.0, total)
    to = k.to(tl.int64)[:, None] * D + column
    mask = inside[:, None] & (column < D)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)
    if chosen is not None:
        tl.store(chosen + to, first, mask=mask)


@triton.jit
def _pool_backward(
    grad, offsets, flat, weight, scale, chosen, values, grad_scale, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Repeat the gradient of each bag for its look-ups, as ``values [nnz, D]``."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    bag = (k % F).to(tl.int64) * batch + k // F
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    length = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    column = tl.arange(0, BLOCK_D)[None, :]
    at_bag = k.to(tl.int64)[:, None] * D + column
    mask = inside[:, None] & (column < D)
    arrived = tl.load(grad + at_bag, mask=mask, other=0.0).to(tl.float32)
    if MODE == "mean":
        arrived /= tl.maximum(length, 1).to(tl.float32)[:, None]
    if MODE == "max":
        first = tl.load(chosen + at_bag, mask=mask, other=-1)
    for step in range(tl.max(length, 0)):
        live = step < length
        at = begin + step
        mask = live[:, None] & (column < D)
        value = arrived
        if MODE == "max":
            value = tl.where(first == at[:, None], arrived, 0.0)
        if grad_scale is not None:
            row = tl.load(flat + at, mask=live, other=0)
            looked = tl.load(weight + row[:, None] * D + column, mask=mask, other=0.0)
            dot = tl.sum(looked.to(tl.float32) * arrived, 1)
            tl.store(grad_scale + at, dot.to(grad_scale.dtype.element_ty), mask=live)
        if scale is not None:
            value = value * tl.load(scale + at, mask=live, other=0.0).to(tl.float32)[:, None]
        to = at[:, None] * D + column
        tl.store(values + to, value.to(values.dtype.element_ty), mask=mask)


class _LookupBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor | None,
        starts: Tensor,
        ids: Tensor,
        offsets: Tensor,
        modulo: Tensor | None,
        last: Tensor | None,
        mode: str,
        sparse: bool,
        sorter: RowSorter | None,
    ) -> Tensor:
        tables, dim = len(starts), weight.shape[1]
        bags = offsets.numel() - 1
        out = weight.new_empty(bags // tables, tables, dim)
        flat = chosen = None
        if any(ctx.needs_input_grad[:2]):
            flat = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
            if mode == "max":
                chosen = torch.empty(out.shape, dtype=torch.int64, device=ids.device)
        grid, sizes = tiling(bags, dim, TILE)
        if bags:
            _pool[grid](
                ids, offsets, (starts, modulo, last), weight, scale, out, flat, chosen,
                bags, bags // tables, F=tables, MODE=mode, **sizes,
            )  # fmt: skip
        if flat is not None and ctx.needs_input_grad[0] and sorter is not None:
            sorter.submit(flat, len(weight))
        ctx.save_for_backward(weight, scale, offsets, flat, chosen)
        ctx.mode, ctx.sparse, ctx.tables = mode, sparse, tables
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, offsets, flat, chosen = ctx.saved_tensors
        bags, dim = offsets.numel() - 1, weight.shape[1]
        values = grad.new_empty(flat.numel(), dim)
        grad_scale = torch.empty_like(scale) if ctx.needs_input_grad[1] else None
        grid, sizes = tiling(bags, dim, TILE)
        if bags:
            _pool_backward[grid](
                grad.contiguous(), offsets, flat, weight, scale, chosen, values, grad_scale,
                bags, bags // ctx.tables, F=ctx.tables, MODE=ctx.mode, **sizes,
            )  # fmt: skip
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_weight = row_gradient(weight, flat, values, ctx.sparse)
        return grad_weight, grad_scale, *[None] * 8


def lookup_bags(
    weight: Tensor,
    starts: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    modulo: Tensor | None = None,
    last: Tensor | None = None,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Pool a bag of rows per table and sample.

    Args:
        weight: the concatenated tables, ``[sum(V), D]``, contiguous; fp32 or bf16.
        starts: first row of each table, ``[F]`` int64.
        ids: ids of all bags, table by table, ``[nnz]`` int32 or int64 (not checked).
        offsets: first id of each bag, then nnz, ``[F * B + 1]`` (not checked).
        per_sample_weights: a factor per id, ``[nnz]``; mode sum only. It has a gradient.
        mode: sum, mean or max; an empty bag gives zeros.
        modulo, last: as in :func:`~dlrm.kernels.lookup.tables.lookup_tables`.
        sparse: whether the gradient of the weight is an uncoalesced COO tensor, its entries in the
            order of ``ids``, or a dense one.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: unknown mode, per_sample_weights in another mode than sum or not one per id,
            offsets of a wrong length, ids or offsets that are not integers or on another device,
            or a tensor that a kernel reads is not contiguous.
    """
    _check(weight, starts, ids, offsets, per_sample_weights, mode)
    if not use_triton(weight, impl):
        return lookup_bags_torch(
            weight, starts, ids, offsets, per_sample_weights, mode, modulo, last, sparse
        )
    require_contiguous(weight=weight, starts=starts, modulo=modulo, last=last)
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights.contiguous()
    ids, offsets = ids.contiguous(), offsets.contiguous()
    return _LookupBags.apply(
        weight, per_sample_weights, starts, ids, offsets, modulo, last, mode, sparse, sorter
    )


def _check(
    weight: Tensor,
    starts: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
) -> None:
    require_integers(weight, ids=ids, offsets=offsets)
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}{did_you_mean(mode, MODES)}")
    if per_sample_weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights need mode sum, the mode is {mode}")
    if per_sample_weights is not None and per_sample_weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights have shape {tuple(per_sample_weights.shape)}, they must have the "
            f"shape of ids, {tuple(ids.shape)}"
        )
    if not offsets.numel() or (offsets.numel() - 1) % len(starts):
        raise ValueError(
            f"{offsets.numel()} offsets for {len(starts)} tables: there must be one more than "
            "tables times samples"
        )


def lookup_bags_torch(
    weight: Tensor,
    starts: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    modulo: Tensor | None = None,
    last: Tensor | None = None,
    sparse: bool = True,
) -> Tensor:
    """:func:`lookup_bags` in PyTorch."""
    tables = len(starts)
    batch = (offsets.numel() - 1) // tables
    lengths = offsets.diff().view(tables, batch).sum(1)

    def of_each(value: Tensor) -> Tensor:
        return value.repeat_interleave(lengths, output_size=ids.numel())

    ids = ids if modulo is None else ids % of_each(modulo)
    ids = ids if last is None else ids.minimum(of_each(last))
    rows = ids + of_each(starts)
    pooled = functional.embedding_bag(
        rows, weight, offsets, mode=mode, sparse=sparse and mode != "max",
        per_sample_weights=per_sample_weights, include_last_offset=True,
    )  # fmt: skip
    return pooled.view(tables, batch, weight.shape[1]).transpose(0, 1)

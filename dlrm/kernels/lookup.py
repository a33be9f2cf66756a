"""Look up rows of tables that stand behind one another in one weight, all in one launch.

:func:`lookup` fetches rows by their index in the weight, :func:`lookup_tables` one row per table
and sample, :func:`lookup_bags` the sum, mean or maximum of a bag of rows. The gradient of the
weight is an uncoalesced sparse COO tensor with one entry per look-up, whose values are the gradient
that arrives, not a copy of it (of bags, its rows repeated): :func:`dlrm.kernels.rows.update_rows`
merges equal rows and updates the weight in one pass.

Bytes a look-up of one row must move: 2 rows, the one read and the one written, and its id.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.hints import nearest
from dlrm.kernels import use_triton
from dlrm.kernels.plan import announce

MODES = ("sum", "mean", "max")
TILE = 4096  # elements of a tile: 32 a thread


@triton.jit
def _gather(
    ids, starts, weight, out, flat, n, batch, stride_b, stride_f,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch one row per table and sample, sample after sample; ``flat`` gets their indices."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    sample, table = (k // F).to(tl.int64), (k % F).to(tl.int64)
    row = tl.load(ids + table * batch + sample, mask=inside, other=0).to(tl.int64)
    if starts is not None:
        row += tl.load(starts + table)
    if flat is not None:
        tl.store(flat + k, row, mask=inside)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    value = tl.load(weight + row[:, None] * D + column, mask=mask, other=0.0)
    to = sample * stride_b + table * stride_f
    tl.store(out + to[:, None] + column, value, mask=mask)


@triton.jit
def _pool(
    ids, offsets, starts, weight, scale, out, flat, chosen, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Pool the rows of a bag per table and sample; ``chosen`` gets the look-ups that max took."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    table = k % F
    bag = table.to(tl.int64) * batch + k // F
    begin = tl.load(offsets + bag, mask=inside, other=0)
    length = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    start = tl.load(starts + table)
    column = tl.arange(0, BLOCK_D)[None, :]
    total = tl.full((BLOCK, BLOCK_D), float("-inf") if MODE == "max" else 0.0, tl.float32)
    first = tl.full((BLOCK, BLOCK_D), -1, tl.int64)
    for step in range(tl.max(length, 0)):
        live = step < length
        at = begin + step
        row = tl.load(ids + at, mask=live, other=0).to(tl.int64) + start
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
    begin = tl.load(offsets + bag, mask=inside, other=0)
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


def _tiling(n: int, dim: int, tile: int = TILE) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for ``n`` rows of ``dim`` in tiles of ``tile`` elements."""
    block_d = triton.next_power_of_2(dim)
    block = max(4, min(256, tile // block_d))
    return (triton.cdiv(n, block),), {"D": dim, "BLOCK": block, "BLOCK_D": block_d}


def gather_rows(
    weight: Tensor, starts: Tensor | None, ids: Tensor, out: Tensor, flat: Tensor | None = None
) -> None:
    """Launch the look-up of one row per table and sample, outside of autograd.

    Args:
        weight: ``[sum(V), D]``, contiguous.
        starts: first row of each table, ``[F]``; None for zeros.
        ids: ``[F, B]``, contiguous.
        out: where to write, ``[B, F, D]``; only its last dimension must be contiguous, so that it
            may be a part of a larger buffer.
        flat: gets the row in ``weight`` of every look-up, int64 ``[B, F]``.
    """
    tables, batch = ids.shape
    grid, sizes = _tiling(ids.numel(), weight.shape[1])
    if ids.numel():
        strides = out.stride()[:2]
        _gather[grid](
            ids, starts, weight, out, flat, ids.numel(), batch, *strides, F=tables, **sizes
        )


def row_gradient(weight: Tensor, flat: Tensor, values: Tensor, sparse: bool) -> Tensor:
    """The gradient of ``weight [V, D]`` from rows ``flat [n]`` and their ``values [n, D]``."""
    if not sparse:
        return torch.zeros_like(weight).index_add_(0, flat, values)
    with torch.sparse.check_sparse_tensor_invariants(False):  # they hold, and it would synchronise
        return torch.sparse_coo_tensor(flat[None], values, weight.shape)


class _LookupTables(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, starts: Tensor | None, ids: Tensor, sparse: bool
    ) -> Tensor:
        tables, batch = ids.shape
        out = weight.new_empty(batch, tables, weight.shape[1])
        flat = None
        if ctx.needs_input_grad[0] and starts is None:
            flat = ids.long()
        elif ctx.needs_input_grad[0]:
            flat = torch.empty(batch, tables, dtype=torch.int64, device=ids.device)
        gather_rows(weight, starts, ids, out, None if starts is None else flat)
        if flat is not None:
            announce(flat.view(-1), len(weight))
        ctx.save_for_backward(weight, flat)
        ctx.sparse = sparse
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, flat = ctx.saved_tensors
        values = grad.reshape(-1, weight.shape[1])
        return row_gradient(weight, flat.view(-1), values, ctx.sparse), None, None, None


class _LookupBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor | None,
        starts: Tensor,
        ids: Tensor,
        offsets: Tensor,
        mode: str,
        sparse: bool,
    ) -> Tensor:
        tables, dim = len(starts), weight.shape[1]
        bags = offsets.numel() - 1
        out = weight.new_empty(bags // tables, tables, dim)
        flat = chosen = None
        if any(ctx.needs_input_grad[:2]):
            flat = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
            if mode == "max":
                chosen = torch.empty(out.shape, dtype=torch.int64, device=ids.device)
        grid, sizes = _tiling(bags, dim, TILE // 4)
        if bags:
            _pool[grid](
                ids, offsets, starts, weight, scale, out, flat, chosen, bags, bags // tables,
                F=tables, MODE=mode, **sizes,
            )  # fmt: skip
        if flat is not None and ctx.needs_input_grad[0]:
            announce(flat, len(weight))
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
        grid, sizes = _tiling(bags, dim, TILE // 4)
        if bags:
            _pool_backward[grid](
                grad.contiguous(), offsets, flat, weight, scale, chosen, values, grad_scale,
                bags, bags // ctx.tables, F=ctx.tables, MODE=ctx.mode, **sizes,
            )  # fmt: skip
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_weight = row_gradient(weight, flat, values, ctx.sparse)
        return grad_weight, grad_scale, None, None, None, None, None


def lookup(weight: Tensor, rows: Tensor, *, sparse: bool = True, impl: str | None = None) -> Tensor:
    """Fetch rows by index.

    Args:
        weight: ``[V, D]``, contiguous; fp32 or bf16.
        rows: any shape, int32 or int64, each in ``[0, V)`` (not checked).
        sparse: give the weight an uncoalesced COO gradient; else a dense one.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[*rows.shape, D]``.
    """
    if not use_triton(weight, impl):
        return functional.embedding(rows, weight, sparse=sparse)
    flat = rows.reshape(1, -1)
    return _LookupTables.apply(weight, None, flat, sparse).view(*rows.shape, weight.shape[1])


def lookup_tables(
    weight: Tensor, starts: Tensor, ids: Tensor, *, sparse: bool = True, impl: str | None = None
) -> Tensor:
    """Fetch one row per table and sample.

    Args:
        weight: the tables behind one another, ``[sum(V), D]``, contiguous; fp32 or bf16.
        starts: first row of each table, ``[F]`` int64.
        ids: ``[F, B]``, int32 or int64, each inside its table (not checked).
        sparse: give the weight an uncoalesced COO gradient, its entries sample after sample; else
            a dense one.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: ``ids`` are not ``[F, B]``.
    """
    if ids.dim() != 2 or len(ids) != len(starts):
        raise ValueError(
            f"ids have shape {tuple(ids.shape)}, they must be [{len(starts)}, B]: a row per table"
        )
    if not use_triton(weight, impl):
        return lookup_tables_torch(weight, starts, ids, sparse=sparse)
    return _LookupTables.apply(weight, starts, ids.contiguous(), sparse)


def lookup_tables_torch(
    weight: Tensor, starts: Tensor, ids: Tensor, *, sparse: bool = True
) -> Tensor:
    """:func:`lookup_tables` in PyTorch."""
    rows = (ids + starts[:, None]).t().contiguous()  # [B, F]
    return functional.embedding(rows, weight, sparse=sparse)


def lookup_bags(
    weight: Tensor,
    starts: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    sparse: bool = True,
    impl: str | None = None,
) -> Tensor:
    """Pool a bag of rows per table and sample.

    Args:
        weight: the tables behind one another, ``[sum(V), D]``, contiguous; fp32 or bf16.
        starts: first row of each table, ``[F]`` int64.
        ids: ids of all bags, table by table, ``[nnz]`` int32 or int64 (not checked).
        offsets: where each bag begins in ``ids``, and the end, ``[F * B + 1]`` int64.
        per_sample_weights: a factor per id, ``[nnz]``; mode sum only. Gets its gradient.
        mode: sum, mean or max; an empty bag gives zeros.
        sparse: as in :func:`lookup_tables`; the entries are in the order of ``ids``.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: unknown mode, weights with another mode than sum, or offsets of a wrong length.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}{nearest(mode, MODES)}")
    if per_sample_weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights need mode sum, the mode is {mode}")
    if (offsets.numel() - 1) % len(starts):
        raise ValueError(
            f"{offsets.numel()} offsets for {len(starts)} tables: there must be one more than "
            "tables times samples"
        )
    if not use_triton(weight, impl):
        return lookup_bags_torch(weight, starts, ids, offsets, per_sample_weights, mode, sparse)
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights.contiguous()
    ids, offsets = ids.contiguous(), offsets.contiguous()
    return _LookupBags.apply(weight, per_sample_weights, starts, ids, offsets, mode, sparse)


def lookup_bags_torch(
    weight: Tensor,
    starts: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    sparse: bool = True,
) -> Tensor:
    """:func:`lookup_bags` in PyTorch."""
    tables = len(starts)
    batch = (offsets.numel() - 1) // tables
    lengths = offsets.diff().view(tables, batch).sum(1)
    rows = ids + starts.repeat_interleave(lengths, output_size=ids.numel())
    pooled = functional.embedding_bag(
        rows, weight, offsets, mode=mode, sparse=sparse and mode != "max",
        per_sample_weights=per_sample_weights, include_last_offset=True,
    )  # fmt: skip
    return pooled.view(tables, batch, weight.shape[1]).transpose(0, 1)

"""Pool bags of rows of tables that are concatenated in one weight, all in one launch.

In a training step the backward pass updates the rows itself: it sums the gradients of bags by row,
and none is copied once per look-up. Where gradients are wanted, as for their norm, that of the
weight is an uncoalesced sparse COO tensor with one entry per look-up, whose values repeat the
gradient of its bag: see :mod:`dlrm.kernels.lookup.tables`.

Bytes that must be moved: a row and an id read per look-up, a row written per bag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, require_integers, tl, triton, use_triton
from dlrm.kernels.lookup.tables import TableRows, row_gradient, row_of, tiling
from dlrm.kernels.update.in_backward import FusedUpdate, FusedUpdates
from dlrm.kernels.update.packed import load_rows, packed_rows, storage
from dlrm.kernels.update.row_sort import RowSorter, sort_rows
from dlrm.kernels.update.sparse import update_rows
from dlrm.utils.bags import Bags
from dlrm.utils.messages import did_you_mean
from dlrm.utils.offsets import offsets_of

MODES = ("sum", "mean", "max")
TILE = 1024  # elements of a tile
BAGS = 256  # elements of the bags that a warp sums at a time; 512 took 1.15 times as long
CHUNK = 4  # rows of a bag that are in flight together


@dataclass(frozen=True, kw_only=True)
class BagContext:
    """What a training step prepared for a look-up of bags."""

    sorter: RowSorter | None = None
    """Sorts the rows that will have a gradient while forward and backward run."""
    updates: FusedUpdates | None = None
    """Updates that the backward pass may apply itself, such as that of rows that are summed
    unweighted."""
    padded: bool = False
    """There are more ids than the last offset says, so that one shape serves several batches; what
    lies beyond it is no look-up."""
    dtype: torch.dtype | None = None
    """Type in which pooled vectors may be returned, which are summed in fp32; None: that of the
    rows."""


NO_BAG_CONTEXT = BagContext()


@triton.jit
def pool(
    ids, offsets, tables, weight, wide, scale, out, entries, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, MEAN: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Sum bags, table by table, whose bags are of like lengths; ``CHUNK`` rows of each at a time.

    ``tables`` has the arguments of :func:`row_of` from ``starts`` on, then ``held``; ``entries``
    receives the row of each look-up, -1 if it is not held, and the index in ``out`` of its bag.
    """
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = bag < n
    table = tl.where(inside, bag // batch, 0)
    owner = (bag % batch) * F + table
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    length = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    column = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for step in range(0, tl.max(length, 0), CHUNK):
        member = step + tl.arange(0, CHUNK)[None, :]
        live = member < length[:, None]
        at = begin[:, None] + member
        id = tl.load(ids + at, mask=live, other=0)
        if entries[1] is not None:
            tl.store(entries[1] + at, tl.broadcast_to(owner[:, None], at.shape), mask=live)
        all_live = live
        if tables[5] is not None:
            id -= tl.load(tables[5] + table)[:, None].to(id.dtype)
            live = live & (id >= 0) & (id < tl.load(tables[5] + F + table)[:, None])
        row = row_of(id, table[:, None], tables[0], tables[1], tables[2], tables[3], tables[4])
        if entries[0] is not None:
            tl.store(entries[0] + at, tl.where(live, row, -1), mask=all_live)
        if FORMAT == 0:
            mask = live[:, :, None] & (column < D)[None, None, :]
            place = row[:, :, None] * D + column[None, None, :]
            value = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        else:
            many, there = tl.reshape(row, (BLOCK * CHUNK,)), tl.reshape(live, (BLOCK * CHUNK,))
            value = load_rows(weight, many, wide, there, column[None, :], D, FORMAT)
            value = tl.reshape(value, (BLOCK, CHUNK, BLOCK_D))
        if scale is not None:
            value *= tl.load(scale + at, mask=live, other=0.0).to(tl.float32)[:, :, None]
        total += tl.sum(value, 1)
    if MEAN:
        total /= tl.maximum(length, 1).to(tl.float32)[:, None]
    to = owner[:, None] * D + column[None, :]
    mask = inside[:, None] & (column < D)[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def pool_max(
    ids, offsets, tables, weight, wide, out, flat, chosen, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """The maxima of bags; ``chosen`` receives the look-ups that gave them."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    table = k % F
    bag = table.to(tl.int64) * batch + k // F
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    length = tl.load(offsets + bag + 1, mask=inside, other=0) - begin
    column = tl.arange(0, BLOCK_D)[None, :]
    total = tl.full((BLOCK, BLOCK_D), float("-inf"), tl.float32)
    first = tl.full((BLOCK, BLOCK_D), -1, tl.int64)
    for step in range(tl.max(length, 0)):
        live = step < length
        at = begin + step
        id = tl.load(ids + at, mask=live, other=0)
        row = row_of(id, table, tables[0], tables[1], tables[2], tables[3], tables[4])
        if flat is not None:
            tl.store(flat + at, row, mask=live)
        mask = live[:, None] & (column < D)
        value = load_rows(weight, row, wide, live, column, D, FORMAT).to(tl.float32)
        better = mask & ((value > total) | (first < 0))
        total = tl.where(better, value, total)
        first = tl.where(better, at[:, None], first)
    total = tl.where(first < 0, 0.0, total)
    to = k.to(tl.int64)[:, None] * D + column
    mask = inside[:, None] & (column < D)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)
    if chosen is not None:
        tl.store(chosen + to, first, mask=mask)


@triton.jit
def pool_backward(
    grad, offsets, flat, weight, wide, scale, chosen, values, grad_scale, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MODE: tl.constexpr, FORMAT: tl.constexpr,
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
            looked = load_rows(weight, row, wide, live, column, D, FORMAT)
            dot = tl.sum(looked.to(tl.float32) * arrived, 1)
            tl.store(grad_scale + at, dot.to(grad_scale.dtype.element_ty), mask=live)
        if scale is not None:
            value = value * tl.load(scale + at, mask=live, other=0.0).to(tl.float32)[:, None]
        to = at[:, None] * D + column
        tl.store(values + to, value.to(values.dtype.element_ty), mask=mask)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a look-up of bags is given besides its tensors."""

    mode: str
    sparse: bool
    context: BagContext
    update: FusedUpdate | None


class _LookupBags(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor | None,
        tables: TableRows,
        ids: Tensor,
        offsets: Tensor,
        held: Tensor | None,
        request: _Request,
    ) -> Tensor:
        num_tables, dim = len(tables.starts), weight.shape[1]
        bags = offsets.numel() - 1
        context, shape = request.context, (bags // num_tables, num_tables, dim)
        out = weight.new_empty(shape, dtype=context.dtype or weight.dtype)
        flat = owners = chosen = None
        if any(ctx.needs_input_grad[:2]):
            flat = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
            if context.padded:
                flat.fill_(-1)  # beyond the last bag: left out of the update
            if request.update is not None:
                owners = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
            if request.mode == "max":
                chosen = torch.empty(out.shape, dtype=torch.int64, device=ids.device)
        data, num_wide, packing = storage(weight)
        index = (*tables, held)
        if bags and request.mode == "max":
            grid, sizes = tiling(bags, dim, TILE)
            pool_max[grid](
                ids, offsets, index, data, num_wide, out, flat, chosen,
                bags, bags // num_tables, F=num_tables, FORMAT=packing, **sizes,
            )  # fmt: skip
        elif bags:
            block_d = triton.next_power_of_2(dim)
            block = max(1, BAGS // block_d)
            pool[triton.cdiv(bags, block),](
                ids, offsets, index, data, num_wide, scale, out, (flat, owners),
                bags, bags // num_tables, F=num_tables, D=dim, BLOCK=block, BLOCK_D=block_d,
                CHUNK=CHUNK, MEAN=request.mode == "mean", FORMAT=packing, num_warps=1,
            )  # fmt: skip
        if flat is not None and ctx.needs_input_grad[0] and context.sorter is not None:
            context.sorter.submit(flat, len(weight), owners)
        ctx.save_for_backward(weight, scale, offsets, flat, owners, chosen)
        ctx.request, ctx.tables = request, num_tables
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, offsets, flat, owners, chosen = ctx.saved_tensors
        request, dim = ctx.request, weight.shape[1]
        if request.update is not None and request.update.due:
            _apply(request, weight, flat, owners, grad.reshape(-1, dim))
            return (None,) * 7
        bags = offsets.numel() - 1
        values = weight.new_empty(flat.numel(), dim)
        grad_scale = torch.empty_like(scale) if ctx.needs_input_grad[1] else None
        grid, sizes = tiling(bags, dim, TILE)
        if bags:
            data, num_wide, packing = storage(weight)
            pool_backward[grid](
                grad.contiguous(), offsets, flat, data, num_wide, scale, chosen, values, grad_scale,
                bags, bags // ctx.tables, F=ctx.tables, MODE=request.mode, FORMAT=packing, **sizes,
            )  # fmt: skip
        grad_weight = None
        if ctx.needs_input_grad[0]:
            if owners is not None:  # they were sorted for an update of whole bags
                flat = flat.clone()
            grad_weight = row_gradient(weight, flat, values, request.sparse)
        return grad_weight, grad_scale, *[None] * 5


def _apply(request: _Request, weight: Tensor, flat: Tensor, owners: Tensor, grads: Tensor) -> None:
    """Update the rows of bags from the gradient of each bag, which is not repeated in memory."""
    update, sorter = request.update, request.context.sorter
    assert update is not None
    found = None if sorter is None else sorter.result(flat)
    found = found or sort_rows(flat, len(weight)).of_owners(owners)
    table = weight if packed_rows(weight) is not None else weight.detach()
    update_rows(
        update.rule, table, flat, grads, update.states,
        lr=update.lr, sorted_rows=found, seed=update.seed, impl="triton",
    )  # fmt: skip
    update.done(weight)


def lookup_bags(
    weight: Tensor,
    tables: TableRows,
    bags: Bags,
    *,
    mode: str = "sum",
    held: Tensor | None = None,
    sparse: bool = True,
    context: BagContext = NO_BAG_CONTEXT,
    impl: str | None = None,
) -> Tensor:
    """Pool a bag of rows per table and sample.

    Args:
        weight: the concatenated tables, ``[sum(V), D]``, contiguous; fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`, for kernels only.
        tables: the rows of each table.
        bags: ids, int32 or int64, and offsets (neither is checked). Weights need mode sum and get
            a gradient.
        mode: sum, mean or max; an empty bag gives zeros.
        held: the first id and the number of ids of each table whose rows are here, ``[2, F]`` int64
            on the device; the others add nothing and have no gradient. Mode sum only, no weights.
        sparse: whether the gradient of the weight is an uncoalesced COO tensor, its entries in the
            order of ``ids``, or a dense one.
        context: what a training step prepared.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: unknown mode, weights in another mode than sum or not one per id, offsets of a
            wrong length, ids or offsets that are not integers or on another device, padded ids with
            a dense gradient, or a tensor that a kernel reads is not contiguous.
    """
    check_bags(weight, len(tables.starts), bags, mode)
    if context.padded and not sparse:
        raise ValueError("padded ids have no dense gradient: give sparse=True, or no padding")
    if not use_triton(weight, impl):
        if context.padded:
            bags = bags.filled()
        out = lookup_bags_torch(weight, tables, bags, mode, sparse, held)
        return out.to(context.dtype or out.dtype)
    require_contiguous(weight=storage(weight)[0], held=held, **tables._asdict())
    bags = bags.contiguous()
    alike = mode == "sum" and bags.weights is None and sparse
    update = context.updates.take(weight) if alike and context.updates is not None else None
    request = _Request(mode=mode, sparse=sparse, context=context, update=update)
    return _LookupBags.apply(weight, bags.weights, tables, bags.ids, bags.offsets, held, request)


def check_bags(weight: Tensor, tables: int, bags: Bags, mode: str) -> None:
    """Raise what :func:`lookup_bags` says about its arguments."""
    require_integers(weight, ids=bags.ids, offsets=bags.offsets)
    per_sample_weights, shape = bags.weights, bags.ids.shape
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}{did_you_mean(mode, MODES)}")
    if per_sample_weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights need mode sum, the mode is {mode}")
    if per_sample_weights is not None and per_sample_weights.shape != shape:
        raise ValueError(
            f"per_sample_weights have shape {tuple(per_sample_weights.shape)}, they must have the "
            f"shape of ids, {tuple(shape)}"
        )
    if bags.count < 0 or bags.count % tables:
        raise ValueError(
            f"{bags.count + 1} offsets for {tables} tables: there must be one more than "
            "tables times samples"
        )


def lookup_bags_torch(
    weight: Tensor,
    tables: TableRows,
    bags: Bags,
    mode: str,
    sparse: bool,
    held: Tensor | None,
) -> Tensor:
    """:func:`lookup_bags` in PyTorch, of rows that are not packed."""
    starts, modulo, last, *_ = tables
    ids, offsets = bags.ids, bags.offsets
    num_tables, batch = len(starts), (offsets.numel() - 1) // len(starts)
    lengths = offsets.diff().view(num_tables, batch).sum(1)

    def of_each(value: Tensor) -> Tensor:
        return value.repeat_interleave(lengths, output_size=ids.numel())

    if held is not None:
        ids = ids - of_each(held[0])
        here = (ids >= 0) & (ids < of_each(held[1]))
        offsets = offsets_of(here)[offsets]
        lengths, ids = offsets.diff().view(num_tables, batch).sum(1), ids[here]
    ids = ids if modulo is None else ids % of_each(modulo)
    ids = ids if last is None else ids.minimum(of_each(last))
    rows = ids + of_each(starts)
    pooled = functional.embedding_bag(
        rows, weight, offsets, mode=mode, sparse=sparse and mode != "max",
        per_sample_weights=bags.weights, include_last_offset=True,
    )  # fmt: skip
    return pooled.view(num_tables, batch, weight.shape[1]).transpose(0, 1)

"""Pool bags of rows of tables, all in one launch.

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

from dlrm.kernels import require_contiguous, require_integers, triton
from dlrm.kernels.lookup._pool import pool, pool_backward, pool_max
from dlrm.kernels.lookup.source import RowSource, Weight
from dlrm.kernels.lookup.tables import (
    NO_ROW_CONTEXT,
    Request,
    RowContext,
    TableRows,
    held_rows_torch,
    lookup,
    tiling,
)
from dlrm.kernels.update.packed import packed_rows, storage
from dlrm.utils.bags import Bags
from dlrm.utils.messages import did_you_mean
from dlrm.utils.offsets import offsets_of

MODES = ("sum", "mean", "max")
TILE = 1024  # elements of a tile
BAGS = 256  # elements of the bags that a warp sums at a time; 512 took 1.15 times as long
CHUNK = 4  # rows of a bag that are in flight together


@dataclass(frozen=True, kw_only=True)
class _Request(Request):
    """A look-up of bags of ``ids [nnz]``, without the tensors that get gradients."""

    offsets: Tensor
    mode: str

    @property
    def bags(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.tables.starts)

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.bags // self.num_tables


class _Pool(torch.autograd.Function):
    """Bags of rows of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor | None, request: _Request) -> Tensor:
        ids, context, dim = request.ids, request.context, request.source.width
        shape = request.batch, request.num_tables, dim
        out = weight.new_empty(shape, dtype=context.dtype or weight.dtype)

        # For the backward pass: the row of each look-up, its bag, and the look-ups of maxima.
        flat = owners = chosen = None
        learns = any(ctx.needs_input_grad[:2])
        if learns:
            flat = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
            if context.padded:
                flat.fill_(-1)  # beyond the last bag: left out of the update
            if request.update is not None:
                owners = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
        if learns and request.mode == "max":
            chosen = torch.empty(shape, dtype=torch.int64, device=weight.device)

        _launch(request, scale, out, flat, owners, chosen)
        entries = None if flat is None else request.source.entries(flat)
        if entries is not None and ctx.needs_input_grad[0] and context.sorter is not None:
            request.source.submit(context.sorter, entries, owners)
        ctx.save_for_backward(weight, scale, flat, entries, owners, chosen)
        ctx.request = request
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, flat, entries, owners, chosen = ctx.saved_tensors
        request, dim = ctx.request, ctx.request.source.width
        if request.update is not None and request.update.due:
            grads = grad.reshape(-1, dim)
            request.update.apply(weight, flat, grads, request.context.sorter, owners)
            return None, None, None

        values = weight.new_empty(flat.numel(), dim)
        grad_scale = torch.empty_like(scale) if ctx.needs_input_grad[1] else None
        grid, sizes = tiling(request.bags, dim, TILE)
        if request.bags:
            source, kind = request.source.for_kernel()
            pool_backward[grid](
                grad.contiguous(), request.offsets, flat, source, scale, chosen, values, grad_scale,
                request.bags, request.batch, F=request.num_tables, MODE=request.mode, KIND=kind,
                **sizes,
            )  # fmt: skip

        grad_weight = None
        if ctx.needs_input_grad[0]:
            if owners is not None:  # they were sorted for an update of whole bags
                entries = entries.clone()
            (grad_weight,) = request.source.gradients(
                entries, values, sparse=request.sparse, flat=True
            )
        return grad_weight, grad_scale, None


def _launch(
    request: _Request,
    scale: Tensor | None,
    out: Tensor,
    flat: Tensor | None,
    owners: Tensor | None,
    chosen: Tensor | None,
) -> None:
    bags, dim = request.bags, request.source.width
    source, kind = request.source.for_kernel()
    shared = (request.ids, request.offsets, request.tables, source)
    options = {"F": request.num_tables, "KIND": kind}
    if bags and request.mode == "max":
        grid, sizes = tiling(bags, dim, TILE)
        pool_max[grid](*shared, out, flat, chosen, bags, request.batch, **options, **sizes)
    elif bags:
        block_d = triton.next_power_of_2(dim)
        block = max(1, BAGS // block_d)
        pool[triton.cdiv(bags, block),](
            *shared, scale, out, (flat, owners), bags, request.batch, D=dim, BLOCK=block,
            BLOCK_D=block_d, CHUNK=CHUNK, MEAN=request.mode == "mean", num_warps=1, **options,
        )  # fmt: skip


def lookup_bags(
    weight: Tensor | RowSource,
    tables: TableRows,
    bags: Bags,
    *,
    mode: str = "sum",
    sparse: bool = True,
    context: RowContext = NO_ROW_CONTEXT,
    impl: str | None = None,
) -> Tensor:
    """Pool a bag of rows per table and sample.

    Args:
        weight: the concatenated tables, ``[sum(V), D]``, contiguous; fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`; or a source of rows of one weight.
        tables: the rows of each table; with ``held``, mode sum only, and no weights.
        bags: ids, int32 or int64, and offsets (neither is checked). Weights need mode sum and get
            a gradient.
        mode: sum, mean or max; an empty bag gives zeros.
        sparse: whether the gradient of the weight is an uncoalesced COO tensor, its entries in the
            order of the ids, or a dense one.
        context: what a training step prepared.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: unknown mode, weights in another mode than sum or not one per id, offsets of a
            wrong length, ids or offsets that are not integers or on another device, or a tensor
            that a kernel reads is not contiguous.
    """
    source = weight if isinstance(weight, RowSource) else Weight(weight)
    (weight,) = source.weights
    require_integers(weight, ids=bags.ids, offsets=bags.offsets)
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}{did_you_mean(mode, MODES)}")
    bags.check(len(tables.starts), mode)
    if not source.runs_triton(weight, impl):
        bags = bags.filled() if context.padded else bags
        out = lookup_bags_torch(source, tables, bags, mode, sparse)
        return out.to(context.dtype or out.dtype)

    # The backward pass may update rows itself where all rows of a bag have its gradient.
    require_contiguous(weight=storage(weight)[0], **tables._asdict())
    bags = bags.contiguous()
    alike = mode == "sum" and bags.weights is None and sparse and source.updates_in_backward
    request = _Request(
        source=source,
        ids=bags.ids,
        offsets=bags.offsets,
        tables=tables,
        mode=mode,
        sparse=sparse,
        context=context,
        update=context.updates.take(weight) if alike and context.updates is not None else None,
    )
    return _Pool.apply(weight, bags.weights, request)


def lookup_bags_torch(
    source: RowSource, tables: TableRows, bags: Bags, mode: str, sparse: bool
) -> Tensor:
    """:func:`lookup_bags` in PyTorch."""
    num_tables, ids, offsets = len(tables.starts), bags.ids, bags.offsets
    batch = bags.count // num_tables
    lengths = offsets.diff().view(num_tables, batch).sum(1)
    numbers = torch.repeat_interleave(lengths, output_size=ids.numel())  # the table of each id
    rows, here = held_rows_torch(ids, numbers, tables)
    if tables.held is not None:
        offsets, rows = offsets_of(here)[offsets], rows[here]

    (weight,) = source.weights
    plain = type(source) is Weight and packed_rows(weight) is None
    if not plain or mode == "max":
        # PyTorch reads no other rows, and for max it would make a dense gradient of the table.
        vectors = lookup(source, rows, sparse=sparse, impl="torch")
        return pool_bags_torch(vectors, Bags(rows, offsets, bags.weights), num_tables, mode)
    pooled = functional.embedding_bag(
        rows, weight, offsets, mode=mode, sparse=sparse,
        per_sample_weights=bags.weights, include_last_offset=True,
    )  # fmt: skip
    return pooled.view(num_tables, batch, source.width).transpose(0, 1)


def pool_bags_torch(vectors: Tensor, bags: Bags, num_tables: int, mode: str = "sum") -> Tensor:
    """Pool bags of vectors, one for each id: ``[nnz, D]`` to ``[B, F, D]``."""
    batch = bags.count // num_tables
    index = torch.arange(len(vectors), device=vectors.device)
    if mode == "max" and vectors.requires_grad and len(vectors):
        # PyTorch has no backward pass of maxima on a GPU for bf16, and no deterministic one.
        found = torch.embedding_bag(
            vectors.detach(), index, bags.offsets, mode=MODES.index(mode), include_last_offset=True
        )
        empty = bags.offsets.diff() == 0
        pooled = vectors.gather(0, found[3].clamp(min=0)).masked_fill(empty[:, None], 0)
    else:
        pooled = functional.embedding_bag(
            index, vectors, bags.offsets, mode=mode, per_sample_weights=bags.weights,
            include_last_offset=True,
        )  # fmt: skip
    return pooled.view(num_tables, batch, vectors.shape[1]).transpose(0, 1)

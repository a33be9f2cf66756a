"""Compose rows of two tables, by the quotient and the remainder of an id, in one launch.

:func:`lookup_quotient` fetches both rows of an id and writes their product, sum or concatenation,
without intermediate results in memory. Both weights have row gradients as in
:mod:`dlrm.kernels.lookup.tables`; for the product, one launch computes the values of both and reads
the rows again.

Bytes a look-up must move: both rows and the id in, one row out; backward one row in, and for the
product both rows in and two out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.kernels import require_contiguous, require_integers, tl, triton, use_triton
from dlrm.kernels.lookup.source import (
    KernelSource,
    SourceKind,
    Weight,
    load_rows,
    row_gradient,
)
from dlrm.kernels.lookup.tables import lookup, tiling
from dlrm.kernels.update.packed import storage
from dlrm.kernels.update.row_sort import RowSorter

TILE = 4096  # elements of a tile


@triton.jit
def _compose(
    ids, starts, sources, out, flat, n, batch, collisions,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr, MULTIPLY: tl.constexpr, KIND_Q: tl.constexpr, KIND_R: tl.constexpr,
):  # fmt: skip
    """Compose one row per table and sample; the first SPLIT columns are of the quotient row.

    ``starts``, ``sources`` and ``flat`` are pairs, one for each table.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    sample, table = (k // F).to(tl.int64), k % F
    id = tl.load(ids + table * batch + sample, mask=inside, other=0)
    row_q = tl.load(starts[0] + table) + id // collisions
    row_r = tl.load(starts[1] + table) + id % collisions
    if flat[0] is not None:
        tl.store(flat[0] + k, row_q, mask=inside)
        tl.store(flat[1] + k, row_r, mask=inside)

    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    of_r = column
    if SPLIT < D:
        of_r = tl.where(column < SPLIT, D, column - SPLIT)  # zeros where the quotient row is
    q = load_rows(sources[0], row_q.to(tl.int64), k, inside, column, SPLIT, KIND_Q)
    DIM: tl.constexpr = D - SPLIT if SPLIT < D else D
    r = load_rows(sources[1], row_r.to(tl.int64), k, inside, of_r, DIM, KIND_R)
    q, r = q.to(tl.float32), r.to(tl.float32)

    value = (q * r if MULTIPLY else q + r).to(out.dtype.element_ty)
    tl.store(out + k.to(tl.int64)[:, None] * D + column, value, mask=mask)


@triton.jit
def _product_backward(
    grad, quotient, remainder, flat_q, flat_r, values_q, values_r, n,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND_Q: tl.constexpr, KIND_R: tl.constexpr,
):  # fmt: skip
    """The gradient of each factor: the incoming one, times the other factor."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    row_q = tl.load(flat_q + k, mask=inside, other=0)
    row_r = tl.load(flat_r + k, mask=inside, other=0)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    at = k.to(tl.int64)[:, None] * D + column
    arrived = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    q = load_rows(quotient, row_q, k, inside, column, D, KIND_Q).to(tl.float32)
    r = load_rows(remainder, row_r, k, inside, column, D, KIND_R).to(tl.float32)
    tl.store(values_q + at, (arrived * r).to(values_q.dtype.element_ty), mask=mask)
    tl.store(values_r + at, (arrived * q).to(values_r.dtype.element_ty), mask=mask)


def _sources(
    quotient: Tensor, remainder: Tensor
) -> tuple[tuple[KernelSource, KernelSource], dict[str, SourceKind]]:
    (q, kind_q), (r, kind_r) = Weight(quotient).for_kernel(), Weight(remainder).for_kernel()
    return (q, r), {"KIND_Q": kind_q, "KIND_R": kind_r}


class _LookupQuotient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        quotient: Tensor,
        remainder: Tensor,
        starts: tuple[Tensor, Tensor],
        ids: Tensor,
        collisions: int,
        operation: str,
        sparse: bool,
        sorter: RowSorter | None,
    ) -> Tensor:
        tables, batch = ids.shape
        dim = quotient.shape[1] + (remainder.shape[1] if operation == "concat" else 0)
        out = quotient.new_empty(batch, tables, dim)
        flat: tuple[Tensor | None, Tensor | None] = None, None
        if any(ctx.needs_input_grad[:2]):
            flat = tuple(torch.empty(2, ids.numel(), dtype=torch.int64, device=ids.device))

        grid, sizes = tiling(ids.numel(), dim, TILE)
        sources, kinds = _sources(quotient, remainder)
        if ids.numel():
            _compose[grid](
                ids, starts, sources, out, flat, ids.numel(), batch, collisions,
                F=tables, SPLIT=quotient.shape[1], MULTIPLY=operation == "multiply",
                **kinds, **sizes,
            )  # fmt: skip

        for rows, weight in zip(flat, (quotient, remainder), strict=True):
            if rows is not None and weight.requires_grad and sorter is not None:
                sorter.submit(weight, rows.view(batch, tables))
        ctx.save_for_backward(quotient, remainder, *flat)
        ctx.operation, ctx.sparse = operation, sparse
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        quotient, remainder, *flat = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[2]).contiguous()

        if ctx.operation == "concat":
            values = list(grad.split([quotient.shape[1], remainder.shape[1]], dim=1))
        elif ctx.operation == "add":
            values = [grad, grad.clone()]  # a copy: gradients are scaled in place
        else:
            values = [torch.empty_like(grad), torch.empty_like(grad)]
            grid, sizes = tiling(len(grad), grad.shape[1], TILE)
            sources, kinds = _sources(quotient, remainder)
            if len(grad):
                _product_backward[grid](
                    grad, *sources, *flat, *values, len(grad), **kinds, **sizes,
                )  # fmt: skip

        grads = [
            row_gradient(weight, rows, value, ctx.sparse) if needed else None
            for weight, rows, value, needed in zip(
                (quotient, remainder), flat, values, ctx.needs_input_grad[:2], strict=True
            )
        ]
        return *grads, *[None] * 6


def lookup_quotient(
    quotient: Tensor,
    remainder: Tensor,
    starts: tuple[Tensor, Tensor],
    ids: Tensor,
    collisions: int,
    *,
    operation: str = "multiply",
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Compose ``quotient[id // collisions]`` and ``remainder[id % collisions]`` of each id.

    Args:
        quotient, remainder: the concatenated tables, ``[sum(V_q), D_q]`` and
            ``[sum(V_r), D_r]``, contiguous; of the same type, fp32 or bf16, or packed, each all
            in 8 or all in 4 bits.
        starts: first row of each table in the two, ``[F]`` int64 each.
        ids: ``[F, B]``, int32 or int64, each inside its table (not checked).
        collisions: the divisor of the ids, the same for all tables.
        operation: multiply, add, or concat, for which D is the sum of the two lengths.
        sparse: whether the gradients of the weights are uncoalesced COO tensors or dense ones.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: ``ids`` are not integers or on another device, or a tensor that a kernel reads
            is not contiguous.
    """
    require_integers(quotient, ids=ids)
    if not use_triton(quotient, impl):
        return lookup_quotient_torch(
            quotient, remainder, starts, ids, collisions, operation=operation, sparse=sparse
        )
    starts_q, starts_r = starts
    require_contiguous(
        quotient=storage(quotient)[0], remainder=storage(remainder)[0], starts_q=starts_q,
        starts_r=starts_r,
    )  # fmt: skip
    return _LookupQuotient.apply(
        quotient, remainder, starts, ids.contiguous(), collisions, operation, sparse, sorter
    )


def lookup_quotient_torch(
    quotient: Tensor,
    remainder: Tensor,
    starts: tuple[Tensor, Tensor],
    ids: Tensor,
    collisions: int,
    *,
    operation: str = "multiply",
    sparse: bool = True,
) -> Tensor:
    """:func:`lookup_quotient` in PyTorch."""
    ids = ids.t()
    q = lookup(quotient, (ids // collisions + starts[0]).contiguous(), sparse=sparse, impl="torch")
    r = lookup(remainder, (ids % collisions + starts[1]).contiguous(), sparse=sparse, impl="torch")
    return compose(q, r, operation)


def compose(q: Tensor, r: Tensor, operation: str) -> Tensor:
    """The product, sum or concatenation (``multiply``, ``add``, ``concat``) of two sets of rows."""
    if operation == "multiply":
        return q * r
    if operation == "add":
        return q + 1 * r  # r gets a gradient of its own: gradients are scaled in place
    return torch.cat([q, r], -1)

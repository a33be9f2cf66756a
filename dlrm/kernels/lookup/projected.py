"""Look up short rows and project them by one matrix per table, in one launch.

:func:`lookup_projected` multiplies the rows ``[E]`` of a table by its matrix ``[E, D]`` while they
are in registers. The backward pass is one launch as well: it reads the short rows again and
computes both gradients, that of a matrix as partial sums over tiles of samples, which are then
added in a fixed order.

Bytes a look-up must move: the short row and the id in, the projected row out; backward the gradient
and the short row in, the short row's gradient out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.kernels import require_contiguous, require_integers, tl, triton, use_triton
from dlrm.kernels.lookup.source import Weight, load_rows, row_gradient
from dlrm.kernels.lookup.tables import TableRows, lookup_tables, row_of
from dlrm.kernels.update.packed import storage
from dlrm.kernels.update.row_sort import RowSorter

BLOCK = 64  # samples of a tile
TILES = 128  # partial sums of the gradient of a matrix, at most
MAX_DIM = 128  # a row up to this length fits in registers


@triton.jit
def _load_matrix(
    projection, table, E: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    at_e, at_d = tl.arange(0, BLOCK_E)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = table * E * D + at_e * D + at_d
    return tl.load(projection + at, mask=(at_e < E) & (at_d < D), other=0.0).to(tl.float32)


@triton.jit
def _forward(
    ids, tables, source, projection, out, flat, batch,
    F: tl.constexpr, E: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Project a tile of samples of one table; ``flat`` receives their rows, table by table."""
    table = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sample < batch
    k = table * batch + sample
    id = tl.load(ids + k, mask=inside, other=0)
    row = row_of(id, table, tables)
    if flat is not None:
        tl.store(flat + k, row, mask=inside)
    at_e, at_d = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_D)[None, :]
    short = load_rows(source, row, k, inside, at_e, E, KIND).to(tl.float32)
    matrix = _load_matrix(projection, table, E, D, BLOCK_E, BLOCK_D)
    projected = tl.dot(short, matrix, input_precision=PRECISION)
    at = (sample.to(tl.int64) * F + table)[:, None] * D + at_d
    tl.store(out + at, projected.to(out.dtype.element_ty), mask=inside[:, None] & (at_d < D))


@triton.jit
def _backward(
    grad, flat, source, projection, values, partials, batch, strides, parts,
    F: tl.constexpr, E: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of ``parts`` tiles of one table, and their sum for the matrix."""
    table = tl.program_id(1).to(tl.int64)
    at_e, at_d = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_D)[None, :]
    matrix = tl.trans(_load_matrix(projection, table, E, D, BLOCK_E, BLOCK_D))

    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for part in range(parts):
        sample = (tl.program_id(0) * parts + part) * BLOCK + tl.arange(0, BLOCK)
        inside = sample < batch
        k = table * batch + sample
        row = tl.load(flat + k, mask=inside, other=0)
        short = load_rows(source, row, k, inside, at_e, E, KIND).to(tl.float32)

        at = (sample.to(tl.int64) * strides[0] + table * strides[1])[:, None] + at_d
        arrived = tl.load(grad + at, mask=inside[:, None] & (at_d < D), other=0.0)
        arrived = arrived.to(tl.float32)
        value = tl.dot(arrived, matrix, input_precision=PRECISION)
        mask = inside[:, None] & (at_e < E)
        tl.store(values + k[:, None] * E + at_e, value.to(values.dtype.element_ty), mask=mask)
        total = tl.dot(tl.trans(short), arrived, total, input_precision=PRECISION)

    slot = (tl.program_id(0) * F + table) * E * D
    at_e = tl.arange(0, BLOCK_E)[:, None]
    tl.store(partials + slot + at_e * D + at_d, total, mask=(at_e < E) & (at_d < D))


def _sizes(weight: Tensor, projection: Tensor) -> dict[str, Any]:
    """The compile-time arguments of the kernels."""
    tables, short, dim = projection.shape
    exact = weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return {
        "F": tables,
        "E": short,
        "D": dim,
        "BLOCK": BLOCK,
        "BLOCK_E": max(16, triton.next_power_of_2(short)),
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "PRECISION": "tf32x3" if exact else "tf32",
        "KIND": Weight(weight).for_kernel()[1],
    }


class _LookupProjected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        projection: Tensor,
        tables: TableRows,
        ids: Tensor,
        sparse: bool,
        sorter: RowSorter | None,
    ) -> Tensor:
        num_tables, batch = ids.shape
        out = weight.new_empty(batch, num_tables, projection.shape[2])
        flat = None
        if any(ctx.needs_input_grad[:2]):
            flat = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
        if batch:
            _forward[triton.cdiv(batch, BLOCK), num_tables](
                ids, tables, Weight(weight).for_kernel()[0], projection, out, flat, batch,
                **_sizes(weight, projection),
            )  # fmt: skip
        if flat is not None and ctx.needs_input_grad[0] and sorter is not None:
            sorter.submit(weight, flat.view(num_tables, batch).t())
        ctx.save_for_backward(weight, projection, flat)
        ctx.sparse = sparse
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, projection, flat = ctx.saved_tensors
        grad = grad if grad.stride(2) == 1 else grad.contiguous()
        batch, tables, _ = grad.shape
        blocks = triton.cdiv(batch, BLOCK)
        parts = max(1, triton.cdiv(blocks, TILES))
        tiles = triton.cdiv(blocks, parts)
        values = grad.new_empty(len(flat), weight.shape[1])
        partials = torch.empty(tiles, *projection.shape, device=grad.device)
        if batch:
            _backward[tiles, tables](
                grad, flat, Weight(weight).for_kernel()[0], projection, values, partials, batch,
                grad.stride()[:2], parts, **_sizes(weight, projection),
            )  # fmt: skip
        grad_weight = row_gradient(weight, flat, values, ctx.sparse)
        return grad_weight, partials.sum(0).to(projection.dtype), *[None] * 4


def lookup_projected(
    weight: Tensor,
    projection: Tensor,
    tables: TableRows,
    ids: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Fetch one short row per table and sample, and multiply it by the table's matrix.

    Args:
        weight: the concatenated tables, ``[sum(V), E]``, contiguous; fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`.
        projection: the matrix of each table, ``[F, E, D]``, contiguous; of the same type.
        tables: the rows of each table, without ``modulo``; tables in two parts are packed.
        ids: ``[F, B]``, int32 or int64, each inside its table (not checked).
        sparse: whether the gradient of the weight is an uncoalesced COO tensor or a dense one.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`. Rows longer than :data:`MAX_DIM` are multiplied by PyTorch.

    Returns:
        ``[B, F, D]``.

    Raises:
        ValueError: ``ids`` are not integers or on another device, or a tensor that a kernel reads
            is not contiguous.
    """
    require_integers(weight, ids=ids)
    if not use_triton(weight, impl) or max(projection.shape[1:]) > MAX_DIM:
        short = lookup_tables(weight, tables, ids, sparse=sparse, sorter=sorter, impl=impl)
        return project(short, projection)
    require_contiguous(weight=storage(weight)[0], projection=projection, **tables._asdict())
    return _LookupProjected.apply(weight, projection, tables, ids.contiguous(), sparse, sorter)


def project(short: Tensor, projection: Tensor) -> Tensor:
    """Project ``short [B, F, E]`` to ``[B, F, D]``, each table by its own matrix, in PyTorch."""
    with torch.autocast(short.device.type, enabled=False):  # it would cast rows and gradients too
        return torch.bmm(short.transpose(0, 1), projection).transpose(0, 1)

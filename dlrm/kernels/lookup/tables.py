"""Look up rows of tables that are concatenated in one weight, all in one launch.

:func:`lookup` fetches rows by their index in the weight, :func:`lookup_tables` one row per table
and sample. The gradient of the weight is an uncoalesced sparse COO tensor with one entry per
look-up, whose values are the incoming gradient, not a copy of it:
:func:`dlrm.kernels.update.sparse.update_rows` merges equal rows and updates the weight in one pass.

Tables may have fewer rows than ids (:class:`TableRows`): the kernels do this arithmetic on the ids
they read.

Bytes a look-up of one row must move: 2 rows, one read and one written, and its id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, require_integers, tl, triton, use_triton
from dlrm.kernels.update.packed import load_rows, packed_rows, storage
from dlrm.kernels.update.row_sort import RowSorter

TILE = 4096  # elements of a tile: 32 per thread


class TableRows(NamedTuple):
    """Which row of a weight each id of its tables has; all are ``[F]`` int64, contiguous."""

    starts: Tensor
    """First row of each table."""
    modulo: Tensor | None = None
    """Ids of equal remainder share a row; None: they don't."""
    last: Tensor | None = None
    """Ids from this one on share its row; None: they don't."""
    num_wide: Tensor | None = None
    """Of tables in two parts, those of all tables one after another: rows of the first part. The
    row that :attr:`last` has shared is then the first of its table."""
    narrow_starts: Tensor | None = None
    """And the first row of the second part."""


@triton.jit
def row_of(id, table, starts, modulo, last, wide_first, wide_starts):
    """The row in the weight of ids of each ``table``."""
    if modulo is not None:
        id %= tl.load(modulo + table).to(id.dtype)
    if last is not None:
        id = tl.minimum(id, tl.load(last + table).to(id.dtype))
    row = id.to(tl.int64)
    if wide_first is not None:
        if last is not None:  # the shared row comes first
            row = tl.where(row == tl.load(last + table), 0, row + 1)
        first = tl.load(wide_first + table)
        row += tl.where(row < first, tl.load(starts + table), tl.load(wide_starts + table) - first)
    elif starts is not None:
        row += tl.load(starts + table)
    return row


@triton.jit
def _gather(
    ids, tables, weight, wide, out, flat, n, batch, stride_b, stride_f,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Fetch one row per table and sample, sample by sample; ``flat`` receives their indices.

    ``tables`` has the arguments of :func:`row_of` from ``starts`` on.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    sample, table = (k // F).to(tl.int64), (k % F).to(tl.int64)
    id = tl.load(ids + table * batch + sample, mask=inside, other=0)
    row = row_of(id, table, tables[0], tables[1], tables[2], tables[3], tables[4])
    if flat is not None:
        tl.store(flat + k, row, mask=inside)
    column = tl.arange(0, BLOCK_D)[None, :]
    value = load_rows(weight, row, wide, inside, column, D, FORMAT)
    to = sample * stride_b + table * stride_f
    tl.store(out + to[:, None] + column, value, mask=inside[:, None] & (column < D))


def tiling(n: int, dim: int, tile: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for ``n`` rows of ``dim`` in tiles of ``tile`` elements."""
    block_d = triton.next_power_of_2(dim)
    block = max(4, min(256, tile // block_d))
    return (triton.cdiv(n, block),), {"D": dim, "BLOCK": block, "BLOCK_D": block_d}


def gather_rows(
    weight: Tensor,
    tables: TableRows | None,
    ids: Tensor,
    out: Tensor,
    flat: Tensor | None = None,
) -> None:
    """Launch the look-up of one row per table and sample, outside of autograd.

    Args:
        weight: ``[sum(V), D]``, contiguous.
        tables: their rows; None if ids are rows of the weight.
        ids: ``[F, B]``, contiguous.
        out: output, ``[B, F, D]``; only its last dimension must be contiguous, so it may be part of
            a larger buffer.
        flat: receives the row in ``weight`` of every look-up, int64 ``[B, F]``.
    """
    num_tables, batch = ids.shape
    grid, sizes = tiling(ids.numel(), weight.shape[1], TILE)
    if ids.numel():
        data, num_wide, packing = storage(weight)
        index = (None,) * 5 if tables is None else tuple(tables)
        _gather[grid](
            ids, index, data, num_wide, out, flat, ids.numel(), batch, *out.stride()[:2],
            F=num_tables, FORMAT=packing, **sizes,
        )  # fmt: skip


def row_gradient(weight: Tensor, flat: Tensor, values: Tensor, sparse: bool) -> Tensor:
    """The gradient of ``weight [V, D]`` from rows ``flat [n]`` and their ``values [n, D]``."""
    if not sparse:
        return torch.zeros_like(weight).index_add_(0, flat, values)
    if not len(flat):  # accumulation writes to the memory of an empty gradient: give it its own
        flat, values = torch.empty_like(flat), torch.empty_like(values)
    with torch.sparse.check_sparse_tensor_invariants(False):  # they hold, and it would synchronise
        # Autograd would copy what is not contiguous, and with it the rows that were sorted ahead.
        # A single row cut from a longer one counts as contiguous, but keeps its stride, which
        # PyTorch takes for the row length where it sums rows, past the end of their memory.
        values = values.contiguous().as_strided(values.shape, (values.shape[1], 1))
        return torch.sparse_coo_tensor(flat[None], values, weight.shape)


class _LookupTables(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        tables: TableRows | None,
        ids: Tensor,
        sparse: bool,
        sorter: RowSorter | None,
    ) -> Tensor:
        num_tables, batch = ids.shape
        out = weight.new_empty(batch, num_tables, weight.shape[1])
        flat = None
        if ctx.needs_input_grad[0] and tables is None:
            flat = ids.long()
        elif ctx.needs_input_grad[0]:
            flat = torch.empty(batch, num_tables, dtype=torch.int64, device=ids.device)
        gather_rows(weight, tables, ids, out, None if tables is None else flat)
        if flat is not None and sorter is not None:
            sorter.submit(flat.view(-1) if tables is None else flat, len(weight))
        ctx.save_for_backward(weight, flat)
        ctx.sparse = sparse
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, flat = ctx.saved_tensors
        values = grad.reshape(-1, weight.shape[1])
        grad_weight = row_gradient(weight, flat.view(-1), values, ctx.sparse)
        return grad_weight, *[None] * 4


def lookup(
    weight: Tensor,
    rows: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Fetch rows by index.

    Args:
        weight: ``[V, D]``, contiguous; fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`.
        rows: any shape, int32 or int64, each in ``[0, V)`` (not checked).
        sparse: whether the gradient of the weight is an uncoalesced COO tensor or a dense one.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[*rows.shape, D]``.

    Raises:
        ValueError: ``rows`` are not integers or on another device, or a tensor that a kernel reads
            is not contiguous.
    """
    require_integers(weight, rows=rows)
    if not use_triton(weight, impl):
        return _lookup_torch(weight, rows, sparse)
    require_contiguous(weight=storage(weight)[0])
    flat = rows.reshape(1, -1).contiguous()
    out = _LookupTables.apply(weight, None, flat, sparse, sorter)
    return out.view(*rows.shape, weight.shape[1])


def lookup_tables(
    weight: Tensor,
    tables: TableRows,
    ids: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Fetch one row per table and sample.

    Args:
        weight: the concatenated tables, ``[sum(V), D]``, contiguous; fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`.
        tables: the rows of each table.
        ids: ``[F, B]``, int32 or int64, each inside its table (not checked).
        sparse: whether the gradient of the weight is an uncoalesced COO tensor, with its entries
            sample by sample, or a dense one.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: ``ids`` are not ``[F, B]``, not integers or on another device, or a tensor that
            a kernel reads is not contiguous.
    """
    require_integers(weight, ids=ids)
    if ids.dim() != 2 or len(ids) != len(tables.starts):
        raise ValueError(
            f"ids have shape {tuple(ids.shape)}, they must be [{len(tables.starts)}, B]: a row per "
            "table"
        )
    if not use_triton(weight, impl):
        return lookup_tables_torch(weight, tables, ids, sparse)
    require_contiguous(weight=storage(weight)[0], **tables._asdict())
    return _LookupTables.apply(weight, tables, ids.contiguous(), sparse, sorter)


def lookup_tables_torch(
    weight: Tensor, tables: TableRows, ids: Tensor, sparse: bool = True
) -> Tensor:
    """:func:`lookup_tables` in PyTorch."""
    numbers = torch.arange(len(tables.starts), device=ids.device)[:, None]
    rows = rows_of_torch(ids, numbers, tables)
    return _lookup_torch(weight, rows.t().contiguous(), sparse)


def rows_of_torch(ids: Tensor, numbers: Tensor, tables: TableRows) -> Tensor:
    """The rows in the weight of ``ids [...]``, and the ``numbers`` of their tables broadcast."""
    starts, modulo, last, num_wide, narrow_starts = tables
    ids = ids if modulo is None else ids % modulo[numbers]
    ids = ids if last is None else ids.minimum(last[numbers])
    if num_wide is None or narrow_starts is None:
        return ids + starts[numbers]
    if last is not None:  # the shared row comes first
        ids = torch.where(ids == last[numbers], 0, ids + 1)
    first = num_wide[numbers]
    return ids + torch.where(ids < first, starts[numbers], narrow_starts[numbers] - first)


def _lookup_torch(weight: Tensor, rows: Tensor, sparse: bool) -> Tensor:
    if packed_rows(weight) is None:
        return functional.embedding(rows, weight, sparse=sparse)
    return _LookupPacked.apply(weight, rows, sparse)


class _LookupPacked(torch.autograd.Function):
    """Packed rows by index, in PyTorch."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, sparse: bool) -> Tensor:
        packed = packed_rows(weight)
        assert packed is not None
        ctx.save_for_backward(weight, rows)
        ctx.sparse = sparse
        return packed.read(rows.reshape(-1)).view(*rows.shape, packed.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows = ctx.saved_tensors
        values = grad.reshape(-1, weight.shape[1])
        return row_gradient(weight, rows.reshape(-1).long(), values, ctx.sparse), None, None

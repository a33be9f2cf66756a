"""Look up rows of tables that are stored one after another, all in one launch.

:func:`lookup` fetches rows by number, :func:`lookup_tables` one row per table and sample, from any
:class:`~dlrm.kernels.lookup.source.RowSource`. The gradient of a weight is an uncoalesced sparse
COO tensor with one entry per look-up, whose values are the incoming gradient, not a copy of it:
:func:`dlrm.kernels.update.sparse.update_rows` merges equal rows and updates the weight in one pass.

Tables may have fewer rows than ids (:class:`TableRows`): the kernels do this arithmetic on the ids
they read.

Bytes a look-up of one row must move: 2 rows, one read and one written, and its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, require_integers, tl, triton
from dlrm.kernels.lookup.source import RowSource, Weight, load_rows, store_flat
from dlrm.kernels.update.in_backward import FusedUpdate, FusedUpdates
from dlrm.kernels.update.packed import packed_rows, storage
from dlrm.kernels.update.row_sort import RowSorter

TILE = 4096  # elements of a tile: 32 per thread


class TableRows(NamedTuple):
    """Which row of a weight each id of its tables has; all are ``[F]`` int64, contiguous."""

    starts: Tensor
    """First row of each table."""
    divisor: Tensor | None = None
    """Ids of equal quotient share a row; None: they don't."""
    modulo: Tensor | None = None
    """Ids of equal remainder share a row; None: they don't."""
    last: Tensor | None = None
    """Ids from this one on share its row; None: they don't."""
    num_wide: Tensor | None = None
    """Of tables in two parts, those of all tables one after another: rows of the first part. The
    row that :attr:`last` has shared is then the first of its table."""
    narrow_starts: Tensor | None = None
    """And the first row of the second part."""
    held: Tensor | None = None
    """Only for bags and new ids: the first id and the number of ids of each table whose rows are
    here, ``[2, F]``; other ids add nothing and have no gradient. None: all rows are here."""


NO_TABLES: TableRows = TableRows._make([None] * 7)
"""Ids are rows already."""


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """Preparations of a training step for a look-up of rows, or of bags, which sum them in fp32."""

    sorter: RowSorter | None = None
    """Sorts the rows that will have a gradient while forward and backward run."""
    updates: FusedUpdates | None = None
    """Updates that the backward pass may apply itself, such as that of rows that are looked up one
    by one, or summed unweighted."""
    dtype: torch.dtype | None = None
    """Type in which vectors may be returned; None: the type of the rows."""
    padded: bool = False
    """Of bags: there are more ids than the last offset says, so that one shape serves several
    batches; what lies beyond it is no look-up."""


NO_ROW_CONTEXT = RowContext()


@triton.jit
def row_of(id, table, tables):
    """The row in the weight of ids of each ``table``; ``tables`` is a :class:`TableRows`."""
    if tables.divisor is not None:
        id //= tl.load(tables.divisor + table).to(id.dtype)
    if tables.modulo is not None:
        id %= tl.load(tables.modulo + table).to(id.dtype)
    if tables.last is not None:
        id = tl.minimum(id, tl.load(tables.last + table).to(id.dtype))
    row = id.to(tl.int64)

    if tables.num_wide is not None:
        if tables.last is not None:  # the shared row comes first
            row = tl.where(row == tl.load(tables.last + table), 0, row + 1)
        wide = tl.load(tables.num_wide + table)
        narrow = tl.load(tables.narrow_starts + table) - wide
        row += tl.where(row < wide, tl.load(tables.starts + table), narrow)
    elif tables.starts is not None:
        row += tl.load(tables.starts + table)
    return row


@triton.jit
def _gather(
    ids, tables, source, out, flat, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Fetch one row per table and sample, sample by sample; ``flat`` receives their numbers."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    sample, table = (k // F).to(tl.int64), (k % F).to(tl.int64)
    id = tl.load(ids + table * batch + sample, mask=inside, other=0)
    row = row_of(id, table, tables)
    if flat is not None:
        store_flat(flat, source, row, k, inside, n, KIND)

    column = tl.arange(0, BLOCK_D)[None, :]
    value = load_rows(source, row, k, inside, column, D, KIND)
    to = k.to(tl.int64)[:, None] * D + column
    tl.store(out + to, value, mask=inside[:, None] & (column < D))


def tiling(n: int, dim: int, tile: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and sizes for ``n`` rows of ``dim`` in tiles of ``tile`` elements."""
    block_d = triton.next_power_of_2(dim)
    block = max(4, min(256, tile // block_d))
    return (triton.cdiv(n, block),), {"D": dim, "BLOCK": block, "BLOCK_D": block_d}


def gather_rows(
    source: RowSource, tables: TableRows, ids: Tensor, out: Tensor, flat: Tensor | None = None
) -> None:
    """Launch the look-up of one row per table and sample, outside of autograd.

    Args:
        source: the rows of all tables.
        tables: which of them ids have.
        ids: ``[F, B]``, contiguous.
        out: the rows, ``[B, F, D]``, contiguous.
        flat: receives the row of every look-up, see :meth:`RowSource.new_flat`.
    """
    num_tables, batch = ids.shape
    grid, sizes = tiling(ids.numel(), out.shape[2], source.tile or TILE)
    if ids.numel():
        arguments, kind = source.for_kernel()
        _gather[grid](
            ids, tables, arguments, out, flat, ids.numel(), batch, F=num_tables, KIND=kind, **sizes
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A look-up of one row per table and sample of ``ids [F, B]``."""

    source: RowSource
    tables: TableRows
    ids: Tensor
    sparse: bool
    context: RowContext
    update: FusedUpdate | None
    triton: bool = True

    def rows(self) -> Tensor:
        """The rows of the look-ups, sample by sample, ``[B * F]`` int64."""
        return _rows(self.ids, self.tables).t().reshape(-1).long()


class _Lookup(torch.autograd.Function):
    """Rows of a source, whose weights are inputs for their gradients."""

    @staticmethod
    def forward(ctx: Any, request: Request, *weights: Tensor) -> Tensor:
        source, ids, (num_tables, batch) = request.source, request.ids, request.ids.shape
        ctx.request = request
        if not request.triton:
            rows = request.rows()
            ctx.save_for_backward(rows)
            found = source.read(rows)
            return found.view(batch, num_tables, found.shape[1])

        # Row numbers that are given need not be stored by the kernel.
        known, flat = request.tables is NO_TABLES and not source.renumbers, None
        if any(ctx.needs_input_grad):
            shape = batch, num_tables
            flat = ids.long().view(-1) if known else source.new_flat(shape, request.sparse)
        dtype = request.context.dtype or source.like.dtype
        out = torch.empty(batch, num_tables, source.width, dtype=dtype, device=ids.device)
        gather_rows(source, request.tables, ids, out, None if known else flat)

        if flat is not None and request.context.sorter is not None:
            source.submit(request.context.sorter, flat)
        changed = () if request.update is None else weights  # a second pass would be an error
        ctx.save_for_backward(flat, *changed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        request, (rows, *_) = ctx.request, ctx.saved_tensors
        flat = request.triton and rows is not None
        rows = request.rows() if rows is None else rows
        values = grad.reshape(-1, grad.shape[2])
        if request.update is not None and request.update.due:
            weight = request.source.weights[0]
            changed, values = request.source.spread(rows, values, flat=flat)
            request.update.apply(weight, changed, values, request.context.sorter)
            return None, None
        values = values.to(request.source.like.dtype)
        found = request.source.gradients(rows, values, sparse=request.sparse, flat=flat)
        return None, *found


def lookup(
    source: Tensor | RowSource,
    rows: Tensor,
    *,
    sparse: bool = True,
    context: RowContext = NO_ROW_CONTEXT,
    impl: str | None = None,
) -> Tensor:
    """Fetch rows by number.

    Args:
        source: the rows: ``[V, D]``, contiguous, fp32 or bf16; a
            :class:`~dlrm.kernels.update.packed.PackedParameter`; or another source.
        rows: any shape, int32 or int64, each in ``[0, V)`` (not checked).
        sparse: whether the gradient of a weight is an uncoalesced COO tensor or a dense one.
        context: what a training step prepared.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[*rows.shape, D]``.

    Raises:
        ValueError: ``rows`` are not integers or on another device, or a tensor that a kernel reads
            is not contiguous.
    """
    out = _look_up(source, NO_TABLES, rows.reshape(1, -1), sparse, context, impl)
    return out.view(*rows.shape, out.shape[2])


def lookup_tables(
    source: Tensor | RowSource,
    tables: TableRows,
    ids: Tensor,
    *,
    sparse: bool = True,
    context: RowContext = NO_ROW_CONTEXT,
    impl: str | None = None,
) -> Tensor:
    """Fetch one row per table and sample.

    Args:
        source: the rows of all tables, one table after another, see :func:`lookup`.
        tables: which of them each table has.
        ids: ``[F, B]``, int32 or int64, each inside its table (not checked).
        sparse: whether the gradient of a weight is an uncoalesced COO tensor, with its entries
            sample by sample, or a dense one.
        context: what a training step prepared.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: ``ids`` are not ``[F, B]``, not integers or on another device, or a tensor that
            a kernel reads is not contiguous.
    """
    if ids.dim() != 2 or len(ids) != len(tables.starts):
        raise ValueError(
            f"ids have shape {tuple(ids.shape)}, they must be [{len(tables.starts)}, B]: a row per "
            "table"
        )
    return _look_up(source, tables, ids, sparse, context, impl)


def _look_up(
    source: Tensor | RowSource,
    tables: TableRows,
    ids: Tensor,
    sparse: bool,
    context: RowContext,
    impl: str | None,
) -> Tensor:
    source = source if isinstance(source, RowSource) else Weight(source)
    require_integers(source.like, ids=ids)

    triton = source.runs_triton(ids, impl)
    ids = ids.contiguous()
    if not triton and type(source) is Weight and packed_rows(source.weight) is None:
        return lookup_tables_torch(source.weight, tables, ids, sparse)

    if triton:
        memory = storage(source.weight)[0] if isinstance(source, Weight) else None
        require_contiguous(weight=memory, **tables._asdict())
    updates = context.updates if triton and sparse and isinstance(source, Weight) else None
    request = Request(
        source=source,
        tables=tables,
        ids=ids,
        sparse=sparse,
        triton=triton,
        context=context,
        update=None if updates is None else updates.take(source.weights[0]),
    )
    return _Lookup.apply(request, *source.weights)


def lookup_tables_torch(
    weight: Tensor, tables: TableRows, ids: Tensor, sparse: bool = True
) -> Tensor:
    """:func:`lookup_tables` in PyTorch, of rows of one tensor that are not packed."""
    rows = _rows(ids, tables).t().contiguous()
    return functional.embedding(rows, weight, sparse=sparse)


def _rows(ids: Tensor, tables: TableRows) -> Tensor:
    """The rows of ``ids [F, B]``."""
    if tables is NO_TABLES:
        return ids
    return rows_of_torch(ids, torch.arange(len(ids), device=ids.device)[:, None], tables)


def rows_of_torch(ids: Tensor, numbers: Tensor, tables: TableRows) -> Tensor:
    """:func:`row_of` in PyTorch: of ``ids [...]`` of tables whose ``numbers`` broadcast."""
    if tables.divisor is not None:
        ids = ids // tables.divisor[numbers]
    if tables.modulo is not None:
        ids = ids % tables.modulo[numbers]
    if tables.last is not None:
        ids = ids.minimum(tables.last[numbers])
    if tables.num_wide is None or tables.narrow_starts is None:
        return ids + tables.starts[numbers]

    if tables.last is not None:  # the shared row comes first
        ids = torch.where(ids == tables.last[numbers], 0, ids + 1)
    wide = tables.num_wide[numbers]
    narrow = tables.narrow_starts[numbers] - wide
    return ids + torch.where(ids < wide, tables.starts[numbers], narrow)


def held_rows_torch(ids: Tensor, numbers: Tensor, tables: TableRows) -> tuple[Tensor, Tensor]:
    """The rows of ids as of :func:`rows_of_torch`, and which of them are here, see
    :attr:`TableRows.held`.
    """
    if tables.held is None:
        return rows_of_torch(ids, numbers, tables), torch.ones_like(ids, dtype=torch.bool)
    first, count = tables.held
    ids = ids - first[numbers]
    return rows_of_torch(ids, numbers, tables), (ids >= 0) & (ids < count[numbers])

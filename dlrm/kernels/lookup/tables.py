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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, require_integers, tl, triton
from dlrm.kernels.lookup.source import RowSource, Weight, load_rows, store_flat
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


@triton.constexpr_function
def _kind_of(kinds, part):
    """The kind of one of several sources."""
    return kinds[part]


@triton.jit
def _gather(
    ids, tables, sources, outs, flats, n, batch,
    F: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    KINDS: tl.constexpr,
):  # fmt: skip
    """Fetch one row of each source per table and sample, sample by sample; ``flats`` receive their
    numbers.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    sample, table = (k // F).to(tl.int64), (k % F).to(tl.int64)
    id = tl.load(ids + table * batch + sample, mask=inside, other=0)
    for part in tl.static_range(len(outs)):
        row = row_of(id, table, tables[part])
        _fetch(
            row, k, inside, n, sources[part], outs[part], flats[part], DIMS[part], BLOCK_D,
            _kind_of(KINDS, part),
        )  # fmt: skip


@triton.jit
def _fetch(
    row, k, inside, n, source, out, flat,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Copy rows of one source to places ``k`` of ``out``."""
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
    sources: Sequence[tuple[RowSource, TableRows]],
    ids: Tensor,
    outs: Sequence[Tensor],
    flats: Sequence[Tensor | None] | None = None,
) -> None:
    """Launch the look-up of one row of each source per table and sample, outside of autograd.

    Args:
        sources: the rows, and which of them ids have.
        ids: ``[F, B]``, contiguous.
        outs: output of each source, ``[B, F, D]``, contiguous.
        flats: receive the row of every look-up, see :meth:`RowSource.new_flat`.
    """
    num_tables, batch = ids.shape
    dims = tuple(out.shape[2] for out in outs)
    tile = min(source.tile or TILE for source, _ in sources)
    grid, sizes = tiling(ids.numel(), max(dims), tile)
    if ids.numel():
        arguments, kinds = zip(*(source.for_kernel() for source, _ in sources), strict=True)
        _gather[grid](
            ids, tuple(tables for _, tables in sources), arguments, tuple(outs),
            tuple(flats or [None] * len(outs)), ids.numel(), batch,
            F=num_tables, DIMS=dims, KINDS=kinds, BLOCK=sizes["BLOCK"], BLOCK_D=sizes["BLOCK_D"],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One row of each source per table and sample of ``ids [F, B]``."""

    sources: Sequence[tuple[RowSource, TableRows]]
    ids: Tensor
    sparse: bool
    sorter: RowSorter | None
    triton: bool

    def rows(self, tables: TableRows) -> Tensor:
        """The rows of the look-ups, sample by sample, ``[B * F]`` int64."""
        return _rows(self.ids, tables).t().reshape(-1).long()


class _Lookup(torch.autograd.Function):
    """Rows of each source; the weights of the sources are inputs for their gradients."""

    @staticmethod
    def forward(ctx: Any, request: _Request, *weights: Tensor) -> tuple[Tensor, ...]:
        ids, (num_tables, batch) = request.ids, request.ids.shape
        ctx.request = request
        if not request.triton:
            rows = [request.rows(tables) for _, tables in request.sources]
            ctx.save_for_backward(*rows)
            pairs = zip(request.sources, rows, strict=True)
            found = [source.read(own) for (source, _), own in pairs]
            return tuple(own.view(batch, num_tables, own.shape[1]) for own in found)

        # Row numbers that are given need not be stored by the kernel.
        outs, flats, stored = [], [], []
        for source, tables in request.sources:
            known, flat = tables is NO_TABLES and not source.renumbers, None
            if any(ctx.needs_input_grad) and known:
                flat = ids.long().view(-1)
            elif any(ctx.needs_input_grad):
                flat = source.new_flat((batch, num_tables), request.sparse)
            flats.append(flat)
            stored.append(None if known else flat)
            shape = batch, num_tables, source.width
            outs.append(torch.empty(shape, dtype=source.like.dtype, device=ids.device))
        gather_rows(request.sources, ids, outs, stored)

        saved = []
        for (source, _), flat in zip(request.sources, flats, strict=True):
            entries = None if flat is None else source.entries(flat)
            if entries is not None and request.sorter is not None:
                source.submit(request.sorter, entries)
            saved.append(entries)
        ctx.save_for_backward(*saved)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        request, found = ctx.request, []
        parts = zip(request.sources, ctx.saved_tensors, grads, strict=True)
        for (source, tables), rows, grad in parts:
            flat = request.triton and rows is not None
            rows = request.rows(tables) if rows is None else rows
            values = grad.reshape(-1, grad.shape[2])
            found += source.gradients(rows, values, sparse=request.sparse, flat=flat)
        return None, *found


def lookup(
    source: Tensor | RowSource,
    rows: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Fetch rows by number.

    Args:
        source: the rows: ``[V, D]``, contiguous, fp32 or bf16; a
            :class:`~dlrm.kernels.update.packed.PackedParameter`; or another source.
        rows: any shape, int32 or int64, each in ``[0, V)`` (not checked).
        sparse: whether the gradient of a weight is an uncoalesced COO tensor or a dense one.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[*rows.shape, D]``.

    Raises:
        ValueError: ``rows`` are not integers or on another device, or a tensor that a kernel reads
            is not contiguous.
    """
    sources = [(source, NO_TABLES)]
    (out,) = _look_up(sources, rows.reshape(1, -1), sparse, sorter, impl)
    return out.view(*rows.shape, out.shape[2])


def lookup_tables(
    source: Tensor | RowSource,
    tables: TableRows,
    ids: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Fetch one row per table and sample.

    Args:
        source: the rows of all tables, one table after another, see :func:`lookup`.
        tables: which of them each table has.
        ids: ``[F, B]``, int32 or int64, each inside its table (not checked).
        sparse: whether the gradient of a weight is an uncoalesced COO tensor, with its entries
            sample by sample, or a dense one.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, F, D]``, contiguous.

    Raises:
        ValueError: ``ids`` are not ``[F, B]``, not integers or on another device, or a tensor that
            a kernel reads is not contiguous.
    """
    (out,) = lookup_parts([(source, tables)], ids, sparse=sparse, sorter=sorter, impl=impl)
    return out


def lookup_parts(
    sources: Sequence[tuple[Tensor | RowSource, TableRows]],
    ids: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """Fetch one row of each of several sources per table and sample, all in one launch.

    Args:
        sources: the rows, and which of them each table has, as of :func:`lookup_tables`.
        ids, sparse, sorter, impl: as of :func:`lookup_tables`.

    Returns:
        Of each source ``[B, F, D]``, contiguous.

    Raises:
        ValueError: as :func:`lookup_tables`.
    """
    count = len(sources[0][1].starts)
    if ids.dim() != 2 or len(ids) != count:
        raise ValueError(
            f"ids have shape {tuple(ids.shape)}, they must be [{count}, B]: a row per table"
        )
    return _look_up(sources, ids, sparse, sorter, impl)


def _look_up(
    sources: Sequence[tuple[Tensor | RowSource, TableRows]],
    ids: Tensor,
    sparse: bool,
    sorter: RowSorter | None,
    impl: str | None,
) -> tuple[Tensor, ...]:
    found = [(s if isinstance(s, RowSource) else Weight(s), tables) for s, tables in sources]
    require_integers(found[0][0].like, ids=ids)
    triton = found[0][0].runs_triton(ids, impl)
    ids = ids.contiguous()
    plain = [type(s) is Weight and packed_rows(s.weight) is None for s, _ in found]
    if not triton and all(plain):
        return tuple(lookup_tables_torch(s.weights[0], tables, ids, sparse) for s, tables in found)

    for source, tables in found if triton else ():
        memory = storage(source.weight)[0] if isinstance(source, Weight) else None
        require_contiguous(weight=memory, **tables._asdict())
    request = _Request(sources=found, ids=ids, sparse=sparse, sorter=sorter, triton=triton)
    weights = [weight for source, _ in found for weight in source.weights]
    return _Lookup.apply(request, *weights)


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

"""The kernels of :mod:`dlrm.kernels.lookup.pool`: sums and maxima of bags, and gradients."""

from __future__ import annotations

from dlrm.kernels import tl, triton
from dlrm.kernels.lookup.source import current_place, load_rows
from dlrm.kernels.lookup.tables import row_of


@triton.jit
def pool(
    ids, offsets, tables, source, scale, out, entries, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, MEAN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sum bags, table by table, whose bags are of like lengths; ``CHUNK`` rows of each at a time.

    ``entries`` receives the row of each look-up, -1 if it is not held, and the index in ``out`` of
    its bag.
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

        # Rows that are elsewhere are not read, but listed.
        all_live = live
        if tables.held is not None:
            id -= tl.load(tables.held + table)[:, None].to(id.dtype)
            live = live & (id >= 0) & (id < tl.load(tables.held + F + table)[:, None])
        row = row_of(id, table[:, None], tables)
        if entries[0] is not None:
            tl.store(entries[0] + at, tl.where(live, row, -1), mask=all_live)

        # Plain rows of full length without the change of layout, which takes time.
        if KIND.name == "plain" and KIND.short == 0:
            mask = live[:, :, None] & (column < D)[None, None, :]
            place = current_place(source, row, live)[:, :, None] * D + column[None, None, :]
            value = tl.load(source.data + place, mask=mask, other=0.0).to(tl.float32)
        else:
            many, there = tl.reshape(row, (BLOCK * CHUNK,)), tl.reshape(live, (BLOCK * CHUNK,))
            lookup = tl.reshape(at, (BLOCK * CHUNK,))
            value = load_rows(source, many, lookup, there, column[None, :], D, KIND)
            value = tl.reshape(value.to(tl.float32), (BLOCK, CHUNK, BLOCK_D))
        if scale is not None:
            value *= tl.load(scale + at, mask=live, other=0.0).to(tl.float32)[:, :, None]
        total += tl.sum(value, 1)

    if MEAN:
        total /= tl.maximum(length, 1).to(tl.float32)[:, None]
    to = owner[:, None] * D + column[None, :]
    mask = inside[:, None] & (column < D)[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bags(offsets, k, inside, batch, F: tl.constexpr):
    """The table of each bag of ``out``, where the bag begins, and its length."""
    table = k % F
    bag = table.to(tl.int64) * batch + k // F
    begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    return table, begin, tl.load(offsets + bag + 1, mask=inside, other=0) - begin


@triton.jit
def pool_max(
    ids, offsets, tables, source, out, flat, chosen, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Write the maxima of bags; ``chosen`` receives the look-ups that gave them."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    table, begin, length = _bags(offsets, k, inside, batch, F)

    column = tl.arange(0, BLOCK_D)[None, :]
    total = tl.full((BLOCK, BLOCK_D), float("-inf"), tl.float32)
    first = tl.full((BLOCK, BLOCK_D), -1, tl.int64)
    for step in range(tl.max(length, 0)):
        live = step < length
        at = begin + step
        id = tl.load(ids + at, mask=live, other=0)
        row = row_of(id, table, tables)
        if flat is not None:
            tl.store(flat + at, row, mask=live)

        value = load_rows(source, row, at, live, column, D, KIND).to(tl.float32)
        better = live[:, None] & (column < D) & ((value > total) | (first < 0))
        total = tl.where(better, value, total)
        first = tl.where(better, at[:, None], first)

    total = tl.where(first < 0, 0.0, total)  # of an empty bag
    to = k.to(tl.int64)[:, None] * D + column
    mask = inside[:, None] & (column < D)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)
    if chosen is not None:
        tl.store(chosen + to, first, mask=mask)


@triton.jit
def pool_backward(
    grad, offsets, flat, source, scale, chosen, values, grad_scale, n, batch,
    F: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MODE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Repeat the gradient of each bag for its look-ups, as ``values [nnz, D]``."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    _, begin, length = _bags(offsets, k, inside, batch, F)

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
        if grad_scale is not None:  # the product of the row and the gradient of its bag
            row = tl.load(flat + at, mask=live, other=0)
            looked = load_rows(source, row, at, live, column, D, KIND)
            dot = tl.sum(looked.to(tl.float32) * arrived, 1)
            tl.store(grad_scale + at, dot.to(grad_scale.dtype.element_ty), mask=live)

        if scale is not None:
            value = value * tl.load(scale + at, mask=live, other=0.0).to(tl.float32)[:, None]
        to = at[:, None] * D + column
        tl.store(values + to, value.to(values.dtype.element_ty), mask=mask)

"""The rows of new ids: drawn by a hash, with optimizer state of zero, or copies of shared rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.dynamic._find import Lookups
from dlrm.kernels.dynamic.hashing import GOLDEN, mix, mix_triton, uniform
from dlrm.kernels.dynamic.index import PROGRAMS, lookups_of
from dlrm.kernels.dynamic.slot_index import Placed
from dlrm.kernels.lookup.hashing import hash32_triton, hashed_offsets_torch
from dlrm.kernels.lookup.tables import TableRows, held_rows_torch, row_of
from dlrm.kernels.update._packed import load_packed, store_packed
from dlrm.kernels.update.cached_slots import CachedSlots, place_of
from dlrm.kernels.update.packed import CHUNK, read_rows, storage, stored_values, write_rows

TILE = 1024  # elements of the rows that a program writes at a time


class SharedPieces(NamedTuple):
    """The pieces of shared rows, in an array that comes after the pieces of own rows."""

    first: Tensor
    """Where the hashes of each table begin, ``[F]``; see
    :func:`~dlrm.kernels.lookup.hashing.hashed_offsets`."""
    size: int
    """Pieces of the array."""
    start: int
    """Pieces before it."""
    number: int
    """Pieces of a row."""


class NewIds(NamedTuple):
    """Look-ups with the new ids among them, and the range of the values that their rows get."""

    placed: Placed
    tables: Tensor
    """Of the look-ups; they broadcast against the ids."""
    ids: Tensor
    """As given to :func:`dlrm.kernels.dynamic.index.place`."""
    num_shared: Tensor
    """Shared rows of each table, ``[F]``."""
    bounds: Tensor
    """See :func:`first_values`."""


def follow_ids(weight: Tensor) -> None:
    """Have optimizers reset the state of a row that gets another id: see :func:`row_states`."""
    if row_states(weight) is None:
        weight.row_states = []  # type: ignore[attr-defined]


def row_states(weight: Tensor) -> list[Tensor] | None:
    """The states that are reset with the rows of a parameter, for its optimizer to fill in; None
    for a parameter whose rows stay with their ids.
    """
    states: list[Tensor] | None = getattr(weight, "row_states", None)
    return states


def first_values(tables: Tensor, ids: Tensor, bounds: Tensor, seed: Tensor, dim: int) -> Tensor:
    """The rows with which ids start, U(-b, b) by a hash of table, id and seed.

    Args:
        tables, ids: of the rows, ``[n]`` int64.
        bounds: b of each table, ``[F]``.
        seed: 0-d int64.
        dim: length of a row.

    Returns:
        ``[n, dim]`` fp32.
    """
    key = mix(mix(ids ^ seed) + (tables + 1) * GOLDEN.value)
    return uniform(key, dim) * bounds[tables, None].float()


@triton.jit
def _reset_rows(
    data, wide, states, slots, strides, to_cache, table_rows, num_shared, lookups, placed, pieces,
    bounds, seed, F: tl.constexpr, D: tl.constexpr, WIDTHS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the first values of the rows that new ids got, and their states."""
    column = tl.arange(0, BLOCK_D)[None, :]
    count = tl.load(placed.number) * PIECES
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        j = start + tl.arange(0, BLOCK)
        live = j < count
        k = tl.load(placed.missing + j // PIECES, mask=live, other=0)
        id = tl.load(lookups.ids + k, mask=live, other=0).to(tl.int64)
        table = tl.load(lookups.tables + k // lookups.repeat, mask=live, other=0)
        row, few = tl.load(placed.rows + k, mask=live, other=0), tl.load(num_shared + table)
        live &= row >= few
        if pieces is not None:
            row = (row - few) * PIECES + j % PIECES
        if table_rows.held is not None:
            row -= tl.load(table_rows.held + table)
            live &= (row >= 0) & (row < tl.load(table_rows.held + F + table))
        row = row_of(row, table, table_rows)
        mask = live[:, None] & (column < D)
        slot = row * 0 - 1  # in a cache
        if slots is not None:
            slot = tl.load(slots + row, mask=live, other=-1)

        if pieces is None:
            key = mix_triton(mix_triton(id ^ tl.load(seed)) + (table + 1) * GOLDEN)
            bits = mix_triton(key[:, None] + (column + 1).to(tl.int64) * GOLDEN) >> 40 & 0xFFFFFF
            value = (bits - (1 << 23)).to(tl.float32) * 2.0**-23
            value *= tl.load(bounds + table, mask=live, other=0.0).to(tl.float32)[:, None]
        else:
            begin = tl.load(pieces.first + table, mask=live, other=0)
            source = begin + hash32_triton(id * PIECES + j % PIECES)
            source = pieces.start + source % pieces.size
            source_slot = slot
            if slots is not None:
                source_slot = tl.load(slots + source, mask=live, other=-1)
            place = place_of(source, source_slot, to_cache[0])
            if FORMAT:
                value, scale = load_packed(data, place, wide, live, column, D, FORMAT)
                value *= scale[:, None]
            else:
                value = tl.load(data + (place * strides[0])[:, None] + column, mask=mask, other=0.0)

        if FORMAT:
            scale = tl.zeros([BLOCK], tl.float32)
            value = tl.where(mask, value, 0.0)
            place = place_of(row, slot, to_cache[0])
            store_packed(
                data, row, place, wide, live, value * 0, scale, value, seed, D, FORMAT, False
            )
        else:
            at = (place_of(row, slot, to_cache[0]) * strides[0])[:, None] + column
            tl.store(data + at, value.to(data.dtype.element_ty), mask=mask)

        # States.
        for index in tl.static_range(len(WIDTHS)):
            mask = live[:, None] & (column < WIDTHS[index])
            state = tl.zeros([BLOCK, BLOCK_D], tl.float32).to(states[index].dtype.element_ty)
            if pieces is not None:
                place = place_of(source, source_slot, to_cache[index + 1])
                at = (place * strides[index + 1])[:, None] + column
                state = tl.load(states[index] + at, mask=mask)
            place = place_of(row, slot, to_cache[index + 1])
            at = (place * strides[index + 1])[:, None] + column
            tl.store(states[index] + at, state, mask=mask)


@torch.no_grad()
def reset_rows(
    weight: Tensor,
    states: Sequence[Tensor],
    table_rows: TableRows,
    new: NewIds,
    seed: Tensor,
    *,
    pieces: SharedPieces | None = None,
    cached: CachedSlots | None = None,
    impl: str | None = None,
) -> None:
    """Give the rows of new ids their first values, and their states.

    Args:
        weight: ``[V, D]``, contiguous, also packed.
        states: one entry per row or weight each, contiguous, from :func:`row_states`.
        table_rows: the rows of the tables in the weight, or those of them that it holds.
        new: the new ids among the look-ups.
        seed: see :func:`first_values`.
        pieces: a new row and its states are copies of these; the weight has pieces of rows. None:
            new rows are drawn by :func:`first_values`, their states are zero.
        cached: the cached rows of weight and states, if these are in host memory.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(new.ids, impl):
        _reset_rows_torch(weight, states, table_rows, new, seed, pieces, cached)
        return
    lookups: Lookups = lookups_of(new.tables, new.ids, None)
    if not lookups.n:
        return

    # Weight and states, and where their cached rows are.
    data, wide, packing = storage(weight)
    dim = weight.shape[1]
    block_d = max(2, triton.next_power_of_2(dim))
    block = max(1, TILE // block_d)
    tensors = data, *states
    strides, slots, to_cache = tuple(each.stride(0) for each in tensors), None, (0,) * len(tensors)
    if cached is not None:
        slots, to_cache = cached.slots, cached.to_cache
    _reset_rows[min(triton.cdiv(lookups.n, block), PROGRAMS),](
        data, wide, tuple(states), slots, strides, to_cache, table_rows, new.num_shared, lookups,
        new.placed, pieces, new.bounds, seed, F=len(new.num_shared), D=dim, BLOCK=block,
        BLOCK_D=block_d, FORMAT=packing, PIECES=1 if pieces is None else pieces.number,
        WIDTHS=tuple(state.numel() // len(weight) for state in states),
    )  # fmt: skip


def _reset_rows_torch(
    weight: Tensor,
    states: Sequence[Tensor],
    table_rows: TableRows,
    new: NewIds,
    seed: Tensor,
    pieces: SharedPieces | None,
    cached: CachedSlots | None,
) -> None:
    """:func:`reset_rows` in PyTorch, which packs rows with the best of several scales."""
    missing = new.placed.missing[: int(new.placed.number)].long()
    table = new.tables.expand_as(new.ids).reshape(-1)[missing]
    rows, id = new.placed.rows.view(-1)[missing], new.ids.reshape(-1)[missing].long()
    own = rows >= new.num_shared[table]
    missing, table, id, rows = missing[own], table[own], id[own], rows[own]
    source = None
    if pieces is not None:
        first, size, start, number = pieces
        source = hashed_offsets_torch(first[table], id, number, size, start=start).view(-1)
        each = torch.arange(number, device=rows.device)
        rows = ((rows - new.num_shared[table])[:, None] * number + each).view(-1)
        table, id = table.repeat_interleave(number), id.repeat_interleave(number)

    rows, here = held_rows_torch(rows, table, table_rows)
    rows, table, id = rows[here], table[here], id[here]

    # The values, then the states.
    for at in torch.arange(len(rows), device=rows.device).split(CHUNK):
        if cached is not None and source is not None:
            cached.write(0, rows[at], cached.read(0, source[at]))
            continue
        if source is None:
            values = first_values(table[at], id[at], new.bounds, seed, weight.shape[1])
        else:
            values = read_rows(weight, source[at])
        if cached is None:
            write_rows(weight, rows[at], values)
        else:
            cached.write(0, rows[at], stored_values(weight, values))
    for index, state in enumerate(states, 1):
        if cached is not None:
            zeros = state.new_zeros(len(rows), state.shape[1])
            cached.write(index, rows, zeros if source is None else cached.read(index, source))
        else:
            state = state.view(len(weight), -1)
            state[rows] = 0 if source is None else state[source]

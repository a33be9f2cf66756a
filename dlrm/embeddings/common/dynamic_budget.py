"""Divide a budget among dynamic tables that have rows of their own, or all rows in common."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm.embeddings.common.budget import MANY_IDS, Budget, highest_level, row_bytes
from dlrm.embeddings.common.dynamic_sizes import (
    LOAD,
    SLOT_BYTES,
    index_bytes,
    shared_rows,
    slots_of,
)
from dlrm.kernels.dynamic.slot_index import LANES
from dlrm.kernels.update.packed import record_bytes

FIXED_BYTES = 80  # time, counts, seed and the smallest sketch
GROWTH = 4  # times as many ids are expected as have occurred
LEAST = 16  # a table of which few ids have occurred gets one of so many rows of the largest
SCARCE, CHANCE, OWN = 0.03, 0.01, 0.5
"""If a smaller share of the ids has room, tables share all rows; then the chance of an id to get
one, and the share of the bytes that ids have for themselves."""

Sizes: TypeAlias = list[tuple[int, int] | None]
"""Rows for ids, and shared ones, of each table; None for one that takes no more if it is dense."""


def own_sizes(
    budget: Budget, *, counted: bool = False, shared: int | None = None
) -> tuple[Sizes, float]:
    """Divide a budget among tables with rows of their own.

    Tables have room for the ids that occur most, of whatever table, and for half as many new ones;
    or, if it is not known how often ids occur, for equally many, as far as there are so many.

    Args:
        budget: the tables, and the bytes for them.
        counted: whether ids wait until they occurred several times, which a sketch counts.
        shared: shared rows of a table, if given.

    Returns:
        The sizes, and the share of the ids that are expected which have a row; no sizes if one row
        of each sort does not fit.
    """
    known, values = budget.num_embeddings, budget.values or [None] * len(budget.num_embeddings)
    expected = [
        ids if ids < MANY_IDS else GROWTH * (seen or MANY_IDS)
        for ids, seen in zip(known, values, strict=True)
    ]

    places = _places(budget.counts) if budget.counts else []
    more = [max(every - len(own), 0) for every, own in zip(expected, places, strict=False)]
    total = sum(map(len, places))

    def room(table: int, level: int) -> int:
        """Ids of a table: of all tables so many have a row or, without counts, of the largest."""
        if not places:
            return max(min(level, expected[table]), level // LEAST)
        others = max(level - total, 0) * more[table] // max(sum(more), 1)
        found = int(np.searchsorted(places[table], level))
        return found + found // 2 + others

    def size(table: int, level: int) -> tuple[int, tuple[int, int] | None]:
        """The bytes of a table at a level, and its size."""
        rows = max(ceil(min(room(table, level), known[table]) / LOAD), 1)
        (slots,) = slots_of([known[table]], rows)
        others, index = shared_rows(slots, shared), index_bytes(slots)
        index += index // 3 if counted else 0  # at most, of the sketch
        own, dense = (slots + others) * budget.row_bytes + index + FIXED_BYTES, known[table]
        dense *= budget.row_bytes
        return (own, (rows, others)) if own < dense else (dense, None)

    tables = range(len(known))
    highest = min(MANY_IDS, ceil(sum(known) / LOAD))
    level = -1 + bisect_right(
        range(highest + 1), budget.size, key=lambda level: sum(size(t, level)[0] for t in tables)
    )
    if level < 0:
        return [], 0.0
    found = [size(table, level)[1] for table in tables]
    wanted = sum(expected[table] for table in tables if found[table])
    rows = sum(own[0] for own in found if own)
    return found, rows / wanted if 0 < wanted < MANY_IDS else 1.0


def _places(counts: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """The places of the ids of each table among those of all tables, the most frequent first; of
    equally frequent ones those of tables that have few.
    """
    each = [-np.sort(-own[own > 0].numpy()) for own in counts]
    table = np.repeat(np.arange(len(each)), [len(own) for own in each])
    rank = np.concatenate([np.arange(len(own)) for own in each])
    order = table[np.lexsort((rank, -np.concatenate(each)))]
    return [np.flatnonzero(order == number) for number in range(len(each))]


def common_sizes(
    budget: Budget,
    pieces: int,
    kind: str,
    *,
    counted: bool = False,
    shared: int | None = None,
) -> Sizes:
    """Divide a budget among tables that share all rows: an equal number of bytes for each.

    Args:
        budget: the tables, and the bytes for them.
        pieces: of a shared row.
        kind: the embedding kind, for the message.
        counted: whether a sketch counts ids.
        shared: shared rows of a table, if given.

    Raises:
        ValueError: one row of each sort does not fit.
    """
    dim = budget.embedding_dim // pieces
    of_id = of_shared = pieces * row_bytes(dim, budget.dtype)
    if budget.dtype == "int4":  # rows of ids have 8 bits
        of_id, of_shared = (pieces * record_bytes(dim, bits) for bits in (8, 4))
    slot = SLOT_BYTES + (1 if len(budget.num_embeddings) <= 256 else 2) + 4 * counted
    of_id += slot
    dense = [known * budget.row_bytes for known in budget.num_embeddings]

    if sum(dense) <= budget.size:
        return [None] * len(dense)

    def cost(level: int) -> int:  # with a bucket that is not full
        each = sum(min(own, max(level, of_id + of_shared)) for own in dense)
        return each + FIXED_BYTES + slot * LANES

    level = max(highest_level(cost, budget.size, budget.size, kind), of_id + of_shared)
    rows = max(1, int(OWN * level) // of_id)
    if shared is not None:
        rows = max(1, (level - shared * of_shared) // of_id)
    few = max(1, (level - rows * of_id) // of_shared) if shared is None else shared
    return [None if each <= level else (rows, few) for each in dense]

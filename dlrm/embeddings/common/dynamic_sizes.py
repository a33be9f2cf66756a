"""How many rows dynamic tables keep."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from dlrm.embeddings.common.budget import MANY_IDS
from dlrm.kernels.dynamic.slot_index import LANES, buckets_for

LOAD = 0.8  # of the slots, if there is one for every id: they fit, even if all come in one step
SLOT_BYTES = 12  # id and score


def slots_of(num_embeddings: Sequence[int], rows: int | Sequence[int] | None) -> list[int]:
    """Ids that have a row at a time in each table, at most as many as it takes for all to fit.

    Raises:
        ValueError: none, or not one for each table, or none where the number of ids is unknown.
    """
    tables = len(num_embeddings)
    each = [rows] * tables if rows is None or isinstance(rows, int) else list(rows)
    if len(each) != tables or any(own is not None and own < 1 for own in each):
        raise ValueError(
            f"dynamic rows is {rows}: set --dynamic.rows to 1 or more; in code it may be a list of "
            f"one for each of the {tables} tables"
        )
    found = []
    for known, own in zip(num_embeddings, each, strict=True):
        if known >= MANY_IDS and own is None:
            raise ValueError(
                "the number of ids is unknown, as they are hashed texts: set --dynamic.rows to the "
                "ids of a table that have a row at a time"
            )
        most = None if known >= MANY_IDS else ceil(known / LOAD)
        found.append(min(value for value in (own, most) if value is not None))
    return found


def index_bytes(slots: int) -> int:
    """Bytes of the index of a table with so many slots, in whole buckets."""
    return SLOT_BYTES * LANES * buckets_for(slots)


def shared_rows(slots: int, shared: int | None) -> int:
    """Shared rows of a table with so many slots."""
    return max(1, slots // LANES) if shared is None else shared

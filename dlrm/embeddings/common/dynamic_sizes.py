"""How many rows dynamic tables keep, and what their options may be."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from dlrm.embeddings.common.budget import MANY_IDS
from dlrm.kernels.dynamic.scores import RULES, Eviction
from dlrm.kernels.dynamic.slot_index import LANES, Admission, buckets_for

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


def sizes_of(
    num_embeddings: Sequence[int],
    rows: int | Sequence[int] | None,
    shared: int | Sequence[int | None] | None,
) -> tuple[list[int], list[int]]:
    """The slots and the shared rows of each table.

    Raises:
        ValueError: as of :func:`slots_of`, or there are more slots than an index can have.
    """
    slots = slots_of(num_embeddings, rows)
    if sum(slots) >= 2**31:
        raise ValueError(
            f"the tables have {sum(slots):,} rows together, dynamic takes up to 2^31 - 1: set "
            "fewer --dynamic.rows, or give some of them other options, so that they form "
            "another group"
        )
    few = [shared] * len(slots) if shared is None or isinstance(shared, int) else shared
    return slots, [shared_rows(own, each) for own, each in zip(slots, few, strict=True)]


def check_options(
    kind: str,
    eviction: Eviction,
    admission: Admission,
    shared: int | Sequence[int | None] | None,
    pieces: int,
    embedding_dim: int,
) -> None:
    """Raise a ``ValueError`` for an option of such a kind of tables that is out of its range."""
    if eviction.rule not in RULES:
        raise ValueError(
            f"{kind} evict is {eviction.rule!r}; set --{kind}.evict to one of {', '.join(RULES)}"
        )

    few = shared if isinstance(shared, Sequence) else [shared]
    least = {"half_life": eviction.half_life, "age": eviction.age, "admit": admission.after}
    least["shared"] = min((own for own in few if own is not None), default=1)
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"{kind} {name} is {value}; set --{kind}.{name} to 1 or more")

    if not 0 < admission.chance <= 1:
        raise ValueError(
            f"{kind} chance is {admission.chance}, it must be above 0, at most 1; set "
            f"--{kind}.chance"
        )
    if pieces < 0 or (pieces and embedding_dim % pieces):
        raise ValueError(
            f"{kind} pieces is {pieces}; set --{kind}.pieces to a divisor of the embedding dim, "
            f"{embedding_dim}"
        )

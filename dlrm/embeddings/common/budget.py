"""Sharing a budget of bytes out among tables, for the kinds that let a table be of any size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

Option = TypeVar("Option")


def water_level(cost: Callable[[int], int], highest: int, budget: int, kind: str) -> int:
    """The highest level, common to all tables, at which they fit into a budget.

    Every table takes what it can use up to the level, so small tables stay whole and the large
    ones, which serve no more look-ups than the small, pay for the compression.

    Args:
        cost: bytes of all tables at a level; never falls as the level rises.
        highest: the level at which nothing is compressed.
        budget: bytes for all tables.
        kind: the embedding kind, for the message.

    Returns:
        A level in ``[0, highest]``.

    Raises:
        ValueError: the tables do not fit even at level 0.
    """
    smallest = cost(0)
    if smallest > budget:
        raise ValueError(
            f"a budget of {budget} bytes is too small for --emb {kind}: these tables need at least "
            f"{smallest} bytes; raise the budget or choose another kind"
        )
    return bisect_right(range(highest + 1), budget, key=cost) - 1


def even_rows(tables: Sequence[int], row: int, budget: int, kind: str) -> int:
    """The most rows, the same for all tables but those that have fewer, that fit; one at least.

    Args:
        tables: rows of each table.
        row: bytes of a row.
        budget: bytes for all tables.
        kind: the embedding kind, for the message.

    Raises:
        ValueError: a row of each table does not fit.
    """

    def cost(rows: int) -> int:
        return row * sum(min(table, max(rows, 1)) for table in tables)

    return water_level(cost, max(tables), budget, kind)


def share_out(
    tables: Sequence[int],
    choose: Callable[[int, int], Option],
    size: Callable[[int, Option], int],
    budget: int,
    kind: str,
) -> list[Option]:
    """Choose an option per table where the sizes that a table can have lie far apart.

    All tables get the same share of bytes. What is left over goes to the tables again, the smallest
    first: in even parts, and then all that still remains to whoever can use it.

    Args:
        tables: rows of each table.
        choose: the largest option of a table of so many rows within a share of bytes, or the
            smallest that there is.
        size: bytes of a table of so many rows under an option.
        budget: bytes for all tables.
        kind: the embedding kind, for the message.

    Raises:
        ValueError: the smallest options do not fit.
    """

    def cost(share: int) -> int:
        return sum(size(rows, choose(rows, share)) for rows in tables)

    share = water_level(cost, budget, budget, kind)
    options = [choose(rows, share) for rows in tables]
    left = budget - cost(share)
    order = sorted(range(len(tables)), key=tables.__getitem__)
    for turn, table in enumerate(order + order):
        before = size(tables[table], options[table])
        extra = left // max(len(order) - turn, 1)
        options[table] = choose(tables[table], max(share, before + extra))
        left -= size(tables[table], options[table]) - before
    return options

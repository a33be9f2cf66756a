"""Divide bytes among tables: a budget before they are made, and shared memory in a footprint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

Option = TypeVar("Option")


def highest_level(cost: Callable[[int], int], highest: int, budget: int, kind: str) -> int:
    """The highest level, common to all tables, at which they fit into a budget.

    Each table takes what it can use up to the level. Small tables stay uncompressed, and the large
    ones, which serve no more look-ups than the small ones, are compressed.

    Args:
        cost: bytes of all tables at a level; must not fall as the level rises.
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


def max_rows(tables: Sequence[int], row_bytes: int, budget: int, kind: str) -> int:
    """The largest limit on the rows of a table, at least 1, under which all tables fit.

    Args:
        tables: rows of each table; those below the limit keep all of them.
        row_bytes: bytes of a row.
        budget: bytes for all tables.
        kind: the embedding kind, for the message.

    Raises:
        ValueError: one row per table does not fit.
    """

    def cost(rows: int) -> int:
        return row_bytes * sum(min(table, max(rows, 1)) for table in tables)

    return highest_level(cost, max(tables), budget, kind)


def max_rows_options(
    tables: Sequence[int], row_bytes: int, budget: int, kind: str
) -> list[dict[str, Any] | None]:
    """The option ``rows`` of each table by :func:`max_rows`; None where all rows fit."""
    rows = max_rows(tables, row_bytes, budget, kind)
    return [None if table <= rows else {"rows": rows} for table in tables]


def allocate(
    tables: Sequence[int],
    choose: Callable[[int, int], Option],
    size: Callable[[int, Option], int],
    budget: int,
    kind: str,
) -> list[Option]:
    """Choose an option for each table, for kinds whose tables come in few sizes.

    All tables get an equal number of bytes. The bytes left over are offered to the tables in two
    rounds, smallest table first: in equal parts, then all that remain.

    Args:
        tables: rows of each table.
        choose: from the rows of a table and a number of bytes, the largest option that fits, or the
            smallest there is.
        size: from the rows of a table and an option, its bytes.
        budget: bytes for all tables.
        kind: the embedding kind, for the message.

    Raises:
        ValueError: the smallest options do not fit.
    """

    def cost(equal: int) -> int:
        return sum(size(rows, choose(rows, equal)) for rows in tables)

    equal = highest_level(cost, budget, budget, kind)
    options = [choose(rows, equal) for rows in tables]
    left = budget - cost(equal)
    order = sorted(range(len(tables)), key=tables.__getitem__)
    for turn, table in enumerate(order + order):
        before = size(tables[table], options[table])
        extra = left // max(len(order) - turn, 1)
        options[table] = choose(tables[table], max(equal, before + extra))
        left -= size(tables[table], options[table]) - before
    return options


def split_by_rows(amount: int, tables: Sequence[int]) -> list[int]:
    """Divide bytes that tables share in proportion to their rows; the parts add up exactly."""
    ends = list(accumulate(tables, initial=0))
    bounds = [end * amount // ends[-1] for end in ends]
    return [end - begin for begin, end in pairwise(bounds)]

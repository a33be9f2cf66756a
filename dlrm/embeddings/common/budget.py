"""Divide bytes among tables: a budget before they are made, and shared memory in a footprint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from torch import Tensor

from dlrm.kernels.update.packed import BITS, record_bytes

WEIGHT_BYTES = {"fp32": 4, "bf16": 2}  # of types without a scale
DTYPES = (*WEIGHT_BYTES, *BITS)
"""Types of tables: ``fp32``, ``bf16``, ``int8``, ``int4``."""
WIDE = 8  # one in eight rows of an int4 table has 8 bits

MANY_IDS = 2**40
"""As many ids or more are hashes, of which nobody knows how many occur."""

Option = TypeVar("Option")


@dataclass(frozen=True)
class Budget:
    """Bytes that some tables may take, for which a kind chooses its options."""

    num_embeddings: Sequence[int]
    """Rows of each table."""
    embedding_dim: int
    """Length of a row."""
    size: int
    """Bytes for all these tables together."""
    counts: Sequence[Tensor] | None = None
    """How often each id of each table occurs, in order of the ids, if it is known."""
    dtype: str = "fp32"
    """Type of the tables, one of :data:`DTYPES`."""
    values: Sequence[int | None] | None = None
    """About how many ids of each table occur in the training rows, where ids are hashes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is not in a packed row, such as that of a matrix."""
        return WEIGHT_BYTES.get(self.dtype, 4)

    @property
    def row_bytes(self) -> int:
        """Bytes of an uncompressed row."""
        return row_bytes(self.embedding_dim, self.dtype)


def row_bytes(dim: int, dtype: str) -> int:
    """Bytes of a row of ``dim`` weights, its scale included, in a type of :data:`DTYPES`.

    Of int4 tables one row in eight has 8 bits, so this is a mean, rounded up.
    """
    if dtype in WEIGHT_BYTES:
        return dim * WEIGHT_BYTES[dtype]
    if dtype == "int8":
        return record_bytes(dim, 8)
    return record_bytes(dim, 4) - (record_bytes(dim, 4) - record_bytes(dim, 8)) // WIDE


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


def max_rows(budget: Budget, kind: str, row_bytes: int | None = None) -> int:
    """The largest limit on the rows of a table, at least 1, under which all tables fit.

    Args:
        budget: the tables, those below the limit keep all rows, and the bytes for them.
        kind: the embedding kind, for the message.
        row_bytes: bytes of a row of a table with fewer; by default as of the others. A table keeps
            all rows where that takes no more than fewer of these.

    Raises:
        ValueError: one row per table does not fit.
    """

    def cost(rows: int) -> int:
        most = max(rows, 1) * (row_bytes or budget.row_bytes)
        return sum(min(own * budget.row_bytes, most) for own in budget.num_embeddings)

    return highest_level(cost, max(budget.num_embeddings), budget.size, kind)


def max_rows_options(
    budget: Budget, kind: str, row_bytes: int | None = None
) -> list[dict[str, Any] | None]:
    """The option ``rows`` of each table by :func:`max_rows`; None where all rows fit."""
    rows = max_rows(budget, kind, row_bytes)
    dense, most = budget.row_bytes, rows * (row_bytes or budget.row_bytes)
    return [None if own * dense <= most else {"rows": rows} for own in budget.num_embeddings]


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

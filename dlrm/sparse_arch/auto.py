"""``--emb auto``: the rows, row length and bits of each table that make the best use of a budget.

What a row is worth follows from the labels (:mod:`dlrm.data.evidence`). Say that what ids say has
the variance ``e``, as a part of that of labels. Of an id that occurs ``n`` times, training learns
the fraction ``e / (e + 1 / n)``, and uses it ``n`` times. So a row of its own explains
``n e^2 / (e + 1 / n)`` of the variance of all labels.

A row of ``d`` weights keeps all of that except a part that falls as ``1 / d``: one weight says how
positive an id is, which its rate among the numbers of a row says too, and more weights say with
which others. Fewer bits keep a little less. Every byte has the same price. Each table gets the
number of rows, the length and the bits with the highest utility minus price, and the price is
chosen so that all tables together use up the budget: no byte would be worth more in another table.

The rare ids of a table have zeros. A row that they share would learn that they remain rare, which
nobody knows of ids that are new after training: where players of one season shared a row, new ones
scored as badly. A table that keeps all rows at full length is ``dense``, one that keeps some of
them is ``drop``. One with shorter rows is ``short``: zeros follow the weights, and the model learns
to use that. Tables that are fitted to trained ones can't be chosen freely, so there it is
``block``, with a matrix for each table.

Rows of 4 bits are chosen for trained tables only. The rows of a compressed table are those of
frequent ids, updated in most steps, and stochastic rounding to 4 bits adds its noise each time:
emulated on the sample, that costs 0.009 AUC at equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from dlrm.data.evidence import RANGES, SMALLEST, Effects, range_of
from dlrm.embeddings.common.budget import WEIGHT_BYTES, WIDE, Budget
from dlrm.embeddings.short import scale_of
from dlrm.kernels.update.packed import record_bytes

FIRST = 0.8  # utility of rows with one weight, relative to rows of any length
RATED = 0.4  # the same next to the rates of ids, which say most of what one weight says
FIDELITY = {"fp32": 1.0, "bf16": 0.9999, "int8": 0.9998, "int4": 0.995}  # of rounded rows
EQUAL = Effects((0.1,) * RANGES)  # if nothing is known of what ids say
PRICES = (1e-9, 1e9)  # bounds of the price of a byte, in occurrences
STEPS = 40  # of the bisection


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Length and type of the rows of a table."""

    dim: int
    """Weights of a row."""
    dtype: str
    """Their type, one of :data:`~dlrm.embeddings.common.budget.DTYPES`."""
    embedding_dim: int
    """Length of a full row."""
    first: float = FIRST
    """Utility of rows with one weight, relative to rows of any length."""
    projected: bool = False
    """Whether a matrix of the table widens shorter rows. Otherwise zeros follow the weights, and
    the rows of several ids are stored as one."""

    @property
    def per_row(self) -> int:
        """Ids of a stored row."""
        return 1 if self.projected else self.embedding_dim // self.dim

    @property
    def _stored_bytes(self) -> float:
        """Bytes of a stored row; for int4, where some rows have 8 bits, the mean."""
        dim = self.dim * self.per_row
        if self.dtype in WEIGHT_BYTES:
            return dim * WEIGHT_BYTES[self.dtype]
        if self.dtype == "int8":
            return record_bytes(dim, 8)
        narrow, wide = record_bytes(dim, 4), record_bytes(dim, 8)
        return narrow + (wide - narrow) / WIDE

    @property
    def _matrix_bytes(self) -> int:
        short = self.projected and self.dim < self.embedding_dim
        return self.dim * self.embedding_dim * WEIGHT_BYTES.get(self.dtype, 4) if short else 0

    def size(self, rows: int) -> int:
        """Bytes of a table of ``rows`` rows, with its matrix."""
        return self._matrix_bytes + ceil(-(-rows // self.per_row) * self._stored_bytes)

    def rows_within(self, size: int) -> int:
        """The most rows that fit into ``size`` bytes; below 0 if the matrix does not."""
        return int((size - self._matrix_bytes) // self._stored_bytes) * self.per_row

    @property
    def row_bytes(self) -> float:
        """Bytes of the row of an id."""
        return self._stored_bytes / self.per_row

    @property
    def quality(self) -> float:
        """Utility of a row relative to a full one in fp32."""
        missing = 1 - self.first
        length = (1 - missing / self.dim) / (1 - missing / self.embedding_dim)
        return FIDELITY[self.dtype] * length


Choice = tuple[RowFormat, int]
"""The rows of a table, and how many ids keep one of their own."""


class Table:
    """Choices for one table: the format of its rows and the number of ids with their own row.

    Args:
        rows: number of ids V.
        embedding_dim: length D of a full row.
        count: occurrences of each id, ``[V]``, in falling order except for single ids.
        effects: how much ids say, see :data:`~dlrm.data.evidence.Effects`.
        dtypes: types that rows may have.
        projected: see :class:`RowFormat`.
    """

    def __init__(
        self,
        rows: int,
        embedding_dim: int,
        count: Tensor,
        effects: Effects,
        dtypes: Sequence[str] = ("fp32",),
        projected: bool = False,
    ) -> None:
        self.rows = rows
        self._given = dtypes[0]

        # What the rows of the most frequent ids are worth, up to the end of each run of equal
        # counts. Where counts do not fall (ids of synthetic rows are in order of expected ones), a
        # run continues to the last count as high.
        highest = count.flip(0).cummax(0).values.flip(0)
        lengths = highest.unique_consecutive(return_counts=True)[1].numpy()
        self._ends = np.append(0, lengths.cumsum())
        counts = np.add.reduceat(count.double().numpy(), self._ends[:-1]) / lengths
        effect = np.array(effects.by_range)[range_of(counts)].clip(SMALLEST)
        utility = counts * effect**2 / (effect + 1 / counts.clip(1))  # of an id of each run
        self._totals = np.append(0, (utility * lengths).cumsum())

        # Rows of any length and type.
        full = RowFormat(
            dim=embedding_dim,
            dtype=dtypes[0],
            embedding_dim=embedding_dim,
            first=RATED if effects.rated and not projected else FIRST,
            projected=projected,
        )
        shorter = (2**k for k in range(embedding_dim.bit_length()))
        dims = [dim for dim in shorter if dim < embedding_dim] + [embedding_dim]
        self.formats = [replace(full, dim=dim, dtype=dtype) for dim in dims for dtype in dtypes]

    def size(self, row_format: RowFormat, keep: int) -> int:
        """Bytes of the table."""
        return row_format.size(min(keep + 1, self.rows))

    def utility(self, row_format: RowFormat, keep: int) -> float:
        """How much of the variance of the labels ``keep`` rows explain, in rows of the data."""
        return row_format.quality * float(np.interp(keep, self._ends, self._totals))

    def best_at_price(self, price: float) -> Choice:
        """The rows with the highest utility minus price."""
        keeps = []
        for row_format in self.formats:
            gains = row_format.quality * self._totals - price * row_format.row_bytes * self._ends
            keeps.append(int(self._ends[gains.argmax()]))
        return self._best(keeps, price)

    def best_within(self, size: int) -> Choice:
        """The rows with the highest utility that fit into ``size`` bytes."""
        return self._best([row_format.rows_within(size) - 1 for row_format in self.formats], 0.0)

    def _best(self, keeps: Sequence[int], price: float) -> Choice:
        """The format with the highest utility minus price, if it keeps the rows that are given for
        it; below 0 it can't be. A single id needs no shared row."""
        options = []
        for index, (row_format, keep) in enumerate(zip(self.formats, keeps, strict=True)):
            if keep >= 0:
                keep = self.rows if keep >= self.rows - 1 else keep
                gain = self.utility(row_format, keep) - price * self.size(row_format, keep)
                options.append((gain, index, keep))
        _, index, keep = max(options)
        return self.formats[index], keep

    def kind_and_options(self, row_format: RowFormat, keep: int) -> tuple[str, dict[str, Any]]:
        """The embedding kind of such a table, and its options."""
        options: dict[str, Any] = {}
        if row_format.dtype != self._given:
            options["dtype"] = row_format.dtype
        if keep < self.rows - 1:
            options["keep"] = keep
            if not row_format.projected and row_format.dtype != "int4":
                options["shared"] = False
        dim, embedding_dim = row_format.dim, row_format.embedding_dim
        if dim == embedding_dim:
            return "drop" if "keep" in options else "dense", options
        if row_format.projected:
            return "block", {"dim": dim, **options}
        return "short", {"dim": dim, "scale": scale_of(dim, embedding_dim), **options}


def choose_tables(
    budget: Budget,
    effects: Sequence[Effects] | None = None,
    *,
    dtypes: Sequence[str] = ("fp32",),
    trained: bool = False,
) -> list[tuple[str, dict[str, Any]]]:
    """Choose the kind and the options of every table.

    Args:
        budget: bytes for all tables together.
        effects: how much the ids of each table say about the label; by default equally much.
        dtypes: types that rows may have; a table of another type than the first has the option
            ``dtype``. int4 is left out in training, unless there is no other.
        trained: whether the tables will be fitted to trained ones, which takes a matrix for shorter
            rows; tables that are trained from the start do as well without.

    Raises:
        ValueError: the counts are unknown, or the budget is too small for one row per table.
    """
    if budget.counts is None:
        raise ValueError("--emb auto needs the number of occurrences of each id: pass counts")
    if not trained:
        dtypes = [dtype for dtype in dtypes if dtype != "int4"] or dtypes
    effects = effects or [EQUAL] * len(budget.counts)
    tables = [
        Table(rows, budget.embedding_dim, count, effect, dtypes, projected=trained)
        for rows, count, effect in zip(budget.num_embeddings, budget.counts, effects, strict=True)
    ]

    def total(choice: Sequence[Choice]) -> int:
        return sum(table.size(*chosen) for table, chosen in zip(tables, choice, strict=True))

    # Bisect the price of a byte.
    low, high = PRICES
    for _ in range(STEPS):
        price = (low * high) ** 0.5
        fits = total([table.best_at_price(price) for table in tables]) <= budget.size
        low, high = (low, price) if fits else (price, high)

    choice = [table.best_at_price(high) for table in tables]
    left = budget.size - total(choice)
    if left < 0:
        raise ValueError(
            f"a budget of {budget.size} bytes is too small for --emb auto: {len(tables)} tables "
            f"need at least {total(choice)} bytes; raise the budget"
        )

    # At any price, either all ids with equal counts keep a row or none, and from one price to the
    # next a table may change its rows. So bytes are left over. They go to the table with the
    # largest gain, again and again.
    while True:
        gains = []
        for index, (table, current) in enumerate(zip(tables, choice, strict=True)):
            more = table.best_within(table.size(*current) + left)
            gains.append((table.utility(*more) - table.utility(*current), index, more))
        gain, index, more = max(gains, key=lambda found: found[0])
        if gain <= 0:
            break
        left += tables[index].size(*choice[index]) - tables[index].size(*more)
        choice[index] = more
    plan = [table.kind_and_options(*chosen) for table, chosen in zip(tables, choice, strict=True)]
    return _look_up_together(plan, budget.num_embeddings)


def _look_up_together(
    plan: Sequence[tuple[str, dict[str, Any]]], num_embeddings: Sequence[int]
) -> list[tuple[str, dict[str, Any]]]:
    """Give tables with equal rows equal options: those of one group take one launch."""

    def rows_of(options: Mapping[str, Any]) -> tuple[Any, ...]:
        return options.get("dim"), options.get("dtype")

    partly = {rows_of(options): options for _, options in plan if "keep" in options}
    found = []
    for (kind, options), rows in zip(plan, num_embeddings, strict=True):
        if "keep" not in options and (like := partly.get(rows_of(options))):
            kind = "drop" if kind == "dense" else kind
            options = {**like, "keep": rows}
        found.append((kind, options))
    return found

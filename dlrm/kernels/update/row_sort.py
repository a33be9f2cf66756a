"""The order in which the rows of a sparse gradient are merged, and how to know it early.

The sort is the larger part of an update of 16 columns, but needs the ids alone: a
:class:`RowSorter` runs it beside the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm.kernels import use_triton
from dlrm.kernels.streams import stream_of

LONGEST = 2048  # entries of a table that one program sorts: of more, a radix sort is as fast


@triton.jit
def _sort_table(
    rows, found, order, batch, stride_b, stride_f, SIZE: tl.constexpr, BITS: tl.constexpr
):
    """Sort the entries of one table by their row, equal ones by their place."""
    table = tl.program_id(0).to(tl.int64)
    sample = tl.arange(0, SIZE)
    inside = sample < batch
    begin = table * stride_f
    row = tl.load(rows + begin + sample * stride_b, mask=inside, other=0).to(tl.int64)
    key = tl.sort(tl.where(inside, (row << BITS) | sample, 0x7FFFFFFFFFFFFFFF))
    to = table * batch + sample
    tl.store(found + to, (key >> BITS).to(found.dtype.element_ty), mask=inside)
    tl.store(order + to, begin + (key & (SIZE - 1)) * stride_b, mask=inside)


@dataclass(frozen=True)
class SortedRows:
    """The entries of a row gradient sorted by row; they may be part of a longer list."""

    rows: Tensor  # [n] int32 or int64, ascending: the row of each entry, plus base
    order: Tensor  # [n] int64, the entry that stands there, plus first
    base: int = 0
    first: int = 0


def sort_rows(rows: Tensor, num_rows: int) -> SortedRows:
    """Sort the entries of a row gradient.

    Args:
        rows: row of each entry, ``[n]`` int32 or int64; -1 for one that is left out.
        num_rows: rows V of the table; below 2^31 the sort takes half the time.

    Returns:
        The plan for :func:`dlrm.kernels.update.sparse.update_rows`, equal rows in order of their
        entries.
    """
    return sort_rows_together([(rows, num_rows)])[0]


def sort_rows_together(
    gradients: Sequence[tuple[Tensor, int]], *, impl: str | None = None
) -> list[SortedRows]:
    """Sort the entries of several row gradients, each as :func:`sort_rows` does.

    A radix sort is a chain of a dozen small kernels: one of a longer list takes little more. Lists
    of several tables with few entries each are sorted table by table, in one kernel.

    Args:
        gradients: rows and number of rows of each. Rows may be ``[B, F]``, contiguous or so
            transposed, if the columns are those of tables that stand behind one another, and no
            entry is left out.
        impl: see :mod:`dlrm.kernels`.
    """
    long = [(_entries(rows), n) for rows, n in gradients if not _is_short(rows, impl)]
    sorted_lists = iter(_sort_lists(long))
    return [
        _sort_tables(rows, n) if _is_short(rows, impl) else next(sorted_lists)
        for rows, n in gradients
    ]


def _is_short(rows: Tensor, impl: str | None) -> bool:
    return rows.dim() == 2 and len(rows) <= LONGEST and use_triton(rows, impl)


def _entries(rows: Tensor) -> Tensor:
    """The rows as they lie, ``[n]``: entry by entry of the gradient."""
    return rows if rows.dim() == 1 else rows.as_strided((rows.numel(),), (1,))


def _type_for(rows: int) -> torch.dtype:
    return torch.int32 if rows <= 2**31 else torch.int64


def _sort_tables(rows: Tensor, num_rows: int) -> SortedRows:
    """Sort each column of ``rows [B, F]``: of tables behind one another that is all."""
    batch, tables = rows.shape
    found = rows.new_empty(rows.numel(), dtype=_type_for(num_rows))
    order = rows.new_empty(rows.numel(), dtype=torch.int64)
    size = max(32, triton.next_power_of_2(batch))
    _sort_table[tables,](
        rows, found, order, batch, *rows.stride(),
        SIZE=size, BITS=size.bit_length() - 1, num_warps=max(1, size // 64),
    )  # fmt: skip
    return SortedRows(found, order)


def _sort_lists(gradients: Sequence[tuple[Tensor, int]]) -> list[SortedRows]:
    """Sort lists behind one another at once."""
    if not gradients:
        return []
    lengths = [len(rows) for rows, _ in gradients]
    firsts = accumulate(lengths, initial=0)
    # The tables behind one another; before each but the first one row, that of what is left out.
    *bases, end = accumulate((number + 1 for _, number in gradients), initial=0)
    keys = gradients[0][0].new_empty(sum(lengths), dtype=_type_for(end))
    for (rows, _), base, part in zip(gradients, bases, keys.split(lengths), strict=True):
        wide = rows if keys.dtype == torch.int32 else rows.long()
        torch.add(wide, base, out=part)
    parts = (found.split(lengths) for found in torch.sort(keys, stable=True))
    return [SortedRows(*found) for found in zip(*parts, bases, firsts, strict=False)]


class RowSorter:
    """Sorts the rows of look-ups on a stream of its own, while forward and backward run.

    Inside ``with planner:`` every look-up of :mod:`dlrm.kernels.lookup.tables` on a GPU that will
    have a gradient announces its rows; the optimizer fetches the result::

        with planner:
            loss(model(batch)).backward()
            rows, values = weight.grad._indices()[0], weight.grad._values()
            update_rows("sgd", weight, rows, values, lr=lr, plan=planner.take(rows))

    Look-ups announced before :meth:`sort` are sorted together. The stream is joined where the block
    ends, so that a CUDA graph can hold the whole of it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._stream = stream_of(torch.device(device), "sorts")
        self._announced: list[tuple[Tensor, int]] = []
        self._plans: dict[int, tuple[Tensor, SortedRows]] = {}

    def __enter__(self) -> Self:
        self._token = _planner.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _planner.reset(self._token)
        if self._announced or self._plans:  # else the stream had no part in what may be a capture
            torch.cuda.current_stream().wait_stream(self._stream)
        self._announced.clear()
        self._plans.clear()

    def announce(self, rows: Tensor, num_rows: int) -> None:
        """Have the rows of a gradient sorted; they must stay as they are until the block ends.

        Args:
            rows, num_rows: see :func:`sort_rows_together`.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        self._announced.append((rows, num_rows))

    def sort(self) -> None:
        """Begin to sort what was announced so far."""
        announced, self._announced = self._announced, []
        if announced:
            # Memory of this stream, freed where the block ends and used again in the next one.
            with torch.cuda.stream(self._stream):
                plans = sort_rows_together(announced)
            for (rows, _), plan in zip(announced, plans, strict=True):
                self._plans[rows.data_ptr()] = rows, plan

    def take(self, rows: Tensor) -> SortedRows | None:
        """The plan of a look-up's rows; None if these are not rows that a look-up announced."""
        self.sort()
        found = self._plans.get(rows.data_ptr())
        if found is None or found[0].numel() != rows.numel():
            return None
        torch.cuda.current_stream().wait_stream(self._stream)
        return found[1]


_planner: ContextVar[RowSorter | None] = ContextVar("planner", default=None)


def announce(rows: Tensor, num_rows: int) -> None:
    """Tell the planner in force, if there is one, which rows will have a gradient."""
    planner = _planner.get()
    if planner is not None and rows.is_cuda and rows.numel():
        planner.announce(rows, num_rows)


def sort_announced() -> None:
    """Tell the planner in force, if there is one, that for now no look-up will follow."""
    planner = _planner.get()
    if planner is not None:
        planner.sort()


def announced(rows: Tensor) -> SortedRows | None:
    """What the planner in force has found out about ``rows``, if they were announced to one."""
    planner = _planner.get()
    return None if planner is None else planner.take(rows)

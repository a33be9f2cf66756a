"""The order in which the rows of a sparse gradient are merged, and how to know it early.

The sort is the larger part of an update of 16 columns, but needs the ids alone: a
:class:`Planner` runs it beside the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The entries of a row gradient sorted by row; they may be part of a longer list."""

    rows: Tensor  # [n] int32 or int64, ascending: the row of each entry, plus base
    order: Tensor  # [n] int64, the entry that stands there, plus first
    base: int = 0
    first: int = 0


def prepare(rows: Tensor, num_rows: int) -> Plan:
    """Sort the entries of a row gradient.

    Args:
        rows: row of each entry, ``[n]`` int32 or int64; -1 for one that is left out.
        num_rows: rows V of the table; below 2^31 the sort takes half the time.

    Returns:
        The plan for :func:`dlrm.kernels.rows.update_rows`, equal rows in order of their entries.
    """
    return prepare_together([(rows, num_rows)])[0]


def prepare_together(gradients: Sequence[tuple[Tensor, int]]) -> list[Plan]:
    """Sort the entries of several row gradients at once, each as :func:`prepare` does.

    A sort is a chain of a dozen small kernels: one of a longer list takes little more.

    Args:
        gradients: rows and number of rows of each.
    """
    lengths = [len(rows) for rows, _ in gradients]
    firsts = accumulate(lengths, initial=0)
    # The tables behind one another; before each but the first one row, that of what is left out.
    *bases, end = accumulate((number + 1 for _, number in gradients), initial=0)
    keys = gradients[0][0].new_empty(
        sum(lengths), dtype=torch.int32 if end <= 2**31 else torch.int64
    )
    for (rows, _), base, part in zip(gradients, bases, keys.split(lengths), strict=True):
        wide = rows if keys.dtype == torch.int32 else rows.long()
        torch.add(wide, base, out=part)
    parts = (found.split(lengths) for found in torch.sort(keys, stable=True))
    return [Plan(*found) for found in zip(*parts, bases, firsts, strict=False)]


class Planner:
    """Sorts the rows of look-ups on a stream of its own, while forward and backward run.

    Inside ``with planner:`` every look-up of :mod:`dlrm.kernels.lookup` on a GPU that will have a
    gradient announces its rows; the optimizer fetches the result::

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
        self._stream = torch.cuda.Stream(device)
        self._announced: list[tuple[Tensor, int]] = []
        self._plans: dict[int, tuple[Tensor, Plan]] = {}

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
        """Have ``rows [n]`` of a table sorted; they must stay as they are until the block ends."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._announced.append((rows, num_rows))

    def sort(self) -> None:
        """Begin to sort what was announced so far."""
        announced, self._announced = self._announced, []
        if announced:
            # Memory of this stream, freed where the block ends and used again in the next one.
            with torch.cuda.stream(self._stream):
                plans = prepare_together(announced)
            for (rows, _), plan in zip(announced, plans, strict=True):
                self._plans[rows.data_ptr()] = rows, plan

    def take(self, rows: Tensor) -> Plan | None:
        """The plan of a look-up's rows; None if these are not rows that a look-up announced."""
        self.sort()
        found = self._plans.get(rows.data_ptr())
        if found is None or found[0].shape != rows.shape:
            return None
        torch.cuda.current_stream().wait_stream(self._stream)
        return found[1]


_planner: ContextVar[Planner | None] = ContextVar("planner", default=None)


def announce(rows: Tensor, num_rows: int) -> None:
    """Tell the planner in force, if there is one, which rows of a table will have a gradient."""
    planner = _planner.get()
    if planner is not None and rows.is_cuda and rows.numel():
        planner.announce(rows, num_rows)


def sort_announced() -> None:
    """Tell the planner in force, if there is one, that for now no look-up will follow."""
    planner = _planner.get()
    if planner is not None:
        planner.sort()


def announced(rows: Tensor) -> Plan | None:
    """What the planner in force has found out about ``rows``, if they were announced to one."""
    planner = _planner.get()
    return None if planner is None else planner.take(rows)

"""The order in which the rows of a sparse gradient are merged, and how to know it early.

The sort is the larger part of an update of 16 columns, but needs the ids alone: a
:class:`Planner` runs it beside the forward and the backward pass.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

STREAMS = 3  # sorts that run at the same time


@dataclass(frozen=True)
class Plan:
    """The entries of a row gradient sorted by row."""

    rows: Tensor  # [n] int32 or int64, ascending
    order: Tensor  # [n] int64, the entry that stands there


def prepare(rows: Tensor, num_rows: int) -> Plan:
    """Sort the entries of a row gradient.

    Args:
        rows: row of each entry, ``[n]`` int32 or int64.
        num_rows: rows V of the table; below 2^31 the sort takes half the time.

    Returns:
        The plan for :func:`dlrm.kernels.rows.update_rows`, equal rows in order of their entries.
    """
    return _sort(rows, _empty(rows, num_rows))


def _empty(rows: Tensor, num_rows: int) -> Plan:
    keys = torch.int32 if num_rows < 2**31 else torch.int64
    return Plan(torch.empty_like(rows, dtype=keys), torch.empty_like(rows, dtype=torch.int64))


def _sort(rows: Tensor, plan: Plan) -> Plan:
    torch.sort(rows.to(plan.rows.dtype), stable=True, out=(plan.rows, plan.order))
    return plan


class Planner:
    """Sorts the rows of look-ups on streams of their own, while forward and backward run.

    Inside ``with planner:`` every look-up of :mod:`dlrm.kernels.lookup` on a GPU that will have a
    gradient starts the sort of its rows; the optimizer fetches the result::

        with planner:
            loss(model(batch)).backward()
            rows, values = weight.grad._indices()[0], weight.grad._values()
            update_rows("sgd", weight, rows, values, lr=lr, plan=planner.take(rows))

    The streams are joined where the block ends, so that a CUDA graph can hold the whole of it.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        # A sort is a chain of small kernels that leaves most of a GPU idle.
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
        self._plans: dict[int, tuple[Tensor, Plan, torch.cuda.Stream]] = {}

    def __enter__(self) -> Self:
        self._token = _planner.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _planner.reset(self._token)
        for _, _, stream in self._plans.values():
            torch.cuda.current_stream().wait_stream(stream)
        self._plans.clear()

    def start(self, rows: Tensor, num_rows: int) -> None:
        """Begin to sort ``rows [n]``, which must stay as they are until the block ends."""
        plan = _empty(rows, num_rows)  # memory of the caller's stream: freed after the join
        stream = self._streams[len(self._plans) % STREAMS]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _sort(rows, plan)
        self._plans[rows.data_ptr()] = (rows, plan, stream)

    def take(self, rows: Tensor) -> Plan | None:
        """The plan of a look-up's rows; None if these are not rows that a look-up announced."""
        found = self._plans.get(rows.data_ptr())
        if found is None or found[0].shape != rows.shape:
            return None
        _, plan, stream = found
        torch.cuda.current_stream().wait_stream(stream)
        return plan


_planner: ContextVar[Planner | None] = ContextVar("planner", default=None)


def announce(rows: Tensor, num_rows: int) -> None:
    """Tell the planner in force, if there is one, which rows of a table will have a gradient."""
    planner = _planner.get()
    if planner is not None and rows.is_cuda and rows.numel():
        planner.start(rows, num_rows)


def announced(rows: Tensor) -> Plan | None:
    """What the planner in force has found out about ``rows``, if they were announced to one."""
    planner = _planner.get()
    return None if planner is None else planner.take(rows)

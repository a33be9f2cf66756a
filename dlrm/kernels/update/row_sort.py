"""Sort the rows of a sparse gradient, so that equal ones can be merged, ahead of the update.

The sort is the larger part of an update of 16 columns, but needs the ids alone: a
:class:`RowSorter` runs it next to the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.kernels import tl, triton, use_triton
from dlrm.utils.streams import stream_of

LONGEST = 2048  # entries of a table that one program sorts: for more, a radix sort is as fast


@triton.jit
def _sort_table(
    rows, found, order, batch, stride_b, stride_f, SIZE: tl.constexpr, BITS: tl.constexpr
):
    """Sort the entries of one table by their row, stably."""
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

    # [n] int32 or int64: the row of each entry, plus base; equal ones are next to each other.
    # Entries to leave out have row -1 in front of all others, and -2 elsewhere.
    rows: Tensor
    order: Tensor  # [n] int32 or int64, the index of each entry's gradient, plus first
    base: int = 0
    first: int = 0

    def of_owners(self, owners: Tensor) -> SortedRows:
        """The same rows, where entry k has the gradient ``owners[k]`` instead of its own."""
        order = self.order - self.first if self.first else self.order
        return replace(self, order=owners[order], first=0)


def sort_rows(rows: Tensor, num_rows: int) -> SortedRows:
    """Sort the entries of a row gradient.

    Args:
        rows: row of each entry, ``[n]`` int32 or int64; -1 for an entry to leave out.
        num_rows: rows V of the table; below 2^31 the sort takes half the time.

    Returns:
        The entries for :func:`dlrm.kernels.update.sparse.update_rows`; the sort is stable.
    """
    return sort_rows_together([(rows, num_rows)])[0]


def sort_rows_together(
    gradients: Sequence[tuple[Tensor, int]], *, impl: str | None = None
) -> list[SortedRows]:
    """Sort the entries of several row gradients, each as :func:`sort_rows` does.

    A radix sort is a chain of a dozen small kernels, and sorting a longer list takes little more.
    Lists of several tables with few entries each are sorted table by table, in one kernel.

    Args:
        gradients: rows and number of rows of each. Rows may be ``[B, F]``, contiguous or the
            transpose of that, if the columns belong to consecutive tables of one weight and no
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
    """The rows in the order of memory, which is that of the gradient's entries, ``[n]``."""
    return rows if rows.dim() == 1 else rows.as_strided((rows.numel(),), (1,))


def _type_for(rows: int) -> torch.dtype:
    return torch.int32 if rows <= 2**31 else torch.int64


def _sort_tables(rows: Tensor, num_rows: int) -> SortedRows:
    """Sort each column of ``rows [B, F]``; for consecutive tables that sorts all entries."""
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
    """Sort several lists at once, as one."""
    if not gradients:
        return []
    lengths = [len(rows) for rows, _ in gradients]
    firsts = accumulate(lengths, initial=0)
    # One table after another, with a row between them for the entries that are left out.
    *bases, end = accumulate((number + 1 for _, number in gradients), initial=0)
    keys = gradients[0][0].new_empty(sum(lengths), dtype=_type_for(end))
    for (rows, _), base, part in zip(gradients, bases, keys.split(lengths), strict=True):
        wide = rows if keys.dtype == torch.int32 else rows.long()
        torch.add(wide, base, out=part)
    parts = (found.split(lengths) for found in torch.sort(keys, stable=True))
    return [SortedRows(*found) for found in zip(*parts, bases, firsts, strict=False)]


def merge_rows_torch(rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of equal rows.

    Args:
        rows: row of each gradient, ``[n]``; those below 0 are skipped.
        grads: ``[n, D]``.

    Returns:
        The unique rows, ascending, and their sums in fp32 or wider.
    """
    rows, order = rows.sort(stable=True)
    rows, counts = rows.unique_consecutive(return_counts=True)
    grads = grads.to(torch.promote_types(grads.dtype, torch.float32))
    sums = functional.embedding_bag(order, grads, counts.cumsum(0) - counts, mode="sum")
    skipped = int((rows < 0).sum())
    return rows[skipped:], sums[skipped:]


@dataclass
class _Submission:
    """Rows of a look-up of ``weight``, and the same rows sorted."""

    weight: Tensor
    rows: Tensor
    owners: Tensor | None
    sorted_rows: SortedRows | None = None


class RowSorter:
    """Sorts the rows of look-ups on a stream of its own, while forward and backward run.

    A training step owns one and passes it down. A look-up on a GPU submits the rows that will have
    a gradient, and the optimizer takes the result::

        with RowSorter(device) as sorter:
            lookup(weight, ids, context=RowContext(sorter=sorter)).square().sum().backward()
            rows, values = weight.grad._indices()[0], weight.grad._values()
            found = sorter.result(weight, rows)
            update_rows("sgd", weight, rows, values, lr=lr, sorted_rows=found)

    Rows submitted before :meth:`sort` are sorted together. The stream is joined at the end of the
    block, so that a CUDA graph can capture all of it.

    Args:
        device: on a CPU nothing is sorted ahead.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        device = torch.device(device)
        self._stream = stream_of(device, "sorts") if device.type == "cuda" else None
        self._submissions: list[_Submission] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # Without rows the stream takes no part in a capture, and after an error there is none.
        joins = bool(self._submissions) and kind is None
        self._submissions.clear()
        if self._stream is not None and joins:
            torch.cuda.current_stream().wait_stream(self._stream)

    def submit(
        self,
        weight: Tensor,
        rows: Tensor,
        owners: Tensor | None = None,
        sorted_rows: SortedRows | None = None,
    ) -> None:
        """Have the rows of a gradient sorted; they must not change until the block ends.

        Args:
            weight: the table that will have the gradient.
            rows: see :func:`sort_rows_together`.
            owners: the gradient of each row, ``[n]``, where several rows share one, as in a bag; by
                default each has its own.
            sorted_rows: the result, if they are in order already.
        """
        if self._stream is not None and rows.is_cuda and rows.numel():
            self._stream.wait_stream(torch.cuda.current_stream())
            self._submissions.append(_Submission(weight, rows, owners, sorted_rows))

    def sort(self) -> None:
        """Begin to sort what was submitted so far; call it after the last look-up."""
        new = [each for each in self._submissions if each.sorted_rows is None]
        if not new:
            return

        # Memory of this stream, freed at the end of the block and reused in the next one.
        with torch.cuda.stream(self._stream):
            found = sort_rows_together([(each.rows, len(each.weight)) for each in new])
            for each, rows in zip(new, found, strict=True):
                each.sorted_rows = rows if each.owners is None else rows.of_owners(each.owners)

    def result(self, weight: Tensor, rows: Tensor) -> SortedRows | None:
        """The sorted rows of a gradient; None if they are not those of one look-up that submitted
        them, as where several look-ups of a table have added up their gradients.

        Args:
            weight: the table.
            rows: the row of each entry of its gradient, ``[n]``.
        """
        if self._stream is None:
            return None
        self.sort()
        for each in self._submissions:
            if each.weight is weight and _entries(each.rows).is_set_to(rows):
                torch.cuda.current_stream().wait_stream(self._stream)
                return each.sorted_rows
        return None

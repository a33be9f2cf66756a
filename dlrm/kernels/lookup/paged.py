"""Look up rows whose table is cut into pages, wherever the pages lie: one kernel, by address.

A table of page addresses says where each page begins: in this GPU's memory, in that of a peer GPU
of the host, or in pinned host memory (:mod:`dlrm.kernels.offload.pinned_memory`). The kernel
follows it, so that a look-up is one launch without copies, staging buffers or a word from the host.
The portable path serves pages that have no address here, such as GPUs that can't reach each other:
it partitions the ids by place with one sort, and each place looks up its share.

Bytes a look-up of one row must move: 2 rows, its id and the address of its page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dlrm.kernels import use_triton
from dlrm.kernels.lookup.tables import row_gradient
from dlrm.kernels.update.row_sort import RowSorter

TILE = 4096  # elements of a program's tile


@triton.jit
def _pointers(
    rows, addresses, k, inside, pages, like,
    PAGE: tl.constexpr, LINES: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Where the rows of entries ``k`` begin, and which entries have one."""
    row = tl.load(rows + k, mask=inside, other=-1).to(tl.int64)
    live = inside & (row >= 0)
    page = row // PAGE
    line = (k % LINES).to(tl.int64)
    begin = tl.load(addresses + line * pages + page, mask=live, other=0)
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    at = (begin + (row - page * PAGE) * (D * size)).to(like.dtype)
    return tl.multiple_of(at, ALIGN), live, page, row - page * PAGE


@triton.jit
def _gather(
    rows, addresses, out, count, flat, group, first, n, pages,
    PAGE: tl.constexpr, LINES: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch a row per entry; ``flat [GROUPS, n]`` gets its row in its group, -1 in the others."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    if count is not None:
        inside &= k < tl.load(count)
    at, live, page, within = _pointers(
        rows, addresses, k, inside, pages, out, PAGE, LINES, D, ALIGN
    )
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None] & (column < D)
    value = tl.load(at[:, None] + column, mask=mask, other=0.0)
    tl.store(out + k.to(tl.int64)[:, None] * D + column, value, mask=mask)
    if flat is not None:
        local = tl.load(first + page, mask=live, other=0) + within
        owner = tl.load(group + page, mask=live, other=-1)
        for index in tl.static_range(GROUPS):
            to = flat + tl.full((), index, tl.int64) * n + k
            tl.store(to, tl.where(owner == index, local, -1), mask=inside)


@triton.jit
def _scatter(
    rows, addresses, values, count, n, pages,
    PAGE: tl.constexpr, LINES: tl.constexpr,
    D: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a row per entry."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    if count is not None:
        inside &= k < tl.load(count)
    at, live, _, _ = _pointers(rows, addresses, k, inside, pages, values, PAGE, LINES, D, ALIGN)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = live[:, None] & (column < D)
    value = tl.load(values + k.to(tl.int64)[:, None] * D + column, mask=mask, other=0.0)
    tl.store(at[:, None] + column, value, mask=mask)


def _sizes(pages: Pages, n: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants for ``n`` entries."""
    assert pages.addresses is not None
    block_d = triton.next_power_of_2(pages.dim)
    block = max(4, min(256, TILE // block_d))
    return (triton.cdiv(n, block),), {
        "PAGE": pages.page_size,
        "LINES": len(pages.addresses),
        "D": pages.dim,
        "ALIGN": pages.alignment,
        "BLOCK": block,
        "BLOCK_D": block_d,
    }


def gather_rows(
    pages: Pages,
    rows: Tensor,
    out: Tensor,
    *,
    count: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Fetch rows into a buffer, outside of autograd.

    Args:
        pages: the table.
        rows: ``[n]`` int32 or int64; of an entry below 0 nothing is read or written.
        out: where to write, ``[n, D]`` contiguous.
        count: how many of the entries count, a tensor of one integer on the device of ``rows``, so
            that the host need not know; all if None.
        impl: see :mod:`dlrm.kernels`; PyTorch's waits for the host.
    """
    if _by_address(pages, rows, impl):
        _launch_gather(pages, rows, out, count=count)
        return
    live = _live(rows, count)
    out[live] = _gather_by_place(pages, rows[live])


def scatter_rows(
    pages: Pages,
    rows: Tensor,
    values: Tensor,
    *,
    count: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Write the rows of a buffer into the pages, the way back of :func:`gather_rows`.

    Args:
        pages: the table, without replicas.
        rows: ``[n]`` int32 or int64, no row twice; entries below 0 are left out.
        values: ``[n, D]`` contiguous.
        count, impl: as of :func:`gather_rows`.

    Raises:
        ValueError: there are replicas, of which only one would be written.
    """
    if any(len(replicas) > 1 for replicas in pages.groups):
        raise ValueError("rows can't be scattered into pages that have replicas")
    n = rows.numel()
    if _by_address(pages, rows, impl):
        grid, sizes = _sizes(pages, n)
        if n:
            _wait(pages, rows.device)
            _scatter[grid](rows, pages.addresses, values, count, n, len(pages.group), **sizes)
            _wait(pages, rows.device, back=True)
        return
    live = _live(rows, count)
    parts = _partition(pages, rows[live])
    with torch.no_grad():
        for (block,), (entries, local) in zip(pages.groups, parts, strict=True):
            block[local.to(block.device)] = values[live][entries].to(block.device)


def _live(rows: Tensor, count: Tensor | None) -> Tensor:
    """The entries that count, as indices."""
    return (rows if count is None else rows[: int(count)]).ge(0).nonzero()[:, 0]


def _launch_gather(
    pages: Pages,
    rows: Tensor,
    out: Tensor,
    *,
    count: Tensor | None = None,
    flat: Tensor | None = None,
) -> None:
    n = rows.numel()
    grid, sizes = _sizes(pages, n)
    if n:
        _wait(pages, rows.device)
        _gather[grid](
            rows, pages.addresses, out, count, flat, pages.group, pages.first, n,
            len(pages.group), GROUPS=len(pages.groups), **sizes,
        )  # fmt: skip


def _wait(pages: Pages, reader: torch.device, *, back: bool = False) -> None:
    """Order the kernel behind what peers do to their pages, or with ``back`` that behind it."""
    for peer in {block.device for block in pages.blocks if block.is_cuda} - {reader}:
        ends = torch.cuda.current_stream(reader), torch.cuda.current_stream(peer)
        behind, ahead = reversed(ends) if back else ends
        behind.wait_stream(ahead)


def _by_address(pages: Pages, rows: Tensor, impl: str | None) -> bool:
    """Whether the kernel runs; without a choice, wherever all pages have an address."""
    if impl is None and pages.addresses is None:
        return False
    if use_triton(rows, impl):
        if pages.addresses is None:
            raise ValueError("impl is 'triton', but not all pages have an address on this device")
        return True
    return False


def _partition(pages: Pages, rows: Tensor) -> list[tuple[Tensor | slice, Tensor]]:
    """For each group the entries of ``rows [n]`` that it holds, ascending, and their rows there.

    One sort, and one word to the host: how many entries each group has.
    """
    page = rows // pages.page_size
    group = pages.group[page]
    local = pages.first[page] + rows % pages.page_size
    if len(pages.groups) == 1:
        return [(slice(None), local)]
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=len(pages.groups)).tolist()
    return list(zip(order.split(counts), local[order].split(counts), strict=True))


@torch.no_grad()
def _gather_by_place(pages: Pages, rows: Tensor) -> Tensor:
    """The rows by the portable path; replicas share the entries of their group evenly."""
    out = torch.empty(len(rows), pages.dim, dtype=pages.dtype, device=rows.device)
    for blocks, (entries, local) in zip(pages.groups, _partition(pages, rows), strict=True):
        shares = zip(blocks, local.chunk(len(blocks)), strict=False)
        found = [block.index_select(0, row.to(block.device)) for block, row in shares]
        out[entries] = torch.cat([rows.to(out.device) for rows in found])
    return out


class _LookupPages(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pages: Pages,
        rows: Tensor,
        sparse: bool,
        sorter: RowSorter | None,
        impl: str | None,
        *blocks: Tensor,
    ) -> Tensor:
        ctx.pages, ctx.sparse = pages, sparse
        ctx.save_for_backward(rows)
        ctx.flat = None
        if not _by_address(pages, rows, impl):
            return _gather_by_place(pages, rows)
        out = torch.empty(len(rows), pages.dim, dtype=pages.dtype, device=rows.device)
        one, learns = len(pages.groups) == 1, any(ctx.needs_input_grad)
        if learns and sparse and (one or _capturing(rows)):
            ctx.flat = rows.new_empty(len(pages.groups), len(rows), dtype=torch.int64)
        _launch_gather(pages, rows, out, flat=ctx.flat)
        if ctx.flat is not None and sorter is not None:
            for flat, (block, *_) in zip(ctx.flat, pages.groups, strict=True):
                sorter.submit(flat, len(block))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pages, (rows,) = ctx.pages, ctx.saved_tensors
        if ctx.flat is None:
            parts = [(row, grad[entries]) for entries, row in _partition(pages, rows)]
        elif len(pages.groups) == 1:
            parts = [(ctx.flat[0], grad)]
        else:
            parts = [(flat, grad.where(flat[:, None] >= 0, 0.0)) for flat in ctx.flat]
        grads = [
            row_gradient(block, row.to(block.device), _own(values, block.device, copy), ctx.sparse)
            for blocks, (row, values) in zip(pages.groups, parts, strict=True)
            for copy, block in enumerate(blocks)
        ]
        return *[None] * 5, *grads


def _own(values: Tensor, device: torch.device, copy: int) -> Tensor:
    """A replica's own values: gradients are scaled in place."""
    return values.to(device, copy=copy > 0)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def lookup_pages(
    pages: Pages,
    rows: Tensor,
    *,
    sparse: bool = True,
    sorter: RowSorter | None = None,
    impl: str | None = None,
) -> Tensor:
    """Fetch rows, with a gradient for every block.

    A block's gradient has one entry for each look-up of its pages, in order; of replicas each has
    all of their group's, so that they stay equal. While a CUDA graph is captured, whose shapes
    can't depend on the ids, it has one for every look-up instead, those of other groups with row
    -1, which :func:`dlrm.kernels.update.sparse.update_rows` leaves out.

    Args:
        pages: the table; its blocks may be parameters.
        rows: any shape, int32 or int64, each of a page's rows (not checked), on the device that
            the pages were made for.
        sparse: give the blocks COO gradients; else dense ones.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`; None runs Triton on a GPU if all pages have an address.

    Returns:
        ``[*rows.shape, D]``, on the device of ``rows``.

    Raises:
        ValueError: Triton is asked for and a page has no address.
    """
    flat = rows.reshape(-1).contiguous()
    out = _LookupPages.apply(pages, flat, sparse, sorter, impl, *pages.blocks)
    return out.view(*rows.shape, pages.dim)


class ReplicaParameter(nn.Parameter):
    """A block that is a replica of another one: its gradient is that one's, and counts once."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.data, self.requires_grad)


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where the pages of a table lie: row r is row r % page_size of page r // page_size.

    Pages lie in blocks of memory, each a contiguous ``[rows, D]``. Blocks of one group are replicas
    of each other, and a page lies in every block of its group, at the same row; look-ups are split
    between them. Made by :func:`pages_of` or :func:`stacked_pages`.
    """

    groups: tuple[tuple[Tensor, ...], ...]
    """The blocks, by group."""
    page_size: int
    """Rows of a page; the last of a block may be shorter."""
    group: Tensor
    """The group of each page, ``[pages]`` int64."""
    first: Tensor
    """The row of the blocks of its group at which each page begins, ``[pages]`` int64."""
    addresses: Tensor | None
    """Address of each page, ``[R, pages]`` int64; look-up k takes line k % R. None if the reading
    device can't follow one of them."""
    alignment: int
    """Bytes of which every row's address is a multiple, up to 16."""

    @property
    def dim(self) -> int:
        """Length D of a row."""
        return self.groups[0][0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return self.groups[0][0].dtype

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        """All blocks, group after group."""
        return tuple(block for group in self.groups for block in group)


def pages_of(
    groups: Sequence[Sequence[Tensor]],
    page_size: int,
    group: Tensor,
    first: Tensor,
    device: torch.device | str,
) -> Pages:
    """Pages at given places.

    Args:
        groups: blocks ``[rows, D]``, contiguous, of one type and dim; those of a group are replicas
            of each other.
        page_size: rows of a page.
        group: the group of each page, ``[pages]``.
        first: the row at which each page begins in its group's blocks, ``[pages]``.
        device: which reads, and has the ids.

    Raises:
        ValueError: blocks that are not alike or not contiguous.
    """
    kept = tuple(tuple(replicas) for replicas in groups)
    blocks = [block for replicas in kept for block in replicas]
    kinds = {(block.dtype, block.shape[1]) for block in blocks}
    if len(kinds) > 1 or not all(block.is_contiguous() for block in blocks):
        raise ValueError("the blocks of pages must be contiguous, of one type and of one dim")
    device = torch.device(device)
    addresses = None
    row = blocks[0].shape[1] * blocks[0].element_size()
    if all(reaches(device, block.device) for block in blocks):
        lines = lcm(*(len(replicas) for replicas in kept))
        starts = [[r[line % len(r)].data_ptr() for r in kept] for line in range(lines)]
        addresses = torch.tensor(starts)[:, group.cpu()] + first.cpu() * row
        addresses = addresses.to(device)
    return Pages(
        groups=kept,
        page_size=page_size,
        group=group.to(device),
        first=first.to(device),
        addresses=addresses,
        alignment=gcd(16, row, *(block.data_ptr() for block in blocks)),
    )


def stacked_pages(blocks: Sequence[Tensor], page_size: int, device: torch.device | str) -> Pages:
    """Blocks behind one another, cut into pages; each but the last must be a multiple of a page.

    Raises:
        ValueError: a block is not.
    """
    for block in blocks[:-1]:
        if len(block) % page_size:
            raise ValueError(f"a block has {len(block)} rows, it must be a multiple of {page_size}")
    counts = torch.tensor([-(-len(block) // page_size) for block in blocks])
    group = torch.arange(len(blocks)).repeat_interleave(counts)
    within = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
    return pages_of([[block] for block in blocks], page_size, group, within * page_size, device)


def reaches(reader: torch.device, memory: torch.device) -> bool:
    """Whether a kernel on ``reader`` can follow an address of ``memory``; opens the way."""
    if reader.type != "cuda" or memory.type != "cuda":
        return reader.type == memory.type
    here = torch.cuda.current_device() if reader.index is None else reader.index
    if here == memory.index:
        return True
    if not torch.cuda.can_device_access_peer(here, memory.index):
        return False
    ends = [torch.zeros(1, device=f"cuda:{index}") for index in (here, memory.index)]
    ends[1].copy_(ends[0])  # PyTorch switches peer access on with the first copy each way
    ends[0].copy_(ends[1])
    return True

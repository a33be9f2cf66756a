"""Look up rows of a table that is cut into pages, wherever the pages lie: one kernel, by address.

A page table has the address of each page: in this GPU's memory, in that of a peer GPU of the host,
or in pinned host memory (:mod:`dlrm.kernels.offload.pinned_memory`). The kernel follows it, so a
look-up is one launch without copies, staging buffers or synchronization with the host. The portable
path is for pages that have no address here, as on GPUs that can't access each other's memory: it
partitions the ids by group with one sort, and each group looks up its own.

Bytes a look-up of one row must move: 2 rows, its id and the address of its page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.lookup.tables import row_gradient
from dlrm.kernels.update.row_sort import RowSorter

TILE = 4096  # elements of a program's tile


class _PageTable(NamedTuple):
    """Fields of :class:`Pages`, for the kernel."""

    addresses: Tensor  # [REPLICAS, pages]
    group: Tensor
    first: Tensor
    pages: int


@triton.jit
def _gather(
    rows, table, out, flat, n,
    PAGE: tl.constexpr, REPLICAS: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch the row of each look-up; ``flat [GROUPS, n]`` receives its row in its own group, and -1
    in the others.
    """
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < n
    row = tl.load(rows + k, mask=inside, other=0).to(tl.int64)
    page = row // PAGE
    within = row - page * PAGE
    replica = (k % REPLICAS).to(tl.int64)
    begin = tl.load(table.addresses + replica * table.pages + page, mask=inside, other=0)
    size: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    at = tl.multiple_of((begin + within * (D * size)).to(out.dtype), ALIGN)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (column < D)
    value = tl.load(at[:, None] + column, mask=mask, other=0.0)
    tl.store(out + k.to(tl.int64)[:, None] * D + column, value, mask=mask)
    if flat is not None:
        local = tl.load(table.first + page, mask=inside, other=0) + within
        own = tl.load(table.group + page, mask=inside, other=-1)
        for index in tl.static_range(GROUPS):
            to = flat + tl.full((), index, tl.int64) * n + k
            tl.store(to, tl.where(own == index, local, -1), mask=inside)


def _launch_gather(pages: Pages, rows: Tensor, out: Tensor, flat: Tensor | None) -> None:
    assert pages.addresses is not None
    n, block_d = rows.numel(), triton.next_power_of_2(pages.dim)
    block = max(4, min(256, TILE // block_d))
    if n:
        _wait_for_peers(pages, rows.device)
        table = _PageTable(pages.addresses, pages.group, pages.first, len(pages.group))
        _gather[triton.cdiv(n, block),](
            rows, table, out, flat, n, PAGE=pages.page_size, REPLICAS=len(pages.addresses),
            GROUPS=len(pages.groups), D=pages.dim, ALIGN=pages.alignment,
            BLOCK=block, BLOCK_D=block_d,
        )  # fmt: skip


def _wait_for_peers(pages: Pages, reader: torch.device) -> None:
    """Make the reader's stream wait for what peers do to their pages."""
    for peer in {block.device for block in pages.blocks if block.is_cuda} - {reader}:
        torch.cuda.current_stream(reader).wait_stream(torch.cuda.current_stream(peer))


def _by_address(pages: Pages, rows: Tensor, impl: str | None) -> bool:
    """Whether the kernel runs; by default where all pages have an address."""
    if impl is None and pages.addresses is None:
        return False
    if use_triton(rows, impl):
        if pages.addresses is None:
            raise ValueError("impl is 'triton', but not all pages have an address on this device")
        return True
    return False


def _partition(pages: Pages, rows: Tensor) -> list[tuple[Tensor | slice, Tensor]]:
    """For each group the look-ups of ``rows [n]`` that it holds, ascending, and their rows there.

    One sort and one synchronization: the host reads how many look-ups each group has.
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
def _gather_by_group(pages: Pages, rows: Tensor) -> Tensor:
    """The rows by the portable path; replicas share the look-ups of their group evenly."""
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
            return _gather_by_group(pages, rows)
        out = torch.empty(len(rows), pages.dim, dtype=pages.dtype, device=rows.device)
        one, learns = len(pages.groups) == 1, any(ctx.needs_input_grad)
        if learns and sparse and (one or _capturing(rows)):
            ctx.flat = rows.new_empty(len(pages.groups), len(rows), dtype=torch.int64)
        _launch_gather(pages, rows, out, ctx.flat)
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
    """Values for one replica of its own: gradients are scaled in place."""
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

    The gradient of a block has one entry for each look-up of its pages, in order. Each replica has
    all entries of its group, so that replicas stay equal. While a CUDA graph is captured, whose
    shapes can't depend on the ids, it has an entry for every look-up instead, with row -1 for those
    of other groups, which :func:`dlrm.kernels.update.sparse.update_rows` skips.

    Args:
        pages: the table; its blocks may be parameters.
        rows: any shape, int32 or int64, each a row of the table (not checked), on the device that
            the pages were made for.
        sparse: whether the gradients of the blocks are COO tensors or dense ones.
        sorter: sorts the rows that will have a gradient ahead of their update.
        impl: see :mod:`dlrm.kernels`; None runs Triton on a GPU if all pages have an address.

    Returns:
        ``[*rows.shape, D]``, on the device of ``rows``.

    Raises:
        ValueError: ``impl`` is "triton" and a page has no address.
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
    """Where the pages of a table are: row r is row r % page_size of page r // page_size.

    Pages are in blocks of memory, each a contiguous ``[rows, D]``. Blocks of one group are replicas
    of each other: a page is in every block of its group, at the same row, and look-ups are split
    between them. Created by :func:`pages_of`.
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
    """Address of each page, ``[R, pages]`` int64; look-up k takes row k % R, which spreads look-ups
    over replicas. None if the reading device can't access one of them."""
    alignment: int
    """Alignment of every row in bytes, up to 16."""

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
    """Pages at given rows of blocks.

    Args:
        groups: blocks ``[rows, D]``, contiguous, of one type and dim; those of a group are replicas
            of each other.
        page_size: rows of a page.
        group: the group of each page, ``[pages]``.
        first: the row at which each page begins in its group's blocks, ``[pages]``.
        device: the device that reads, and has the ids.

    Raises:
        ValueError: blocks differ in type or dim, or one is not contiguous.
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


def reaches(reader: torch.device, memory: torch.device) -> bool:
    """Whether a kernel on ``reader`` can access ``memory`` by address; enables peer access."""
    if reader.type != "cuda" or memory.type != "cuda":
        return reader.type == memory.type
    here = torch.cuda.current_device() if reader.index is None else reader.index
    if here == memory.index:
        return True
    if not torch.cuda.can_device_access_peer(here, memory.index):
        return False
    ends = [torch.zeros(1, device=f"cuda:{index}") for index in (here, memory.index)]
    ends[1].copy_(ends[0])  # PyTorch enables peer access with the first copy each way
    ends[0].copy_(ends[1])
    return True

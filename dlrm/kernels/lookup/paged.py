"""A table that is cut into pages, wherever the pages are: one kernel reads them, by address.

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
from functools import cached_property
from math import gcd, lcm
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dlrm.kernels import use_triton
from dlrm.kernels.lookup.source import KernelSource, RowSource, SourceKind, row_gradient
from dlrm.kernels.update.row_sort import RowSorter


@dataclass(frozen=True, kw_only=True)
class Pages(RowSource):
    """Where the pages of a table are: row r is row r % page_size of page r // page_size.

    Pages are in blocks of memory, each a contiguous ``[rows, D]``. Blocks of one group are replicas
    of each other: a page is in every block of its group, at the same row, and look-ups are split
    between them. Created by :func:`pages_of`.

    In a look-up every block gets a gradient, with one entry for each look-up of its pages, in
    order. Each replica has all entries of its group, so that replicas stay equal. While a CUDA
    graph is captured, whose shapes can't depend on the ids, it has an entry for every look-up
    instead, with row -1 for those of other groups, which
    :func:`dlrm.kernels.update.sparse.update_rows` skips.
    """

    renumbers: ClassVar[bool] = True

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
    def weights(self) -> tuple[Tensor, ...]:
        """All blocks, group after group."""
        return tuple(block for group in self.groups for block in group)

    @cached_property
    def like(self) -> Tensor:
        return self.weights[0].new_empty(1, device=self.group.device)

    def for_kernel(self) -> tuple[KernelSource, SourceKind]:
        assert self.addresses is not None
        # The stream that reads waits for what peers do to their pages.
        reader = self.group.device
        for peer in {block.device for block in self.weights if block.is_cuda} - {reader}:
            torch.cuda.current_stream(reader).wait_stream(torch.cuda.current_stream(peer))

        source = KernelSource(
            data=self.like,
            addresses=self.addresses,
            pages=len(self.group),
            group=self.group,
            first=self.first,
        )
        kind = SourceKind(
            name="paged",
            page_size=self.page_size,
            replicas=len(self.addresses),
            groups=len(self.groups),
            alignment=self.alignment,
        )
        return source, kind

    def runs_triton(self, ids: Tensor, impl: str | None) -> bool:
        """Whether the kernel runs; by default where all pages have an address."""
        if impl is None and self.addresses is None:
            return False
        if use_triton(ids, impl) and self.addresses is None:
            raise ValueError("impl is 'triton', but not all pages have an address on this device")
        return use_triton(ids, impl)

    @torch.no_grad()
    def read(self, rows: Tensor) -> Tensor:
        """The rows by the portable path; replicas share the look-ups of their group evenly."""
        out = rows.new_empty(len(rows), self.weights[0].shape[1], dtype=self.weights[0].dtype)
        for blocks, (entries, local) in zip(self.groups, self._partition(rows), strict=True):
            shares = zip(blocks, local.chunk(len(blocks)), strict=False)
            found = [block.index_select(0, row.to(block.device)) for block, row in shares]
            out[entries] = torch.cat([rows.to(out.device) for rows in found])
        return out

    def _partition(self, rows: Tensor) -> list[tuple[Tensor | slice, Tensor]]:
        """For each group the look-ups of ``rows [n]`` that it holds, ascending, and their rows.

        One sort and one synchronization: the host reads how many look-ups each group has.
        """
        page = rows // self.page_size
        group = self.group[page]
        local = self.first[page] + rows % self.page_size
        if len(self.groups) == 1:
            return [(slice(None), local)]
        order = group.argsort(stable=True)
        counts = torch.bincount(group, minlength=len(self.groups)).tolist()
        return list(zip(order.split(counts), local[order].split(counts), strict=True))

    def new_flat(self, shape: tuple[int, int], sparse: bool) -> Tensor | None:
        count, groups = shape[0] * shape[1], len(self.groups)
        if sparse and (groups == 1 or _capturing(self.group)):
            return self.group.new_empty(groups, count, dtype=torch.int64)
        return None

    def submit(self, sorter: RowSorter, flat: Tensor, owners: Tensor | None = None) -> None:
        for rows, (block, *_) in zip(flat, self.groups, strict=True):
            sorter.submit(block, rows)

    def gradients(self, rows: Tensor, grad: Tensor, *, sparse: bool, flat: bool) -> list[Tensor]:
        if not flat:
            parts = [(local, grad[entries]) for entries, local in self._partition(rows)]
        elif len(rows) == 1:
            parts = [(rows[0], grad)]
        else:
            parts = [(own, grad.where(own[:, None] >= 0, 0.0)) for own in rows]

        grads = []
        for blocks, (own, values) in zip(self.groups, parts, strict=True):
            for replica, block in enumerate(blocks):
                # Each replica has values of its own, as gradients are scaled in place.
                values_here = values.to(block.device, copy=replica > 0)
                grads.append(row_gradient(block, own.to(block.device), values_here, sparse))
        return grads


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class ReplicaParameter(nn.Parameter):
    """A block that is a replica of another one: its gradient is that one's, and counts once."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.data, self.requires_grad)


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

    # The address of each page, one line of them for each replica.
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

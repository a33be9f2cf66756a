"""Where the pages of a table lie, and at which addresses a device finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

import torch
from torch import Tensor


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

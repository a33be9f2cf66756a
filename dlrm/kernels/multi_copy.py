"""Copy several matrices in one launch: a launch takes as long as the copy of a small batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton

_BLOCK = 1024


@triton.jit
def _copy(sources, targets, orders, sizes, width, BLOCK: tl.constexpr):
    """Copy one block of one matrix; the blocks of all matrices are numbered in sequence."""
    block = tl.program_id(0)
    for k in tl.static_range(len(sources)):
        blocks = tl.cdiv(sizes[k], BLOCK)
        if (block >= 0) & (block < blocks):
            at = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
            mask = at < sizes[k]
            place = at
            if orders[k] is not None:
                row = tl.load(orders[k] + at // width, mask=mask, other=0)
                place = row * width + at % width
            tl.store(targets[k] + at, tl.load(sources[k] + place, mask=mask), mask=mask)
        block -= blocks


def copy_together(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    orders: Sequence[Tensor | None],
    *,
    impl: str | None = None,
) -> None:
    """Copy matrices of one width.

    Args:
        targets: ``[R, B]`` or ``[B]`` each, contiguous, of one B.
        sources: one per target, of its shape and type.
        orders: for each target the row of the source that each of its rows is copied from, ``[R]``
            int64; None for the same row.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: a source differs from its target, or a target is not as described above.
    """
    width = targets[0].shape[-1]
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if _like(source) != _like(target):
            raise ValueError(f"source {index} is {_like(source)}, its target {_like(target)}")
        if not target.is_contiguous() or target.shape[-1] != width:
            raise ValueError(f"target {index} must be contiguous and {width} wide")
    if not use_triton(targets[0], impl):
        for target, source, order in zip(targets, sources, orders, strict=True):
            target.copy_(source if order is None else source[order])
        return
    sizes = tuple(target.numel() for target in targets)
    blocks = sum(triton.cdiv(size, _BLOCK) for size in sizes)
    if blocks:
        contiguous = tuple(source.contiguous() for source in sources)
        _copy[blocks,](contiguous, tuple(targets), tuple(orders), sizes, width, BLOCK=_BLOCK)


def _like(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], torch.device]:
    return tensor.dtype, tuple(tensor.shape), tensor.device

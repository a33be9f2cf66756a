"""Copy several matrices in one launch: a launch takes as long as the copy of a small batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton

_BLOCK = 1024


@triton.jit
def _copy(sources, strides, columns, orders, targets, sizes, widths, BLOCK: tl.constexpr):
    """Copy one block of one matrix; the blocks of all matrices are numbered in sequence.

    Values get the type of the target, and columns that a source lacks are zeros.
    """
    block = tl.program_id(0)
    for k in tl.static_range(len(sources)):
        blocks = tl.cdiv(sizes[k], BLOCK)
        if (block >= 0) & (block < blocks):
            at = block * BLOCK + tl.arange(0, BLOCK)
            row, column = (at // widths[k]).to(tl.int64), (at % widths[k]).to(tl.int64)
            mask = at < sizes[k]
            if orders[k] is not None:
                row = tl.load(orders[k] + row, mask=mask, other=0)
            place = sources[k] + row * strides[k][0] + column * strides[k][1]
            value = tl.load(place, mask=mask & (column < columns[k]), other=0)
            tl.store(targets[k] + at, value.to(targets[k].dtype.element_ty), mask=mask)
        block -= blocks


def _launch(
    targets: Sequence[Tensor], sources: Sequence[Tensor], orders: Sequence[Tensor | None]
) -> None:
    """Copy matrices or vectors, of fewer than 2^31 elements each, to contiguous ones."""
    sizes = tuple(target.numel() for target in targets)
    if blocks := sum(triton.cdiv(size, _BLOCK) for size in sizes):
        _copy[blocks,](
            tuple(sources), tuple((0, *source.stride())[-2:] for source in sources),
            tuple(source.shape[-1] for source in sources), tuple(orders), tuple(targets), sizes,
            tuple(target.shape[-1] for target in targets), BLOCK=_BLOCK,
        )  # fmt: skip


def copy_together(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    orders: Sequence[Tensor | None],
    *,
    impl: str | None = None,
) -> None:
    """Copy matrices.

    Args:
        targets: ``[R, B]`` or ``[B]`` each, contiguous.
        sources: one per target, of its shape and type.
        orders: for each target the row of the source that each of its rows is copied from, ``[R]``
            int64; None for the same row.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: a source differs from its target, or a target is not as described above.
    """
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if _like(source) != _like(target):
            raise ValueError(f"source {index} is {_like(source)}, its target {_like(target)}")
        if not target.is_contiguous():
            raise ValueError(f"target {index} must be contiguous")
    if use_triton(targets[0], impl):
        _launch(targets, sources, orders)
        return
    for target, source, order in zip(targets, sources, orders, strict=True):
        target.copy_(source if order is None else source[order])


def cast_together(
    tensors: Sequence[Tensor], dtype: torch.dtype, widths: Sequence[int] | None = None
) -> list[Tensor]:
    """Matrices or vectors in a type, by a kernel.

    Args:
        tensors: ``[R, B]`` or ``[B]`` each.
        dtype: the type.
        widths: of the results, which zeros fill up; by default those of the tensors.

    Returns:
        The results; tensors that are so already, and contiguous, are themselves.
    """
    found = list(tensors)
    copied = []
    for index, (tensor, width) in enumerate(
        zip(tensors, widths or [tensor.shape[-1] for tensor in tensors], strict=True)
    ):
        if tensor.dtype != dtype or tensor.shape[-1] != width or not tensor.is_contiguous():
            found[index] = tensor.new_empty(*tensor.shape[:-1], width, dtype=dtype)
            copied.append(index)
    sources, targets = ([own[index] for index in copied] for own in (tensors, found))
    _launch(targets, sources, [None] * len(copied))
    return found


def _like(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], torch.device]:
    return tensor.dtype, tuple(tensor.shape), tensor.device

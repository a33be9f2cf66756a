"""Tensor-train look-ups in plain PyTorch: the reference for the kernels, also used on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from dlrm.kernels.tt.layout import TTShape
from dlrm.utils.bags import Bags

_GROUP = 8  # rows for which a large slice is read once


def tt_vectors_torch(
    cores: Sequence[Tensor], shape: TTShape, tables: Tensor, ids: Tensor
) -> Tensor:
    """:func:`~dlrm.kernels.tt.tt_vectors` in plain PyTorch.

    Equal ids are looked up once, and ids with equal first digits share the product of the first
    cores. The host waits for the number of unique ids, so a CUDA graph can't capture this.
    """
    p, q, ranks = shape
    core_offsets = shape.core_offsets()
    tables = tables.to(torch.int64).expand(ids.shape).reshape(-1)
    heights = p.prod(1)
    ends = heights.cumsum(0)
    starts = ends - heights

    # From the last digit to the first: ids without it are the prefixes of the step before. Ids and
    # prefixes are numbered from the start of their table, so a number stands for both.
    key = ids.to(torch.int64).reshape(-1) + starts[tables]
    key, children = key.unique(return_inverse=True)
    steps = []
    for k in reversed(range(len(cores))):
        table = torch.searchsorted(ends, key, right=True)
        prefix, size = key - starts[table], p[table, k]
        steps.append((core_offsets[table, k] + prefix % size, children))
        key = starts[table] + prefix // size
        key, children = key.unique_consecutive(return_inverse=True)
    # steps[k]: slices of the unique prefixes of k + 1 digits, and their prefixes in the next step
    steps.reverse()

    rows = cores[0].new_ones(1, 1, 1)  # [prefixes, q_1 .. q_k, r_k]
    parent = torch.zeros_like(steps[0][0])
    for k, (core, (digits, children)) in enumerate(zip(cores, steps, strict=True)):
        slices = core.view(-1, ranks[k], q[k] * ranks[k + 1])
        rows = _multiply_slices(rows.index_select(0, parent), slices, digits)
        rows = rows.view(len(digits), prod(q[: k + 1]), ranks[k + 1])
        parent = children
    return rows.view(-1, prod(q)).index_select(0, parent).view(*ids.shape, prod(q))


def tt_bags_torch(
    cores: Sequence[Tensor],
    shape: TTShape,
    bags: Bags,
    mode: str,
) -> Tensor:
    """:func:`~dlrm.kernels.tt.tt_bags` in plain PyTorch."""
    tables = shape.p.shape[0]
    batch = bags.count // tables
    lengths = bags.offsets.diff()
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    vectors = tt_vectors_torch(cores, shape, bag // max(batch, 1), bags.ids[: len(bag)])
    if bags.weights is not None:
        vectors = vectors * bags.weights[: len(bag), None]
    out = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, bag, vectors)
    if mode == "mean":
        out = out / lengths.clamp(min=1)[:, None]
    return out.view(tables, batch, vectors.shape[1])


def _multiply_slices(rows: Tensor, slices: Tensor, index: Tensor) -> Tensor:
    """``rows[i] @ slices[index[i]]``, ``[n, Q, r] @ [S, r, c]`` to ``[n, Q, c]``.

    Many rows with large slices are sorted by slice and padded, so each slice is read once for
    ``_GROUP`` rows: 2 to 3 times as fast on a CPU.
    """
    if min(len(index), slices[0].numel()) < 1024:
        return torch.bmm(rows, slices.index_select(0, index))

    # The position of each row, in groups of one slice.
    counts = torch.bincount(index, minlength=len(slices))
    groups = (counts + _GROUP - 1) // _GROUP  # of each slice
    order = index.argsort()
    rank = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[index[order]]
    position = torch.empty_like(index)
    position[order] = (groups.cumsum(0) - groups)[index[order]] * _GROUP + rank

    slice_of_group = torch.repeat_interleave(groups)
    padded = rows.new_zeros(len(slice_of_group) * _GROUP, *rows.shape[1:])
    padded = padded.index_copy(0, position, rows).view(len(slice_of_group), -1, rows.shape[2])
    out = torch.bmm(padded, slices.index_select(0, slice_of_group))
    return out.view(-1, rows.shape[1], slices.shape[2]).index_select(0, position)
